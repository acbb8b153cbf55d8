"""The simulated ranks answer as the real ones do, so that what holds for thousands of them means something."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from weightsync import messages as m
from weightsync.config import SyncConfig
from weightsync.engines.torch_module import TorchModuleAdapter
from weightsync.receiver import ReceiverRank
from weightsync.sender import SenderRank
from weightsync.testing.simulated_engine import SimulatedRank
from weightsync.testing.simulated_trainer import Clock, SimulatedTrainer, Wires

CONFIG = SyncConfig(timeout_s=5, transport="shared_memory")
WAIT_S = 2.0


class Flaky(TorchModuleAdapter):
    """Fails after the first group, when told to."""

    fails = False

    def apply(self, groups: Iterable[Iterable[tuple[str, torch.Tensor]]]) -> int:
        if self.fails:
            super().apply([next(iter(groups))])
            raise RuntimeError("out of memory")
        return super().apply(groups)


@dataclass
class Pair:
    """A trainer and an engine's rank, real or simulated, and their coordinator's memory."""

    ask: Callable[[str, m.Call, bool], m.Reply]
    """(which, the call, whether it goes wrong)"""
    session: str = "first"
    number: int = 0
    epoch: int = 0
    link: int = 0
    description: m.Description | None = None
    last: m.Call | None = None
    """To the engine."""

    def send(self, which: str, request: m.Request, *, fails: bool = False) -> m.Reply:
        self.number += 1
        call = m.Call(session=self.session, epoch=self.epoch, number=self.number, request=request)
        self.last = call if which == "engine" else self.last
        return self.ask(which, call, fails)

    def open(self, decided: int) -> list[m.Reply]:
        """As a new coordinator does: it learns the epoch from the answers."""
        described = self.send("trainer", m.Describe(config=CONFIG))
        assert isinstance(described, m.Description)
        self.description = described
        asked = m.OpenReceiver(config=CONFIG, manifest=described.manifest, engine=0, decided=decided)
        opened = self.send("engine", asked)
        assert isinstance(opened, m.ReceiverOpened)
        self.epoch = max(described.epoch, opened.epoch)
        return [opened, *self.relink()]

    def relink(self) -> list[m.Reply]:
        assert self.description is not None
        self.epoch += 1
        self.link += 1
        names = tuple(meta.name for meta in self.description.manifest.tensors)
        plan = m.LinkPlan(
            id=self.link,
            transport="shared_memory",
            sender=0,
            num_receivers=1,
            host="127.0.0.1",
            token=f"{self.session}-{self.link}",
        )
        opened = self.send("trainer", m.OpenSender(manifest=self.description.manifest, names=names, links=(plan,)))
        assert isinstance(opened, m.SenderOpened)
        link = m.ReceiverLink(plan=plan, address=opened.addresses[0], names=names, stable=True, receiver={0: 0})
        self.send("trainer", m.Connect())
        self.send("engine", m.Connect(links=(link,)))
        replies = [self.send("engine", m.Poll(wait_s=WAIT_S))]
        self.send("trainer", m.Poll(wait_s=WAIT_S))
        return replies


def real_pair() -> Pair:
    trainer = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    adapter = Flaky(torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3))))
    sender, receiver = SenderRank(0, lambda: trainer), ReceiverRank(adapter)

    def ask(which: str, call: m.Call, fails: bool) -> m.Reply:
        adapter.fails = fails
        return sender.handle(call) if which == "trainer" else receiver.handle(call)

    return Pair(ask)


def simulated_pair() -> Pair:
    clock = Clock()
    wires = Wires(clock, 0.01, lambda: 0.0)
    trainer, rank = SimulatedTrainer(0, 1, wires), SimulatedRank(0, 2, wires)

    def ask(which: str, call: m.Call, fails: bool) -> m.Reply:
        clock.now += 0.1
        if which == "trainer":
            (reply,) = trainer.handle(call)
            return reply
        rank.flaw = "fails" if fails else ""
        answer = rank.handle(call)
        assert answer is not None, "it waits"
        return answer

    return Pair(ask)


def told(reply: m.Reply) -> tuple[Any, ...]:
    """What a coordinator acts on."""
    facts = [getattr(reply, name, None) for name in ("version", "epoch", "poisoned", "reloads")]
    kind = reply.error.kind if isinstance(reply, m.Failed) else ""
    return (type(reply).__name__, kind if kind in ("AgreementError", "RestartedError") else "", *facts)


STEPS = ["Prepare", "Transfer", "Vote", "Apply", "Commit"]
SUCCESSORS = {"successor": False, "informed successor": True, "failure and informed successor": True}
"""A new coordinator; whether it knows of the decision."""
Mishap = st.sampled_from(["lost", "twice", "epoch", "session", "failure", "abort", *SUCCESSORS])


def update(pair: Pair, version: int, mishaps: dict[str, str]) -> list[m.Reply]:
    """One update; *mishaps*: step -> what goes wrong there. All that the engine answers."""
    requests: dict[str, m.Request] = {
        "Prepare": m.Prepare(version=version, staged=True),
        "Transfer": m.Transfer(version=version),
        "Vote": m.Poll(wait_s=WAIT_S),
        "Apply": m.Apply(version=version),
        "Commit": m.Commit(version=version),
    }
    replies: list[m.Reply] = []
    for step, request in requests.items():
        mishap = mishaps.get(step, "")
        if mishap != "lost":
            replies.append(pair.send("engine", request, fails=mishap.startswith("failure") and step == "Apply"))
        failed = mishap in ("lost", "abort") or isinstance(replies[-1], m.Failed)
        call = pair.last
        assert call is not None
        match mishap:
            case "twice":
                replies.append(pair.ask("engine", call, False))
            case "epoch" | "session":
                other: dict[str, Any] = {"epoch": 0} if mishap == "epoch" else {"session": "a stranger's"}
                pair.number += 1
                replies.append(pair.ask("engine", replace(call, number=pair.number, **other), False))
            case _ if mishap in SUCCESSORS:
                pair.session, pair.number = f"after {pair.session}", 0
                replies += pair.open(version if SUCCESSORS[mishap] else 0)
                replies.append(pair.ask("engine", replace(call, number=99, epoch=99), False))
                return replies
        if failed:
            replies.append(pair.send("engine", m.Abort()))
            pair.send("trainer", m.Abort())
            return replies + pair.relink()
        if step in ("Prepare", "Transfer", "Commit"):
            pair.send("trainer", request)
        if step == "Transfer":
            pair.send("trainer", m.Poll(wait_s=WAIT_S))
    return replies


def story(pair: Pair, updates: list[dict[str, str]]) -> list[tuple[Any, ...]]:
    replies = pair.open(0)
    for version, mishaps in enumerate([*updates, {}], start=1):
        replies += update(pair, version, mishaps)
    replies += [pair.send("engine", m.Close())]
    pair.send("trainer", m.Close())
    return [told(reply) for reply in replies]


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(st.dictionaries(st.sampled_from(STEPS), Mishap, max_size=2), max_size=3))
@example([{"Apply": "failure"}, {"Apply": "twice"}])
@example([{"Apply": "informed successor"}, {"Apply": "successor"}])
@example([{"Apply": "failure and informed successor"}])
def test_a_simulated_rank_answers_as_a_real_one(updates: list[dict[str, str]]) -> None:
    real, simulated = story(real_pair(), updates), story(simulated_pair(), updates)
    assert simulated == real
