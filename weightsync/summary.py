"""One update's report, from the state machine that has finished."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weightsync import messages as m
from weightsync.identity import Identity
from weightsync.manifest import Manifest
from weightsync.report import RankRow, UpdateReport
from weightsync.update import UpdateMachine


def summarize(
    machine: UpdateMachine,
    *,
    manifest: Manifest,
    trainers: Mapping[str, Identity],
    engines: Mapping[str, Sequence[m.ReceiverOpened]],
    seconds: float,
    phases: dict[str, float],
    transports: dict[str, str],
    joined: Sequence[str],
) -> UpdateReport:
    """The report; parties that the update was not for are left out.

    Args:
        joined: engines that were not at the last version before.
    """
    rows = []
    for party, sent in machine.sent.items():
        identity = trainers[party]
        rows.append(
            RankRow(
                rank=party,
                host=identity.host,
                pid=identity.pid,
                node=identity.node,
                nbytes=sent.nbytes,
                transfer_s=sent.seconds,
            )
        )
    for party, applied in machine.applied.items():
        for opened, rank in zip(engines[party], applied, strict=False):
            rows.append(
                RankRow(
                    rank=opened.load.rank,
                    host=opened.identity.host,
                    pid=opened.identity.pid,
                    node=opened.identity.node,
                    nbytes=rank.vote.nbytes,
                    transfer_s=rank.vote.seconds,
                    apply_s=rank.seconds,
                    peak_staging_bytes=rank.vote.peak_staging_bytes,
                    reloads=rank.reloads,
                    num_direct=rank.num_direct,
                    reloaded=rank.reloaded,
                    num_skipped=rank.num_skipped,
                )
            )
    changed = [sent.changed_values for sent in machine.sent.values()]
    committed = machine.applied.keys() - machine.poisoned.keys()
    return UpdateReport(
        version=machine.version,
        nbytes=manifest.nbytes,
        seconds=seconds,
        pause_s=max(machine.pause_s.values(), default=0.0),
        phases=phases,
        apply="staged" if machine.staged else "streaming",
        transports={pair: name for pair, name in transports.items() if pair.partition(" -> ")[0] in machine.sent},
        ranks=tuple(sorted(rows, key=lambda row: (row.rank.startswith("engine"), _numbers(row.rank)))),
        load=tuple(rank.load for party, ranks in engines.items() if party in machine.applied for rank in ranks),
        total_values=sum(meta.numel for meta in manifest.tensors),
        changed_values=None if any(c is None for c in changed) else sum(c for c in changed if c is not None),
        num_skipped=max((rank.num_skipped for ranks in machine.applied.values() for rank in ranks), default=0),
        skipped_bytes=machine.left_out_bytes,
        poisoned={engine: str(error) for engine, error in machine.poisoned.items()},
        joined=tuple(party for party in joined if party in committed),
    )


def _numbers(rank: str) -> list[int]:
    return [int(word) for word in rank.split() if word.isdigit()]
