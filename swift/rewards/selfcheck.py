"""The start-up call: does every function fit the data, and does it keep its contract? And the texts of trial calls."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from swift.errors import join_problems
from swift.rewards.contract import Signature, missing_columns
from swift.rewards.functions.accuracy import ground_truth
from swift.rewards.payload import Outcome
from swift.types import Completion, Prompt, RolloutGroup

logger = logging.getLogger("swift.rewards")

ROWS = 64
PROBED_ROWS = 4
FAILURES = ("exception", "timeout", "crash", "not_finite")


def check_rows(signatures: Sequence[Signature], rows: Sequence[Prompt]) -> None:
    """Refuses rows that miss columns, or all of which lack a ground truth."""
    if not rows:
        return
    columns = sorted({name for row in rows for name in row.columns})
    problems = [line for signature in signatures for line in missing_columns(signature, columns)]
    needs_truth = any(signature.counts_ground_truths for signature in signatures)
    if not problems and needs_truth and not any(ground_truth(row.columns.get("solution")) for row in rows):
        problems.append(
            f"--dataset: the column 'solution' is empty in all of the first {len(rows)} rows, so accuracy is "
            f"always 0; columns seen: {', '.join(columns)}; rename the right one with "
            f'--columns \'{{"<your column>":"solution"}}\''
        )
    join_problems(problems)


def truth_of(row: Prompt, column: str | None = None) -> str:
    """The ground truth of a row: of `column` when given, else of solution, else of answer; "" without one."""
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
    """Texts that a good reward function must not pay for, one per kind.

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
    """Two made-up completions of a row: its ground truth in the asked-for form, and an empty text."""
    truth = truth_of(row)
    return [f"<think>{truth}</think><answer>{truth}</answer>", ""]


def made_up_group(
    row: Prompt, texts: Sequence[str], name: str, tokenize: Callable[[str], Sequence[Any]] = str.split
) -> RolloutGroup:
    """A group with the given completions; only the number of their tokens means something."""
    completions = []
    for number, text in enumerate(texts):
        length = len(tokenize(text))
        completions.append(Completion(f"{name}-{number}", [0] * length, [0.0] * length, "stop", text))
    return RolloutGroup(group_id=name, launch_index=-1, launch=0, prompt=row, completions=completions)


def first_groups(rows: Sequence[Prompt]) -> list[RolloutGroup]:
    """The groups of the first start-up calls."""
    return [
        made_up_group(row, start_up_texts(row), f"self-check-{index}") for index, row in enumerate(rows[:PROBED_ROWS])
    ]


def truth_groups(rows: Sequence[Prompt]) -> list[RolloutGroup]:
    """Groups of nothing but ground truths, one per row and form, for functions that failed on `first_groups`."""
    return [
        made_up_group(row, [text, text], f"self-check-{form}-{index}")
        for index, row in enumerate(rows[: PROBED_ROWS // 2])
        if truth_of(row)
        for form, text in truth_forms(truth_of(row)).items()
    ]


def unusable(outcomes: Mapping[str, Sequence[Outcome]]) -> list[str]:
    """One problem per function that returned something it may not return, or hung in every call."""
    broken = {name: [one.detail for one in found if one.kind == "contract"] for name, found in outcomes.items()}
    hung = {name: [one.detail for one in found] for name, found in outcomes.items() if _all_failed(found, ["timeout"])}
    return [f"--reward_funcs: {name}: {details[0]}" for name, details in {**broken, **hung}.items() if details]


def always_failing(outcomes: Mapping[str, Sequence[Outcome]]) -> list[str]:
    """Functions of which every call failed; each earns a warning."""
    failing = [name for name, found in outcomes.items() if _all_failed(found)]
    for name in failing:
        first, count = outcomes[name][0], len(outcomes[name])
        logger.warning(
            "warning: reward function %s failed on all %d start-up calls: %s: %s", name, count, first.kind, first.detail
        )
    return failing


def refused(outcomes: Mapping[str, Sequence[Outcome]]) -> list[str]:
    """One problem per function that fails on every ground truth, in every form."""
    return [
        f"--reward_funcs: {name}: fails on every ground truth of the first rows: {found[0].kind}: {found[0].detail}; "
        f"correct the function; swift reward-test shows all of its failures"
        for name, found in outcomes.items()
        if _all_failed(found)
    ]


def _all_failed(outcomes: Sequence[Outcome], kinds: Sequence[str] = FAILURES) -> bool:
    return bool(outcomes) and all(one.kind in kinds for one in outcomes)
