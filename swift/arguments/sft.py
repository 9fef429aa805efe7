"""The settings of `swift sft` and `swift pt`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from swift.arguments.common import TrainerModeArguments
from swift.flags import flag
from swift.models.labels import Labels, Problem
from swift.trainers.arguments import MEASURED, ActivationArguments, RouterArguments

LossScale = Literal[
    "default", "last_round", "all", "ignore_empty_think", "last_round+ignore_empty_think",
    "hermes", "last_round+hermes", "hermes+ignore_empty_think", "last_round+hermes+ignore_empty_think",
    "react", "last_round+react", "react+ignore_empty_think", "last_round+react+ignore_empty_think",
    "qwen", "last_round+qwen", "qwen+ignore_empty_think", "last_round+qwen+ignore_empty_think",
]  # fmt: skip
WEIGHTS = ("hermes", "react", "qwen")
"""Values of loss_scale that weigh parts of an answer."""


@dataclass(kw_only=True)
class PackingArguments(TrainerModeArguments):
    """Rows without padding."""

    GROUP: ClassVar[str] = "Data"

    max_length: int | None = flag(
        at_least=1, unset="the model's context, with packing 2048 tokens at most", resume="fixed"
    )
    """Maximum length of a row in tokens. Longer ones are left out and counted."""

    packing: bool = flag(False, resume="fixed")
    """Whether rows are put together to rows of packing_length tokens. They do not attend to each other."""

    packing_length: int | None = flag(at_least=2, needs="packing", everyday=False, unset="max_length", resume="fixed")
    """Length of packed rows in tokens. With max_length too, rows over that are left out instead of cut."""

    padding_free: bool = flag(False, everyday=False, resume="fixed")
    """Whether a micro-batch is one stream of tokens without padding, as with packing."""

    def notes(self) -> Iterator[str]:
        if self.packing and not (self.packing_length or self.max_length):
            yield "--packing_length: at most 2048, without --max_length; in ms-swift the model's whole context"

    def problems(self) -> Iterator[str]:
        if self.torch_compile and (self.packing or self.padding_free):
            which = "packing" if self.packing else "padding_free"
            yield (
                f"--torch_compile: true: --{which} true gives each batch a layout of its own, which would be compiled "
                f"again and again; use --torch_compile false, or --{which} false"
            )
        if self.packing and (self.max_length or 0) > (self.packing_length or self.max_length or 0):
            yield (
                f"--packing_length: {self.packing_length}: shorter than --max_length {self.max_length}; use "
                f"--max_length {self.packing_length}"
            )


@dataclass(kw_only=True)
class LanguageModelingArguments(RouterArguments, ActivationArguments, PackingArguments):
    """What `swift sft` and `swift pt` have in common."""

    GROUP: ClassVar[str] = "Data"
    USUAL_DROPOUT: ClassVar[float] = 0.05

    min_length: int | None = flag(at_least=1, everyday=False, unset="none", resume="fixed")
    """Minimum length of a row in tokens. Shorter ones are left out and counted."""

    truncation_strategy: Literal["delete", "left", "right"] = flag("delete", everyday=False, resume="fixed")
    """Rows above max_length: left out, or cut at this side. Rows with images are left out in any case."""

    packing_strategy: Literal["bfd", "bfd_split", "wrapped"] = flag(
        "bfd", values={"binpack": "bfd"}, needs="packing", everyday=False, resume="fixed"
    )
    """Packing: bfd keeps rows whole (best-fit decreasing). bfd_split cuts those over packing_length. wrapped cuts
    wherever a packed row is full."""

    group_by_length: bool = flag(False, group="Optimization", everyday=False, resume="fixed")
    """Whether a batch has rows of similar length, which saves padding."""

    loss_type: Literal["nll", "dft"] = flag("nll", values={"loss_scale": "nll"}, group="Objective", everyday=False)
    """Loss: negative log-likelihood, or that of Dynamic Fine-Tuning (arXiv:2508.05629)."""

    def problems(self) -> Iterator[str]:
        if self.group_by_length and (self.packing or self.streaming):
            which = "streaming" if self.streaming else "packing"
            why = "a stream is read in its own order" if self.streaming else "packed rows are equally long"
            yield f"--group_by_length: true: {why}; use --group_by_length false, or --{which} false"
        if self.packing and self.max_length == 1:
            yield "--max_length: 1: a packed row of one token predicts nothing; use --max_length 2048"


@dataclass(kw_only=True)
class SFTArguments(LanguageModelingArguments):
    """`swift sft`: supervised tuning; the loss counts the assistant's turns."""

    GROUP: ClassVar[str] = "Objective"
    SEES: ClassVar[bool] = True

    loss_scale: LossScale = flag(
        "default", values={f"default+{name}": name for name in ("ignore_empty_think", *WEIGHTS)}, resume="fixed"
    )
    """Tokens that the loss counts: default the assistant's turns, last_round those after the last question, all every
    token. ignore_empty_think leaves out empty thoughts; hermes, react and qwen weigh calls of tools twice. `loss` of a
    message has precedence."""

    dataset_transform: Literal["alpaca"] | None = flag(
        group="Data", everyday=False, unset="rows as they are", resume="fixed"
    )
    """alpaca: instruction, input and output of a row, with the input apart from the instruction, which `--template
    alpaca` and those like it need."""

    eot_tokens: list[str] = flag([], group="Data", everyday=False, resume="fixed")
    """Further tokens at the end of a turn that are trained on, if the chat template writes them there."""

    agent_template: str | None = flag(group="Data", everyday=False, unset="that of the chat template", resume="fixed")
    """Format of tools and calls. The chat template writes them; another format than its own is refused."""

    disable_ignore_empty_think: bool = flag(False, everyday=False, resume="fixed")
    """Whether empty thoughts count where the chat template can switch thinking off; by default they are left out."""

    assistant_only_loss: bool | None = flag(everyday=False, unset="as loss_scale says", resume="fixed")
    """Whether the loss counts the assistant's turns only. false is loss_scale all."""

    completion_only_loss: bool | None = flag(everyday=False, unset="as loss_scale says", resume="fixed")
    """Whether the loss counts the last answer only. true is loss_scale last_round, false is all."""

    predict_with_generate: bool = flag(False, group="Run", everyday=False, resume="free")
    """Whether evaluation also answers each row, greedily, and compares the answer with the row's: rouge-1, rouge-2,
    rouge-l and bleu-4 of words, in percent."""

    max_new_tokens: int = flag(
        64, at_least=1, group="Run", everyday=False, needs="predict_with_generate", resume="free"
    )
    """Maximum number of tokens of such an answer."""

    @property
    def loss_tokens(self) -> LossScale:
        """What the three settings come to."""
        if self.assistant_only_loss is False or self.completion_only_loss is False:
            return "all"
        return "last_round" if self.completion_only_loss and self.loss_scale == "default" else self.loss_scale

    def problems(self) -> Iterator[str]:
        for name in ("assistant_only_loss", "completion_only_loss"):
            value = getattr(self, name)
            contradicted = self.loss_scale == "all" if value else self.loss_scale not in ("default", "all")
            if value is not None and contradicted:
                yield f"--{name}: {str(value).lower()}: contradicts --loss_scale {self.loss_scale}; drop one of the two"
        for name, off in (("loss_type", "nll"), ("sequence_parallel_size", 1)):
            if (value := getattr(self, name)) != off and set(WEIGHTS) & set(self.loss_scale.split("+")):
                yield f"--{name}: {value}: not with the weights of --loss_scale {self.loss_scale}; use {off}"
        if self.predict_with_generate:
            for obstacle in (text for text, holds in self._no_answers().items() if holds):
                yield f"--predict_with_generate: true: {obstacle}, or --predict_with_generate false"
        elif (self.metric_for_best_model or "").removeprefix("eval_") in MEASURED:
            yield f"--metric_for_best_model: {self.metric_for_best_model}: needs --predict_with_generate true"
        given = {self.assistant_only_loss, self.completion_only_loss} - {None}
        if len(given) > 1:
            yield "--completion_only_loss: contradicts --assistant_only_loss: one of them is true; drop one of the two"

    def _no_answers(self) -> dict[str, bool]:
        """Why no answers can be sampled, and what to use: for each whether it holds."""
        return {
            "nothing is evaluated; give --val_dataset or --split_dataset_ratio": self.eval_strategy == "no",
            f"--{self.sharded_by} shards the model; leave it out": bool(self.sharded_by),
            "rows are sharded; use --sequence_parallel_size 1": self.sequence_parallel_size > 1,
            "packed rows are cut; use --packing_strategy bfd": self.packing and self.packing_strategy != "bfd",
            "rows are cut; use --truncation_strategy delete": self.truncation_strategy != "delete",
        }


