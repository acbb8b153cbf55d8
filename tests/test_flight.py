"""What an attempt's record says: spans of every rank on one clock, plan, bytes, and who failed where."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
import torch

from weightsync import messages as m
from weightsync.config import SyncConfig
from weightsync.errors import TransportError, WeightSyncError
from weightsync.flight import Flight
from weightsync.identity import identify
from weightsync.report import Attempt, LoadSummary, Span
from weightsync.testing.local import LocalSync, module_engine
from weightsync.update import UpdateMachine


def make_module(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(16, 33), torch.nn.Linear(33, 7))


def spans_of(attempt: Attempt, rank: str) -> dict[str, Span]:
    return {span.phase: span for span in attempt.spans if span.rank == rank}


RANKS = ("trainer 0", "engine 0 rank 0", "engine 1 rank 0")


@pytest.mark.parametrize("apply", ["staged", "streaming"])
def test_every_rank_has_its_phases_within_those_of_the_update(apply: Any) -> None:
    module = make_module(1)
    engines = [module_engine(make_module(2)), module_engine(make_module(3))]
    with LocalSync([lambda: module], engines, SyncConfig(apply=apply)) as session:
        (attempt,) = session.update().attempts
    assert (attempt.version, attempt.epoch, attempt.error) == (1, session.epoch, None)
    assert attempt.manifest_digest
    assert abs(attempt.started - time.time()) < 60
    nbytes = sum(t.nbytes for t in module.state_dict().values())
    (link,) = attempt.links
    assert (link.transport, link.sender, link.receivers) == ("shared_memory", "trainer 0", RANKS[1:])
    assert link.nbytes == nbytes
    own = spans_of(attempt, "coordinator")
    assert list(own) == (
        ["prepare", "transfer", "apply", "commit"] if apply == "staged" else ["prepare", "transfer", "commit"]
    )
    for rank in RANKS:
        spans = spans_of(attempt, rank)
        assert list(spans) == ["prepare", "transfer", *(["apply"] if rank != "trainer 0" else []), "commit"]
        assert spans["transfer"].nbytes == nbytes
        for phase, span in spans.items():
            around = own.get(phase, own["transfer"])  # streaming applies during the transfer
            assert span.ended
            assert around.start_s <= span.start_s
            assert span.start_s + span.seconds <= around.start_s + around.seconds + 1e-4
    assert all(clock.offset_s == clock.error_s == 0 for clock in attempt.clocks.values())
    assert attempt.clocks.keys() == set(RANKS)


def test_a_failed_attempt_says_who_failed_where_and_travels_with_the_error() -> None:
    module: Any = make_module(1)
    with LocalSync([lambda: module], [module_engine(make_module(2))], SyncConfig()) as session:
        session.update()
        del module[1]
        with pytest.raises(WeightSyncError) as caught:
            session.update()
    (attempt,) = caught.value.attempts
    assert (attempt.error, attempt.culprit, attempt.phase) == ("ManifestError", "trainer 0", "prepare")
    assert attempt.version == 2
    assert "1.weight" in (attempt.message or "")
    assert not spans_of(attempt, "trainer 0")["prepare"].ended
    assert not spans_of(attempt, "coordinator")["prepare"].ended
    assert spans_of(attempt, "engine 0 rank 0")["abort"].ended


def test_each_attempt_of_an_update_that_was_retried_is_told() -> None:
    class Once:
        breaks = False

        def __call__(self) -> Any:
            for name, tensor in make_module(1).state_dict().items():
                yield name, tensor
                if self.breaks:
                    self.breaks = False
                    raise TransportError("the source lost its link")

    source = Once()
    with LocalSync([source], [module_engine(make_module(2))], SyncConfig(retries=1)) as session:
        session.update()
        source.breaks = True
        report = session.update()
    assert [(a.error, a.culprit, a.phase) for a in report.attempts] == [
        ("TransportError", "trainer 0", "transfer"),
        (None, None, None),
    ]
    failed, done = (spans_of(attempt, "trainer 0")["transfer"] for attempt in report.attempts)
    assert (failed.ended, done.ended) == (False, True)
    assert spans_of(report.attempts[1], "coordinator")["connect"].seconds > 0


class Elsewhere:
    """A trainer and an engine whose clocks are ahead, answering by hand."""

    def __init__(self, ahead_s: dict[str, float]) -> None:
        self.flight, self.ahead_s = Flight(), ahead_s
        machine = UpdateMachine(
            version=1, epoch=1, manifest_digest="m", trainers=["trainer 0"], engines=["engine 0"], staged=True,
            timeout_s=9, plan_digests={},
        )  # fmt: skip
        there = msgspec.structs.replace(identify(), machine="another")
        load = LoadSummary(rank="engine 0 rank 0", num_groups=1)
        opened = m.ReceiverOpened(identity=there, rank=0, load=load, order=(), version=0)
        self.flight.begin(
            machine, epoch=1, manifest_digest="m", nbytes=8, links=(), trainers=["trainer 0"],
            engines={"engine 0": [opened]}, identities={"trainer 0": there, "engine 0 rank 0": there},
        )  # fmt: skip

    def ask(self, party: str, request: m.Request, reply: Any, *, wait_s: float = 0.0, work_s: float = 0.01) -> None:
        """*party* begins after *wait_s*, and works for so long."""
        self.flight.sent(party, request)
        time.sleep(wait_s)
        began = time.monotonic() + self.ahead_s[party]
        time.sleep(work_s)
        timed = msgspec.structs.replace(reply, began=began, seconds=time.monotonic() + self.ahead_s[party] - began)
        self.flight.answered(party, [timed])


PREPARED = m.Prepared(version=0, epoch=1, manifest_digest="m", plan_digest="p")


def test_clocks_of_other_machines_are_brought_to_the_coordinators() -> None:
    there = Elsewhere({"trainer 0": 5000.0, "engine 0": -77.0})
    # The engine is busy for a while before it hears of the update: its clock is bounded by what is quick.
    there.ask("trainer 0", m.Prepare(version=1, staged=True), PREPARED)
    there.ask("engine 0", m.Prepare(version=1, staged=True), PREPARED, wait_s=0.2)
    there.ask("engine 0", m.Commit(version=1), m.Ok(), work_s=0.02)
    attempt = there.flight.record()
    for rank, ahead_s in (("trainer 0", 5000.0), ("engine 0 rank 0", -77.0)):
        clock = attempt.clocks[rank]
        assert abs(clock.offset_s - ahead_s) <= clock.error_s + 1e-6
        assert clock.error_s < 0.1, "half of what the engine was busy for"
    assert spans_of(attempt, "engine 0 rank 0")["prepare"].start_s == pytest.approx(0.3, abs=0.15)


def test_progress_tells_bytes_and_groups_of_each_engine_while_it_lasts() -> None:
    there = Elsewhere({"engine 0": 0.0})
    assert (there.flight.progress().phase, Flight().progress().phase) == ("prepare", "connect")
    there.flight.sent("engine 0", m.Transfer(version=1))
    there.flight.answered("engine 0", [m.Pending(progress=6, groups=0)])
    time.sleep(0.02)
    progress = there.flight.progress()
    assert (progress.version, progress.nbytes) == (1, 8)
    engine = progress.engines["engine 0"]
    assert (engine.nbytes, engine.groups, engine.num_groups) == (6, 0, 1)
    assert 0.02 <= engine.seconds < 10


def test_a_party_that_is_silent_has_a_span_that_did_not_end() -> None:
    there = Elsewhere({"trainer 0": 0.0})
    there.ask("trainer 0", m.Prepare(version=1, staged=True), PREPARED)
    there.flight.sent("engine 0", m.Prepare(version=1, staged=True))
    time.sleep(0.02)
    there.flight.end()
    time.sleep(3)  # who is to blame is found out
    attempt = there.flight.record(TransportError("gone", rank="engine 0 rank 0", phase="prepare"))
    span = spans_of(attempt, "engine 0 rank 0")["prepare"]
    assert not span.ended
    assert 0.02 <= span.seconds <= attempt.seconds < 3
    assert "engine 0 rank 0" not in attempt.clocks
