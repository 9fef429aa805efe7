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
    """The model: a local folder or a hub id. Required unless `--adapters` say which model they were trained
    on."""

    model_revision: str | None = flag(everyday=False, unset="the hub's default branch")
    """Branch, tag or commit of a hub model."""

    model_type: str | None = flag(everyday=False, unset="read from config.json")
    """Architecture, in transformers' words, when config.json names another one."""

    template: str | None = flag(unset="the tokenizer's own")
    """Chat template by name, instead of the one that comes with the tokenizer."""

    chat_template_kwargs: dict[str, Any] = flag({}, everyday=False)
    """Variables for the chat template, as JSON such as `{"enable_thinking": false}`; used wherever a chat becomes
    tokens."""

    torch_dtype: Literal["bfloat16", "float16", "float32"] | None = flag(
        aliases=("dtype",), values={"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}
    )
    """Precision of the weights and of the arithmetic; float16 not in reinforcement learning."""

    attn_impl: Literal["sdpa", "eager", "flash_attn", "flex_attention"] = flag(
        "sdpa", aliases=("attn_implementation",), values={"flash_attention_2": "flash_attn"}, everyday=False
    )
    """Attention implementation; eager where an architecture has no sdpa, or caps its scores. flash_attn needs its
    package and a GPU."""

    adapters: list[str] = flag([])
    """Folders of LoRA adapters to start from. With LoRA the one adapter is trained on; with full tuning and in
    inference all are folded into the weights, in order."""

    trust_remote_code: bool = flag(False, everyday=False)
    """Run Python code that comes with a model. Read that code first."""


@dataclass(kw_only=True)
class TunerArguments(CheckpointArguments):
    """What of the model is trained."""

    tuner_type: Literal["lora", "full"] = flag("lora", aliases=("train_type",))
    """Train a low-rank adapter or all weights. LoRA (arXiv:2106.09685) needs far less memory and a ten times
    higher learning rate."""

    lora_rank: int = flag(8, at_least=1, needs="tuner_type=lora")
    """Rank of the LoRA matrices."""

    lora_alpha: float = flag(32.0, above=0, needs="tuner_type=lora")
    """LoRA scale; the adapter's output is multiplied by lora_alpha / lora_rank."""

    lora_dropout: float | None = flag(at_least=0, below=1, everyday=False, needs="tuner_type=lora")
    """Dropout in front of the LoRA matrices. Reinforcement learning compares log-probs, so there it is off
    unless given."""

    target_modules: list[str] = flag(["all-linear"], everyday=False, needs="tuner_type=lora")
    """Modules that get LoRA matrices; all-linear means every linear layer but the output head."""

    modules_to_save: list[str] = flag([], everyday=False, needs="tuner_type=lora")
    """Modules that are trained in full and saved beside the adapter, such as embed_tokens."""

    gradient_checkpointing: bool = flag(True)
    """Recompute activations in the backward pass: much less memory for about a third more time."""

    gradient_checkpointing_kwargs: dict[str, Any] = flag({}, everyday=False, needs="gradient_checkpointing")
    """Options of torch's checkpointing, as JSON such as `{"use_reentrant": false}`."""


@dataclass(kw_only=True)
class ModelArguments(TunerArguments):
    """The policy and its reference."""

    ref_model: str | None = flag(everyday=False, unset="the policy as it starts")
    """Model or adapter folder that the KL term compares the policy with. Without it LoRA uses the policy with
    its adapter off, full tuning a frozen copy; with `--beta 0` there is none."""
