"""Who takes part: late, removed, restarted and lost parties, coordinators that come and go, and versions over all that."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from weightsync import messages as m
from weightsync.chunk import as_bytes
from weightsync.config import SyncConfig
from weightsync.engines.torch_module import TorchModuleAdapter
from weightsync.errors import (
    AgreementError,
    ConfigError,
    EnginePoisonedError,
    EngineStateError,
    ManifestError,
    RestartedError,
    TransportError,
    WeightSyncError,
)
from weightsync.loadmap import LoadMap
from weightsync.manifest import Manifest
from weightsync.receiver import ReceiverRank
from weightsync.sender import SenderRank
from weightsync.session import Session
from weightsync.testing import LocalFleet, in_process_party
from weightsync.testing.campaign import look, odd_weights, serve_module
from weightsync.testing.modules import nested_module
from weightsync.testing.processes import ProcessParty


def weights(module: torch.nn.Module) -> dict[str, bytes]:
    return {name: as_bytes(t.detach()).numpy().tobytes() for name, t in module.state_dict().items()}


def make(seed: int) -> torch.nn.Module:
    return nested_module(odd_weights(seed))


class Engine:
    """A module as an engine that may be restarted, or fail while it applies."""

    def __init__(self, seed: int) -> None:
        self.start(seed)
        self.restarted = False

    def start(self, seed: int) -> None:
        self.module = make(seed)
        self.adapter = Adapter(self.module)
        self.rank = ReceiverRank(self.adapter)

    def restart(self, seed: int) -> None:
        self.rank.discard()  # the kernel closes what a dead process had open
        self.start(seed)
        self.restarted = True

    def __call__(self, payload: bytes) -> Sequence[bytes]:
        if self.restarted:
            raise RestartedError("this process was restarted", rank="engine 1")
        return in_process_party([self.rank])(payload)

    def reopen(self) -> Engine:
        self.restarted = False
        return self


class Adapter(TorchModuleAdapter):
    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self.applied = self.failures = self.refusals = 0

    def load_map(self, manifest: Manifest) -> LoadMap:
        if self.refusals:
            self.refusals -= 1
            raise RuntimeError("still starting")
        return super().load_map(manifest)

    def apply(self, groups: Iterable[Iterable[tuple[str, torch.Tensor]]]) -> int:
        self.applied += 1
        if self.failures:
            self.failures -= 1
            super().apply([next(iter(groups))])
            raise RuntimeError("out of memory")
        return super().apply(groups)


_opened: list[tuple[Session, LocalFleet]] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Close what a test has opened."""
    yield
    while _opened:
        session, fleet = _opened.pop()
        session.close()
        fleet.close()


class World:
    """One trainer, some engines, and a session over them."""

    def __init__(self, engines: int = 2, **settings: Any) -> None:
        self.module = make(1)
        self.sender = SenderRank(0, lambda: self.module)
        self.engines = [Engine(10 + i) for i in range(engines)]
        self.settings = {"timeout_s": 5, **settings}
        self.connect()

    def connect(self, engines: Sequence[Any] | None = None) -> None:
        """A coordinator, the first or one in place of another that is gone."""
        self.fleet = LocalFleet([in_process_party([self.sender])], [])
        for engine in self.engines if engines is None else engines:
            self.fleet.add(engine, restart=engine.reopen)
        self.session = Session(self.fleet, SyncConfig(**self.settings))
        self.session.open()
        _opened.append((self.session, self.fleet))

    def step(self) -> None:
        with torch.no_grad():
            for tensor in self.module.state_dict().values():
                tensor.add_(1)

    def add(self, engine: Engine) -> Any:
        report = self.session.add_engine(self.fleet.add(engine, restart=engine.reopen))
        self.engines.append(engine)
        return report

    def restart_and_refuse(self, times: int) -> None:
        """Engine 1 cannot be opened so many times; its process before is gone, as the coordinator sees it."""
        member, engine = self.session.engines["engine 1"], self.engines[1]
        member.ranks = tuple(replace(rank, identity=replace(rank.identity, pid=0)) for rank in member.ranks)
        engine.restart(30)
        engine.adapter.refusals = times

    def exact(self) -> bool:
        return all(weights(engine.module) == weights(self.module) for engine in self.engines)


