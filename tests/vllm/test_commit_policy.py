"""What a real LLM does along with an update: it labels outputs, drops what old weights computed, refuses requests in
doubt, and refuses updates in states that would make them wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import weightsync as ws
from weightsync.doctor.diagnosis import diagnose
from weightsync.doctor.examination import Examination
from weightsync.doctor.finding import Finding
from weightsync.sender import SenderRank
from weightsync.session import Session
from weightsync.testing import LocalFleet, in_process_party

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

Weights = dict[str, torch.Tensor]
PROMPT = [1 + i % 200 for i in range(70)]
"""Longer than two blocks of the cache, so that its beginning is found there."""
REFUSAL = r"engine 0 may hold mixed weights: version \d+ was not applied as a whole"


class Engine:
    """An LLM with small cache blocks, and a trainer that alternates between two sets of weights."""

    def __init__(self, llm: Any, party: Callable[[bytes], list[bytes]], sets: tuple[Weights, Weights]) -> None:
        self.llm, self.party, self.sets = llm, party, sets
        self.at = 0
        self.expected: list[Any] = [None, None]
        self.sender = SenderRank(0, lambda: self.sets[self.at])

    @property
    def worker(self) -> Any:
        return self.llm.llm_engine.model_executor.driver_worker.worker

    def connect(self, **settings: Any) -> Session:
        fleet = LocalFleet([in_process_party([self.sender])], [self.party])
        session = Session(fleet, ws.SyncConfig(**({"timeout_s": 60} | settings)))
        session.open()
        return session

    def ask(self, salt: str | None = None) -> Any:
        from vllm import SamplingParams

        prompt = {"prompt_token_ids": PROMPT} | ({"cache_salt": salt} if salt else {})
        asked = SamplingParams(temperature=0, max_tokens=8, logprobs=0, detokenize=False)
        return self.llm.generate([prompt], asked, use_tqdm=False)[0]

    def is_exact(self, output: Any) -> bool:
        return bool(comparable(output) == self.expected[self.at])


def comparable(output: Any) -> Any:
    said = output.outputs[0]
    return list(said.token_ids), [[(token, at[token].logprob) for token in at] for at in said.logprobs]


@pytest.fixture(scope="module")
def engine(moe: tuple[Path, Path], start_llm: Any, vllm_party: Any, load_weights: Any) -> Engine:
    llm = start_llm(moe[0], block_size=32)
    sets = load_weights(moe[0]), load_weights(moe[1])
    engine = Engine(llm, vllm_party(llm), sets)
    engine.expected[0] = comparable(engine.ask("before"))
    session = engine.connect()
    engine.at = 1
    session.update()
    engine.expected[1] = comparable(engine.ask("before"))  # test_update compares it with a fresh engine
    engine.at = 0
    session.update()
    session.close()
    assert engine.is_exact(engine.ask("after"))
    assert engine.expected[0] != engine.expected[1]
    return engine


@pytest.fixture
def swap(engine: Engine) -> Iterator[Callable[[Session], Any]]:
    """Update to the other weights."""

    def update(session: Session) -> Any:
        engine.at = 1 - engine.at
        return session.update()

    yield update
    session = engine.connect()
    session.update()  # whatever the test left
    session.close()


# ---- what comes with a commit ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("apply", ["staged", "streaming"])
def test_outputs_carry_the_committed_version_and_nothing_old_is_found_in_the_cache(
    apply: str, engine: Engine, swap: Any
) -> None:
    session = engine.connect(apply=apply)
    for _ in range(2):
        report = swap(session)
        first, second = engine.ask(), engine.ask()
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 64)
        assert engine.is_exact(first)
        assert engine.is_exact(second)
        if hasattr(first.outputs[0], "weight_versions"):  # vLLM 0.27 and later
            assert [span.version for span in first.outputs[0].weight_versions] == [str(report.version)]
    session.close()


def test_without_the_flush_old_blocks_would_be_found(engine: Engine, swap: Any) -> None:
    """So the test above can fail."""
    session = engine.connect(on_commit=())
    engine.ask()
    swap(session)
    output = engine.ask()
    assert output.num_cached_tokens == 64
    assert not engine.is_exact(output)
    session.close()
    engine.llm.reset_prefix_cache()


def test_salted_with_the_version_old_blocks_stay_and_never_match(
    engine: Engine, swap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.llm, "reset_prefix_cache", lambda *_, **__: pytest.fail("flushed"))
    session = engine.connect(version_salt=True, on_commit=("set_weight_version",))
    for _ in range(2):
        engine.ask()
        engine.ask("mine")
        swap(session)
        for salt in (None, "mine", "yours"):
            first, second = engine.ask(salt), engine.ask(salt)
            assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 64), "each salt has its own blocks"
            assert engine.is_exact(first)
            assert engine.is_exact(second)
    session.close()


def test_a_prompt_that_cannot_be_salted_is_refused(engine: Engine, swap: Any) -> None:
    from vllm import SamplingParams

    session = engine.connect(version_salt=True)
    with pytest.raises(ws.EngineStateError, match="version_salt"):
        engine.llm.llm_engine.add_request("0", {"data": 1}, SamplingParams())
    session.close()
    session = engine.connect()
    assert engine.llm.llm_engine.get_num_unfinished_requests() == 0
    session.close()


@pytest.mark.parametrize("apply", ["staged", "streaming"])
def test_a_refused_flush_keeps_the_engine_from_serving_until_the_next_update(
    apply: str, engine: Engine, swap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = engine.connect(apply=apply)
    with monkeypatch.context() as patch:
        patch.setattr(engine.llm, "reset_prefix_cache", lambda *_, **__: False)
        with pytest.raises(ws.EnginePoisonedError, match="refused to flush prefix cache"):
            swap(session)
    with pytest.raises(ws.EnginePoisonedError, match=rf"{REFUSAL} \(.*refused to flush prefix cache"):
        engine.ask()
    session.close()
    session = engine.connect(apply=apply)
    assert session.status()["poisoned"] == {"engine 0": "engine 0 rank 0 held mixed weights"}
    swap(session)
    assert engine.is_exact(engine.ask())
    session.close()


# ---- requests in doubt ----------------------------------------------------------------------------------------------


def test_a_poisoned_llm_refuses_every_kind_of_request_before_it_is_queued(
    engine: Engine, swap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import SamplingParams

    llm, asked = engine.llm, SamplingParams(temperature=0, max_tokens=8, logprobs=0, detokenize=False)
    prompt = {"type": "token", "prompt_token_ids": PROMPT}
    monkeypatch.setattr(llm, "_preprocess_chat_one", lambda *_, **__: prompt)  # these models have no tokenizer
    session = engine.connect()
    llm.enqueue([{"prompt_token_ids": PROMPT}], asked, use_tqdm=False)
    with monkeypatch.context() as patch:
        break_apply(patch, at=5)
        with pytest.raises(ws.EnginePoisonedError, match="planted"):
            swap(session)
    refusal = rf"{REFUSAL} \(engine 0 rank 0: RuntimeError: planted\)"
    requests: list[Callable[[], Any]] = [
        engine.ask,
        lambda: llm.generate([{"prompt_token_ids": PROMPT}] * 3, asked, use_tqdm=False),
        lambda: llm.chat([{"role": "user", "content": "hello"}], asked, use_tqdm=False),
        lambda: llm.enqueue([{"prompt_token_ids": PROMPT}], asked, use_tqdm=False),
        lambda: llm.wait_for_completion(use_tqdm=False),
    ]
    for request in requests:
        with pytest.raises(ws.EnginePoisonedError, match=refusal):
            request()
        assert llm.llm_engine.get_num_unfinished_requests() == 1, "what was queued before waits; nothing came to it"
    session.update()
    (waited,) = llm.wait_for_completion(use_tqdm=False)
    assert engine.is_exact(waited)
    assert engine.is_exact(engine.ask())
    session.close()


def break_apply(patch: pytest.MonkeyPatch, *, at: int) -> None:
    """Every apply fails before its group *at*; -1: after the last."""
    plain = ws.Coalescer.groups

    def broken(self: ws.Coalescer, **kinds: Any) -> Iterator[Any]:
        for i, group in enumerate(plain(self, **kinds)):
            if i == at:
                raise RuntimeError("planted")
            yield group
        raise RuntimeError("planted")

    patch.setattr(ws.Coalescer, "groups", broken)


@pytest.mark.parametrize("apply", ["staged", "streaming"])
@pytest.mark.parametrize("at", [0, 1, 7, -1])
def test_wherever_an_apply_is_cut_the_retry_is_exact(
    at: int, apply: str, engine: Engine, swap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group holds what feeds one module, so there is no cut inside a fused one."""
    session = engine.connect(apply=apply, bucket_bytes=1)
    with monkeypatch.context() as patch:
        break_apply(patch, at=at)
        with pytest.raises(ws.EnginePoisonedError, match="planted"):
            swap(session)
    assert not any(tensor.is_meta for tensor in engine.worker.get_model().state_dict().values())
    with pytest.raises(ws.EnginePoisonedError, match="planted"):
        engine.ask()
    for _ in range(2):
        session.update()
        assert engine.is_exact(engine.ask())
        swap(session)
        assert engine.is_exact(engine.ask())
    session.close()


