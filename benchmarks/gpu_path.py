"""weightsync's transport and load alone, without a coordinator: what the peers of `benchmarks.onegpu` do, too."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from weightsync.background import Background
from weightsync.coalescer import Coalescer
from weightsync.direct import DirectApply
from weightsync.engines.torch_module import TorchModuleAdapter
from weightsync.grouptable import GroupTable
from weightsync.interfaces import LinkContext, Transfer
from weightsync.manifest import Manifest
from weightsync.registry import transport_classes
from weightsync.source import TrainerSource

if TYPE_CHECKING:
    from benchmarks.gpu_party import Party
    from benchmarks.gpu_peers import Remote, Timing

_TIMEOUT_S = 30.0


def transport_of(device: torch.device) -> str:
    return "shared_memory" if device.type == "cpu" else "cuda_ipc"


class ReceivingEnd:
    """The engine's side: one link, one model."""

    def __init__(self, model: torch.nn.Module, context: LinkContext, address: bytes, manifest: Manifest) -> None:
        self._manifest, self._verify = manifest, context.digest
        self._adapter = adapter = TorchModuleAdapter(model)
        context = replace(context, device=str(adapter.device))
        load_map = adapter.load_map(manifest)
        self._table = GroupTable.of(manifest, load_map.groups)
        self._direct = DirectApply(adapter, load_map, manifest, mode="auto", audit_every=10)
        self._receiver = transport_classes(transport_of(adapter.device))[1](context, receiver=0)
        self._receiver.connect(address)

    def load(self, version: int) -> None:
        """Receive one version and load it as it comes; verified, where digests are on, when it has landed."""
        way = self._direct.plan(sets=self._receiver.sends_sets, staged=False)
        coalescer = Coalescer(
            self._manifest,
            self._table,
            version=version,
            staging_limit_bytes=1 << 32,
            timeout_s=_TIMEOUT_S,
            verify=self._verify,
            defer_sets=self._receiver.sends_sets,
        )
        receiving = Background(lambda: self._drain(coalescer, version), name="receive")
        self._direct.apply(way, coalescer, verify=self._verify)
        self._adapter.synchronize()
        receiving.join(_TIMEOUT_S)
        receiving.result()
        coalescer.wait_whole()
        coalescer.close()

    def _drain(self, coalescer: Coalescer, version: int) -> None:
        transfer = Transfer(version=version, manifest=self._manifest, names=tuple(self._manifest.by_name))
        for chunk in self._receiver.receive(transfer):
            coalescer.put(chunk)
        coalescer.producer_done()

    def close(self) -> None:
        self._direct.forget_links()
        self._receiver.close()


@contextmanager
def data_path(trainer: Party, engine: Remote, *, digest: bool) -> Iterator[Any]:
    """The trainer's side. A sync's seconds are all it takes; "after the head start" leaves out what an update does while
    it is prepared: to look at the weights and to start their digest."""
    source = TrainerSource(lambda: trainer.model, wire_dtype={})
    manifest = source.manifest()
    names = tuple(manifest.by_name)
    context = LinkContext(
        sender=0,
        num_receivers=1,
        host="127.0.0.1",
        token=secrets.token_hex(16),
        timeout_s=_TIMEOUT_S,
        bucket_bytes=8 << 20,
        staging_limit_bytes=1 << 32,
        digest=digest,
        device=str(source.device),
        gpus=("", ""),
    )
    sender = transport_classes(transport_of(source.device))[0](context)
    sender.look(list(source.tensors(manifest, names)))
    address = sender.open(manifest.tensors)
    connecting = Background(sender.connect, name="connect")
    engine.ask("open_path", context, address, manifest)
    connecting.join(_TIMEOUT_S)
    connecting.result()
    version = 0

    def sync() -> Timing:
        nonlocal version
        version += 1
        started = time.perf_counter()
        source.check(manifest, names)
        held = list(source.tensors(manifest, names))
        sender.begin(held)
        begun = time.perf_counter()
        engine.start("load_path", version)
        sender.send(Transfer(version=version, manifest=manifest, names=names, held=True), iter(held))
        engine.result()
        ended = time.perf_counter()
        sender.finish()
        return {"seconds": ended - started, "after the head start": ended - begun}

    try:
        yield sync
    finally:
        engine.ask("close_path")
        sender.close()