@pytest.mark.parametrize("transport", ["shared_memory", "broadcast"])
def test_a_late_engine_gets_the_committed_version_and_the_others_links_stay(transport: str) -> None:
    world = World(transport=transport)
    world.session.update()
    world.step()
    world.session.update()
    epoch = world.session.epoch
    report = world.add(Engine(20))
    assert world.exact()
    assert (report.version, report.joined) == (2, ("engine 2",))
    assert [row.rank for row in report.ranks] == ["trainer 0", "engine 2 rank 0"]
    assert world.session.epoch == epoch, "no link was made anew"
    assert [engine.adapter.applied for engine in world.engines] == [2, 2, 1]
    assert world.session.status()["admitted"] == ["engine 0", "engine 1", "engine 2"]
    for version in (3, 4):
        world.step()
        assert world.session.update().version == version
        assert world.exact()
    assert world.session.epoch == epoch


def test_a_late_engine_whose_trainers_have_moved_on_comes_in_with_the_next_update() -> None:
    world = World()
    world.session.update()
    before = [weights(engine.module) for engine in world.engines]
    world.step()
    assert world.add(Engine(20)) is None
    assert [weights(engine.module) for engine in world.engines[:2]] == before
    assert world.session.status()["admitted"] == ["engine 0", "engine 1"]
    assert weights(world.engines[2].module) == weights(make(20)), "what it was brought was never applied"
    report = world.session.update()
    assert (report.version, report.joined) == (2, ("engine 2",))
    assert world.exact()


def test_without_digests_nothing_proves_the_version_so_a_late_engine_waits() -> None:
    world = World(digest=False)
    world.session.update()
    assert world.add(Engine(20)) is None
    assert world.session.update().joined == ("engine 2",)
    assert world.exact()


def test_a_late_engine_that_cannot_take_part_changes_nothing() -> None:
    world = World()
    world.session.update()
    wrong = Engine(3)
    wrong.adapter._module = torch.nn.Linear(3, 3)
    with pytest.raises(ManifestError, match="engine 2"):
        world.session.add_engine(world.fleet.add(wrong))
    assert list(world.session.engines) == ["engine 0", "engine 1"]
    world.step()
    world.session.update()
    assert world.exact()


def test_a_late_engine_that_fails_to_apply_is_left_out_and_the_others_go_on() -> None:
    world = World()
    world.session.update()
    late = Engine(20)
    late.adapter.failures = 1
    with pytest.raises(WeightSyncError, match="out of memory"):
        world.session.add_engine(world.fleet.add(late))
    world.step()
    world.session.update()
    assert world.exact()
    assert late.rank.poisoned


def test_an_engine_can_be_removed_and_comes_back_under_a_new_name() -> None:
    world = World()
    world.session.update()
    world.session.remove_engine("engine 0")
    removed = world.engines.pop(0)
    world.step()
    world.session.update()
    assert world.exact()
    assert weights(removed.module) == weights(make(1)), "it keeps what it had"
    report = world.add(removed)
    assert report.joined == ("engine 2",)
    assert world.exact()


def test_the_only_engine_and_a_stranger_cannot_be_removed() -> None:
    world = World(engines=1)
    with pytest.raises(ConfigError, match="only engine"):
        world.session.remove_engine("engine 0")
    with pytest.raises(ConfigError, match=r"engine 7 takes no part; there are engine 0"):
        world.session.remove_engine("engine 7")


