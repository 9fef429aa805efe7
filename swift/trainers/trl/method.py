"""Training methods that use a trainer of TRL or transformers: one `Method` each.

The rest (`run`, `frame`, `callbacks`) is the same for all: run folder, checkpoints, exact resume, signals, logs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from swift.errors import ConfigError, join_problems
from swift.plugin import load_external_plugins
from swift.plugin.registry import methods

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

    from swift.models.policy import Head
    from swift.models.template import Template
    from swift.trainers.preferences.rows import Layout
    from swift.trainers.trl.parts import Parting

Encoded: TypeAlias = "tuple[Dataset | IterableDataset, Dataset | dict[str, Dataset] | None, list[str]]"
"""Training rows, evaluation rows (by name if there are several sets, None without any), and lines to print."""


def _nothing(*_: Any) -> dict[str, Any]:
    return {}


def _chat_template(args: Any) -> Template:
    from swift.models import load_chat

    return load_chat(args)


def load_texts(args: Any) -> Template:
    """The tokenizer alone, for rows that are documents."""
    from swift.models import load_chat

    return load_chat(args, plain=True)


def _never(_: Any) -> Parting:
    return ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Method:
    """A training method.

    What has to be imported when it is used, and no sooner, may be given as `module:name`.

    parameters: its own settings. summary: what it does, in a line. sees: whether rows may have images.
    trainer, config: their classes, as `module:name`.
    rows: the layout of its rows; see `swift.trainers.preferences.rows`.
    encode: settings and chat template -> rows, if they are not those of `rows` alone.
    collator: TRL's, of the rows that `encode` makes, as `module:name`; for rows with images, if they are single.
    template: settings -> tokenizer and chat template.
    reward_head: of the model to train; None for a language model.
    model_dropout: whether the model keeps the dropout of its config; without it, the model and a frozen copy differ by
        training only.
    fuses_head: whether the loss multiplies by the weight of the output layer directly, which bypasses an adapter on it.
    shares_rows: whether ranks may compute its rows together (`--sequence_parallel_size`).
    options: settings -> keyword arguments of `config` that only this method has.
    parts: prepares the model; settings and model -> keyword arguments of `trainer` that only this method has, such as
        a reference model.
    parting: settings -> how a batch may be computed in parts without a change of the gradient, if memory runs out.
    overrides: mixins that come before `trainer` in the order of classes.
    logged: metrics in its training log lines beside those of every method.
    measured: metrics of its evaluations beside those that it logs and those of every method.
    shown: metric -> its name on the console.
    in_trl: defaults of TRL's config class. commands_of_trl: what starts it there.
    """

    trainer: type | str
    config: type | str
    parameters: type | None = None
    summary: str = ""
    sees: bool = True
    rows: Layout | None = None
    encode: Callable[[Any, Template], Encoded] | str | None = None
    collator: str | None = None
    template: Callable[[Any], Template] = _chat_template
    reward_head: Head | None = None
    model_dropout: bool = False
    fuses_head: bool = False
    shares_rows: bool = True
    options: Callable[[Any], dict[str, Any]] = _nothing
    parts: Callable[[Any, Any], dict[str, Any]] | str = _nothing
    parting: Callable[[Any], Parting] = _never
    overrides: tuple[type | str, ...] = ()
    logged: tuple[str, ...] = ()
    measured: tuple[str, ...] = ()
    shown: tuple[tuple[str, str], ...] = ()
    in_trl: Mapping[str, Any] = field(default_factory=dict)
    commands_of_trl: tuple[str, ...] = ()

    def divides(self, args: Any) -> bool:
        """Whether the loss is the same with fewer rows in a micro-batch and more of these."""
        packs_pairs = self.rows == "pair" and getattr(args, "packing", False)  # of which a row has many or few
        return bool(self.parting(args)) and not packs_pairs

    def encoded(self, args: Any, template: Template) -> Encoded:
        """Its rows.

        Raises:
            ConfigError: wrong data.
        """
        if self.encode is not None:
            return found(self.encode)(args, template)  # type: ignore[no-any-return]
        return found("swift.trainers.preferences.rows:encoding")(self.rows)(args, template)  # type: ignore[no-any-return]

    @property
    def evaluated(self) -> list[str]:
        """The metrics that an evaluation may have, without the prefix `eval_`."""
        return sorted({"loss", "runtime", "samples_per_second", "steps_per_second", *self.logged, *self.measured})


METHODS = {
    "sft": "swift.trainers.sft:SFT",
    "pt": "swift.trainers.sft:PT",
    "seq_cls": "swift.trainers.classification:SEQ_CLS",
    "ebft_strided": "swift.trainers.ebft.strided:STRIDED",
}
"""Modes beside the methods of `swift.methods` -> their `Method`, as `module:name`."""


def rows_of(args: Any, method: Method, template: Template) -> Encoded:
    """The rows of a method, after plugins are loaded, and a check of the metric that selects the best checkpoint.

    Raises:
        ConfigError: wrong data, a setting that does not go with images, or a metric that no evaluation has.
    """
    load_external_plugins(args.external_plugins)
    if template.vision is not None:
        from swift.trainers.images import vision_problems

        join_problems(vision_problems(args))
    train, val, lines = method.encoded(args, template)
    metric = name = args.metric_for_best_model.removeprefix("eval_")
    if isinstance(val, dict):
        of = next((dataset for dataset in sorted(val, key=len, reverse=True) if metric.startswith(f"{dataset}_")), None)
        name = metric.removeprefix(f"{of}_") if of is not None else "loss"  # without a set there is no best one
    if val is not None and args.eval_strategy != "no" and name not in method.evaluated:
        raise ConfigError(f"--metric_for_best_model: {metric}: not measured; there are: {', '.join(method.evaluated)}")
    return train, val, lines


def found(part: Any) -> Any:
    """A part of a method; that which `module:name` names."""
    if not isinstance(part, str):
        return part
    module, _, name = part.partition(":")
    return getattr(importlib.import_module(module), name)


def is_method(mode: str) -> bool:
    """Whether a mode trains with a `Method`."""
    return mode in METHODS or mode in methods


def method_of(mode: str) -> Method:
    """The method that a mode trains with."""
    method: Method = found(METHODS[mode]) if mode in METHODS else methods[mode]
    return method
