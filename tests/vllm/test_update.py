"""Updates of a real vLLM engine: after each, it cannot be told from a fresh engine on the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import weightsync as ws
from tests.vllm.processor import packs_linear
from weightsync.sender import SenderRank
from weightsync.session import Session
from weightsync.testing import LocalFleet, in_process_party
from weightsync.transports.shared_memory import SharedMemorySender

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

Weights = dict[str, torch.Tensor]
Chunking = Callable[[Weights], Any]


def reversed_pairs(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    yield from reversed(list(weights.items()))


def interleaved_pairs(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """Layer 0's first, layer 1's first, ..., so that every group is open at once."""
    yield from sorted(weights.items(), key=lambda item: [part for part in item[0].split(".") if not part.isdigit()])


CHUNKINGS: dict[str, tuple[Chunking, dict[str, Any]]] = {
    "one chunk for all": (lambda weights: weights, {"bucket_bytes": "1GiB"}),
    "one parameter a chunk": (lambda weights: weights, {"bucket_bytes": 1}),
    "reversed": (reversed_pairs, {"bucket_bytes": 1}),
    "interleaved over layers": (interleaved_pairs, {"bucket_bytes": 1}),
    "broadcast, interleaved": (interleaved_pairs, {"transport": "broadcast", "bucket_bytes": "64KiB"}),
}


class Engine:
    """One vLLM engine in this process, with a trainer whose weights the test sets."""

    def __init__(self, llm: Any, party: Callable[[bytes], list[bytes]], weights: Weights) -> None:
        self.llm = llm
        self.weights: Any = weights
        self.sender = SenderRank(0, lambda: self.weights() if callable(self.weights) else self.weights)
        self.party = party
        self.reloads = 0
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        plain = runner.reload_weights

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.reloads += 1
            return plain(*args, **kwargs)

        runner.reload_weights = counted

    def connect(self, **settings: Any) -> Session:
        fleet = LocalFleet([in_process_party([self.sender])], [self.party])
        session = Session(fleet, ws.SyncConfig(**({"timeout_s": 60} | settings)))
        session.open()
        return session


@pytest.fixture(scope="module")
def moe_engine(moe: tuple[Path, Path], reference: Any, vllm_party: Any, load_weights: Any) -> Engine:
    llm = reference.start(moe[0])
    return Engine(llm, vllm_party(llm), load_weights(moe[0]))


@pytest.fixture(scope="module")
def dense_engine(smollm2: tuple[Path, Path], reference: Any, vllm_party: Any, load_weights: Any) -> Engine:
    llm = reference.start(smollm2[0])
    return Engine(llm, vllm_party(llm), load_weights(smollm2[0]))


def tied(weights: Weights) -> Weights:
    """SmolLM2's checkpoint names plus the tied head, as a trainer's module has them."""
    return {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}


@pytest.mark.parametrize("chunking", CHUNKINGS)
def test_a_moe_equals_a_fresh_engine_after_every_chunking(
    chunking: str, moe: tuple[Path, Path], moe_engine: Engine, load_weights: Any, outputs: Any, reference: Any
) -> None:
    order, settings = CHUNKINGS[chunking]
    old, new = load_weights(moe[0]), load_weights(moe[1])
    session = moe_engine.connect(**settings)
    for weights, folder in ((new, moe[1]), (new, moe[1]), (old, moe[0])):
        moe_engine.weights, before = (lambda weights=weights: order(weights)), moe_engine.reloads
        report = session.update()
        assert outputs(moe_engine.llm) == reference(folder)
        assert moe_engine.reloads - before == 1
        assert [row.reloads for row in report.ranks if row.rank.startswith("engine")] == [1]
    session.close()


def test_fused_expert_names_as_a_trainer_holds_them_are_exact(
    moe: tuple[Path, Path], moe_engine: Engine, outputs: Any, reference: Any
) -> None:
    old, new = (torch.load(folder / "memory.pt") for folder in moe)
    assert "model.layers.0.mlp.experts.gate_up_proj" in new
    assert new["model.layers.0.mlp.experts.gate_up_proj"].dim() == 3
    moe_engine.weights = new
    session = moe_engine.connect(bucket_bytes=1)
    session.update()
    assert outputs(moe_engine.llm) == reference(moe[1])
    moe_engine.weights = old
    session.update()
    assert outputs(moe_engine.llm) == reference(moe[0])
    session.close()


@pytest.mark.parametrize("chunking", CHUNKINGS)
def test_a_dense_tied_model_equals_a_fresh_engine_after_every_chunking(
    chunking: str, smollm2: tuple[Path, Path], dense_engine: Engine, load_weights: Any, outputs: Any, reference: Any
) -> None:
    order, settings = CHUNKINGS[chunking]
    if "transport" in settings:
        settings = settings | {"bucket_bytes": "4MiB"}
    old, new = tied(load_weights(smollm2[0])), tied(load_weights(smollm2[1]))
    dense_engine.weights = old
    session = dense_engine.connect(**settings)
    for weights, folder in ((new, smollm2[1]), (old, smollm2[0])):
        dense_engine.weights, before = (lambda weights=weights: order(weights)), dense_engine.reloads
        report = session.update()
        assert report.nbytes == sum(t.nbytes for t in load_weights(folder).values()), "the tied head travels once"
        assert outputs(dense_engine.llm) == reference(folder)
        assert dense_engine.reloads - before == (1 if packs_linear() or weights is new else 0)
    session.close()


def test_a_trainer_that_sends_the_embeddings_only_refreshes_the_tied_head(
    smollm2: tuple[Path, Path], dense_engine: Engine, load_weights: Any, outputs: Any, reference: Any
) -> None:
    dense_engine.weights = load_weights(smollm2[1])
    assert "lm_head.weight" not in dense_engine.weights
    session = dense_engine.connect()
    report = session.update()
    assert "lm_head.weight" not in report.load[0].unfed
    assert outputs(dense_engine.llm) == reference(smollm2[1])
    dense_engine.weights = load_weights(smollm2[0])
    session.update()
    assert outputs(dense_engine.llm) == reference(smollm2[0])
    session.close()


def test_a_budget_smaller_than_the_model_streams_within_it(
    smollm2: tuple[Path, Path], dense_engine: Engine, load_weights: Any, outputs: Any, reference: Any
) -> None:
    limit = 80 * 2**20
    dense_engine.weights = tied(load_weights(smollm2[0]))
    session = dense_engine.connect(staging_limit_bytes=limit)
    peaks = []
    for folder in (smollm2[1], smollm2[0]):
        dense_engine.weights = tied(load_weights(folder))
        report = session.update()
        assert outputs(dense_engine.llm) == reference(folder)
        assert report.apply == "streaming"
        peaks += [row.peak_staging_bytes for row in report.ranks if row.rank.startswith("engine")]
    assert max(peaks) <= limit < report.nbytes
    assert peaks[0] > 0  # which reloads; where nothing is packed, the next lands in place
    session.close()


def test_the_load_map_covers_every_fed_parameter_once(
    moe: tuple[Path, Path], moe_engine: Engine, load_weights: Any
) -> None:
    from weightsync.engines.vllm import VllmAdapter

    worker = moe_engine.llm.llm_engine.model_executor.driver_worker.worker
    for weights in (load_weights(moe[0]), torch.load(moe[0] / "memory.pt")):
        manifest = ws.Manifest.from_tensors(weights)
        load_map = VllmAdapter(worker).load_map(manifest)
        assert load_map.fallback is None
        assert load_map.unmapped == ()
        assert load_map.unfed == (), "unfed: error must not refuse a sound engine"
        coverage = load_map.coverage()
        assert coverage.keys() >= {"model.layers.0.self_attn.qkv_proj.weight", "lm_head.weight"}
        assert all(found.exact for found in coverage.values()), coverage
        read = {name: sum(c.source.numel for c in load_map.copies if c.name == name and c.source) for name in weights}
        assert read == {name: tensor.numel() for name, tensor in weights.items()}


@pytest.mark.parametrize(
    "name", ["model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.experts.2.up_proj.weight"]
)
def test_a_trainer_that_lacks_a_shard_of_a_fused_module_is_refused(
    name: str, moe: tuple[Path, Path], moe_engine: Engine, load_weights: Any, outputs: Any
) -> None:
    before = outputs(moe_engine.llm)
    moe_engine.weights = without(name)(load_weights(moe[1]))
    moe_engine.weights = dict(moe_engine.weights)
    with pytest.raises(ws.ManifestError, match=r"feed only a part of .*(qkv_proj|w13_weight)"):
        moe_engine.connect()
    assert outputs(moe_engine.llm) == before


@pytest.mark.parametrize(
    ("name", "grow"),
    [("model.layers.1.self_attn.q_proj.weight", (1, 0)), ("model.layers.0.self_attn.o_proj.weight", (0, 1))],
)
def test_a_tensor_that_is_larger_than_the_engine_reads_is_refused(
    name: str, grow: tuple[int, int], moe: tuple[Path, Path], moe_engine: Engine, load_weights: Any
) -> None:
    weights = load_weights(moe[1])
    rows, columns = weights[name].shape
    moe_engine.weights = weights | {name: torch.zeros(rows + grow[0], columns + grow[1], dtype=torch.bfloat16)}
    with pytest.raises(ws.ManifestError, match=r"engine 0 reads .* elements of .*expects another shape") as caught:
        moe_engine.connect()
    assert caught.value.name == name


def test_names_that_feed_nothing_are_reported_and_do_no_harm(
    moe: tuple[Path, Path], moe_engine: Engine, load_weights: Any, outputs: Any, reference: Any
) -> None:
    moe_engine.weights = {**load_weights(moe[1]), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}
    session = moe_engine.connect()
    report = session.update()
    assert report.load[0].unmapped == ("model.layers.0.self_attn.rotary_emb.inv_freq",)
    assert outputs(moe_engine.llm) == reference(moe[1])
    session.close()


@pytest.fixture
def old_moe(moe: tuple[Path, Path], moe_engine: Engine, load_weights: Any) -> Engine:
    """The engine on its old weights, whatever the test before left."""
    moe_engine.weights = load_weights(moe[0])
    session = moe_engine.connect()
    session.update()
    session.close()
    return moe_engine


def without(name: str) -> Callable[[Weights], Any]:
    return lambda weights: ((n, t) for n, t in weights.items() if n != name)


NAME = "model.layers.1.self_attn.k_proj.weight"
LIES: dict[str, tuple[Callable[[Weights], Any], type[ws.WeightSyncError]]] = {
    "missing": (without(NAME), ws.IncompleteUpdateError),
    "duplicated": (lambda w: (p for n, t in w.items() for p in [(n, t)] * (1 + (n == NAME))), ws.IncompleteUpdateError),
    "unexpected": (lambda w: iter([*w.items(), ("model.layers.9.new.weight", torch.ones(3))]), ws.ManifestError),
    "mis-shaped": (lambda w: ((n, t[:-1] if n == NAME else t) for n, t in w.items()), ws.ManifestError),
    "mis-typed": (lambda w: ((n, t.float() if n == NAME else t) for n, t in w.items()), ws.ManifestError),
    "renamed": (
        lambda w: ((n.replace("k_proj", "kk_proj") if n == NAME else n, t) for n, t in w.items()),
        ws.ManifestError,
    ),
}


@pytest.mark.parametrize("transport", ["shared_memory", "broadcast"])
@pytest.mark.parametrize("lie", LIES)
def test_a_trainer_that_sends_other_than_it_announced_changes_nothing(
    lie: str, transport: str, moe: tuple[Path, Path], old_moe: Engine, load_weights: Any, outputs: Any, reference: Any
) -> None:
    new = load_weights(moe[1])
    old_moe.weights = lambda: iter(new.items())
    session = old_moe.connect(transport=transport)
    tell, error = LIES[lie]
    old_moe.weights = lambda: tell(new)
    named = "model.layers.9.new.weight" if lie == "unexpected" else "k_proj"
    with pytest.raises(error, match=named):
        session.update()
    assert outputs(old_moe.llm) == reference(moe[0])
    old_moe.weights = lambda: iter(new.items())
    session.update()
    assert outputs(old_moe.llm) == reference(moe[1])
    session.close()


@pytest.mark.parametrize("fault", ["flipped byte", "other version", "other manifest"])
def test_a_transport_that_carries_other_than_was_sent_changes_nothing(
    fault: str,
    moe: tuple[Path, Path],
    old_moe: Engine,
    load_weights: Any,
    outputs: Any,
    reference: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = SharedMemorySender._tell

    def faulty(self: SharedMemorySender, message: Any, **descriptor: Any) -> None:
        if hasattr(message, "pieces") and any(piece.name == NAME for piece in message.pieces):
            piece = next(piece for piece in message.pieces if piece.name == NAME)
            if fault == "flipped byte":
                self._segments[message.segment].payload[piece.offset + 5] ^= 1
            elif fault == "other version":
                message = msgspec.structs.replace(message, version=message.version + 7)
            else:
                message = msgspec.structs.replace(message, manifest_digest="0" * 32)
        plain(self, message, **descriptor)

    old_moe.weights = load_weights(moe[1])
    session = old_moe.connect(bucket_bytes=1)
    error = {"flipped byte": ws.DigestError, "other version": ws.IncompleteUpdateError}.get(fault, ws.ManifestError)
    with monkeypatch.context() as patch:
        patch.setattr(SharedMemorySender, "_tell", faulty)
        with pytest.raises(error, match=NAME) as caught:
            session.update()
    assert caught.value.rank == "engine 0 rank 0"
    assert outputs(old_moe.llm) == reference(moe[0])
    session.update()
    assert outputs(old_moe.llm) == reference(moe[1])
    session.close()


@pytest.mark.parametrize("settings", [{}, {"apply": "streaming"}], ids=["staged", "streaming"])
def test_a_reload_that_fails_half_way_poisons_and_the_next_update_is_exact(
    settings: dict[str, Any],
    moe: tuple[Path, Path],
    old_moe: Engine,
    load_weights: Any,
    outputs: Any,
    reference: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = ws.Coalescer.groups

    def broken(self: ws.Coalescer, **kinds: Any) -> Iterator[Any]:
        for i, group in enumerate(plain(self, **kinds)):
            if i == 7:
                raise RuntimeError("planted")
            yield group

    old_moe.weights = load_weights(moe[1])
    session = old_moe.connect(**settings)
    with monkeypatch.context() as patch:
        patch.setattr(ws.Coalescer, "groups", broken)
        with pytest.raises(ws.EnginePoisonedError, match=r"engine 0 failed.*planted"):
            session.update()
    with pytest.raises(ws.EnginePoisonedError, match=r"engine 0 may hold mixed weights.*planted"):
        outputs(old_moe.llm)
    for folder in (moe[1], moe[0]):
        old_moe.weights = load_weights(folder)
        session.update()
        assert outputs(old_moe.llm) == reference(folder)
    session.close()


def test_an_engine_without_the_extension_is_refused_with_the_cure(
    moe_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = type(moe_engine.llm.llm_engine.model_executor.driver_worker.worker)
    extension = next(base for base in worker.__mro__ if "weightsync_handle" in vars(base))
    monkeypatch.delattr(extension, "weightsync_handle")
    with pytest.raises(ws.EngineStateError, match="worker_extension_cls="):
        moe_engine.connect()