def test_a_restarted_engine_is_opened_again_and_comes_in_with_the_update() -> None:
    world = World()
    world.session.update()
    world.engines[1].restart(30)
    world.step()
    report = world.session.update()
    assert world.exact()
    assert (report.version, report.joined, len(report.failed_attempts)) == (2, ("engine 1",), 1)
    assert "restarted" in report.failed_attempts[0]


@pytest.mark.parametrize("policy", ["raise", "remove"])
def test_a_restarted_engine_that_cannot_be_opened_is_opened_by_the_next_update(policy: str) -> None:
    world = World(on_lost_engine=policy)
    world.session.update()
    world.restart_and_refuse(times=2)
    before = weights(world.engines[0].module)
    world.step()
    for _ in range(2):
        with pytest.raises(WeightSyncError, match="engine 1 rank 0: RuntimeError: still starting"):
            world.session.update()
        assert weights(world.engines[0].module) == before
        assert world.session.status()["admitted"] == ["engine 0"]
    report = world.session.update()
    assert (report.version, report.joined, report.failed_attempts) == (2, ("engine 1",), ())
    assert world.exact()
    assert world.session.status()["admitted"] == ["engine 0", "engine 1"]


def test_a_restarted_engine_that_is_gone_before_it_could_be_opened_is_left_out_where_the_config_says_so() -> None:
    world = World(on_lost_engine="remove")
    world.session.update()
    world.restart_and_refuse(times=1)
    world.step()
    with pytest.raises(WeightSyncError, match="still starting"):
        world.session.update()
    del world.fleet._restarts["engine 1"], world.engines[1]
    assert world.session.update().lost == ("engine 1",)
    assert world.exact()


def test_a_restarted_trainer_continues_at_the_right_version() -> None:
    world = World(version_log=None)
    world.session.update()
    world.sender = SenderRank(0, lambda: world.module)  # a new process, which knows of no version
    world.connect()
    assert world.session.version == 1
    world.step()
    assert world.session.update().version == 2
    assert world.exact()


def test_a_restarted_trainer_with_other_tensors_is_refused() -> None:
    world = World()
    world.session.update()
    world.sender = SenderRank(0, lambda: torch.nn.Linear(3, 3))
    restarted = True

    def trainer(payload: bytes) -> Sequence[bytes]:
        if restarted:
            raise RestartedError("this process was restarted", rank="trainer 0")
        return in_process_party([world.sender])(payload)

    def reopen() -> Callable[[bytes], Sequence[bytes]]:
        nonlocal restarted
        restarted = False
        return trainer

    world.fleet._start("trainer 0", trainer)
    world.fleet.add_restart("trainer 0", reopen)
    for _ in range(2):
        with pytest.raises(AgreementError, match=r"trainer 0 was restarted and holds other tensors.*connect again"):
            world.session.update()


def test_versions_continue_from_the_log_when_every_process_is_new(tmp_path: Path) -> None:
    log = str(tmp_path / "versions.jsonl")
    world = World(version_log=log)
    for _ in range(3):
        world.session.update()
    with pytest.raises(EngineStateError, match="another weight sync uses this version log"):
        Session(world.fleet, SyncConfig(version_log=log))
    world.session.close()
    again = World(version_log=log)
    assert again.session.version == 3
    assert again.session.update().version == 4
    assert again.exact()


def test_a_coordinator_that_was_replaced_cannot_touch_the_engines() -> None:
    world = World()
    world.session.update()
    zombie = world.session
    world.connect()
    world.step()
    before = [weights(engine.module) for engine in world.engines]
    with pytest.raises(AgreementError, match="another weight sync has taken"):
        zombie.update()
    with pytest.raises(AgreementError, match="another weight sync has taken"):
        zombie.open()
    assert [weights(engine.module) for engine in world.engines] == before
    assert world.session.update().version == 2
    assert world.exact()


class Lost(BaseException):
    """The coordinator is gone."""