@dataclass(kw_only=True)
class PTArguments(LanguageModelingArguments):
    """`swift pt`: pre-training on plain text, possibly with images; the loss counts all tokens of text."""

    GROUP: ClassVar[str] = "Data"
    SEES: ClassVar[bool] = True

    truncation_strategy: Literal["delete", "left", "right", "split"] = flag(  # type: ignore[assignment]
        "delete", everyday=False, resume="fixed"
    )
    """Documents above max_length: left out, cut at this side, or split into several rows. Those with images are left
    out in any case."""

    def problems(self) -> Iterator[str]:
        for name in ("system", "template", "chat_template_kwargs"):
            if value := getattr(self, name):
                yield f"--{name}: {value}: plain text has no chat template; leave it out, or use swift sft"


@dataclass(kw_only=True)
class ClassifierArguments(PackingArguments):
    """`swift sft --task_type seq_cls`: classifiers and regression, with a head of labels on the model."""

    GROUP: ClassVar[str] = "Objective"
    SEES: ClassVar[bool] = True
    USUAL_DROPOUT: ClassVar[float] = 0.05

    task_type: Literal["seq_cls"] = flag("seq_cls")
    """Kind of model: seq_cls is a classifier."""

    num_labels: int | None = flag(at_least=1, unset="1 in regression", resume="fixed")
    """Number of labels: classes 0 to num_labels - 1, or numbers of a row."""

    problem_type: Problem | None = flag(
        unset="regression with one label, else single_label_classification", resume="fixed"
    )
    """Loss: cross-entropy of one class of a row, binary cross-entropy of each of several, or mean squared error."""

    truncation_strategy: Literal["delete", "left", "right"] = flag(
        "delete", group="Data", everyday=False, resume="fixed"
    )
    """Texts above max_length: left out, or cut at this side. Rows with images are left out in any case."""

    use_chat_template: bool | None = flag(group="Data", unset="true if the tokenizer has one", resume="fixed")
    """Whether a text is rendered by the chat template, as a prompt. Otherwise contents are tokenised as they are."""

    @property
    def labels(self) -> Labels:
        """The labels of the head."""
        return Labels.of(self.num_labels, self.problem_type)

    def problems(self) -> Iterator[str]:
        if self.num_labels is None and self.problem_type != "regression":
            yield "--num_labels: missing: a classifier has a number of classes; give --num_labels N"
        if self.num_labels == 1 and self.problem_type == "single_label_classification":
            yield "--num_labels: 1: one class teaches nothing; use 2 or more, or --problem_type regression"
        for name in ("template", "chat_template_kwargs"):
            if (value := getattr(self, name)) and self.use_chat_template is False:
                yield f"--{name}: {value}: contradicts --use_chat_template false; drop one of the two"
        if self.tuner_type == "vera":
            yield "--tuner_type: vera: PEFT cannot keep it out of the head, which is trained in full; use lora"
        metric = (self.metric_for_best_model or "loss").rpartition("_")[2]
        if metric in ("accuracy", "f1", "mse") and metric not in self._metrics:
            yield f"--metric_for_best_model: {metric}: not measured; there are: {', '.join(self._metrics)}, loss"

    @property
    def _metrics(self) -> tuple[str, ...]:
        return {"regression": ("mse",), "single_label_classification": ("accuracy",)}.get(
            self.labels.problem, ("accuracy", "f1")
        )
