"""Easy rows before hard ones: stages of a curriculum from a column of numbers.

A stage is a set of rows that are visited before those of the next one; inside a stage the order is that of the epoch.
Each epoch visits all stages. Rows of equal difficulty are always in one stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from swift.data.columns import as_number
from swift.data.report import first_few
from swift.errors import ConfigError, join_problems, suggest

if TYPE_CHECKING:
    import numpy as np

    from swift.data.arguments import PromptArguments
    from swift.data.loading import Example

FLAG = "--curriculum_column"


def curriculum_stages(args: PromptArguments, examples: Sequence[Example]) -> np.ndarray:
    """The stage of every row by `--curriculum_column`, which is not None."""
    column = args.curriculum_column
    assert column is not None
    seen = list(dict.fromkeys(name for example in examples for name in example.columns))
    if column not in seen:
        fix = suggest(column, seen) if seen else "the dataset has no columns beside the prompt"
        raise ConfigError(f"{FLAG}: {column}: no dataset has this column; {fix}")
    numbers = [as_number(example.columns.get(column)) for example in examples]
    problems = [
        f"{FLAG}: {column}: {example.origin}: {example.columns.get(column, 'no value')!r} is no number; "
        "give every row one"
        for example, number in zip(examples, numbers, strict=True)
        if number is None
    ]
    join_problems(first_few(problems, f"{FLAG}: {column}: {len(problems)} rows without a number"))
    present = [number for number in numbers if number is not None]
    return stages(present, descending=args.curriculum_order == "descending", bins=args.curriculum_bins)


def stages(numbers: Sequence[float], *, descending: bool = False, bins: int | None = None) -> np.ndarray:
    """The stage of each row, from 0.

    Args:
        numbers: difficulty of each row.
        descending: the largest numbers come first.
        bins: stages of about equally many rows; None makes a stage of each different number.

    >>> stages([3, 1, 2, 2], bins=2).tolist()
    [1, 0, 0, 0]
    """
    import numpy as np

    keys = np.asarray(numbers, dtype=np.float64) * (-1.0 if descending else 1.0)
    first = np.searchsorted(np.sort(keys), keys, side="left")  # rows before the first one of equal difficulty
    return first if bins is None else first * bins // len(keys)
