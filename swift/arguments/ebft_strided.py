"""The settings of `swift rlhf --rlhf_type ebft --ebft_mode strided`: EBFT on documents, without an engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from swift.arguments.common import CommonArguments, PluginArguments, model_missing, training_data_missing
from swift.arguments.ebft import FeatureArguments
from swift.arguments.rlhf import MethodArguments
from swift.data.arguments import DataArguments
from swift.flags import flag
from swift.models.arguments import TunerArguments
from swift.trainers.arguments import OptimizationArguments, RunArguments


@dataclass(kw_only=True)
class StridedArguments(
    PluginArguments,
    CommonArguments,
    RunArguments,
    OptimizationArguments,
    DataArguments,
    TunerArguments,
    FeatureArguments,
    MethodArguments,
):
    """Strided EBFT: a mode of its own, because none of the settings of rollouts means anything here."""

    GROUP: ClassVar[str] = "Data"

    dataset_transform: Literal["strided", "strided_text", "strided_structured", "strided_chat", "strided_reasoning"] = (
        flag("strided", resume="fixed")
    )
    """Rows as documents: a text, a prompt with its completion, or a chat; strided chooses by the columns."""

    max_length: int | None = flag(at_least=2, unset="the model's context", resume="fixed")
    """Maximum length of a document in tokens. A text above it is several documents, a completion is cut, a chat is left
    out."""

    ebft_mask_thinking_ce: bool = flag(
        False, group="Objective", aliases=("mask_thinking_ce",), everyday=False, resume="fixed"
    )
    """Whether the cross-entropy leaves thoughts of assistant turns out. Blocks may still begin there."""

    def problems(self) -> Iterator[str]:
        """What is wrong with these settings, one line each."""
        yield from model_missing(self)
        yield from training_data_missing(self)
        shortest = self.ebft_context_length + self.ebft_generate_max_len
        if self.max_length is not None and self.max_length < shortest:
            yield (
                f"--max_length: {self.max_length}: no block fits: --ebft_context_length {self.ebft_context_length} + "
                f"--ebft_generate_max_len {self.ebft_generate_max_len} = {shortest}; raise it, or lower these"
            )
        if self.ebft_n_samples_per_prompt == 1 and self.ebft_diversity_coef and self.ebft_rl_coef:
            yield (
                "--ebft_n_samples_per_prompt: 1: one sample has no diversity; use at least 2, or "
                "--ebft_diversity_coef 0"
            )
        if self.torch_dtype == "float16":
            yield "--torch_dtype: float16: losses are not scaled here; use --torch_dtype bfloat16, or float32"

    def notes(self) -> Iterator[str]:
        """Remarks about settings that work but should be known about."""
        if self.ebft_top_p < 1:
            yield (
                f"--ebft_top_p: {self.ebft_top_p}: truncated sampling biases the gradient, which uses the whole "
                "vocabulary"
            )
