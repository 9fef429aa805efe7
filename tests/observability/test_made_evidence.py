"""Verdicts on evidence that is made here: what a rule must tell apart, without a run."""

import random
from dataclasses import replace

import numpy as np
import pytest

from swift.observability.diagnosis import diagnose
from swift.observability.evidence import Evidence

STEPS = 40
FULL = {"tuner_type": "full", "beta": 0.0, "max_completion_length": 64}
RNG = random.Random(0)


def group(step, number, truth, texts, rewards, *, parts=None, ends="stop", tokens=None, **row):
    """The completions of a group."""
    return [
        {
            "step": step, "group_id": f"{step}-{number}", "prompt_id": f"{truth}-{number}", "used": True,
            "prompt": f"[user]\nproblem {truth} {number} {step}", "completion": text, "reward": reward,
            "completion_tokens": tokens or max(1, len(text) // 3), "excluded": None, "finish_reason": ends,
            "columns": {"solution": str(truth)},
            "rewards": {name: values[at] for name, values in parts.items()} if parts else {"accuracy": reward}, **row,
        }
        for at, (text, reward) in enumerate(zip(texts, rewards, strict=True))
    ]  # fmt: skip


def text(value):
    return f"<think>{RNG.random():.6f}</think><answer>{value}</answer>"


def answers(step, share=0.5, *, score=None, groups=4, wrong=1, **row):
    """Groups of eight, of which a share is right; `score` makes rewards of whether each is."""
    found = []
    for number in range(groups):
        truth = 100 + 4 * step + number
        right = [RNG.random() < share for _ in range(8)]
        rewards = score(number, right) if score else [float(one) for one in right]
        found += group(step, number, truth, [text(truth if one else truth + wrong) for one in right], rewards, **row)
    return found


def rising(step, first=0.1, last=0.8, steps=STEPS):
    return first + (last - first) * step / steps + RNG.uniform(-0.03, 0.03)


def learning(step):
    return answers(step, 0.1 + 0.7 * step / STEPS)


def run(rows, *, steps=STEPS, every=1, args=None, reasons=(), record=(), prompts=(), **metrics):
    """Evidence of a run: metrics are numbers, or functions of the step; `every`: --logging_steps; `prompts`: texts."""
    usual = {"loss": 0.01, "learning_rate": 1e-5, "grad_norm": 0.3, "frac_reward_zero_std": 0.3}
    log = [
        {"step": step, "attempt": 1, **{k: v(step) if callable(v) else v for k, v in {**usual, **metrics}.items()}}
        for step in range(1, steps + 1)
        if step == 1 or step % every == 0
    ]
    completions = [row for step in range(1, steps + 1) for row in rows(step)]
    args = {**FULL, **(args or {})}
    return Evidence(log, completions=completions, args=args, reasons=reasons, record=record, prompts=prompts)


def rejected(rows, kind, share):
    """Rows of which a share got no reward; `share`: a number, or a function of the row."""
    lost = {"reward": None, "rewards": {"accuracy": None}, "excluded": kind}
    return [{**row, **lost} if RNG.random() < (share(row) if callable(share) else share) else row for row in rows]


def hard(step, **row):
    return answers(step, 0.0, **row)


def costly(step, name="length_cost", weight=-0.1):
    """Right answers become more and their cost falls, as it should."""
    found = []
    for number in range(4):
        truth = 100 + 4 * step + number
        right = [RNG.random() < 0.2 + 0.6 * step / STEPS for _ in range(8)]
        cost = [max(0.1, 1 - step / 50 + RNG.uniform(-0.1, 0.1)) for _ in right]
        rewards = [one + weight * value for one, value in zip(right, cost, strict=True)]
        parts = {"accuracy": [float(one) for one in right], name: cost}
        texts = [text(truth if one else truth + 1) for one in right]
        found += group(step, number, truth, texts, rewards, parts=parts)
    return found


def drawn_again(step):
    """Dynamic sampling: most groups have equal rewards and are left out."""
    again = [row for number in range(12) for row in hard(1000 * step + number, groups=1, used=False)]
    return learning(step) + [{**row, "step": step} for row in again]


def same_text(step):
    found = []
    for number in range(4):
        found += group(step, number, 7 + number, [f"<answer>{8 + number}</answer>"] * 8, [0.0] * 8)
    return found


def of_the_prompt(number, right):
    return [0.2 * number] * len(right)


def form_only(number, right):
    return [RNG.choice([0.3, 0.5]) for _ in right]


def stops(step):
    return answers(step, 0.5, score=(lambda _, right: [0.0] * len(right)) if step > 20 else None)


def thoughts(step):
    """Plain thoughts, most of them cut; the others are right."""
    rows = answers(step, 0.9)
    cut = {"completion": "so we add them and see that this goes on and on", "finish_reason": "length"}
    return [{**row, **cut, "reward": 0.0, "rewards": {"accuracy": 0.0}} if at % 10 < 7 else row
            for at, row in enumerate(rows)]  # fmt: skip


def of_rank(rank):
    """Seconds that the other three wait for a rank, each fourth step."""
    return lambda step: 1.0 if step % 4 == rank else None


def recorded(ids):
    return [{"step": 1, "prompt_ids": np.array(one), "versions": [], "token_ids": np.array([1])} for one in ids]


TWICE = "<|im_start|>user\n1+2=<|im_end|><|im_end|>\n<|im_start|>assistant\n"
AT_LIMIT = {"record": recorded([[1, n % 7, *range(30)] for n in range(12)]), "args": {"max_length": 32}}


def game(step, **row):
    """One prompt, and texts that do not give what their tasks want."""
    asked = {"prompt": "[user]\nplay"}
    return [{**one, **asked, "completion": f"I move {RNG.random()}", **row} for one in answers(step)]


def logged(step):
    """Columns of reward functions, and one that numbers rows."""
    read = ({"result": f"{step} {at}", "gold_id": step, "gold_extracted": step} for at in range(32))
    return [{**row, "columns": columns} for row, columns in zip(game(step), read, strict=True)]


PLAYED = {"rollout_func": "f.py", "gym_env": "wordle", "multi_turn_scheduler": "tools", "rollout_source": "atropos"}
HEALTHY = {
    **{f"a game by --{name}": lambda name=name: run(game, args={name: PLAYED[name]}) for name in PLAYED},
    "episodes that timed out": lambda: run(lambda s: game(s, turns=[])),
    "few prompts of one turn": lambda: run(lambda s: game(s, turns=None if s < 4 else [{}])),
    "columns that are logged": lambda: run(logged),
    "given texts whose entropy falls": lambda: run(lambda _: [], entropy=lambda s: 2 / s**2),
    "a row whose text has an end": lambda: run(answers, prompts=[TWICE.replace("<|im_end|>" * 2, "<|im_end|>"), TWICE]),
    "texts with an end that are learned": lambda: run(learning, reward=rising, prompts=[TWICE]),
    "prompts that are cut and learned": lambda: run(learning, reward=rising, **AT_LIMIT),
    "baseline": lambda: run(answers, reward=lambda _: 0.4 + RNG.uniform(-0.05, 0.05)),
    "learns": lambda: run(learning, reward=rising),
    "a game whose prompt is always one text": lambda: run(
        lambda s: [{**row, "prompt": "[user]\nguess"} for row in learning(s)], reward=rising
    ),
    "few prompts are at the limit": lambda: run(
        learning, reward=rising, record=recorded([[*range(32 - n % 8)] for n in range(16)]), args={"max_length": 32}
    ),
    "12 steps at 1e-6": lambda: run(answers, steps=12, learning_rate=lambda s: 1e-6 * (1 - s / 12)),
    "step 15 of a warm-up": lambda: run(answers, steps=15, learning_rate=lambda s: 1e-6 * s / 30),
    "step 25 of a long warm-up": lambda: run(
        answers, steps=25, learning_rate=lambda s: 1e-7 * s / 100, args={"max_steps": 1000}
    ),
    "dynamic sampling": lambda: run(
        drawn_again, reward=rising, frac_reward_zero_std=0.77, args={"dynamic_sample": True}
    ),
    "vLLM on a GPU": lambda: run(
        learning,
        reward=rising,
        step_time=6.3,
        args={"use_vllm": True},
        **{"time/generate": 5.1, "time/train": 0.64, "completions/mean_length": 200.0, "completions/max_length": 256.0},
    ),
    "a cost that falls": lambda: run(
        costly,
        reward=rising,
        args={"reward_weights": [1.0, -0.1]},
        **{"rewards/length_cost/mean": lambda s: 1 - s / 50},
    ),
    "a cost that is watched": lambda: run(
        lambda s: costly(s, weight=0.0),
        reward=rising,
        args={"reward_weights": [1.0, 0.0]},
        **{"rewards/length_cost/mean": lambda s: 1 - s / 50},
    ),
    "a cost named answer_length": lambda: run(
        lambda s: costly(s, "answer_length"), reward=rising, args={"reward_weights": [1.0, -0.1]}
    ),
    "1.6 % of rewards time out": lambda: run(
        lambda s: rejected(learning(s), "timeout: accuracy", 0.016), reward=rising
    ),
    "solved by step 15 of 60": lambda: run(
        lambda s: answers(s, min(0.995, 0.2 + 0.055 * s)), steps=60, reward=lambda s: min(1.0, 0.2 + 0.055 * s)
    ),
    "a curriculum": lambda: run(
        lambda s: answers(s, 0.75 if s <= 20 else 0.45),
        reward=lambda s: (0.75 if s <= 20 else 0.45) + rising(0, 0, 0),
        args={"curriculum_column": "level"},
    ),
    "one update in 1,000 is skipped": lambda: run(
        lambda s: answers(s, rising(s, steps=1000)) if s % 25 == 0 else [],
        steps=1000,
        reward=lambda s: rising(s, steps=1000),
        **{"health/nan_skips": lambda s: float(s == 500), "health/engine_restarts": lambda s: float(s == 600)},
    ),
    "another reference, hardly felt": lambda: run(
        learning, reward=rising, kl=lambda s: 0.3 + s / 400, args={"beta": 0.001}
    ),
    "ranks wait for this one and for that one": lambda: run(
        learning, reward=rising, step_time=2.0, **{f"time/held_up/generate/rank-{r}": of_rank(r) for r in range(4)}
    ),
    "a rank that was slow once": lambda: run(
        learning, reward=rising, step_time=2.0, **{"time/held_up/train/rank-1": lambda s: 40.0 if s == 1 else None}
    ),
    "prompts that begin with an image": lambda: run(
        learning, reward=rising, record=recorded([[-5, -5, -5, 9, number] for number in range(12)])
    ),
}

CAUSES = {
    "hard data with a column that is always the same": (
        "zero_variance_hard",
        lambda: run(
            lambda s: [{**row, "columns": {**row["columns"], "data_source": "mine", "input": ""}} for row in hard(s)]
        ),
    ),
    "easy data whose solutions have their steps": (
        "zero_variance_easy",
        lambda: run(
            lambda s: [
                {**row, "columns": {"solution": "because " * 40 + f"\n#### {row['columns']['solution']}"}}
                for row in answers(s, 1.0)
            ]
        ),
    ),
    "a tiny rate, logged every 5 steps": (
        "learning_rate_low",
        lambda: run(answers, every=5, learning_rate=1e-8),
    ),
    "a judge that reads the prompt alone": ("reward_constant", lambda: run(lambda s: answers(s, score=of_the_prompt))),
    "a function that sees the form alone": ("reward_unparsed", lambda: run(lambda s: answers(s, score=form_only))),
    "stopped by a rule on hard data": (
        "zero_variance_hard",
        lambda: run(hard, reasons=["health: rule equal_rewards: --health_action stop"]),
    ),
    "a judge that returns 0 from step 21 on": (
        "reward_constant",
        lambda: run(stops, reward=lambda s: 0.5 + rising(0, 0, 0) if s <= 20 else 0.0),
    ),
    "half of the losses are no numbers": (
        "non_finite",
        lambda: run(
            answers,
            reward=lambda s: (0.5 if s < 20 else 0.38) + rising(0, 0, 0),
            **{"health/nan_skips": lambda s: float(s >= 20)},
        ),
    ),
    "a rate that destroys the policy at once": (
        "learning_rate_high",
        lambda: run(
            lambda s: answers(s, 0.5 if s == 1 else 0.0), reward=lambda s: 0.5 if s == 1 else 0.0, learning_rate=1e-2
        ),
    ),
    "an end token that is none": (
        "never_stops",
        lambda: run(lambda s: [{**row, "completion_tokens": 512, "finish_reason": "length"} for row in answers(s)]),
    ),
    "thoughts that are cut": ("truncation", lambda: run(thoughts)),
    "all are cut": (
        "truncation",
        lambda: run(
            lambda s: [
                {**row, "completion": f"{RNG.random()} and so on", "finish_reason": "length"} for row in hard(s)
            ],
            steps=30,
            every=5,
        ),
    ),
    "--top_k 1": ("entropy_collapse", lambda: run(same_text, args={"top_k": 1})),
    "a template without the user's text": (
        "template_wrong",
        lambda: run(hard, record=recorded([[5, 6, 7, 8]] * 12)),
    ),
    "prompts that are cut on the right": (
        "truncation",
        lambda: run(
            hard,
            record=recorded([[1, n % 7, *range(30)] for n in range(12)]),
            prompts=["<|im_start|>user\nproblem"],
            args={"max_length": 32, "truncation_strategy": "right"},
        ),
    ),
    "a column whose texts have an end": (
        "template_wrong",
        lambda: run(hard, prompts=[TWICE, TWICE.replace("2", "3"), TWICE.replace("2", "4")]),
    ),
    "prompts without the task": (
        "data_repeated",
        lambda: run(lambda s: [{**row, "prompt": "[user]\nSolve it."} for row in hard(s)]),
    ),
    "no solution in any row, and a function that gives almost all a 1": (
        "reward_constant",
        lambda: run(
            lambda s: [
                {**row, "columns": {"solution": ""}}
                for row in answers(
                    s, score=lambda n, right: [float(s % 4 != n or i > 1 or s > 12) for i, _ in enumerate(right)]
                )
            ]
        ),
    ),
    "the question in place of the solution": (
        "reward_constant",
        lambda: run(
            lambda s: [{**row, "columns": {"solution": row["prompt"].removeprefix("[user]\n")}} for row in hard(s)]
        ),
    ),
    "hard data and some timeouts": (
        "zero_variance_hard",
        lambda: run(lambda s: rejected(hard(s), "timeout: accuracy", 0.016)),
    ),
    "a parser that raises on some right answers": (
        "reward_failing",
        lambda: run(lambda s: rejected(answers(s, 0.1), "exception: accuracy", lambda row: 0.2 * row["reward"])),
    ),
    "None for almost half": ("reward_failing", lambda: run(lambda s: rejected(answers(s), "no_reward", 0.45))),
    "a rank that samples slowly": (
        "slow_rank",
        lambda: run(
            learning,
            every=5,
            reward=rising,
            step_time=2.0,
            **{"time/generate": 1.5, "time/train": 0.2, "time/held_up/generate/rank-3": 5.5},
            **{f"time/held_up/train/rank-{r}": lambda _: RNG.uniform(0, 0.2) for r in range(4)},
        ),
    ),
    "new weights do not arrive": (
        "stale_weights",
        lambda: run(answers, **{"mismatch/logp_abs_diff_mean": lambda s: 0.01 * s, "mismatch/kl": lambda s: 1e-3 * s}),
    ),
}


@pytest.fixture(autouse=True)
def same_numbers():
    """Each case has its own, whatever ran before."""
    RNG.seed(0)


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_is_not_called_sick(name):
    assert [(one.cause, one.confidence, *one.evidence) for one in diagnose(HEALTHY[name]())] == []


def test_a_leak_of_the_ground_truth_is_told():
    def asked(step, *columns):
        texts = [[row["columns"][name] for name in columns] for row in answers(step, 1.0)]
        return [
            {**row, "prompt": f"[user]\n{step} {told}"} for row, told in zip(answers(step, 1.0), texts, strict=True)
        ]

    (leaks, *_), (plain, *_) = (diagnose(run(lambda s, c=c: asked(s, *c))) for c in (["solution"], []))
    assert leaks.cause == plain.cause == "zero_variance_easy"
    assert leaks.evidence[-1] == "100% of the prompts have their solution in the text, which may give it away"
    assert len(plain.evidence) == len(leaks.evidence) - 1

    def choices(step):
        asked, texts = f"[user]\n{step}: A) 1 B) 2 C) 3 D) 4", zip("ABCD", answers(step, 1.0)[::8], strict=True)
        return [
            {**row, "prompt": asked, "completion": text(one), "columns": {"solution": one}, "index": index}
            for one, row in texts
            for index in range(8)
        ]

    (plain, *_) = diagnose(run(choices))
    assert plain.cause == "zero_variance_easy" and "give it away" not in plain.evidence[-1]


@pytest.mark.parametrize(("context", "settings"), [(0, "--max_length 64"), (128, "--max_length 64"), (127, "")])
def test_cut_prompts_get_twice_the_room_that_the_model_has(context, settings):
    (found, *_) = diagnose(replace(run(hard, **AT_LIMIT), context=context))
    assert (found.cause, found.settings) == ("truncation", settings)


@pytest.mark.parametrize("name", CAUSES)
def test_the_cause_comes_first(name):
    cause, made = CAUSES[name]
    found = [(one.cause, one.confidence, *one.evidence) for one in diagnose(made())]
    assert found, "healthy"
    assert found[0][0] == cause, found