@pytest.mark.parametrize("logged", [True, False])
def test_a_coordinator_that_dies_between_apply_and_commit_is_rolled_forward_by_its_log(
    logged: bool, tmp_path: Path
) -> None:
    world = World(version_log=str(tmp_path / "log") if logged else None)
    world.session.update()
    world.step()
    send = world.session._calls.send

    def dies(party: str, request: m.Request) -> None:
        if isinstance(request, m.Commit):
            raise Lost
        send(party, request)

    world.session._calls.send = dies  # type: ignore[method-assign]
    with pytest.raises(Lost):
        world.session.update()
    assert world.exact(), "applied everywhere"
    world.session._log.close()
    world.connect()
    if logged:
        assert world.session.version == 2, "what was decided is committed"
        assert world.session.status()["admitted"] == ["engine 0", "engine 1"]
        assert not any(engine.rank.poisoned for engine in world.engines)
    else:
        assert set(world.session.status()["poisoned"]) == {"engine 0", "engine 1"}
    world.step()
    assert world.session.update().version == (3 if logged else 2)
    assert world.exact()
    assert not world.session.status()["poisoned"]


def test_a_poisoned_engine_is_tried_again_and_the_report_says_so() -> None:
    world = World(retries=1)
    world.session.update()
    world.step()
    world.engines[1].adapter.failures = 1
    report = world.session.update()
    assert world.exact()
    assert len(report.failed_attempts) == 1
    assert "engine 1" in report.failed_attempts[0]
    assert report.joined == ("engine 1",)