def test_what_a_failed_reload_of_somebody_elses_left_behind_does_no_harm(engine: Engine, swap: Any) -> None:
    def fails(pairs: list[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        yield from pairs
        raise RuntimeError("planted")

    session = engine.connect()
    pairs = list(engine.sets[1 - engine.at].items())
    for count in (1, len(pairs) // 2, len(pairs)):
        with pytest.raises(RuntimeError, match="planted"):
            engine.worker.model_runner.reload_weights(weights_iterator=fails(pairs[:count]))
        assert any(tensor.is_meta for tensor in engine.worker.get_model().state_dict().values()) or count == len(pairs)
        swap(session)
        assert engine.is_exact(engine.ask())
    session.close()


# ---- states that would make an update wrong -------------------------------------------------------------------------


def set_config(path: str, value: Any) -> Callable[[Any, pytest.MonkeyPatch], None]:
    def set_it(worker: Any, patch: pytest.MonkeyPatch) -> None:
        *parents, name = path.split(".")
        owner = worker
        for part in parents:
            owner = getattr(owner, part)
        patch.setattr(owner, name, value, raising=False)

    return set_it


def asleep(worker: Any, patch: pytest.MonkeyPatch) -> None:
    from vllm.device_allocator import cumem

    entries = {1: SimpleNamespace(tag="weights", is_asleep=True)}
    patch.setattr(cumem.CuMemAllocator, "instance", SimpleNamespace(pointer_to_data=entries))


STATES: dict[str, tuple[Callable[[Any, pytest.MonkeyPatch], None], str]] = {
    "eplb": (set_config("vllm_config.parallel_config.enable_eplb", True), "enable_eplb=False"),
    "lora": (set_config("vllm_config.lora_config", object()), "without enable_lora"),
    "draft": (
        set_config("vllm_config.speculative_config", SimpleNamespace(method="eagle")),
        "eagle.*without speculative_config",
    ),
    "vLLM's own update": (set_config("_weight_update_active", True), "finish it first"),
    "asleep": (asleep, "wake_up"),
}


@pytest.mark.parametrize("state", STATES)
def test_a_state_that_would_make_an_update_wrong_is_refused_before_anything_moves(
    state: str, engine: Engine, swap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter, cure = STATES[state]
    session = engine.connect()
    with monkeypatch.context() as patch:
        enter(engine.worker, patch)
        with pytest.raises(ws.EngineStateError, match=cure) as caught:
            swap(session)
        assert (caught.value.rank, caught.value.phase) == ("engine 0 rank 0", "prepare")
        with pytest.raises(ws.EngineStateError, match=cure):
            engine.connect()
    engine.at = 1 - engine.at
    assert engine.is_exact(engine.ask())


def test_an_llm_that_is_asleep_is_refused(engine: Engine, swap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    session = engine.connect()
    monkeypatch.setattr(engine.llm.model_config, "enable_sleep_mode", True)
    engine.llm.sleep(level=1)
    try:
        with pytest.raises(ws.EngineStateError, match=r"asleep.*wake_up"):
            swap(session)
    finally:
        engine.llm.wake_up()
    session.update()
    assert engine.is_exact(engine.ask())
    session.close()


def test_an_llm_of_which_only_the_cache_is_asleep_is_updated(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.device_allocator import cumem

    session = engine.connect()
    monkeypatch.setattr(engine.llm.model_config, "enable_sleep_mode", True)
    states = {"weights": False, "kv_cache": True}
    entries = {i: SimpleNamespace(tag=tag, is_asleep=state) for i, (tag, state) in enumerate(states.items())}
    monkeypatch.setattr(cumem.CuMemAllocator, "instance", SimpleNamespace(pointer_to_data=entries))
    engine.llm.sleep(level=1)
    try:
        assert engine.llm.llm_engine.is_sleeping()
        session.update()
    finally:
        engine.llm.wake_up()
    assert engine.is_exact(engine.ask())
    session.close()


def test_the_weights_of_a_draft_model_are_reported_as_fed_by_nothing(
    engine: Engine, swap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = torch.nn.Module()
    draft.fc = torch.nn.Linear(2, 2, bias=False)
    draft.shared = engine.worker.get_model().lm_head
    monkeypatch.setattr(engine.worker.vllm_config, "speculative_config", SimpleNamespace(method="mtp"))
    monkeypatch.setattr(engine.worker.model_runner, "get_draft_model", lambda: draft, raising=False)
    session = engine.connect()
    (load,) = swap(session).load
    assert [path for path in load.unfed if path.startswith("draft_model.")] == ["draft_model.fc.weight"]
    session.close()


BUGS: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "40390": ("0.20.2", "0.21.0", {}),
    "48251": ("0.27.1", "0.28.0", {"use_mla": True}),
    "41670": ("0.32.0", None, {"quantization": "fp8"}),
    "44814": ("0.23.0", "0.24.0", {"is_hybrid": True}),
    "44371": ("0.25.1", "0.26.0", {"architectures": ["Gemma4ForCausalLM"]}),
}


@pytest.mark.parametrize("upstream", BUGS)
def test_a_known_bug_is_refused_where_the_engine_has_it(
    upstream: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm

    from weightsync.engines.vllm_state import refuse_unfit

    has_it, is_cured, kind = BUGS[upstream]
    plain: dict[str, Any] = {
        "enforce_eager": False,
        "use_mla": False,
        "quantization": None,
        "is_hybrid": False,
        "is_attention_free": False,
        "architectures": ["Qwen3MoeForCausalLM"],
        "get_num_experts": lambda: 4 if upstream in ("40390", "41670") else 0,
    }
    config = SimpleNamespace(
        model_config=SimpleNamespace(**plain | kind),
        parallel_config=SimpleNamespace(),
        compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(name="FULL_AND_PIECEWISE")),
    )
    worker = SimpleNamespace(vllm_config=config, model_runner=engine.worker.model_runner)
    own = {"fused_experts": SimpleNamespace(ab_strides1=torch.ones(1))}
    for module in engine.worker.get_model().modules():
        if upstream == "41670" and hasattr(getattr(module, "quant_method", None), "moe_kernel"):
            monkeypatch.setattr(module.quant_method, "moe_kernel", SimpleNamespace(**own))
    monkeypatch.setattr(vllm, "__version__", has_it)
    with pytest.raises(ws.EngineStateError, match=rf"vLLM {has_it}: .*vllm#{upstream}"):
        refuse_unfit(worker)
    for build in ("dev", "0.1.dev1+g1234567"):
        monkeypatch.setattr(vllm, "__version__", build)
        refuse_unfit(worker)
    if is_cured is not None:
        monkeypatch.setattr(vllm, "__version__", is_cured)
        refuse_unfit(worker)
    else:
        own["fused_experts"].ab_strides1 = None
        monkeypatch.setattr(vllm, "__version__", has_it)
        refuse_unfit(worker)


# ---- what a doctor sees of it ---------------------------------------------------------------------------------------


def examined(engine: Engine, source: Callable[[], Weights] | None = None, **settings: Any) -> list[Finding]:
    """What a doctor finds that is not green."""
    sender = engine.sender if source is None else SenderRank(0, source)
    fleet = LocalFleet([in_process_party([sender])], [engine.party])
    evidence = Examination(fleet, ws.SyncConfig(**({"timeout_s": 60} | settings))).run()
    fleet.close()
    return [finding for finding in diagnose(evidence) if finding.level != "green"]


def test_a_doctor_finds_a_sound_engine_sound_and_leaves_it_so(engine: Engine) -> None:
    assert examined(engine) == []
    assert engine.is_exact(engine.ask())
    session = engine.connect()
    version = session.version
    assert session.update().version == version + 1
    session.close()


@pytest.mark.parametrize("state", STATES)
def test_a_doctor_names_the_cure_of_such_a_state(state: str, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    enter, cure = STATES[state]
    with monkeypatch.context() as patch:
        enter(engine.worker, patch)
        (finding,) = examined(engine)
    assert (finding.check, finding.level, finding.party) == ("state", "red", "engine 0 rank 0")
    assert re.search(cure, f"{finding.found} {finding.cure}")


def test_a_doctor_finds_what_settings_and_names_do_to_a_real_engine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache,) = examined(engine, on_commit=())
    assert (cache.check, cache.level) == ("prefix cache", "red")

    (asleep,) = (f for f in of_a_sleeping_one(engine, monkeypatch) if f.check == "load map")
    assert asleep.level == "red"
    assert "call wake_up()" in asleep.cure

    def without_keys() -> Weights:
        return {name: t for name, t in engine.sets[engine.at].items() if "layers.0.self_attn.k_proj" not in name}

    partial = {f.check: f for f in examined(engine, without_keys)}["parameters fed in part"]
    assert partial.level == "red"
    assert "qkv_proj" in partial.found

    def in_fp32() -> Weights:
        return {name: t.float() for name, t in engine.sets[engine.at].items()}

    (cast,) = examined(engine, in_fp32)
    assert (cast.check, cast.level) == ("dtype casts", "yellow")
    assert "float32 -> bfloat16" in cast.found

    extension = next(base for base in type(engine.worker).__mro__ if "weightsync_handle" in vars(base))
    with monkeypatch.context() as patch:
        patch.delattr(extension, "weightsync_handle")
        (missing,) = (f for f in examined(engine) if f.check == "worker extension")
    assert 'worker_extension_cls="weightsync.' in missing.cure
    assert engine.is_exact(engine.ask())


def of_a_sleeping_one(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    """With the LLM put to sleep."""
    with monkeypatch.context() as patch:
        patch.setattr(engine.llm.model_config, "enable_sleep_mode", True)
        engine.llm.sleep(level=1)
        try:
            return examined(engine)
        finally:
            engine.llm.wake_up()
