"""A look at a weight sync before its first byte: what every process is like, and what would go wrong, with the cure.

    facts         one process, as it sees itself         look        collects them there
    evidence      all that is known about a weight sync  examination collects it from the parties
    finding       one green, yellow or red line          diagnosis   all checks: pure functions of the evidence

`weightsync doctor FILE.yaml` is `run`; with actor handles of your own, `weightsync.ray_actors.doctor.examine`.
"""
