"""One weight sync from opening to closing: who holds what, who sends what to whom, and update after update.

Talks to the parties through a `Fleet`; knows neither Ray nor any engine or transport.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import Any

from weightsync import messages as m
from weightsync.chunk import aligned
from weightsync.config import SyncConfig
from weightsync.errors import EnginePoisonedError, StagingLimitError, UpdateTimeoutError, WeightSyncError
from weightsync.interfaces import Fleet
from weightsync.manifest import Manifest
from weightsync.plan import assign_owners, choose_transport, merge_manifests
from weightsync.report import RankRow, UpdateReport
from weightsync.update import POLL_S, Command, UpdateMachine


class Session:
    """Owns one weight sync: the parties, their links, the version and the epoch."""

    def __init__(self, fleet: Fleet, config: SyncConfig) -> None:
        self._config = config
        self._fleet = fleet
        self._manifest: Manifest | None = None
        self._held: list[m.Description] = []
        self._engines: dict[str, tuple[m.ReceiverOpened, ...]] = {}
        self._links: list[m.LinkPlan] = []
        self._transports: dict[str, str] = {}
        self._stable = False
        self._linked = False
        self.version = 0
        self.epoch = 1

    def open(self) -> None:
        """Agree on the manifest, record every load map, connect all links."""
        described = self._ask({party: m.Describe(config=self._config) for party in self._fleet.trainers})
        self._held = [
            reply for party in self._fleet.trainers for reply in described[party] if isinstance(reply, m.Description)
        ]
        self._manifest = merge_manifests([description.manifest for description in self._held])
        opened = self._ask(
            {
                party: m.OpenReceiver(config=self._config, manifest=self._manifest, engine=i)
                for i, party in enumerate(self._fleet.engines)
            }
        )
        self._engines = {
            party: tuple(reply for reply in opened[party] if isinstance(reply, m.ReceiverOpened))
            for party in self._fleet.engines
        }
        ranks = [rank for engine in self._engines.values() for rank in engine]
        self.version = max([d.version for d in self._held] + [rank.version for rank in ranks])
        self._connect()

    def _connect(self) -> None:
        """Open every link, afresh: plan, senders, then both ends at once."""
        assert self._manifest is not None
        order = next(iter(self._engines.values()))[0].order
        owned = assign_owners(self._manifest, [d.manifest for d in self._held], order)
        receivers: dict[tuple[int, str], list[tuple[int, m.ReceiverOpened]]] = {}
        self._transports = {}
        for sender, description in enumerate(self._held):
            if not owned[sender]:
                continue
            for engine, ranks in enumerate(self._engines.values()):
                for rank in ranks:
                    name = choose_transport(self._config, description.identity, rank.identity)
                    receivers.setdefault((sender, name), []).append((engine, rank))
                    self._transports[f"trainer {sender} -> {rank.load.rank}"] = name
        plans = {
            key: m.LinkPlan(
                transport=key[1],
                sender=key[0],
                num_receivers=len(ends),
                host=self._held[key[0]].identity.address,
                token=secrets.token_hex(16),
            )
            for key, ends in receivers.items()
        }
        opened = self._ask(
            {
                party: m.OpenSender(
                    manifest=self._manifest,
                    names=owned[i],
                    links=tuple(plan for (sender, _), plan in plans.items() if sender == i),
                )
                for i, party in enumerate(self._fleet.trainers)
            }
        )
        links: list[tuple[m.LinkPlan, bytes, bool]] = []
        for i, party in enumerate(self._fleet.trainers):
            reply = opened[party][0]
            assert isinstance(reply, m.SenderOpened), reply
            mine = [plan for (sender, _), plan in plans.items() if sender == i]
            links += zip(mine, reply.addresses, reply.stable, strict=True)
        self._stable = all(stable for _, _, stable in links)
        requests: dict[str, m.Request] = {party: m.Connect() for party in self._fleet.trainers}
        for engine, party in enumerate(self._fleet.engines):
            requests[party] = m.Connect(
                links=tuple(
                    m.ReceiverLink(
                        plan=plan,
                        address=address,
                        names=owned[plan.sender],
                        stable=stable,
                        receiver={
                            rank.rank: index
                            for index, (of, rank) in enumerate(receivers[plan.sender, plan.transport])
                            if of == engine
                        },
                    )
                    for plan, address, stable in links
                )
            )
        self._ask(requests)
        self._linked = True

    def update(self) -> UpdateReport:
        """Bring every engine to the next version; see `weightsync.update` for what can happen."""
        assert self._manifest is not None, "update before open"
        started = time.perf_counter()
        phases: dict[str, float] = {}
        if not self._linked:
            self.epoch += 1
            self._connect()
            phases["connect"] = time.perf_counter() - started
        machine = UpdateMachine(
            version=self.version + 1,
            epoch=self.epoch,
            manifest_digest=self._manifest.digest,
            trainers=self._fleet.trainers,
            engines=self._fleet.engines,
            staged=self._staged(),
            timeout_s=self._config.timeout_s,
        )
        self._linked = False  # unless all goes well
        self._drive(machine)
        self._linked = machine.error is None and not machine.poisoned
        if machine.phase != "failed":
            self.version = machine.version
        if machine.poisoned and (machine.phase == "failed" or self._config.on_failure == "raise"):
            engine, error = next(iter(machine.poisoned.items()))
            healthy = len(machine.applied.keys() - machine.poisoned.keys()) if machine.phase != "failed" else 0
            raise EnginePoisonedError(
                f"{', '.join(machine.poisoned)} failed while applying version {machine.version} and may hold mixed "
                f"weights; no rollouts from there until a whole update succeeds ({healthy} engines have committed). "
                f"First failure: {error}",
                rank=error.rank or engine,
                phase=error.phase,
            ) from error
        if machine.error is not None and machine.phase == "failed":
            raise machine.error
        return self._report(machine, time.perf_counter() - started, {**phases, **machine.phases})

    def _staged(self) -> bool:
        assert self._manifest is not None
        needed = sum(aligned(meta.nbytes) for meta in self._manifest.tensors)
        fits = self._stable or needed <= self._config.staging_limit
        if self._config.apply == "staged" and not fits:
            raise StagingLimitError(
                f"apply: staged needs {needed} bytes of staging on every engine rank, staging_limit_bytes allows "
                f"{self._config.staging_limit}; raise it, or use apply: auto",
                group="(the whole model)",
                needed_bytes=needed,
                limit_bytes=self._config.staging_limit,
            )
        return fits if self._config.apply == "auto" else self._config.apply == "staged"

    def _drive(self, machine: UpdateMachine) -> None:
        """Carry out what the machine asks for until it has finished."""
        for command in machine.start(time.monotonic()):
            self._fleet.send(command.party, command.request)
        while not machine.finished:
            for command in machine.on_tick(time.monotonic()):
                self._fleet.send(command.party, command.request)
            commands: list[Command] = []
            for party, replies in self._fleet.replies(0.1):
                if any(command.party == party for command in commands):  # superseded, though not sent yet
                    continue
                now = time.monotonic()
                if isinstance(replies, WeightSyncError):
                    commands += machine.on_error(party, replies, now)
                else:
                    commands += machine.on_reply(party, replies, now)
            for command in commands:
                self._fleet.send(command.party, command.request)

    def _report(self, machine: UpdateMachine, seconds: float, phases: dict[str, float]) -> UpdateReport:
        assert self._manifest is not None
        rows = []
        for i, party in enumerate(self._fleet.trainers):
            identity, sent = self._held[i].identity, machine.sent[party]
            rows.append(
                RankRow(rank=party, host=identity.host, pid=identity.pid, nbytes=sent.nbytes, transfer_s=sent.seconds)
            )
        for party, ranks in self._engines.items():
            for opened, applied in zip(ranks, machine.applied.get(party, ()), strict=False):
                rows.append(
                    RankRow(
                        rank=opened.load.rank,
                        host=opened.identity.host,
                        pid=opened.identity.pid,
                        nbytes=applied.vote.nbytes,
                        transfer_s=applied.vote.seconds,
                        apply_s=applied.seconds,
                        peak_staging_bytes=applied.vote.peak_staging_bytes,
                        reloads=applied.reloads,
                    )
                )
        changed = [sent.changed_values for sent in machine.sent.values()]
        return UpdateReport(
            version=machine.version,
            nbytes=self._manifest.nbytes,
            seconds=seconds,
            pause_s=max(machine.pause_s.values(), default=0.0),
            phases=phases,
            apply="staged" if self._staged() else "streaming",
            transports=self._transports,
            ranks=tuple(rows),
            load=tuple(rank.load for ranks in self._engines.values() for rank in ranks),
            total_values=sum(meta.numel for meta in self._manifest.tensors),
            changed_values=None if any(c is None for c in changed) else sum(c for c in changed if c is not None),
            poisoned={engine: str(error) for engine, error in machine.poisoned.items()},
        )

    def status(self) -> dict[str, Any]:
        """Plain facts for people: version, epoch, parties, transports, what feeds nothing."""
        return {
            "version": self.version,
            "epoch": self.epoch,
            "trainers": len(self._fleet.trainers),
            "engines": {party: len(ranks) for party, ranks in self._engines.items()},
            "transports": self._transports,
            "tensors": len(self._manifest.tensors) if self._manifest else 0,
            "nbytes": self._manifest.nbytes if self._manifest else 0,
            "unmapped": {r.load.rank: r.load.unmapped for ranks in self._engines.values() for r in ranks},
            "unfed": {r.load.rank: r.load.unfed for ranks in self._engines.values() for r in ranks},
            "fallback": {r.load.rank: r.load.fallback for ranks in self._engines.values() for r in ranks},
        }

    def close(self) -> None:
        """Break all links; engines keep serving the version they have."""
        self._linked = False
        parties = {*self._fleet.trainers, *self._fleet.engines}
        for party in parties:
            self._fleet.send(party, m.Close())
        deadline = time.monotonic() + min(5.0, self._config.timeout_s)
        while parties and time.monotonic() < deadline:
            parties -= {party for party, _ in self._fleet.replies(0.1)}

    def _ask(self, requests: Mapping[str, m.Request]) -> dict[str, tuple[m.Reply, ...]]:
        """Send all requests at once, poll those whose answer is Pending, and collect the answers.

        Raises:
            WeightSyncError: the first that any rank answered. UpdateTimeoutError: naming who was silent.
        """
        answers: dict[str, tuple[m.Reply, ...]] = {}
        for party, request in requests.items():
            self._fleet.send(party, request)
        # A little more than the ranks' own bounds, so that their errors, which know more, come first.
        deadline = time.monotonic() + 1.25 * self._config.timeout_s + 1
        while len(answers) < len(requests):
            for party, replies in self._fleet.replies(0.1):
                if party not in requests or party in answers:  # a late answer to an earlier question
                    continue
                if isinstance(replies, WeightSyncError):
                    raise replies
                for reply in replies:
                    if isinstance(reply, m.Failed):
                        raise reply.error.to_error()
                if any(isinstance(reply, m.Pending) for reply in replies):
                    self._fleet.send(party, m.Poll(wait_s=POLL_S))
                else:
                    answers[party] = replies
            if time.monotonic() > deadline:
                silent = ", ".join(party for party in requests if party not in answers)
                what = type(next(iter(requests.values()))).__name__
                raise UpdateTimeoutError(
                    f"{silent} did not answer {what} within {self._config.timeout_s:g} s: busy in a long call, still "
                    "starting, or stuck",
                    rank=silent,
                )
        return answers
