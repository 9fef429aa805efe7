"""Rows made by the reasoning-gym library: `reasoning_gym:<task>[#n][?seed=7&key=value]`.

Row i depends on (task, settings, seed, i) only, so every process makes the same rows. Columns: `question`,
`answer`, `metadata`; `metadata["source_dataset"]` is the task's name, by which a reward finds its scorer. All
values are plain JSON.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from swift.data.records import Record, plain_row
from swift.data.spec import PROCEDURAL, DatasetSpec
from swift.errors import ResourceError, suggest

DEFAULT_COUNT = 500


def read_procedural(spec: DatasetSpec, *, seed: int) -> Iterator[Record]:
    """The `count` (default 500) rows of a task, generated one by one; its option `seed` has precedence over `seed`."""
    task = _create(spec, seed)
    for index in range(spec.count or DEFAULT_COUNT):
        entry = task[index]
        metadata = {**entry["metadata"], "source_dataset": spec.target}
        values = {"question": entry["question"], "answer": entry["answer"], "metadata": metadata}
        yield plain_row(values, f"{PROCEDURAL}{spec.target}:{index + 1}")


def _create(spec: DatasetSpec, seed: int) -> Any:
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise ResourceError(
            f"{spec.subject}: reasoning_gym cannot be imported ({error}); pip install reasoning-gym"
        ) from error
    if spec.target not in DATASETS:
        raise spec.wrong(f"unknown reasoning_gym task {spec.target!r}; {suggest(spec.target, sorted(DATASETS))}")
    _check_options(spec, [field.name for field in dataclasses.fields(DATASETS[spec.target][1])])
    settings = {"seed": seed, **spec.options, "size": spec.count or DEFAULT_COUNT}
    try:
        return create_dataset(spec.target, **settings)
    except (AssertionError, ValueError, TypeError, AttributeError, KeyError) as error:  # how tasks refuse settings
        reason = str(error) or type(error).__name__
        given = "; check the values after '?'" if spec.options else "; this task needs settings after '?'"
        raise spec.wrong(f"{spec.target} refuses its settings: {reason}{given}") from error


def _check_options(spec: DatasetSpec, known: list[str]) -> None:
    for key in spec.options:
        if key == "size":
            raise spec.wrong("the number of rows is written #n, not ?size=")
        if key not in known:
            choices = [name for name in known if name != "size"]
            raise spec.wrong(f"{spec.target} has no setting {key!r}; {suggest(key, choices)}")
    seed = spec.options.get("seed")
    if "seed" in spec.options and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise spec.wrong(f"seed {seed!r} is not a whole number; write ?seed=7")
