"""Start-up check of reward functions: do they fit the data, and keep their contract? And the texts of trial calls."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from swift.errors import RewardError, join_problems
from swift.rewards.functions.accuracy import ground_truth
from swift.rewards.payload import Outcome
from swift.types import Completion, Prompt, RolloutGroup

logger = logging.getLogger("swift.rewards")

CHECKED_ROWS = 64
PROBED_ROWS = 4
FAILURES = frozenset({"exception", "timeout", "crash", "not_finite"})
"""Kinds of outcomes that may be due to the texts of the check rather than to the function."""


def truth_of(row: Prompt, column: str | None = None) -> str:
    """The ground truth of a row: of `column` if given, else of solution, else of answer; "" without one."""
    for name in [column] if column and column != "solution" else ["solution", "answer"]:
        if row.columns.get(name) not in (None, ""):
            return ground_truth(row.columns[name])
    return ""


def truth_forms(truth: str) -> dict[str, str]:
    """The ground truth as a model might write it: plain, boxed, and in think/answer form."""
    return {
        "plain": truth,
        "boxed": f"\\boxed{{{truth}}}",
        "tagged": f"<think>The answer is {truth}.</think><answer>{truth}</answer>",
    }


def adversarial_texts(question: str, truth: str, other_truth: str | None) -> dict[str, str]:
    """Texts that a good reward function must not reward, one per kind.

    "another row's truth" is left out when no other row has a different ground truth.
    """
    other = {"another row's truth": f"<think>so</think><answer>{other_truth}</answer>"} if other_truth else {}
    return {
        "empty": "",
        "blanks": " \n\t " * 8,
        "echoed question": question,
        **other,
        "truth 200 times": f"{truth} " * 200,
        "several boxed values": f"\\boxed{{{truth}}} \\boxed{{0}} \\boxed{{1}} \\boxed{{-1}}",
        "unclosed brace": f"\\boxed{{{truth}",
        "empty tags": "<think></think><answer></answer>",
        "nested tags": "<think><think></think><answer><answer></answer></answer>",
        "100,000 characters": "the answer is " * 7142 + "nothing",
        "control characters": "".join(map(chr, range(1, 32))) * 8 + "\u202e\ufeff\x7f",
        "power tower": "\\boxed{9^{9^{9^{9}}}}",
        "reward claim": "reward: 1.0",
    }


def start_up_texts(row: Prompt) -> list[str]:
    """Two made-up completions of a row: its ground truth in the think/answer form, and an empty text."""
    truth = truth_of(row)
    return [f"<think>{truth}</think><answer>{truth}</answer>", ""]


def made_up_group(
    row: Prompt, texts: Sequence[str], name: str, tokenize: Callable[[str], Sequence[Any]] = str.split
) -> RolloutGroup:
    """A group with the given completions, whose token ids and log-probs are zeros of the right number."""
    completions = []
    for number, text in enumerate(texts):
        length = len(tokenize(text))
        completions.append(Completion(f"{name}-{number}", [0] * length, [0.0] * length, "stop", text))
    return RolloutGroup(group_id=name, launch_index=-1, launch=0, prompt=row, completions=completions)


def truth_groups(rows: Sequence[Prompt]) -> list[RolloutGroup]:
    """Groups whose completions are ground truths, one per row and form, for functions that failed on the first rows."""
    return [
        made_up_group(row, [text, text], f"self-check-{form}-{index}")
        for index, row in enumerate(rows[: PROBED_ROWS // 2])
        if truth_of(row)
        for form, text in truth_forms(truth_of(row)).items()
    ]


def always_failing(outcomes: Mapping[str, Sequence[Outcome]]) -> list[str]:
    """Names of functions of which every start-up call failed, after a warning for each.

    Raises:
        RewardError: a function returned something that its contract forbids, or hung in every call.
    """
    problems, failing = {}, []
    for name, found in outcomes.items():
        kinds = {outcome.kind for outcome in found}
        if broken := [outcome.detail for outcome in found if outcome.kind == "contract"]:
            problems[name] = broken[0]
        if kinds == {"timeout"}:
            problems[name] = found[0].detail
        if kinds and kinds <= FAILURES:
            failing.append(name)
    join_problems([f"--reward_funcs: {name}: {detail}" for name, detail in problems.items()], RewardError)
    for name in failing:
        first, count = outcomes[name][0], len(outcomes[name])
        logger.warning(
            "warning: reward function %s failed on all %d start-up calls: %s: %s", name, count, first.kind, first.detail
        )
    return failing


def failing_on_truths(outcomes: Mapping[str, Sequence[Outcome]]) -> list[str]:
    """One problem per function that fails on every ground truth, in every form."""
    return [
        f"--reward_funcs: {name}: fails on every ground truth of the first rows: {found[0].kind}: {found[0].detail}; "
        f"correct the function; swift reward-test shows all of its failures"
        for name, found in outcomes.items()
        if found and all(outcome.kind in FAILURES for outcome in found)
    ]
