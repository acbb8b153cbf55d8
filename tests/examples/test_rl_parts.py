"""The parts of the RL demo that need neither a real model nor Ray nor vLLM."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
import torch
import transformers
from rich.console import Console

from examples.rl import live, report
from examples.rl.engines import TorchEngine
from examples.rl.gap import GapSum
from examples.rl.reload_per_chunk import FilledMemory, one_parameter_per_chunk
from examples.rl.task import QUESTIONS, Group, Sample, advantages, question_numbers, reward
from examples.rl.trainer import Trainer
from examples.rl.updates import UpdateFigures
from examples.rl.verdict import Row, Verdict, gap_limit, judge, judge_corruption
from examples.rl_smollm2 import BREAK, parse_args

END = 2


def answer(num_tokens: int, *, ended: bool = True) -> Sample:
    return Sample(engine=0, token_ids=(5,) * num_tokens, logprobs=(-1.0,) * num_tokens, ended=ended)


def figures(version: int = 1, *, changed: int | None = 25) -> UpdateFigures:
    return UpdateFigures(
        version=version, nbytes=2_000_000_000, seconds=4.0, pause_s=0.5, changed_values=changed, total_values=100
    )


def row(step: int, *, reward: float = 0.5, gaps: tuple[float, float] = (0.04, 0.03), updated: bool = True) -> Row:
    return Row(
        step=step,
        version=step,
        reward=reward,
        gap=sum(gaps) / 2,
        gap_by_engine=dict(enumerate(gaps)),
        answer_tokens=10.0,
        rollout_s=1.0,
        train_s=2.0,
        grad_norm=0.5,
        update=figures(step + 1) if updated else None,
    )


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
    assert verdict.gap_limit == pytest.approx(0.12)


def test_one_step_of_one_engine_above_the_limit_fails_and_is_named() -> None:
    rows = rising_rows()
    # The mean over both engines stays below the limit.
    rows[7] = row(7, reward=rows[7].reward, gaps=(0.01, 0.13))
    verdict = judge(rows)
    assert rows[7].gap < verdict.gap_limit
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


# Figures and files


def test_rates_and_shares_of_an_update() -> None:
    assert figures().gb_per_s == 0.5
    assert figures().changed_share == 0.25
    assert figures(changed=0).changed_share == 0.0
    assert figures(changed=None).changed_share is None


def test_the_summary_holds_every_row_and_writes_nan_as_null(tmp_path: Path) -> None:
    rows = [row(0), row(1, gaps=(math.nan, 0.5), updated=False)]
    path = report.write_summary(
        tmp_path,
        rows=rows,
        verdict=judge(rows),
        settings={"steps": 1, "seed": 0},
        answers={"Why?": {"first": "So.", "last": "Because."}},
        seconds=12.5,
    )
    summary = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert [r["step"] for r in summary["rows"]] == [0, 1]
    assert summary["rows"][0]["update"]["changed_values"] == 25
    assert summary["rows"][0]["update"]["gb_per_s"] == 0.5
    assert summary["rows"][1]["update"] is None
    assert summary["rows"][1]["gap_by_engine"] == {"0": None, "1": 0.5}
    assert summary["verdict"]["ok"] is False
    assert summary["settings"] == {"steps": 1, "seed": 0}
    assert summary["versions"]["torch"] == torch.__version__
    assert summary["machine"]["cpus"] >= 1


def test_an_interrupted_run_leaves_a_summary_without_a_verdict(tmp_path: Path) -> None:
    path = report.write_summary(tmp_path, rows=[], verdict=None, settings={}, answers={}, seconds=1.0)
    assert json.loads(path.read_text())["verdict"] is None


@pytest.mark.parametrize("gaps", [(0.05, 0.04), (9.0, 11.0), (math.nan, 0.05)])
def test_the_plot_is_an_image_for_healthy_broken_and_nan_rows(tmp_path: Path, gaps: tuple[float, float]) -> None:
    rows = [row(0), row(1, gaps=gaps), row(2, gaps=gaps, updated=False)]
    verdict = Verdict(ok=True, gap_limit=gap_limit(rows), reasons=())
    path = report.write_plot(tmp_path, rows=rows, verdict=verdict, title="a title")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_off_a_terminal_each_row_is_one_aligned_line() -> None:
    out = io.StringIO()
    with live.Progress(Console(file=out, force_terminal=False, width=120)) as progress:
        progress.doing("nothing to be seen")
        progress.add(row(0))
        progress.add(row(13, updated=False))
    head, first, last = out.getvalue().splitlines()
    assert len(head) == len(first) == len(last)
    assert first.split() == ["0", "0", "0.50", "0.035", "4.00", "0.50", "0.50", "25.0%", "7.0"]
    assert last.split() == ["13", "13", "0.50", "0.035", "-", "-", "-", "-", "3.0"]


def test_on_a_terminal_the_finished_table_stays() -> None:
    out = io.StringIO()
    with live.Progress(Console(file=out, force_terminal=True, width=120)) as progress:
        progress.add(row(0))
    assert "25.0%" in out.getvalue()


# Command line


def test_break_mode_is_short_and_needs_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_args([]).steps == 14
    assert parse_args(["--break", BREAK]).steps == 3
    assert parse_args(["--break", BREAK, "--steps", "5"]).steps == 5
    with pytest.raises(SystemExit):
        parse_args(["--break", BREAK, "--engine", "torch"])
    assert "vllm" in capsys.readouterr().err


def test_no_steps_at_all_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--steps", "0"])
    assert "--steps" in capsys.readouterr().err


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


@pytest.fixture
def trainer(tiny_model: Path) -> Trainer:
    return Trainer(tiny_model, learning_rate=1e-2, num_threads=1, device="cpu")


@pytest.fixture
def groups(tiny_model: Path) -> list[Group]:
    engine = TorchEngine(0, tiny_model, num_threads=1, device="cpu")
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
    engine = TorchEngine(0, tiny_model, num_threads=1, device="cpu")
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
    for master, weight in zip(trainer.masters, trainer.weights, strict=True):
        assert master.dtype == torch.float32
        assert torch.equal(weight, master.to(torch.bfloat16))
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


# Break mode


def test_break_mode_sends_every_name_alone_the_tied_head_included(trainer: Trainer) -> None:
    chunks = one_parameter_per_chunk(trainer)
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
