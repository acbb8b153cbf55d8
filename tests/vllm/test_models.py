"""Kinds of models that make tensors of their weights, or keep them otherwise than they are loaded, on a real vLLM.

Every update, by whichever way, leaves an engine that cannot be told from a fresh one; what was not copied says why.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file

import weightsync as ws
from tests.vllm.processor import ON_CPU, packs_convolution, packs_linear
from weightsync.report import RankRow
from weightsync.sender import SenderRank
from weightsync.session import Session
from weightsync.testing import LocalFleet, in_process_party
from weightsync.testing.models import tiny_mamba, tiny_mla, tiny_qwen3_next, tiny_tied

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

PACKED = "is not kept as it is loaded"


class Kind(NamedTuple):
    make: Callable[[int, Path], object]
    reloaded: Callable[[], dict[str, str]] = dict
    """Module groups that must not be copied on this machine -> a part of the reason."""
    copied: tuple[str, ...] = ()
    """Those that are, on a CPU."""
    only: tuple[str, ...] = ()
    """Names of which an update changes nothing else, so that whatever is made of them has to be made anew."""
    on_gpu: dict[str, Any] = {}  # noqa: RUF012 - read only
    """What vLLM needs there in order to run a model as small as this."""

    @property
    def arguments(self) -> dict[str, Any]:
        return {} if ON_CPU else self.on_gpu


KINDS = {
    # W_UK_T and W_UV are views of kv_b_proj here, so that a copy reaches them too.
    "mla": Kind(
        tiny_mla,
        lambda: {"model.layers.1.self_attn.q_b_proj": PACKED} if packs_linear() else {},
        copied=("model.layers.0.self_attn.kv_b_proj", "model.layers.0.input_layernorm"),
        only=("model.layers.0.self_attn.kv_b_proj.weight",),
        on_gpu={"attention_backend": "TRITON_MLA"},
    ),
    "tied": Kind(
        tiny_tied,
        lambda: {"lm_head": "handler_tensor, which no tensor feeds"} if packs_linear() else {},
        copied=("model.layers.1.input_layernorm",),
        only=("model.embed_tokens.weight",),
    ),
    "gated delta": Kind(
        tiny_qwen3_next,
        lambda: {"model.layers.0.linear_attn.conv1d": PACKED} if packs_convolution() else {},
        copied=("model.layers.0.input_layernorm",),
        only=("model.layers.0.linear_attn.A_log", "model.layers.0.linear_attn.conv1d.weight"),
    ),
    "mamba": Kind(
        tiny_mamba,
        lambda: {"backbone.layers.0.mixer": ""},
        only=("backbone.layers.0.mixer.A_log", "backbone.layers.0.mixer.conv1d.weight"),
        on_gpu={"enable_prefix_caching": False},  # a block of its cache is smaller than a chunk of its kernel
    ),
}


class Models(NamedTuple):
    """Three folders of one kind: the third is the first with few tensors of the second; and an engine on the first."""

    kind: Kind
    folders: tuple[Path, Path, Path]
    weights: tuple[dict[str, torch.Tensor], ...]
    llm: Any


def make_folders(make: Callable[[int, Path], object], only: tuple[str, ...], folder: Path, load: Any) -> list[Path]:
    folders = [folder / name for name in ("old", "new", "few")]
    for seed, path in enumerate(folders):
        make(1 if seed == 2 else seed + 1, path)
    few = load(folders[0]) | {name: tensor for name, tensor in load(folders[1]).items() if name in only}
    save_file(few, folders[2] / "model.safetensors", metadata={"format": "pt"})
    return folders


@pytest.fixture(
    scope="module",
    params=[
        "gated delta",
        "mla",
        "tied",
        pytest.param("mamba", marks=pytest.mark.gpu),  # vLLM 0.32 on CPU serves Mamba-2 one prompt at a time only
    ],
)
def models(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, load_weights: Any, reference: Any
) -> Models:
    kind = KINDS[request.param]
    old, new, few = make_folders(kind.make, kind.only, tmp_path_factory.mktemp("kind"), load_weights)
    llm = reference.start(old, **kind.arguments)
    return Models(kind, (old, new, few), tuple(load_weights(folder) for folder in (old, new, few)), llm)


def engine_row(report: ws.UpdateReport) -> RankRow:
    return next(row for row in report.ranks if row.rank.startswith("engine"))


class Connected:
    """A weight sync whose trainer holds one of the models' weights."""

    def __init__(self, models: Models, vllm_party: Any, **settings: Any) -> None:
        self.models, self.at = models, 1
        sender = SenderRank(0, lambda: models.weights[self.at])
        fleet = LocalFleet([in_process_party([sender])], [vllm_party(models.llm)])
        self.session = Session(fleet, ws.SyncConfig(timeout_s=60, **settings))
        self.session.open()

    def update(self, at: int) -> RankRow:
        self.at = at
        return engine_row(self.session.update())


SETTINGS: list[dict[str, Any]] = [
    {"apply": "staged"},
    {"apply": "streaming", "skip_unchanged": True},
    {"direct_apply": "audit", "audit_every": 2},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_an_engine_equals_a_fresh_one_after_each_update(
    settings: dict[str, Any], models: Models, vllm_party: Any, outputs: Any, reference: Any
) -> None:
    sync = Connected(models, vllm_party, **settings)
    rows = []
    for at in (1, 0, 2, 1, 0, 0, 2):
        rows.append(sync.update(at))
        assert outputs(models.llm) == reference(models.folders[at], **models.kind.arguments)
    sync.session.close()
    if settings.get("skip_unchanged"):
        assert [rows[i].num_skipped > 0 for i in (0, 1, 2, 5, 6)] == [False, False, True, True, True]
        assert rows[-2].nbytes == rows[-2].reloads == 0
        return
    for key, reason in models.kind.reloaded().items():
        assert reason in rows[-1].reloaded[key]
    if ON_CPU and settings == {"apply": "staged"}:
        assert not {*models.kind.copied} & rows[-1].reloaded.keys()


@pytest.mark.gpu
def test_an_engine_that_quantises_what_it_loads_equals_a_fresh_one(
    tmp_path: Path, start_llm: Any, vllm_party: Any, outputs: Any, load_weights: Any
) -> None:
    """FP8 made of bfloat16 while loading. vLLM on CPU has no kernel that quantises to it."""
    folders = make_folders(tiny_tied, ("model.layers.0.mlp.up_proj.weight",), tmp_path, load_weights)
    engines = [start_llm(folder, quantization="fp8") for folder in folders]
    expected = [outputs(llm) for llm in engines]
    kind = Kind(tiny_tied)
    models = Models(kind, tuple(folders), tuple(map(load_weights, folders)), engines[0])  # type: ignore[arg-type]
    for settings in SETTINGS:
        sync = Connected(models, vllm_party, **settings)
        for at in (1, 0, 2, 1, 0, 0, 2):
            row = sync.update(at)
            assert outputs(models.llm) == expected[at]
        sync.session.close()
        if settings == {"apply": "staged"}:
            assert PACKED in row.reloaded["model.layers.0.mlp.gate_up_proj"]
