"""Settings of models: which one, in which precision, and what of it is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from swift.data.arguments import HubArguments
from swift.flags import flag


@dataclass(kw_only=True)
class CheckpointArguments(HubArguments):
    """A model as it lies in a folder or on a hub, with the adapters that belong to it."""

    GROUP: ClassVar[str] = "Model"

    model: str | None = flag(unset="the base model that --adapters name")
    """Local folder or hub id of the model."""

    model_revision: str | None = flag(everyday=False, unset="the hub's default branch")
    """Branch, tag or commit of a hub model."""

    model_type: str | None = flag(everyday=False, unset="read from config.json")
    """Architecture in transformers' names."""

    template: str | None = flag(unset="the tokenizer's own")
    """Name of a chat template."""

    chat_template_kwargs: dict[str, Any] = flag({}, everyday=False)
    """Variables of the chat template, such as `{"enable_thinking": false}`."""

    torch_dtype: Literal["bfloat16", "float16", "float32"] | None = flag(
        aliases=("dtype",), values={"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}
    )
    """Precision of weights and arithmetic. float16 is not for grpo."""

    attn_impl: Literal["sdpa", "eager", "flash_attn", "flex_attention"] = flag(
        "sdpa", aliases=("attn_implementation",), values={"flash_attention_2": "flash_attn"}, everyday=False
    )
    """Attention kernel. In rlhf, sdpa is FlexAttention on CUDA if a trial agrees with masked SDPA. flex_attention and
    flash_attn need a GPU; flash_attn also its package and 16 bits. eager is used if an architecture has no sdpa or caps
    its scores."""

    adapters: list[str] = flag([])
    """Folders of LoRA adapters to start from. LoRA trains a single one further; otherwise all are merged into the
    weights, in order."""

    trust_remote_code: bool = flag(False, everyday=False)
    """Whether Python code of a model's repository may run."""


@dataclass(kw_only=True)
class TunerArguments(CheckpointArguments):
    """What of the model is trained."""

    tuner_type: Literal["lora", "full"] = flag("lora", aliases=("train_type",))
    """Trained weights: a LoRA adapter (arXiv:2106.09685) or all."""

    lora_rank: int = flag(8, at_least=1, needs="tuner_type=lora")
    """Rank of the LoRA matrices."""

    lora_alpha: float = flag(32.0, above=0, needs="tuner_type=lora")
    """Scale: the adapter's output times lora_alpha / lora_rank."""

    lora_dropout: float | None = flag(at_least=0, below=1, everyday=False, needs="tuner_type=lora")
    """Dropout before the LoRA matrices."""

    target_modules: list[str] = flag(["all-linear"], everyday=False, needs="tuner_type=lora")
    """Modules with LoRA matrices. all-linear excludes the output head."""

    modules_to_save: list[str] = flag([], everyday=False, needs="tuner_type=lora")
    """Modules trained in full and saved with the adapter, such as embed_tokens."""

    gradient_checkpointing: bool = flag(True)
    """Whether the backward pass recomputes activations: less memory, a third more time."""

    gradient_checkpointing_kwargs: dict[str, Any] = flag({}, everyday=False, needs="gradient_checkpointing")
    """Options of torch's checkpointing, such as `{"use_reentrant": false}`."""


@dataclass(kw_only=True)
class ModelArguments(TunerArguments):
    """The policy and its reference."""

    ref_model: str | None = flag(everyday=False, needs="beta", unset="the policy as it starts")
    """Model or adapter folder of the KL reference."""
