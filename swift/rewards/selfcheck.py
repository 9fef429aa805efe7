"""The start-up call: does every function fit the data, and does it keep its contract? Pure, except for logs."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from swift.errors import join_problems
from swift.plugin import orms
from swift.rewards import contract
from swift.rewards.catalogue import Catalogue
from swift.rewards.functions import CosineReward, MathAccuracy
from swift.rewards.functions.accuracy import gold_text
from swift.rewards.protocol import Outcome
from swift.types import Completion, Prompt, RolloutGroup

logger = logging.getLogger("swift.rewards")

ROWS = 64
PROBED_ROWS = 4


def check_rows(catalogue: Catalogue, rows: Sequence[Prompt]) -> None:
    """Columns and gold answers of the first rows.

    Raises:
        ConfigError: with one problem per missing or reserved column, and when no row has a gold answer.
    """
    if not rows:
        return
    columns = sorted({name for row in rows for name in row.columns})
    problems = contract.reserved_columns(columns)
    for signature in catalogue.signatures:
        problems += contract.missing_columns(signature, columns)
    if not problems and _needs_gold(catalogue) and not any(_gold(row) for row in rows):
        problems.append(
            f"--dataset: the column 'solution' is empty in all of the first {len(rows)} rows, so accuracy is "
            f"always 0; columns seen: {', '.join(columns)}; rename the right one with "
            f'--columns \'{{"<your column>":"solution"}}\''
        )
    join_problems(problems)


def _needs_gold(catalogue: Catalogue) -> bool:
    return any(orms.get(name) in (MathAccuracy, CosineReward) for name in catalogue.functions)


def _gold(row: Prompt) -> str:
    return gold_text(row.columns.get("solution"))


def probe(row: Prompt, index: int) -> RolloutGroup:
    """A group of made-up completions of a row: its gold answer in the asked-for form, and an empty text."""
    gold = gold_text(row.columns.get("solution", row.columns.get("answer")))
    texts = [f"<think>{gold}</think><answer>{gold}</answer>", ""]
    completions = [
        Completion(
            request_id=f"self-check-{index}-{number}",
            token_ids=[0] * len(text.split()),
            logprobs=[0.0] * len(text.split()),
            finish_reason="stop",
            text=text,
        )
        for number, text in enumerate(texts)
    ]
    return RolloutGroup(group_id=f"self-check-{index}", launch_index=-1, launch=0, prompt=row, completions=completions)


def judge(catalogue: Catalogue, outcomes: Sequence[tuple[str, Outcome]]) -> list[str]:
    """Broken contracts as problems; functions that fail on every probe earn a warning.

    Args:
        catalogue: of the run.
        outcomes: (function, outcome of one call), several per function.
    """
    problems: dict[str, str] = {}
    for name, outcome in outcomes:
        if outcome.kind == "contract":
            problems.setdefault(name, f"--reward_funcs: {name}: {outcome.detail}")
    for name in catalogue.functions:
        mine = [outcome for other, outcome in outcomes if other == name]
        if mine and all(outcome.kind in ("exception", "timeout", "crash") for outcome in mine):
            logger.warning(
                "warning: reward function %s failed on all %d start-up calls: %s: %s",
                name,
                len(mine),
                mine[0].kind,
                mine[0].detail,
            )
    return list(problems.values())
