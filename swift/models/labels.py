"""What a classifier says of a text: its number of labels, and the kind of problem, in transformers' words."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from swift.errors import ConfigError

Problem = Literal["single_label_classification", "multi_label_classification", "regression"]


class Labels(NamedTuple):
    """One of `num` classes, any of them, or `num` numbers (regression)."""

    num: int
    problem: Problem

    @classmethod
    def of(cls, num_labels: int | None, problem_type: Problem | None) -> Labels:
        """With the defaults of ms-swift: a single label is a number, several are classes.

        >>> Labels.of(None, "regression"), Labels.of(3, None).problem
        (Labels(num=1, problem='regression'), 'single_label_classification')
        """
        num = num_labels or 1
        return cls(num, problem_type or ("regression" if num == 1 else "single_label_classification"))


def labels_in(folder: Path, config: Mapping[str, Any], recorded: Mapping[str, Any]) -> Labels | None:
    """The labels of a classifier, from its `config.json` and the `args.json` of its training; None of other models.

    A reward model has the same architecture. Of one label, and without a record, a model is a reward model unless its
    config names a problem.

    Raises:
        ConfigError: values of another kind in a file.
    """
    if "rlhf_type" in recorded:
        return None
    if recorded.get("task_type") == "seq_cls":
        return _labels(folder / "args.json", recorded.get("num_labels"), recorded.get("problem_type"))
    num = len(config.get("id2label") or ()) or config.get("num_labels") or 2  # as transformers reads a config
    if "ForSequenceClassification" in str(config.get("architectures")) and (num != 1 or config.get("problem_type")):
        return _labels(folder / "config.json", num, config.get("problem_type"))
    return None


def _labels(file: Path, num: Any, problem: Any) -> Labels:
    if type(num) is not int and not (num is None and problem == "regression"):
        raise ConfigError(f"{file}: num_labels {num!r}: no number of labels; correct it")
    if problem not in (None, *get_args(Problem)):
        raise ConfigError(
            f"{file}: problem_type {problem!r}: not a kind of problem; one of {', '.join(get_args(Problem))}"
        )
    return Labels.of(num, problem)
