"""The parts of the RL demo that need neither a real model nor Ray nor vLLM."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
import transformers

from examples.rl.engines import TorchEngine
from examples.rl.gap import GapSum
from examples.rl.pipeline import PipelineTorchEngine, PipelineTrainer
from examples.rl.reload_per_chunk import FilledMemory, one_parameter_per_chunk
from examples.rl.task import QUESTIONS, Group, Sample, advantages, question_numbers, reward
from examples.rl.trainer import Trainer
from examples.rl.verdict import Row, judge, judge_corruption
from examples.smollm2 import model_dir
from weightsync.pipeline import Rollout

END = 2


def answer(num_tokens: int, *, ended: bool = True) -> Sample:
    return Sample(engine=0, token_ids=(5,) * num_tokens, logprobs=(-1.0,) * num_tokens, ended=ended)


def row(step: int, *, reward: float = 0.5, gaps: tuple[float, float] = (0.04, 0.03)) -> Row:
    return Row(step=step, version=step, reward=reward, gap_by_engine=dict(enumerate(gaps)))


def rising_rows(num_rows: int = 12) -> list[Row]:
    return [row(step, reward=step / (num_rows - 1)) for step in range(num_rows)]


# Reward and advantages


@pytest.mark.parametrize(
    ("num_tokens", "ended", "expected"),
    [(2, True, 1.0), (16, True, 1.0), (17, True, 15 / 16), (24, True, 0.5), (32, True, 0.0), (8, False, 0.0)],
)
def test_the_reward_is_full_up_to_16_tokens_and_falls_to_0_at_32(num_tokens: int, ended: bool, expected: float) -> None:
    assert reward(answer(num_tokens, ended=ended)) == expected


def test_an_answer_of_nothing_but_its_end_earns_nothing() -> None:
    assert reward(answer(1)) == 0.0


def test_advantages_have_mean_0_and_deviation_1_and_keep_the_order() -> None:
    got = advantages([0.0, 0.25, 1.0, 0.25])
    assert sum(got) == pytest.approx(0.0, abs=1e-12)
    assert sum(a * a for a in got) / len(got) == pytest.approx(1.0)
    assert got[0] < got[1] == got[3] < got[2]


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1 + 0.2])
def test_equal_rewards_give_advantages_of_exactly_0(value: float) -> None:
    assert advantages([value] * 8) == [0.0] * 8


def test_the_questions_are_taken_in_turn_and_wrap_around() -> None:
    seen = [number for step in range(4) for number in question_numbers(step, per_step=4)]
    assert seen == list(range(len(QUESTIONS))) * 2
    assert question_numbers(1, per_step=6) == [6, 7, 0, 1, 2, 3]


# Gap


def test_the_gap_is_a_mean_over_tokens_not_over_answers() -> None:
    gap = GapSum()
    gap.add(0, [-1.0, -2.0, -3.0], [-1.0, -2.0, -3.0])
    gap.add(1, [-1.0], [-0.2])
    assert gap.mean() == pytest.approx(0.8 / 4)
    assert gap.by_engine() == pytest.approx({0: 0.0, 1: 0.8})


def test_differences_of_opposite_sign_do_not_cancel() -> None:
    gap = GapSum()
    gap.add(0, [-1.0, -1.0], [-2.0, 0.0])
    assert gap.mean() == 1.0


def test_a_nan_log_probability_makes_the_gap_nan() -> None:
    gap = GapSum()
    gap.add(0, [-1.0], [math.nan])
    gap.add(1, [-1.0], [-1.0])
    assert math.isnan(gap.mean())
    assert math.isnan(gap.by_engine()[0])
    assert gap.by_engine()[1] == 0.0


def test_log_probabilities_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        GapSum().add(0, [-1.0, -2.0], [-1.0])


# Verdict


def test_a_rising_reward_with_the_gap_at_noise_passes() -> None:
    verdict = judge(rising_rows())
    assert verdict.ok
    assert "limit 0.120" in verdict.reasons[0]


def test_one_step_of_one_engine_above_the_limit_fails_and_is_named() -> None:
    rows = rising_rows()
    # The mean over both engines stays below the limit.
    rows[7] = row(7, reward=rows[7].reward, gaps=(0.01, 0.13))
    verdict = judge(rows)
    assert not verdict.ok
    assert "step(s) 7," in verdict.reasons[0]


def test_a_nan_gap_fails_whatever_the_other_engine_says() -> None:
    for gaps in ((math.nan, 0.01), (0.01, math.nan)):
        assert not judge([*rising_rows()[:-1], row(11, reward=1.0, gaps=gaps)]).ok


def test_a_nan_gap_before_any_update_cannot_pass() -> None:
    assert not judge([row(0, gaps=(math.nan, 0.04)), *rising_rows()[1:]]).ok


@pytest.mark.parametrize(("first", "last"), [(0.1, 0.45), (0.6, 0.8), (0.9, 0.1)])
def test_a_reward_that_does_not_rise_clearly_fails(first: float, last: float) -> None:
    rows = [row(step, reward=first if step < 6 else last) for step in range(12)]
    verdict = judge(rows)
    assert not verdict.ok
    assert "NOT" in verdict.reasons[1]


def test_a_short_run_is_judged_by_the_gap_alone_and_says_so() -> None:
    flat = [row(step, reward=0.0) for step in range(4)]
    assert judge(flat).ok
    assert "not judged" in judge(flat).reasons[1]
    assert not judge([*flat, row(4, gaps=(9.0, 9.0))]).ok


@pytest.mark.parametrize("exploded", [9.9, math.nan, math.inf])
def test_break_mode_passes_when_every_row_after_an_update_exploded(exploded: float) -> None:
    rows = [row(0), row(1, gaps=(exploded, 9.0)), row(2, gaps=(exploded, exploded))]
    assert judge_corruption(rows).ok


def test_break_mode_fails_when_the_corruption_hides_in_a_step() -> None:
    verdict = judge_corruption([row(0), row(1, gaps=(9.0, 9.0)), row(2, gaps=(0.3, 0.04))])
    assert not verdict.ok
    assert "step(s) 2" in verdict.reasons[0]


def test_break_mode_without_an_update_shows_nothing() -> None:
    assert not judge_corruption([row(0)]).ok


# Trainer and torch engine, on a model of a few thousand weights


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.3,  # far from uniform, so that a score of the wrong token stands out
        bos_token_id=1,
        eos_token_id=END,
        pad_token_id=END,
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(params=["AVX512", "AVX2"])
def trainer(tiny_model: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    """As on a processor that multiplies bf16, and as on one that does not."""
    monkeypatch.setattr("examples.rl.trainer.get_cpu_capability", lambda: request.param)
    return Trainer(tiny_model, learning_rate=1e-2, num_threads=1, device="cpu")


@pytest.fixture
def groups(tiny_model: Path) -> list[Group]:
    engine = TorchEngine(tiny_model, device="cpu")
    return engine.sample([(1, 7, 9), (1, 4, 11, 12)], num_samples=8, seed=3)


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [weight.detach().clone() for weight in trainer.weights]


def test_the_torch_engine_ends_an_answer_at_its_end_token_and_nowhere_else(groups: list[Group]) -> None:
    samples = [sample for group in groups for sample in group.samples]
    assert len(samples) == 16
    for sample in samples:
        assert len(sample.token_ids) == len(sample.logprobs) <= 32
        assert sample.ended == (sample.token_ids[-1] == END)
        assert END not in sample.token_ids[:-1]
        assert sample.ended or len(sample.token_ids) == 32
    assert any(sample.ended for sample in samples)


def test_the_torch_engine_repeats_itself_with_one_seed_only(tiny_model: Path, groups: list[Group]) -> None:
    engine = TorchEngine(tiny_model, device="cpu")
    prompts = [group.prompt_ids for group in groups]
    assert engine.sample(prompts, num_samples=8, seed=3) == groups
    assert engine.sample(prompts, num_samples=8, seed=4) != groups


def test_trainer_and_engine_agree_on_log_probabilities_to_rounding(trainer: Trainer, groups: list[Group]) -> None:
    # Padding, the one-position shift or a wrong mask would show as a gap of whole units.
    assert trainer.step(groups, train=False).gap.mean() < 0.02


def test_the_gap_shows_an_engine_with_other_weights(trainer: Trainer, groups: list[Group]) -> None:
    with torch.no_grad():
        for weight in trainer.weights:
            weight.mul_(1.5)
    assert trainer.step(groups, train=False).gap.mean() > 0.2


def test_a_step_makes_rewarded_answers_likelier_than_the_others(trainer: Trainer, groups: list[Group]) -> None:
    def advantage_weighted(group: Group) -> float:
        with torch.no_grad():
            logprobs, mask = trainer._logprobs(group)
        signal = torch.tensor(advantages([reward(s) for s in group.samples]))[:, None] * mask
        return float((signal * logprobs).sum())

    before = sum(map(advantage_weighted, groups))
    step = trainer.step(groups)
    assert step.num_trained_groups > 0
    assert step.grad_norm > 0
    assert sum(map(advantage_weighted, groups)) > before


def test_the_gradient_is_a_mean_so_that_the_same_group_twice_gives_the_same(
    tiny_model: Path, groups: list[Group]
) -> None:
    norms = [
        Trainer(tiny_model, learning_rate=1e-2, num_threads=1, device="cpu").step(groups[:1] * times).grad_norm
        for times in (1, 2)
    ]
    assert norms[0] > 0
    assert norms[1] == pytest.approx(norms[0], rel=0.02)  # bf16 gradients


def test_the_module_always_holds_the_masters_rounded(trainer: Trainer, groups: list[Group]) -> None:
    before = weights(trainer)
    for _ in range(2):
        trainer.step(groups)
    assert any(not torch.equal(old, new) for old, new in zip(before, trainer.weights, strict=True))
    for master, sent, weight in zip(trainer.masters, trainer.model.parameters(), trainer.weights, strict=True):
        assert (master.dtype, sent.dtype) == (torch.float32, torch.bfloat16)
        assert torch.equal(sent, master.to(torch.bfloat16))
        assert torch.equal(weight, sent.to(weight.dtype))
    # What rounding drops is kept for later steps.
    assert any(not torch.equal(m, w.float()) for m, w in zip(trainer.masters, trainer.weights, strict=True))
    assert trainer.model.lm_head.weight is trainer.model.model.embed_tokens.weight


def test_answers_that_are_all_equally_good_move_nothing_even_after_a_step(
    trainer: Trainer, groups: list[Group]
) -> None:
    trainer.step(groups)  # so that the optimiser has a momentum
    before = weights(trainer)
    cut_off = [Group(prompt_ids=g.prompt_ids, samples=(answer(4, ended=False),) * 4) for g in groups]
    step = trainer.step(cut_off)
    assert (step.num_trained_groups, step.grad_norm) == (0, 0.0)
    assert all(torch.equal(old, new) for old, new in zip(before, trainer.weights, strict=True))


def test_measuring_alone_moves_nothing(trainer: Trainer, groups: list[Group]) -> None:
    before = weights(trainer)
    trainer.step(groups, train=False)
    assert all(torch.equal(old, new) for old, new in zip(before, trainer.weights, strict=True))


# What `weightsync run` runs


@pytest.fixture(scope="module")
def wordy_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small model that has SmolLM2's words."""
    folder = tmp_path_factory.mktemp("wordy")
    for file in model_dir().iterdir():
        if "token" in file.name or file.suffix in (".jinja", ".txt"):
            shutil.copy(file, folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        initializer_range=0.3, bos_token_id=1, eos_token_id=END, pad_token_id=END,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("stale", [False, True])
def test_the_demo_judges_its_run_by_what_the_engines_answer(wordy_model: str, stale: bool) -> None:
    trainer, engine = PipelineTrainer(wordy_model, learning_rate=1e-2), PipelineTorchEngine(wordy_model)

    def answered(step: int) -> list[Rollout]:
        prompts = trainer.prompts(step)
        completions = engine.rollout(prompts, seed=step)
        return [
            Rollout(prompt=p, completions=tuple(c), rewards=(0.0, 1.0) * 4, engine=0, version=step)
            for p, c in zip(prompts, completions, strict=True)
        ]

    metrics = trainer.step(0, answered(0))
    assert metrics["gap"] == metrics["gap 0"] < 0.02
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.mul_(1.5 if stale else 1.0)
    verdict = trainer.evaluate(1, answered(1))
    assert verdict.ok is not stale
    assert any(reason.startswith("What is the ocean? first:") for reason in verdict.reasons)
    assert ("NOT noise" in verdict.reasons[-2]) is stale
    assert verdict.metrics["tokens"] > 1


def test_the_demo_refuses_to_expect_anything_else(wordy_model: str) -> None:
    with pytest.raises(ValueError, match="expected learning or corruption"):
        PipelineTrainer(wordy_model, expect="luck")  # type: ignore[arg-type]


# Break mode


def test_break_mode_sends_every_name_alone_the_tied_head_included(trainer: Trainer) -> None:
    chunks = list(one_parameter_per_chunk(trainer.model))
    assert all(len(chunk) == 1 for chunk in chunks)
    assert [chunk[0][0] for chunk in chunks] == list(trainer.model.state_dict())
    assert "lm_head.weight" in [chunk[0][0] for chunk in chunks]


def test_filled_memory_is_finite_the_same_each_time_and_only_for_real_memory() -> None:
    def rebuild() -> torch.Tensor:
        with FilledMemory(), torch.device("cpu"):
            torch.empty_strided((2, 2), (2, 1), device="meta")
            return torch.empty_strided((64, 64), (64, 1), dtype=torch.bfloat16)

    first = rebuild()
    assert torch.isfinite(first).all()
    assert first.float().std() > 0.05
    assert torch.equal(first, rebuild())
