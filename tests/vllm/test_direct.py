"""Direct apply on a real vLLM: whichever way its modules are loaded, it cannot be told from a fresh engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import weightsync as ws
import weightsync.placement
from tests.vllm.processor import packs_linear
from weightsync.digest import copy_and_digest
from weightsync.errors import EnginePoisonedError
from weightsync.qualify import NOT_SEEN
from weightsync.report import RankRow
from weightsync.sender import SenderRank
from weightsync.session import Session
from weightsync.testing import LocalFleet, in_process_party

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

Weights = dict[str, torch.Tensor]
NATIVE = "handler_tensor, which no tensor feeds"
PACKED = "weight is not kept as it is loaded"


class Engine:
    """One vLLM engine in this process, and a trainer whose weights the test sets."""

    def __init__(self, llm: Any, party: Callable[[bytes], list[bytes]]) -> None:
        self.llm = llm
        self.weights: Weights = {}
        self._sender = SenderRank(0, lambda: self.weights)
        self._party = party

    def connect(self, weights: Weights, **settings: Any) -> Session:
        self.weights = weights
        session = Session(
            LocalFleet([in_process_party([self._sender])], [self._party]), ws.SyncConfig(timeout_s=60, **settings)
        )
        session.open()
        return session


def engine_row(report: ws.UpdateReport) -> RankRow:
    return next(row for row in report.ranks if row.rank.startswith("engine"))


@pytest.fixture(scope="module")
def moe_engine(moe: tuple[Path, Path], reference: Any, vllm_party: Any) -> Engine:
    llm = reference.start(moe[0])
    return Engine(llm, vllm_party(llm))


@pytest.fixture(scope="module")
def dense_engine(smollm2: tuple[Path, Path], reference: Any, vllm_party: Any) -> Engine:
    llm = reference.start(smollm2[0])
    return Engine(llm, vllm_party(llm))


SETTINGS: list[dict[str, Any]] = [
    {"direct_apply": "auto", "apply": "staged"},
    {"direct_apply": "auto", "apply": "streaming"},
    {"direct_apply": "off", "apply": "streaming"},
    {"direct_apply": "audit", "audit_every": 2, "apply": "staged"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_moe_equals_a_fresh_engine_after_each_update(
    settings: dict[str, Any],
    moe: tuple[Path, Path],
    moe_engine: Engine,
    load_weights: Any,
    outputs: Any,
    reference: Any,
) -> None:
    weights = [load_weights(folder) for folder in moe]
    session = moe_engine.connect(weights[1], **settings)
    rows = []
    for i in range(6):
        moe_engine.weights = weights[1 - i % 2]
        rows.append(engine_row(session.update()))
        assert outputs(moe_engine.llm) == reference(moe[1 - i % 2])
    assert session.verify().version == session.version
    assert outputs(moe_engine.llm) == reference(moe[0])
    session.close()
    if settings["direct_apply"] != "off":
        reasons = rows[-1].reloaded
        assert "is not laid out as loaded" in reasons["model.layers.0.mlp.experts.routed_experts"]
        assert (PACKED in reasons.get("model.layers.1.self_attn.qkv_proj", "")) == packs_linear()
        assert reasons["model.norm"] == NOT_SEEN, "the tiny model's norms are all ones"


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_dense_model_equals_a_fresh_engine_after_each_update(
    settings: dict[str, Any],
    smollm2: tuple[Path, Path],
    dense_engine: Engine,
    load_weights: Any,
    outputs: Any,
    reference: Any,
) -> None:
    weights = [load_weights(folder) for folder in smollm2]
    session = dense_engine.connect(weights[1], **settings)
    rows = []
    for i in range(6):
        dense_engine.weights = weights[1 - i % 2]
        rows.append(engine_row(session.update()))
        assert outputs(dense_engine.llm) == reference(smollm2[1 - i % 2])
    assert session.verify().version == session.version
    norm = dense_engine.llm.llm_engine.model_executor.driver_worker.get_model().model.norm.weight
    with torch.no_grad():
        norm[5] += 1
    with pytest.raises(EnginePoisonedError, match=r"model\.norm\.weight \(1 of its"):
        session.verify()
    session.update()
    assert session.verify().version == session.version
    assert outputs(dense_engine.llm) == reference(smollm2[0])
    session.close()
    assert rows[0].reloads == 1
    if settings["direct_apply"] == "off":
        assert all(row.reloads == 1 for row in rows)
        assert {reason for row in rows for reason in row.reloaded.values()} == {"direct_apply is off"}
        return
    last = rows[-1]
    if not packs_linear():
        if settings["direct_apply"] == "auto":
            assert (last.num_direct, last.reloaded, last.reloads) == (6 * 30 + 2, {}, 0)
        return
    assert all(row.reloads == 1 for row in rows)
    layers = {f"model.layers.{i}.{name}" for i in range(30) for name in ("self_attn.qkv_proj", "mlp.down_proj")}
    assert last.num_direct == 2 * 30 + 1, "the norms"
    assert not any("norm" in key for key in last.reloaded)
    assert layers < last.reloaded.keys()
    assert all(PACKED in last.reloaded[key] for key in layers), "what native code has packed"
    assert NATIVE in last.reloaded["lm_head"], "laid out as loaded, and packed besides"


@pytest.mark.parametrize("apply", ["staged", "streaming"])
def test_a_failure_in_the_middle_of_the_copies_poisons_and_the_next_update_is_exact(
    apply: Any,
    smollm2: tuple[Path, Path],
    dense_engine: Engine,
    load_weights: Any,
    outputs: Any,
    reference: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = [load_weights(folder) for folder in smollm2]
    session = dense_engine.connect(weights[1], apply=apply)
    for i in (1, 0):
        dense_engine.weights = weights[i]
        session.update()
    calls = iter(range(1000))

    def broken(plain: Any) -> Any:
        def call(*args: Any) -> Any:
            if next(calls) == 20:
                raise RuntimeError("planted")
            return plain(*args)

        return call

    dense_engine.weights = weights[1]
    with monkeypatch.context() as patch:
        patch.setattr("weightsync.direct.run_copies", broken(weightsync.placement.run_copies))
        patch.setattr("weightsync.coalescer.copy_and_digest", broken(copy_and_digest))  # what is written in place
        with pytest.raises(ws.EnginePoisonedError, match=r"engine 0 failed.*planted"):
            session.update()
    with pytest.raises(ws.EnginePoisonedError, match="may hold mixed weights"):
        outputs(dense_engine.llm)
    for i in (1, 0):
        dense_engine.weights = weights[i]
        assert engine_row(session.update()).num_direct == (61 if packs_linear() else 182)
        assert outputs(dense_engine.llm) == reference(smollm2[i])
    session.close()


@pytest.fixture
def model(dense_engine: Engine) -> Any:
    return dense_engine.llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()


def test_a_tensor_planted_in_a_norm_is_found(
    smollm2: tuple[Path, Path],
    dense_engine: Engine,
    model: Any,
    load_weights: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A module that caches a product of its weight, made anew when it is reloaded."""
    import weightsync.engines.vllm as engine_module

    norm = model.model.layers[3].input_layernorm
    norm.cached = [norm.weight.detach() * 2]
    plain = engine_module.VllmAdapter.apply

    def caching(self: Any, groups: Any) -> int:
        def watched() -> Iterator[Any]:
            for pairs in groups:
                yield pairs
                if any(name == "model.layers.3.input_layernorm.weight" for name, _ in pairs):
                    norm.cached = [dict(pairs)["model.layers.3.input_layernorm.weight"] * 2]

        # The cache is made while the group is loaded, as a module's own post-processing does.
        return plain(self, watched())

    weights = [load_weights(folder) for folder in smollm2]
    session = dense_engine.connect(weights[1])
    with monkeypatch.context() as patch:
        patch.setattr(engine_module.VllmAdapter, "apply", caching)
        for i in (1, 0, 1):
            dense_engine.weights = weights[i]
            row = engine_row(session.update())
            assert torch.equal(norm.cached[0], norm.weight * 2)
    assert "input_layernorm's cached[0], which no tensor feeds" in row.reloaded["model.layers.3.input_layernorm"]
    assert row.num_direct == (60 if packs_linear() else 181)
    del norm.cached
    session.close()
