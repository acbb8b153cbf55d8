"""Slices of GPU tensors: two trainer ranks and three engine ranks, each a process of its own, on one GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import weightsync as ws
from tests.transports.test_sharded import NUM_TRAINERS, Columns, Trainer, serve, weights
from weightsync.identity import nccl_version
from weightsync.plan import why_not_nccl
from weightsync.receiver import ReceiverRank
from weightsync.session import Session
from weightsync.testing import LocalFleet, in_process_party
from weightsync.testing.processes import ProcessParty

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

GPU = "cuda:0"
FIRST_COLUMNS = (0, 0, 2)


def serve_engine(first: int) -> tuple[Callable[[bytes], Sequence[bytes]], Columns]:
    engine = Columns(first, GPU)
    return in_process_party([ReceiverRank(engine)]), engine


@pytest.mark.parametrize("apply", ["staged", "streaming"])
@pytest.mark.parametrize("transport", ["sharded_cuda_ipc", "sharded_broadcast"])
def test_engine_ranks_get_their_slices_of_what_two_ranks_hold(transport: str, apply: Any, tmp_path: Path) -> None:
    if transport == "sharded_broadcast":
        why = why_not_nccl(("one", "one"), nccl=nccl_version(), cupy=True, environment=os.environ)
        if why:
            pytest.skip(f"ranks of NCCL cannot share this GPU: {why}")
    trainers = [
        ProcessParty(f"trainer {i}", partial(serve, i, str(tmp_path / "store"), GPU)) for i in range(NUM_TRAINERS)
    ]
    engines = [ProcessParty(f"engine {i}", partial(serve_engine, first)) for i, first in enumerate(FIRST_COLUMNS)]
    fleet = LocalFleet(trainers, engines)
    config = ws.SyncConfig(transport=transport, apply=apply, timeout_s=60, partial="report")
    session = Session(fleet, config)
    try:
        session.open()
        for seed in (1, 2, 3):
            for trainer in trainers:
                trainer.ask(Trainer.step, seed)
            report = session.update()
            for engine in engines:
                engine.ask(Columns.check, seed)
        session.close()
    finally:
        fleet.close()
        for party in (*trainers, *engines):
            party.close()
    assert set(report.transports.values()) == {transport}
    whole, less = (
        sum(tensor[:, n:].nbytes if tensor.dim() == 2 else tensor.nbytes for tensor in weights(0).values())
        for n in (0, 2)
    )
    rows = {row.rank: row.nbytes for row in report.ranks}
    assert [rows[f"engine {i} rank 0"] for i in range(3)] == [whole, whole, less]
    assert sum(rows[f"trainer {i}"] for i in range(NUM_TRAINERS)) == whole + less, "twins are served at once"
