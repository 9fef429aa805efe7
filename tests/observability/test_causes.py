"""`swift doctor RUN` names the cause of a sick run, by evidence of many kinds, and calls a healthy one healthy."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from swift.arguments import parse
from swift.observability.answers import is_right
from swift.observability.diagnosis import EXPLAINS, diagnose
from swift.observability.evidence import Evidence, Series
from swift.observability.findings import CAUSES
from swift.observability.time_spent import time_of

SICK = Path(__file__).parent / "sick"
STEPS = range(1, 41)


def kept(path):
    content = json.loads(gzip.decompress(path.read_bytes()))
    prompts = [content.pop("about")["prompt"]]
    record = [{**row, "prompt_ids": np.array(row["prompt_ids"])} for row in content.pop("record")]
    return Evidence(**content, record=record, prompts=prompts)


@pytest.mark.parametrize("path", sorted(SICK.glob("*.json.gz")), ids=lambda path: path.name[:-8])
def test_the_cause_of_a_kept_run_comes_first(path):
    cause = path.name.rpartition("-")[0]
    findings = diagnose(kept(path))
    assert (findings[0].cause if findings else "healthy") == cause


@pytest.mark.parametrize("path", sorted(SICK.glob("*.json.gz"))[::3], ids=lambda path: path.name[:-8])
def test_a_finding_tells_the_steps_of_its_evidence(path):
    evidence = kept(path)
    logged = {row["step"] for row in (*evidence.log, *evidence.completions)}
    for finding in diagnose(evidence):
        assert len(finding.steps) == 2 and set(finding.steps) <= logged and finding.steps[0] <= finding.steps[1]


GRPO = "--rlhf_type grpo --model m --dataset d --beta 0.1 --reward_funcs accuracy format"


def test_the_settings_of_a_finding_are_those_of_a_run():
    found = {one.settings for path in SICK.glob("*.json.gz") for one in diagnose(kept(path))} - {""}
    for settings in found:
        args = parse("rlhf", f"{GRPO} {settings}".split(), {}).given
        assert {word[2:] for word in settings.split() if word.startswith("--")} <= set(args)
    assert len(found) > 8


def group(step, texts, rewards, truth="7", finish="stop", **parts):
    return [
        {
            "step": step, "group_id": f"{truth}-{step}", "prompt_id": truth, "prompt": f"problem {step}: {truth}",
            "completion": text, "completion_tokens": len(text), "finish_reason": finish, "reward": reward,
            "rewards": {name: values[at] for name, values in parts.items()} or {"accuracy": reward}, "excluded": None,
            "columns": {"solution": truth},
        }
        for at, (text, reward) in enumerate(zip(texts, rewards, strict=True))
    ]  # fmt: skip


def run(log=lambda step: {}, rows=lambda step: [], **more):
    """Forty steps: a reward that neither rises nor falls, and what the functions say of each step."""
    lines = [
        {
            "step": step,
            "attempt": 1,
            "loss": 0.0,
            "reward": 0.4 + 0.05 * (step % 3),
            "learning_rate": 1e-3,
            "grad_norm": 0.3,
        }
        | log(step)
        for step in STEPS
    ]
    return Evidence(lines, completions=[row for step in STEPS for row in rows(step)], **more)


def first(evidence):
    found = diagnose(evidence)
    return found[0].cause if found else "healthy"


def mixed(step):
    return group(step, ["<answer>7</answer>", "<answer>8</answer>"], [1.0, 0.0]) + group(
        step, ["<answer>12</answer>", "<answer>1</answer>"], [1.0, 0.0], truth="12"
    )


def test_a_run_whose_reward_only_moves_a_little_is_healthy():
    assert diagnose(run(rows=mixed)) == []


def test_every_rule_speaks_of_known_causes():
    assert set(EXPLAINS) | {effect for effects in EXPLAINS.values() for effect in effects} <= set(CAUSES)


@pytest.mark.parametrize(
    ("cause", "log"),
    {
        "non_finite": lambda step: {"loss": None, "health/nan_skips": 1.0} if step > 30 else {},
        "engine_flapping": lambda step: {"health/engine_restarts": float(step % 10 == 0)},
        "memory_growth": lambda step: {"perf/rss_gib": 1 + 0.02 * step},
        "slow_reward": lambda step: {"step_time": 2.0, "time/reward": 1.6, "time/train": 0.2, "time/generate": 0.2},
        "sampler_mismatch": lambda step: {"mismatch/logp_abs_diff_mean": 0.4, "mismatch/kl": 0.2},
        "stale_weights": lambda step: {
            "mismatch/logp_abs_diff_mean": 0.01 * min(step, 30), "mismatch/kl": 0.01, "off_policy/max": 6.0
        },
        "learning_rate_low": lambda step: {"learning_rate": 1e-9, "kl": 1e-9},
        "learning_rate_high": lambda step: {
            "kl": 0.01 * step**2, "grad_norm": 0.3 * step, "reward": max(0.02, 0.6 - 0.04 * step)
        },
    }.items(),
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_cause_that_the_log_shows(cause, log):
    assert first(run(log, mixed, args={"beta": 0.01, "tuner_type": "full"})) == cause


def test_right_answers_without_a_reward_are_unparsed_and_not_hard():
    evidence = run(
        lambda step: {"reward": 0.0},
        lambda step: [{**row, "reward": 0.0, "rewards": {"own": 0.0}} for row in mixed(step)],
    )
    (finding, *others) = diagnose(evidence)
    assert finding.cause == "reward_unparsed" and "own is 0 for 100%" in finding.evidence[0]
    assert all(other.confidence < finding.confidence for other in others)


def test_wrong_answers_everywhere_are_hard_prompts():
    def wrong(step):
        return group(step, [f"<answer>{step}3</answer>", "<answer>99</answer>"], [0.0, 0.0], truth=str(step))

    assert first(run(lambda step: {"reward": 0.0}, wrong)) == "zero_variance_hard"


def test_two_prompts_again_and_again():
    assert first(run(rows=lambda step: [{**row, "prompt": row["prompt_id"]} for row in mixed(step)])) == "data_repeated"


def test_functions_that_oppose_each_other():
    def rows(step):
        return group(step, ["<answer>7</answer>", "<answer>8</answer>"], [0.0, 0.0], a=[1.0, 0.0], b=[-1.0, 0.0])

    assert first(run(rows=rows)) == "rewards_cancel"


def test_a_reward_that_pays_for_length():
    def rows(step):
        long, short = "x" * (10 + 2 * step), "x" * (5 + step)
        return group(step, [long, short, short + "x"], [len(long) / 50, len(short) / 50, len(short) / 50 + 0.02])

    assert (
        first(run(lambda step: {"completions/mean_length": 10.0 + step, "reward": step / 50}, rows)) == "length_hacking"
    )


def test_a_rising_reward_with_fewer_right_answers_is_hacked():
    def rows(step):
        right = ["<answer>7</answer>"] * (40 - step) + ["<answer>0</answer>"] * step
        return [*group(step, right[::10], [0.1] * 4), *mixed(step)[2:]]

    assert first(run(lambda step: {"reward": step / 40}, rows)) == "reward_hacked"


def test_an_adapter_whose_b_stays_zero():
    assert first(run(rows=mixed, args={"tuner_type": "lora"}, adapter=[0.0, 0.0])) == "dead_adapter"
    assert first(run(rows=mixed, args={"tuner_type": "lora"}, adapter=[0.0, 0.1])) == "healthy"


@pytest.mark.parametrize(
    ("prompt", "cause"),
    [
        ("<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n", "healthy"),
        ("<|im_start|>user\n1+1<|im_end|>\n", "template_wrong"),
        ("<|im_start|>user\n1+1<|im_end|>\n<|im_start|>user\n", "template_wrong"),
        ("<start_of_turn>user\n1+1<end_of_turn>\n<start_of_turn>model\n", "healthy"),
        ("<|im_start|>system\nbe brief\n<|im_start|>user\n1+1\n<|im_start|>assistant\n", "template_wrong"),
        ("[INST] 1+1 [/INST]", "healthy"),
    ],
)
def test_a_prompt_that_does_not_fit_its_template(prompt, cause):
    assert first(run(rows=mixed, prompts=[prompt, prompt.replace("1+1", "1+2")])) == cause


def test_prompts_that_begin_twice():
    def record(*starts):
        return [{"prompt_ids": np.array([*starts, number, 7]), "versions": [], "step": 1} for number in (5, 6)]

    assert first(run(rows=mixed, record=record(1, 1))) == "template_wrong"
    assert first(run(rows=mixed, record=record(1, 2))) == "healthy"


def test_texts_that_are_cut_and_texts_that_go_on():
    def cut(text):
        return lambda step: group(step, [text, text + "1"], [1.0, 0.0], finish="length")

    assert first(run(rows=cut("<think>7 and then"))) == "truncation"
    assert first(run(rows=cut("<answer>7</answer> and then user asks"))) == "never_stops"


@pytest.mark.parametrize(
    ("text", "truth", "right"),
    [
        ("<answer> 7 </answer>", "7", True),
        ("<answer>8</answer> or 7", "7", False),
        ("so \\boxed{1,234}", "1234", True),
        ("#### 12", "The sum.\n#### 12", True),
        ("The answer is 5.", 5, True),
        ("it gives 7.0", "7", True),
        ("7", "", False),
        ("7", None, False),
        ("<answer>7</answer>", "7 apples", True),
    ],
)
def test_what_counts_as_a_right_answer(text, truth, right):
    assert is_right(text, truth) is right


def test_a_trend_is_told_from_noise():
    up, noise = [0.1 * step for step in STEPS], [float(step * 7919 % 13) for step in STEPS]
    assert Series(list(STEPS), up).trend > 1e6
    assert abs(Series(list(STEPS), noise).trend) < 3
    assert Series(list(STEPS), [u + n for u, n in zip(up, noise, strict=True)]).trend > 1
    assert Series([1, 2], [1.0, 2.0]).trend == 0


def test_the_setting_that_saves_most():
    slow = run(lambda step: {"step_time": 2.0, "time/reward": 1.6, "time/train": 0.2}, args={"reward_workers": 2})
    time = time_of(slow)
    assert time["shares"] == {"reward": 0.8, "train": 0.1} and time["setting"] == "--reward_workers 4"
    assert time_of(run()) == {}
