"""`connect` and the handle that it returns: what a training loop uses."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import ray
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from weightsync.config import SyncConfig
from weightsync.errors import ConfigError, CoordinatorLostError, EngineStateError, WeightSyncError
from weightsync.ray_actors.coordinator import Coordinator
from weightsync.ray_actors.fleet import translate
from weightsync.ray_actors.reply import Replies
from weightsync.ray_actors.side import Locator
from weightsync.ray_actors.staying import stand_by
from weightsync.ray_actors.watching import Watching
from weightsync.registry import check_transport
from weightsync.report import Progress, UpdateReport

_making_replies = threading.Lock()
_MOST_STANDING_BY = 32
"""Actors; calling more costs more than it saves."""


def connect(
    *,
    trainers: Sequence[Any],
    engines: Sequence[Any],
    source: Locator,
    target: Locator,
    config: SyncConfig | str | Path | dict[str, Any] | None = None,
) -> WeightSync:
    """Connect trainers and engines that are Ray actors; returns a handle whose `update()` syncs the weights.

    No mixin is asked of the actors' classes. An actor must be free while weightsync talks to it (connect, and during
    an update); one with an AsyncLLM may go on generating, one with an LLM or a module must not do so from another
    thread. An actor takes part in one weight sync at a time: a new one takes it over.

    Args:
        trainers: actor handles, one per trainer rank.
        engines: actor handles, one per engine replica, with all its ranks inside.
        source: attribute path in the trainer actor ("model"), or a function of the actor; names a module, a mapping
            of tensors, or (name, tensor) pairs, or a method that returns one of these. Asked anew for each update.
        target: attribute path in the engine actor ("llm"), or a function; a vllm.LLM or AsyncLLM created with
            worker_extension_cls="weightsync.ray_actors.vllm_worker.WeightSyncWorkerExtension", an nn.Module, or an
            EngineAdapter.
        config: a SyncConfig, a dict, the path of a YAML file, or None for the defaults.

    Raises:
        ConfigError: a setting, `source` or `target` is wrong.
        AgreementError: trainer ranks disagree on a tensor, or the processes on a version of torch or weightsync.
        ManifestError: an engine's loader refuses a name or a shape.
        EngineStateError: an engine cannot be updated as it is, the worker extension is missing, for instance.
        TransportError: an actor is gone, or a link cannot be made.
        UpdateTimeoutError: an actor is busy.
    """
    settings = check_arguments(trainers, engines, config)
    sync = WeightSync(list(trainers), list(engines), source, target, settings)
    sync._start()
    return sync


def check_arguments(
    trainers: Sequence[Any], engines: Sequence[Any], config: SyncConfig | str | Path | dict[str, Any] | None
) -> SyncConfig:
    """The config, whole. Raises ConfigError for what can be known to be wrong before anybody is asked."""
    settings = SyncConfig.load(config)
    for name in [settings.transport] if isinstance(settings.transport, str) else [r.use for r in settings.transport]:
        if name != "auto":
            check_transport(name)
    _check_actors(trainers, engines)
    if settings.version_log:  # the coordinator works in another folder
        log = str(Path(settings.version_log).expanduser().absolute())
        settings = msgspec.structs.replace(settings, version_log=log)
    return settings


def _check_actors(trainers: Sequence[Any], engines: Sequence[Any]) -> None:
    """Raises ConfigError where the lists are not of actor handles, each once in its list, none the calling actor."""
    own_id = ray.get_runtime_context().get_actor_id()
    for key, actors in (("trainers", trainers), ("engines", engines)):
        if not isinstance(actors, Sequence) or not actors:
            raise ConfigError(f"{key}: expected a list of at least one actor handle, got {actors!r:.80}", key=key)
        places: dict[str, str] = {}
        for i, actor in enumerate(actors):
            if not isinstance(actor, ray.actor.ActorHandle):
                raise ConfigError(f"{key}[{i}]: expected a Ray actor handle, got {type(actor).__name__}", key=key)
            actor_id = actor._actor_id.hex()
            if actor_id in places:
                raise ConfigError(f"{key}[{i}] is the same actor as {places[actor_id]}; each must be its own", key=key)
            if actor_id == own_id:
                raise ConfigError(
                    f"{key}[{i}] is the actor that calls connect: it cannot answer meanwhile; call connect and update from "
                    "the driver or another actor",
                    key=key,
                )
            places[actor_id] = f"{key}[{i}]"


class WeightSync:
    """A connected weight sync. May be passed to other Ray tasks; close it once.

    A coordinator that dies is started anew, and continues at the version that the ranks, or the version log, have.
    """

    def __init__(
        self, trainers: list[Any], engines: list[Any], source: Locator, target: Locator, config: SyncConfig
    ) -> None:
        self.config = config
        self._trainers, self._engines, self._source, self._target = trainers, engines, source, target
        self._owner = secrets.token_hex(8)
        self._node = ray.get_runtime_context().get_node_id()
        self._coordinator: Any = None
        self._closed = False
        self._watching = Watching(config)
        self._replies: Replies | None = None

    def _start(self) -> None:
        """Find the coordinator, or start it, and have it opened."""
        start = ray.remote(num_cpus=0, concurrency_groups={"watch": 2})(Coordinator)
        self._coordinator = start.options(
            name=f"weightsync-{self._owner}",
            get_if_exists=True,
            scheduling_strategy=self._place(),
        ).remote(self._owner, self._trainers, self._engines, self._source, self._target, self.config)
        try:
            self._get("open")
        except BaseException:
            if self._coordinator is not None:
                ray.kill(self._coordinator)
            self._coordinator = None
            raise

    def _place(self) -> Any:
        """On the node that called connect, where the version log is, as long as there is such a node. Soft affinity is
        not enough: Ray 2.60 was seen to take another node with room on this one."""
        alive = any(node["NodeID"] == self._node and node["Alive"] for node in ray.nodes())
        return NodeAffinitySchedulingStrategy(self._node, soft=False) if alive else "DEFAULT"

    def update(self) -> UpdateReport:
        """Bring every engine to the trainers' present weights, as the next version.

        Returns when all engines have committed. The trainers' weights must not change meanwhile.

        Raises:
            WeightSyncError: one of its kinds; every engine then serves the version it had, unless the error is
                EnginePoisonedError, or CoordinatorLostError: then what was decided goes on, and `version` tells which it
                was. A later update starts afresh.
        """
        started = time.perf_counter()
        try:
            report = self._update()
        except WeightSyncError as error:
            self._watching.failed(error, time.perf_counter() - started)
            self._forget_lost()
            raise
        self._watching.committed(report)
        if report.lost:
            self._forget_lost()
        return report

    def _forget_lost(self) -> None:
        """Engines that the update went on without take no part any more, and may be added again."""
        if self.config.on_lost_engine == "remove" and self._coordinator is not None:
            with contextlib.suppress(WeightSyncError):
                left = set(self._get("engine_ids"))
                self._engines = [engine for engine in self._engines if engine._actor_id.hex() in left]

    def _update(self) -> UpdateReport:
        if self._closed:
            raise _closed_error()
        retries = self.config.retries  # the coordinator counts those of which it is not the cause
        while True:
            standing_by: list[Any] = []
            try:
                if self._coordinator is None:
                    self._start()
                return self._get_report(standing_by)
            except CoordinatorLostError:
                if retries == 0:
                    raise
                retries -= 1
            except BaseException:
                _look_away(standing_by)
                raise

    def _start_update(self, standing_by: list[Any], **options: Any) -> Any:
        """Call the coordinator, and have the actors stand by meanwhile: what was asked of them before is done before the
        update. Trainers first, who have the most to do ahead."""
        all_can = len(self._trainers) + len(self._engines) <= _MOST_STANDING_BY
        if all_can:
            standing_by += [actor.__ray_call__.remote(stand_by, "trainer") for actor in self._trainers]
        ref = self._coordinator.update.remote(standing_by=all_can, **options)
        if all_can:
            standing_by += [actor.__ray_call__.remote(stand_by, "engine") for actor in self._engines]
        return ref

    async def update_async(self) -> UpdateReport:
        """`update` for async code."""
        return await asyncio.to_thread(self.update)

    def verify(self) -> UpdateReport:
        """Prove that every engine holds the trainers' weights: they are sent once more, every engine's own loader loads them, and
        every parameter must come out as it was.

        To be called between an update and the trainers' next step. The version stays. Engines pause as for an update by a
        reload, which is what it costs; a parameter that the loader fills only in part is not compared.

        Raises:
            EnginePoisonedError: an engine held something else, in the parameters that are named; direct apply is off there
                from then on, and the next update repairs it.
            AgreementError: the trainers do not hold the committed version any more; nothing has changed.
            EngineStateError: there is no version yet, or an engine cannot show what it holds.
            WeightSyncError: as `update`; it is not tried again.
        """
        report: UpdateReport = self._call("verify")
        return report

    def add_engine(self, engine: Any) -> UpdateReport | None:
        """Take in an engine that is late, or comes in place of a lost one; the others go on undisturbed.

        Where the trainers still hold the last committed version, as its digest proves, the engine gets it now and the
        report is returned. Otherwise it takes part from the next update on, and None is returned. It must not serve
        before it has committed: `status()["admitted"]` lists who has.

        Raises:
            ConfigError: no actor handle, or one that takes part already. And as `connect`; then nothing has changed.
        """
        _check_actors(self._trainers, [*self._engines, engine])
        report: UpdateReport | None = self._call("add_engine", engine)
        self._engines.append(engine)
        if report is not None:
            self._watching.committed(report)
        return report

    def remove_engine(self, engine: Any) -> None:
        """Go on without an engine, alive or dead.

        Raises:
            ConfigError: it takes no part, or is the only one.
        """
        if not isinstance(engine, ray.actor.ActorHandle):
            raise ConfigError(f"remove_engine: expected a Ray actor handle, got {type(engine).__name__}", key="engine")
        actor_id = engine._actor_id.hex()
        self._call("remove_engine", actor_id)
        self._engines = [known for known in self._engines if known._actor_id.hex() != actor_id]

    def progress(self) -> Progress | None:
        """How far the update that runs is, or how the last one ended; None where the coordinator does not say within a
        second. May be called from another thread than `update`."""
        coordinator = self._coordinator
        if coordinator is None:
            return None
        try:
            progress: Progress | None = ray.get(coordinator.progress.remote(), timeout=1.0)
            return progress
        except Exception:  # whoever drives the update hears of it
            return None

    @property
    def version(self) -> int:
        """The last committed version; 0 before the first update."""
        return int(self.status()["version"])

    def status(self) -> dict[str, Any]:
        """Version, epoch, parties, transports, and what feeds nothing or is fed by nothing. Waits for a running update."""
        try:
            status: dict[str, Any] = self._call("status")
        except CoordinatorLostError:
            status = self._call("status")
        return status

    def close(self) -> None:
        """End the weight sync; trainers and engines live on, engines with the version they have. Idempotent, and
        never raises for a coordinator that is gone. Waits for an update that runs."""
        if self._closed:
            return
        self._closed = True
        if self._replies is not None:
            self._replies.close()
            self._replies = None
        if self._coordinator is None:
            return
        with contextlib.suppress(WeightSyncError):
            self._get("close")
        if self._coordinator is not None:
            ray.kill(self._coordinator)

    def _call(self, method: str, *args: Any, **options: Any) -> Any:
        if self._closed:
            raise _closed_error()
        if self._coordinator is None:
            self._start()
        return self._get(method, *args, **options)

    def _get_report(self, standing_by: list[Any]) -> UpdateReport:
        with _making_replies:
            self._replies = self._replies or Replies()
        replies, token = self._replies, self._replies.take()
        if not token:
            return self._wait("update", self._start_update(standing_by))  # type: ignore[no-any-return]
        try:
            ref = self._start_update(standing_by, reply_to=(replies.address, token))
            report = replies.wait(ref, token, self._slice_s)
        finally:
            replies.give_back()
        return report if report is not None else self._wait("update", ref)

    @property
    def _slice_s(self) -> float:
        return self.config.timeout_s + 10

    def _get(self, method: str, *args: Any, **options: Any) -> Any:
        return self._wait(method, getattr(self._coordinator, method).remote(*args, **options))

    def _wait(self, method: str, ref: Any) -> Any:
        """The result of a coordinator's call. Its own waits are bounded, a transfer by progress; so this one lasts as
        long as the coordinator lives."""
        slice_s = self._slice_s
        try:
            while not ray.wait([ref], timeout=slice_s)[0]:
                ray.get(self._coordinator.ping.remote(), timeout=slice_s)
            return ray.get(ref, timeout=slice_s)
        except RayActorError as error:
            self._coordinator = None
            raise CoordinatorLostError(
                f"the coordinator died in {method} ({str(error).splitlines()[0]}); the next call starts another, which "
                "continues at the version that the engines have"
            ) from error
        except Exception as error:
            raise translate(error, None, slice_s) from error

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_replies": None}  # another process makes its own

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _closed_error() -> EngineStateError:
    return EngineStateError("this weight sync was closed; connect again")


def _look_away(refs: list[Any]) -> None:
    """Their ends say nothing; Ray reports a failed call that nobody has looked at."""
    done, _ = ray.wait(refs, num_returns=len(refs), timeout=0) if refs else ([], [])
    for ref in done:
        with contextlib.suppress(Exception):
            ray.get(ref, timeout=0)