def test_retries_end(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(retries=2)
    world.session.update()
    world.step()
    world.engines[1].adapter.failures = 3
    with pytest.raises(EnginePoisonedError, match="engine 1"):
        world.session.update()
    assert world.session.status()["poisoned"].keys() == {"engine 1"}
    assert world.session.update().poisoned == {}
    assert world.exact()


def test_what_a_retry_cannot_cure_is_not_tried_again() -> None:
    world = World(retries=5)
    world.session.update()
    del world.module._modules["layers"]
    with pytest.raises(ManifestError):
        world.session.update()


@pytest.mark.parametrize("field", ["weightsync", "torch"])
def test_other_library_versions_are_refused_with_both_names(field: str) -> None:
    world = World()

    def other(payload: bytes) -> Sequence[bytes]:
        (answer,) = in_process_party([world.engines[1].rank])(payload)
        reply = m.decode_reply(answer)
        if isinstance(reply, m.ReceiverOpened):
            reply = replace(reply, identity=replace(reply.identity, **{field: "0.0.9"}))
        return [m.encode(reply)]

    fleet = LocalFleet([in_process_party([world.sender])], [world.engines[0], other])
    with pytest.raises(AgreementError, match=rf"engine 1 rank 0 .* runs {field} 0\.0\.9, trainer 0 runs") as caught:
        Session(fleet, SyncConfig()).open()
    assert caught.value.field == field


@pytest.fixture(scope="module")
def party() -> Iterable[ProcessParty]:
    party = ProcessParty("engine 1", partial(serve_module, odd_weights))
    yield party
    party.close()


@pytest.mark.parametrize("policy", ["raise", "remove"])
def test_a_killed_engine_is_named_with_its_process_and_left_out_where_the_config_says_so(
    policy: str, party: ProcessParty
) -> None:
    if not party.is_alive():
        party.restart()
        party.reopen()
    world = World(engines=1, on_lost_engine=policy)
    world.connect([world.engines[0], party])
    world.session.update()
    world.step()
    before, pid = weights(world.engines[0].module), party.pid
    party.signal(signal.SIGKILL)
    if policy == "raise":
        with pytest.raises(TransportError, match=rf"engine 1 rank 0 \(host .*, pid {pid}\) is gone") as caught:
            world.session.update()
        assert caught.value.rank == "engine 1"
        assert weights(world.engines[0].module) == before
        assert world.session.status()["admitted"] == ["engine 0"]
        world.session.remove_engine("engine 1")
        world.session.update()
    else:
        report = world.session.update()
        assert report.lost == ("engine 1",)
    assert world.exact()


def test_a_stopped_engine_is_named_as_stopped(party: ProcessParty) -> None:
    if not party.is_alive():
        party.restart()
        party.reopen()
    party.ask(look)  # a process that was just started may take long to answer first
    world = World(engines=1, timeout_s=3)
    world.connect([world.engines[0], party])
    world.session.update()
    party.signal(signal.SIGSTOP)
    try:
        with pytest.raises(WeightSyncError, match=r"engine 1 rank 0 \(host .*\) is stopped") as caught:
            world.session.update()
        assert caught.value.rank == "engine 1"
    finally:
        party.signal(signal.SIGCONT)
    world.step()
    world.session.update()
    assert world.exact()
    assert party.ask(look) is not None


class TwoTrainers:
    """Of the same tensors, either of which may be started anew with others of its own."""

    def __init__(self, **config: Any) -> None:
        self.weights = [self.values(1), self.values(1)]
        self.engine = nested_module(self.values(0))
        self.anew: set[int] = set()
        self.senders = [SenderRank(i, partial(self._weights_of, i)) for i in range(2)]
        receivers = in_process_party([ReceiverRank(TorchModuleAdapter(self.engine))])
        self.fleet = LocalFleet([partial(self._handle, i) for i in range(2)], [receivers])
        for i in range(2):
            self.fleet.add_restart(f"trainer {i}", partial(self._reopen, i))
        self.session = Session(self.fleet, SyncConfig(transport="shared_memory", timeout_s=20, **config))
        self.session.open()

    @staticmethod
    def values(seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        return {f"layers.{i}": torch.randn(8, 4) for i in range(6)}

    def _weights_of(self, i: int) -> dict[str, torch.Tensor]:
        return self.weights[i]

    def _handle(self, i: int, payload: bytes) -> Sequence[bytes]:
        if i in self.anew:
            raise RestartedError("this process was restarted", rank=f"trainer {i}")
        return in_process_party([self.senders[i]])(payload)

    def _reopen(self, i: int) -> Callable[[bytes], Sequence[bytes]]:
        self.anew.discard(i)
        self.senders[i] = SenderRank(i, partial(self._weights_of, i))
        return partial(self._handle, i)

    def restart(self, *trainers: int) -> None:
        self.anew.update(trainers)
        for i in trainers:
            self.senders[i]._drop_links(None)  # as the end of a process does
            self.weights[i] = self.values(99)

    def holds(self, weights: dict[str, torch.Tensor]) -> bool:
        return all(torch.equal(tensor, weights[name]) for name, tensor in self.engine.state_dict().items())

    def close(self) -> None:
        self.session.close()
        self.fleet.close()


@pytest.mark.parametrize("apply", ["staged", "streaming"])
def test_a_trainer_that_was_restarted_beside_others_is_told_once_and_nothing_is_mixed(apply: str) -> None:
    made = TwoTrainers(apply=apply)
    made.session.update()
    made.restart(1)
    with pytest.raises(AgreementError, match=r"trainer 1 was restarted.*than trainer 0.*update again") as caught:
        made.session.update()
    assert (caught.value.field, caught.value.rank) == ("restarted", "trainer 1")
    assert made.holds(made.values(1))
    assert made.session.status()["poisoned"] == {}
    made.weights = [made.values(2), made.values(2)]
    assert made.session.update().version == 2
    assert made.holds(made.values(2))
    made.close()


def test_trainers_that_were_all_restarted_are_what_there_is() -> None:
    made = TwoTrainers()
    made.session.update()
    made.restart(0, 1)
    report = made.session.update()
    assert (report.version, len(report.failed_attempts)) == (2, 2)
    assert made.holds(made.values(99))
    made.close()
