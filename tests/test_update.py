"""The state machine of one update, driven without I/O."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from weightsync import messages as m
from weightsync.errors import (
    AgreementError,
    DigestError,
    ErrorInfo,
    IncompleteUpdateError,
    TransportError,
    UpdateTimeoutError,
    WeightSyncError,
)
from weightsync.update import Command, Phase, UpdateMachine

TIMEOUT_S = 10.0


def machine(trainers: int = 2, engines: int = 2, *, staged: bool = True) -> UpdateMachine:
    return UpdateMachine(
        version=5,
        epoch=3,
        manifest_digest="abc",
        trainers=[f"trainer {i}" for i in range(trainers)],
        engines=[f"engine {i}" for i in range(engines)],
        staged=staged,
        timeout_s=TIMEOUT_S,
        plan_digests={party: "p" for i in range(64) for party in (f"trainer {i}", f"engine {i}")},
    )


def prepared(version: int = 4, epoch: int = 3, digest: str = "abc", plan: str = "p") -> m.Prepared:
    return m.Prepared(version=version, epoch=epoch, manifest_digest=digest, plan_digest=plan)


def sent(trainer: int, digest: int = 7) -> m.Sent:
    """What a trainer answers that has one link, of its own number."""
    return m.Sent(nbytes=10, content_digests={trainer: digest}, changed_values=None, seconds=0.1)


def vote(*digests: int) -> m.Vote:
    """What an engine rank answers, with one digest a link."""
    return m.Vote(nbytes=20, content_digests=dict(enumerate(digests or (7, 7))), peak_staging_bytes=0, seconds=0.1)


def applied(*digests: int) -> m.Applied:
    return m.Applied(vote=vote(*digests), seconds=0.1, reloads=1)


def failed(error: WeightSyncError, *, poisoned: bool = False) -> m.Failed:
    return m.Failed(error=ErrorInfo.of(error), poisoned=poisoned)


def good_reply(command: Command, *, trainers: int) -> m.Reply:
    """What a party that is well answers."""
    is_trainer = command.party.startswith("trainer")
    match command.request:
        case m.Prepare():
            return prepared()
        case m.Transfer():
            return m.Pending()
        case m.Poll():
            return sent(int(command.party.split()[1])) if is_trainer else vote(*[7] * trainers)
        case m.Apply():
            return applied(*[7] * trainers)
        case m.Commit() | m.Abort():
            return m.Ok(pause_s=0.5)
    raise AssertionError(command)


def names(commands: list[Command], kind: type) -> list[str]:
    return [command.party for command in commands if isinstance(command.request, kind)]


def run(
    target: UpdateMachine,
    answer: Callable[[Command], m.Reply | WeightSyncError | None] = lambda command: None,
    *,
    trainers: int = 2,
) -> list[Command]:
    """Answer every command, with *answer* where it says something, else well; returns all commands."""
    asked = target.start(0.0)
    pending = list(asked)
    while pending:
        command = pending.pop(0)
        reply = answer(command) or good_reply(command, trainers=trainers)
        # A newer command to the party supersedes this one.
        if any(other.party == command.party for other in pending):
            continue
        if isinstance(reply, WeightSyncError):
            more = target.on_error(command.party, reply, 1.0)
        else:
            more = target.on_reply(command.party, [reply], 1.0)
        asked += more
        pending += more
    return asked


def test_a_staged_update_votes_everywhere_before_it_applies_anywhere() -> None:
    target = machine()
    asked = run(target)
    assert target.phase is Phase.DONE
    assert target.error is None
    order = [type(command.request).__name__ for command in asked if not isinstance(command.request, m.Poll)]
    assert order == ["Prepare"] * 4 + ["Transfer"] * 4 + ["Apply"] * 2 + ["Commit"] * 4
    assert names(asked, m.Apply) == ["engine 0", "engine 1"]
    assert names(asked, m.Transfer) == ["engine 0", "engine 1", "trainer 0", "trainer 1"]
    assert target.pause_s["engine 0"] == 0.5
    assert set(target.phases) == {"prepare", "transfer", "apply", "commit"}


def test_a_streaming_update_applies_while_it_transfers() -> None:
    target = machine(staged=False)
    asked = run(target)
    assert target.phase is Phase.DONE
    assert set(target.applied) == {"engine 0", "engine 1"}
    assert names(asked, m.Commit) == ["engine 0", "engine 1", "trainer 0", "trainer 1"]


@pytest.mark.parametrize(
    ("reply", "field"),
    [
        (prepared(digest="xyz"), "manifest_digest"),
        (prepared(epoch=2), "epoch"),
        (prepared(plan="other"), "plan_digest"),
        (prepared(version=5), "version"),
    ],
)
def test_a_disagreement_names_rank_and_field_and_nothing_moves(reply: m.Reply, field: str) -> None:
    target = machine()
    asked = run(target, lambda c: reply if c.party == "engine 1" and isinstance(c.request, m.Prepare) else None)
    assert target.phase is Phase.FAILED
    assert isinstance(target.error, AgreementError)
    assert (target.error.rank, target.error.field, target.error.phase) == ("engine 1 rank 0", field, "prepare")
    assert names(asked, m.Transfer) == []
    assert sorted(names(asked, m.Abort)) == ["engine 0", "engine 1", "trainer 0", "trainer 1"]


@pytest.mark.parametrize("request_kind", [m.Prepare, m.Transfer, m.Poll])
@pytest.mark.parametrize("party", ["trainer 1", "engine 0"])
@pytest.mark.parametrize("dead", [True, False])
def test_a_failure_before_apply_aborts_and_applies_nowhere(request_kind: type, party: str, dead: bool) -> None:
    error = IncompleteUpdateError("missing: w", missing=["w"])
    target = machine()

    def answer(command: Command) -> m.Reply | WeightSyncError | None:
        if command.party == party and isinstance(command.request, request_kind):
            return TransportError("gone") if dead else failed(error)
        return None

    asked = run(target, answer)
    assert target.phase is Phase.FAILED
    assert target.error is not None
    assert target.error.rank == party
    assert names(asked, m.Apply) == []
    assert names(asked, m.Commit) == []
    expected = {"trainer 0", "trainer 1", "engine 0", "engine 1"} - ({party} if dead else set())
    assert set(names(asked, m.Abort)) == expected
    if not dead:
        assert isinstance(target.error, IncompleteUpdateError)
        assert target.error.missing == ["w"]


def test_bytes_that_nobody_sent_are_a_digest_error_that_names_the_rank() -> None:
    target = machine()
    asked = run(target, lambda c: vote(1) if c.party == "engine 1" and isinstance(c.request, m.Poll) else None)
    assert isinstance(target.error, DigestError)
    assert target.error.rank == "engine 1 rank 0"
    assert names(asked, m.Apply) == []


def test_each_link_is_compared_with_what_went_over_it() -> None:
    """Two links of one trainer may cut tensors differently."""
    for wrong in (False, True):
        target = machine()

        def answer(command: Command, wrong: bool = wrong) -> m.Reply | None:
            if isinstance(command.request, m.Poll):
                if command.party == "trainer 0":
                    return m.Sent(nbytes=10, content_digests={0: 1, 2: 2}, changed_values=None, seconds=0.1)
                held = {0: 1, 1: 7} if command.party == "engine 0" else {2: 1 if wrong else 2, 1: 7}
                if command.party.startswith("engine"):
                    return m.Vote(nbytes=20, content_digests=held, peak_staging_bytes=0, seconds=0.1)
            return None

        run(target, answer)
        assert (target.error is not None) == wrong


def test_a_rank_that_holds_what_no_link_carried_is_named() -> None:
    target = machine()

    def answer(command: Command) -> m.Reply | None:
        if isinstance(command.request, m.Poll) and command.party == "engine 1":
            return vote(7, 8)
        return None

    asked = run(target, answer)
    assert isinstance(target.error, DigestError)
    assert target.error.rank == "engine 1 rank 0"
    assert "trainer 1" in str(target.error)
    assert not names(asked, m.Apply)


@pytest.mark.parametrize("dead", [True, False])
def test_an_apply_that_fails_poisons_that_engine_and_the_others_commit(dead: bool) -> None:
    target = machine(engines=3)

    def answer(command: Command) -> m.Reply | WeightSyncError | None:
        if command.party == "engine 1" and isinstance(command.request, m.Apply):
            return TransportError("out of memory") if dead else failed(WeightSyncError("out of memory"))
        return None

    asked = run(target, answer)
    assert target.phase is Phase.DONE
    assert list(target.poisoned) == ["engine 1"]
    assert names(asked, m.Commit) == ["engine 0", "engine 2", "trainer 0", "trainer 1"]
    assert names(asked, m.Abort) == ([] if dead else ["engine 1"])


def test_the_first_failure_of_a_poisoned_engine_is_the_one_that_is_told() -> None:
    target = machine()

    def answer(command: Command) -> m.Reply | WeightSyncError | None:
        if command.party == "engine 1" and isinstance(command.request, m.Apply):
            return failed(WeightSyncError("out of memory"))
        if command.party == "engine 1" and isinstance(command.request, m.Abort):
            return TransportError("its process is gone")
        return None

    run(target, answer)
    assert target.phase is Phase.DONE
    assert str(target.poisoned["engine 1"]) == "engine 1: out of memory"


@pytest.mark.parametrize("poisoned", [True, False])
def test_when_every_engine_fails_to_apply_the_update_fails_and_those_with_mixed_weights_are_poisoned(
    poisoned: bool,
) -> None:
    target = machine()
    boom = failed(WeightSyncError("boom"), poisoned=poisoned)
    asked = run(target, lambda c: boom if isinstance(c.request, m.Apply) else None)
    assert target.phase is Phase.FAILED
    assert set(target.poisoned) == ({"engine 0", "engine 1"} if poisoned else set())
    assert names(asked, m.Commit) == []


def test_a_streaming_transfer_that_fails_poisons_the_engines_that_had_begun_to_apply() -> None:
    target = machine(engines=3, staged=False)

    def answer(command: Command) -> m.Reply | WeightSyncError | None:
        if command.party == "trainer 0" and isinstance(command.request, m.Transfer):
            return failed(TransportError("broke"))
        if isinstance(command.request, m.Abort):
            return m.Ok(poisoned=command.party == "engine 1")
        return None

    run(target, answer)
    assert target.phase is Phase.FAILED
    assert set(target.poisoned) == {"engine 1"}


def test_an_engine_that_dies_while_it_applies_what_streams_in_is_poisoned_whenever_that_is_noticed() -> None:
    target = machine(staged=False)

    def answer(command: Command) -> m.Reply | WeightSyncError | None:
        if command.party == "trainer 0" and isinstance(command.request, m.Transfer):
            return failed(TransportError("broke"))
        if command.party == "engine 0" and isinstance(command.request, m.Abort):
            return TransportError("its process is gone")
        return None

    asked = run(target, answer)
    assert target.phase is Phase.FAILED
    told_to_apply = set(names(asked, m.Apply))
    assert set(target.poisoned) == told_to_apply & {"engine 0"}
    assert told_to_apply, "the engines were told to apply before the trainer failed"


def test_an_engine_that_fails_to_commit_is_poisoned_and_a_trainer_that_does_is_not_waited_for() -> None:
    target = machine()

    def answer(command: Command) -> m.Reply | WeightSyncError | None:
        if isinstance(command.request, m.Commit) and command.party in ("engine 0", "trainer 0"):
            return TransportError("gone")
        return None

    run(target, answer)
    assert target.phase is Phase.DONE
    assert list(target.poisoned) == ["engine 0"]


@pytest.mark.parametrize("phase", [Phase.PREPARE, Phase.TRANSFER])
def test_a_silent_party_is_named_after_the_bound_and_still_told_to_abort(phase: Phase) -> None:
    target = machine()
    target.start(0.0)
    if phase is Phase.TRANSFER:
        for party in ("trainer 0", "trainer 1", "engine 0", "engine 1"):
            target.on_reply(party, [prepared()], 0.0)
    assert target.phase is phase
    for party in ("trainer 0", "trainer 1", "engine 0"):
        target.on_reply(party, [prepared() if phase is Phase.PREPARE else m.Pending(progress=1)], 5.0)
    assert target.on_tick(TIMEOUT_S) == []
    commands = target.on_tick(TIMEOUT_S + 0.1)
    assert isinstance(target.error, UpdateTimeoutError)
    assert (target.error.rank, target.error.phase) == ("engine 1", phase.value)
    assert sorted(names(commands, m.Abort)) == ["engine 0", "engine 1", "trainer 0", "trainer 1"]
    for party in ("trainer 0", "trainer 1", "engine 0"):
        assert not target.finished
        target.on_reply(party, [m.Ok()], 11.0)
    assert target.phase is Phase.FAILED


def test_progress_extends_the_bound_and_the_same_answer_again_does_not() -> None:
    target = machine(trainers=1, engines=1)
    run_until_transfer = target.start(0.0)
    for command in run_until_transfer:
        target.on_reply(command.party, [prepared()], 0.0)
    for now in range(1, 40):
        target.on_reply("engine 0", [m.Pending(progress=min(now, 30))], now)
        target.on_reply("trainer 0", [m.Pending(progress=min(now, 20))], now)
        assert target.on_tick(now) == []
    target.on_reply("engine 0", [m.Pending(progress=30)], 41.0)
    target.on_reply("trainer 0", [m.Pending(progress=20)], 41.0)
    target.on_tick(41.0)
    assert target.error is not None
    assert target.error.rank == "trainer 0"


def test_an_engine_that_is_silent_while_it_applies_is_poisoned_and_the_others_commit() -> None:
    target = machine(trainers=1)
    pending = target.start(0.0)
    while pending:
        command = pending.pop(0)
        if command == Command("engine 1", m.Apply(version=5)):
            continue
        pending += target.on_reply(command.party, [good_reply(command, trainers=1)], 0.0)
    assert target.phase is Phase.APPLY
    commands = target.on_tick(TIMEOUT_S + 1)
    assert list(target.poisoned) == ["engine 1"]
    assert names(commands, m.Commit) == ["engine 0", "trainer 0"]


def test_replies_that_nobody_waits_for_are_ignored() -> None:
    target = machine()
    target.start(0.0)
    target.on_reply("engine 0", [prepared()], 0.0)
    assert target.on_reply("engine 0", [failed(WeightSyncError("late"))], 0.0) == []
    assert target.on_reply("a stranger", [prepared()], 0.0) == []
    assert (target.phase, target.error) == (Phase.PREPARE, None)
    done = machine()
    run(done)
    assert done.on_reply("engine 0", [failed(WeightSyncError("late"))], 2.0) == []
    assert done.on_error("engine 0", WeightSyncError("late"), 2.0) == []
    assert done.on_tick(1e9) == []
    assert done.phase is Phase.DONE
