"""Settings of models: which one, in which precision, and what of it is trained."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from swift.data.arguments import HubArguments
from swift.flags import flag

OTHER_FLASH = ("flash_attention_3", "flash_attention_4")
"""Kernels of attention whose place flash_attn takes."""


@dataclass(kw_only=True)
class CheckpointArguments(HubArguments):
    """A model in a folder or on a hub, with its adapters."""

    GROUP: ClassVar[str] = "Model"

    SEES: ClassVar[bool] = False
    """Whether a model with a vision tower is loaded whole, and prompts may have images."""

    model: str | None = flag(unset="the base model that --adapters name", resume="fixed")
    """Local folder or hub id of the model."""

    model_revision: str | None = flag(everyday=False, unset="the hub's default branch", resume="fixed")
    """Branch, tag or commit of a hub model."""

    model_type: str | None = flag(everyday=False, unset="read from config.json", resume="fixed")
    """Architecture in transformers' names."""

    template: str | None = flag(unset="the tokenizer's own", resume="fixed")
    """Name of a chat template."""

    chat_template_kwargs: dict[str, Any] = flag({}, everyday=False, resume="fixed")
    """Variables of the chat template, such as `{"enable_thinking": false}`."""

    special_tokens: dict[str, Any] = flag({}, everyday=False, secret=False, resume="fixed")
    """Tokens of the vocabulary with a role, such as `{"eos_token": "<|im_end|>"}`, in place of the tokenizer's own."""

    torch_dtype: Literal["bfloat16", "float16", "float32"] | None = flag(
        aliases=("dtype",),
        values={"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"},
        resume="fixed",
    )
    """Precision of weights and arithmetic. In float16 sampler and trainer agree better than in bfloat16; the loss of
    grpo and ebft is scaled by 65536."""

    attn_impl: Literal["sdpa", "eager", "flash_attn", "flex_attention", "flash_attention_3", "flash_attention_4"] = (
        flag("sdpa", aliases=("attn_implementation",), values={"flash_attention_2": "flash_attn"}, everyday=False)
    )
    """Attention kernel. In rlhf, sdpa is FlexAttention on CUDA if a trial agrees with masked SDPA. flex_attention and
    flash_attn need a GPU, flash_attn also its package and 16 bits; without them sdpa takes their place, with a note, as
    flash_attn does for flash_attention_3 and 4. eager is used if an architecture has no sdpa or caps its scores."""

    adapters: list[str] = flag([], resume="fixed")
    """Folders of adapters to start from. An adapter tuner trains a single one further; otherwise all are merged into
    the weights, in order."""

    trust_remote_code: bool = flag(False, everyday=False, resume="free")
    """Whether Python code of a model's repository may run."""


@dataclass(kw_only=True)
class ImageArguments(CheckpointArguments):
    """How a model sees images."""

    max_pixels: int | None = flag(at_least=1, everyday=False, unset="as the model's processor has it", resume="fixed")
    """Pixels of an image; a larger one is made smaller, in the same proportions. Also MAX_PIXELS."""

    def notes(self) -> Iterator[str]:
        for name in ("IMAGE_MAX_TOKEN_NUM", "MIN_PIXELS"):
            if value := os.environ.get(name):
                yield f"{name}: {value}: not read; --max_pixels bounds the pixels of an image"


@dataclass(kw_only=True)
class SeeingArguments(ImageArguments):
    """Those of a model that is loaded whole."""

    SEES: ClassVar[bool] = True


@dataclass(kw_only=True)
class QuantArguments(CheckpointArguments):
    """How the linear layers of a model are stored."""

    quant_method: Literal["bnb"] | None = flag(everyday=False, unset="weights as they are in the files", resume="fixed")
    """Quantisation of the base model while it is loaded, by bitsandbytes. Training needs `--tuner_type lora` (QLoRA,
    arXiv:2305.14314)."""

    quant_bits: int | None = flag(everyday=False, needs="quant_method", unset="none", resume="fixed")
    """Bits of a weight, 4 or 8."""

    bnb_4bit_quant_type: Literal["nf4", "fp4"] = flag("nf4", everyday=False, needs="quant_method", resume="fixed")
    """Values of a 4-bit weight."""

    bnb_4bit_use_double_quant: bool = flag(True, everyday=False, needs="quant_method", resume="fixed")
    """Whether the scales of 4-bit weights are quantised, too."""

    bnb_4bit_compute_dtype: Literal["bfloat16", "float16", "float32"] | None = flag(
        everyday=False, needs="quant_method", unset="torch_dtype"
    )
    """Precision of products with 4-bit weights."""

    bnb_4bit_quant_storage: Literal["uint8", "bfloat16", "float16", "float32"] | None = flag(
        everyday=False, needs="quant_method", unset="uint8; torch_dtype where the base is sharded", resume="free"
    )
    """Type in which 4-bit weights are packed."""

    quant_experts: bool = flag(False, everyday=False, needs="quant_method", strict=True, resume="fixed")
    """Whether the experts of a mixture are quantised to 4 bits, too, where they are one parameter of three
    dimensions."""

    def quant_problems(self) -> Iterator[str]:
        """Problems of the settings of quantisation, one line each."""
        if self.quant_method and self.quant_bits is None:
            yield "--quant_bits: missing: --quant_method bnb has two sizes; give --quant_bits 4 or 8"
        elif self.quant_bits not in (None, 4, 8):
            yield f"--quant_bits: {self.quant_bits}: not a choice; valid: 4, 8"
        elif self.quant_experts and self.quant_bits == 8:
            yield "--quant_experts: true: experts are quantised to 4 bits; use --quant_bits 4, or leave it out"


WHOLE_WEIGHTS = (None, "zero1", "zero2", "zero2_offload")
"""Values of `--deepspeed` with which each process has all weights."""

_ADAPTERS = "tuner_type=lora|vera|ia3|boft|miss"


@dataclass(kw_only=True)
class TunerArguments(ImageArguments, QuantArguments):
    """Trained parameters of the model."""

    USUAL_DROPOUT: ClassVar[float] = 0.0
    """The default of `lora_dropout`. Adapters on parameters leave it out; any other rate is refused there."""

    rope_scaling: str | None = flag(everyday=False, unset="as config.json has it", resume="fixed")
    """Scaling of RoPE for a longer context: yarn or linear, by the factor that max_model_len needs, or JSON of
    transformers' rope_parameters, such as `{"rope_type": "yarn", "factor": 4}`."""

    max_model_len: int | None = flag(at_least=1, everyday=False, unset="as config.json has it", resume="fixed")
    """Context of the model in tokens; above its own with rope_scaling."""

    new_special_tokens: list[str] = flag([], everyday=False, secret=False, resume="fixed")
    """Special tokens that tokenizer and model get, or text files (.txt) of them. Embedding and output layer have to be
    trained: modules_to_save, or tuner_type full."""

    tuner_type: Literal["lora", "full", "vera", "ia3", "boft", "miss"] = flag(
        "lora", aliases=("train_type",), values={"bone": "miss", "lora_llm": "lora"}, resume="fixed"
    )
    """Trained weights: a LoRA adapter (arXiv:2106.09685), all, or an adapter of another kind: VeRA
    (arXiv:2310.11454), IA3 (arXiv:2205.05638), BOFT (arXiv:2311.06243), MiSS, which was called Bone
    (arXiv:2409.15371)."""

    autocast: Literal["bfloat16"] | None = flag(
        everyday=False, unset="off", values={"bf16": "bfloat16"}, resume="fixed"
    )
    """Precision of the matrix products of float32 weights in the trainer, and of engines. It is what `--torch_dtype
    float32 --bf16 true` means in TRL and ms-swift."""

    lora_rank: int = flag(8, at_least=1, needs="tuner_type=lora|miss", resume="fixed")
    """Rank of the LoRA matrices, or of MiSS."""

    lora_alpha: float = flag(32.0, above=0, needs="tuner_type=lora", resume="fixed")
    """Scale: the adapter's output times lora_alpha / lora_rank."""

    lora_dropout: float | None = flag(at_least=0, below=1, everyday=False, needs="tuner_type=lora", resume="fixed")
    """Dropout before the LoRA matrices."""

    target_modules: list[str] = flag(["all-linear"], everyday=False, needs=_ADAPTERS, resume="fixed")
    """Modules with an adapter. all-linear excludes the output head, and in Nemotron-H and Falcon-H1 out_proj; for ia3
    it is PEFT's choice for the model. Other names may stand beside it, such as embed_tokens."""

    target_regex: str | None = flag(everyday=False, needs=_ADAPTERS, unset="target_modules", resume="fixed")
    """Regular expression for the whole names of the modules with an adapter."""

    target_parameters: list[str] = flag(
        [], aliases=("lora_target_parameters",), everyday=False, needs="tuner_type=lora", resume="fixed"
    )
    """Ends of the names of parameters with an adapter besides, such as experts.down_proj."""

    modules_to_save: list[str] = flag([], everyday=False, needs=_ADAPTERS, resume="fixed")
    """Modules trained in full and saved with the adapter, such as embed_tokens."""

    use_dora: bool = flag(False, everyday=False, needs="tuner_type=lora", resume="fixed")
    """Whether the length of each row of a weight is trained apart from its direction (DoRA, arXiv:2402.09353)."""

    use_rslora: bool = flag(False, everyday=False, needs="tuner_type=lora", resume="fixed")
    """Whether the scale is lora_alpha / sqrt(lora_rank) (rsLoRA, arXiv:2312.03732)."""

    init_weights: str = flag(
        "true", aliases=("init_lora_weights",), everyday=False, needs="tuner_type=lora", resume="fixed"
    )
    """Start of the LoRA matrices: true (no change), gaussian, orthogonal, pissa (arXiv:2404.02948), pissa_niter_N (the
    same with a fast SVD), olora (arXiv:2406.01775), or false (random)."""

    loraplus_lr_ratio: float | None = flag(
        above=0, aliases=("lorap_lr_ratio",), everyday=False, unset="1", needs="tuner_type=lora", resume="fixed"
    )
    """How many times `learning_rate` the rate of LoRA's matrices B is, such as 16 (LoRA+, arXiv:2402.12354)."""

    rank_pattern: dict[str, Any] = flag({}, everyday=False, needs="tuner_type=lora", resume="fixed")
    """Other ranks by module name or regular expression, such as `{"q_proj": 16}`."""

    alpha_pattern: dict[str, Any] = flag({}, everyday=False, needs="tuner_type=lora", resume="fixed")
    """Other values of lora_alpha by module name or regular expression, such as `{"q_proj": 64}`."""

    vera_rank: int = flag(256, at_least=1, everyday=False, needs="tuner_type=vera", resume="fixed")
    """Rank of VeRA: of the two random matrices that all layers share (arXiv:2310.11454)."""

    vera_projection_prng_key: int = flag(0, everyday=False, needs="tuner_type=vera", resume="fixed")
    """Seed of the random matrices of VeRA."""

    vera_dropout: float = flag(0.0, at_least=0, below=1, everyday=False, needs="tuner_type=vera")
    """Dropout of the inputs of VeRA's random matrices."""

    vera_d_initial: float = flag(0.1, everyday=False, needs="tuner_type=vera", resume="fixed")
    """Initial value of the trained scaling vector between the two random matrices of VeRA."""

    boft_block_size: int = flag(4, at_least=0, everyday=False, needs="tuner_type=boft", resume="fixed")
    """Size of the orthogonal blocks of BOFT; 0 leaves it to boft_block_num."""

    boft_block_num: int = flag(0, at_least=0, everyday=False, needs="tuner_type=boft", resume="fixed")
    """Number of orthogonal blocks of BOFT per layer; 0 leaves it to boft_block_size."""

    boft_dropout: float = flag(0.0, at_least=0, below=1, everyday=False, needs="tuner_type=boft")
    """Share of the blocks of BOFT that are left out in a forward pass."""

    freeze_parameters: list[str] = flag([], everyday=False, needs="tuner_type=full", resume="fixed")
    """Beginnings of the names of parameters that are not trained."""

    freeze_parameters_regex: str | None = flag(everyday=False, needs="tuner_type=full", unset="none", resume="fixed")
    """Regular expression found in the names of parameters that are not trained."""

    freeze_parameters_ratio: float = flag(
        0.0, at_least=0, at_most=1, everyday=False, needs="tuner_type=full", resume="fixed"
    )
    """Share of the model's parameters, from the first layer on, that are not trained."""

    trainable_parameters: list[str] = flag([], everyday=False, needs="tuner_type=full", resume="fixed")
    """Beginnings of the names of parameters that are trained although the freeze settings name them."""

    trainable_parameters_regex: str | None = flag(everyday=False, needs="tuner_type=full", unset="none", resume="fixed")
    """Regular expression found in the names of parameters that are trained although the freeze settings name them."""

    freeze_vit: bool = flag(True, everyday=False, resume="fixed")
    """Whether a model's vision tower stays as it is; for adapters, whether they leave it out."""

    freeze_aligner: bool = flag(True, everyday=False, resume="fixed")
    """Whether the layers between vision tower and language model stay as they are; for adapters, whether they leave
    them out."""

    freeze_llm: bool = flag(False, everyday=False, resume="fixed")
    """Whether the language model of a model that sees stays as it is; for adapters, whether they leave it out."""

    full_towers: bool = flag(False, everyday=False, needs="tuner_type=lora", resume="fixed")
    """Whether vision tower and aligner are trained in full, beside LoRA on the language model. `--tuner_type lora_llm`
    of ms-swift is lora with this, and with freeze_vit and freeze_aligner false."""

    vit_lr: float | None = flag(above=0, everyday=False, unset="learning_rate", resume="fixed")
    """Peak learning rate of the vision tower."""

    aligner_lr: float | None = flag(above=0, everyday=False, unset="learning_rate", resume="fixed")
    """Peak learning rate of the layers between the tower and the language model."""

    gradient_checkpointing: bool = flag(True)
    """Whether the backward pass recomputes activations: less memory, a third more time."""

    gradient_checkpointing_kwargs: dict[str, Any] = flag({}, everyday=False, needs="gradient_checkpointing")
    """Options of torch's checkpointing, such as `{"use_reentrant": false}`."""

    vit_gradient_checkpointing: bool | None = flag(everyday=False, unset="gradient_checkpointing")
    """Whether the backward pass recomputes activations of the vision tower."""

    @property
    def tuner_dropout(self) -> float:
        """The dropout rate of the adapter; 0 without any."""
        rates = {"lora": self.lora_dropout, "vera": self.vera_dropout, "boft": self.boft_dropout}
        return rates.get(self.tuner_type) or 0.0

    @property
    def changes_base(self) -> bool:
        """Whether the start of the adapter is taken out of the base weights (PiSSA, OLoRA)."""
        return self.tuner_type == "lora" and self.init_weights.startswith(("pissa", "olora"))

    @property
    def sent_rank(self) -> int:
        """The largest rank of the LoRA adapter that engines get."""
        ranks = [rank for rank in self.rank_pattern.values() if isinstance(rank, int)]
        largest = max([self.lora_rank, *ranks])
        return 2 * largest if self.changes_base else largest

    def tuner_problems(self) -> Iterator[str]:
        """Problems of the settings of tuner and quantisation, one line each."""
        if self.quant_method or self.quant_bits is not None:
            yield from self.quant_problems()
        if not re.fullmatch("true|false|gaussian|orthogonal|olora|pissa(_niter_[1-9][0-9]*)?", self.init_weights):
            yield (
                f"--init_weights: {self.init_weights}: not a choice; valid: true, false, gaussian, orthogonal, pissa, "
                "pissa_niter_N, olora"
            )
        if self.autocast:
            yield from self._autocast_problems()
        if self.init_weights == "orthogonal" and self.lora_rank % 2:
            yield f"--lora_rank: {self.lora_rank}: --init_weights orthogonal halves it; use an even rank"
        yield from self._module_problems()
        if self.tuner_type == "boft" and bool(self.boft_block_size) == bool(self.boft_block_num):
            yield (
                f"--boft_block_num: {self.boft_block_num}: together with --boft_block_size {self.boft_block_size}; "
                "give one of them, and 0 for the other"
            )
        if self.quant_method:
            yield from self.quantised_problems(f"--quant_method: {self.quant_method}")
        elif (self.tuner_type in ("vera", "boft") or self.changes_base) and self.sharded_by:
            subject = "init_weights" if self.changes_base else "tuner_type"
            yield (
                f"--{subject}: {getattr(self, subject)}: is computed from whole weights; leave --{self.sharded_by} "
                "out, or use plain LoRA"
            )

    def _module_problems(self) -> Iterator[str]:
        regexes = "target_regex", "freeze_parameters_regex", "trainable_parameters_regex"
        texts = [(name, getattr(self, name) or "") for name in regexes]
        texts += [(name, text) for name in ("rank_pattern", "alpha_pattern") for text in getattr(self, name)]
        for name, text in texts:
            try:
                re.compile(text)
            except re.error as error:
                yield f"--{name}: {text}: no regular expression ({error}); correct it"
        if self.target_regex and self.target_modules != ["all-linear"]:
            yield f"--target_regex: {self.target_regex}: excludes --target_modules; leave one of them out"
        for name, kinds in (("rank_pattern", (int,)), ("alpha_pattern", (int, float))):
            for module, value in getattr(self, name).items():
                if type(value) not in kinds or value <= 0:
                    wanted = "number" if float in kinds else "whole number"
                    yield f"--{name}: {module}: {value}: not a {wanted} above 0"

    @property
    def sharded_by(self) -> str:
        """The setting that shards the weights over the ranks, or ""."""
        return next((name for name in ("deepspeed", "fsdp") if getattr(self, name, None)), "")

    @property
    def shards_weights(self) -> bool:
        """Whether the ranks have parts of the weights: with FSDP, ZeRO-3, or a file of DeepSpeed's."""
        return bool(getattr(self, "fsdp", None)) or getattr(self, "deepspeed", None) not in WHOLE_WEIGHTS

    def _autocast_problems(self) -> Iterator[str]:
        """Why products cannot be cast on their own."""
        if self.torch_dtype != "float32":
            yield (
                f"--autocast: {self.autocast}: casts float32 weights, and --torch_dtype is {self.torch_dtype}; use "
                "--torch_dtype float32, or leave --autocast out"
            )
        if self.sharded_by:
            yield (
                f"--autocast: {self.autocast}: --{self.sharded_by} has float32 weights of its own, and computes in "
                "--torch_dtype; use --torch_dtype bfloat16 without --autocast"
            )

    def quantised_problems(self, subject: str) -> Iterator[str]:
        """Problems of settings with quantised weights, one line each; `subject`: the setting that they come from."""
        if self.tuner_type != "lora":
            yield (
                f"{subject}: quantised weights do not learn, and {self.tuner_type} is not made for them; "
                "use --tuner_type lora"
            )
        if self.autocast:
            yield f"{subject}: --autocast {self.autocast} casts float32 weights; leave one of the two out"
        if self.changes_base:
            yield f"--init_weights: {self.init_weights}: changes weights that are quantised; use true or gaussian"
        if self.quant_experts:
            yield from self._quantised_experts_problems()
        if self.shards_weights:
            yield from self._sharded_quantised_problems(subject, f"--{self.sharded_by}")
        if getattr(self, "offload_model", False):
            yield "--offload_model: true: quantised weights stay on their device; use --offload_model false"

    def _quantised_experts_problems(self) -> Iterator[str]:
        if self.shards_weights:
            yield f"--quant_experts: true: --{self.sharded_by} cannot shard them; leave one of the two out"
        if self.target_parameters:
            yield (
                f"--target_parameters: {' '.join(self.target_parameters)}: --quant_experts true quantises them; leave "
                "one of the two out"
            )
        if hasattr(self, "num_generations"):
            yield "--quant_experts: true: engines get whole weights of experts; leave it out"

    def _sharded_quantised_problems(self, subject: str, way: str) -> Iterator[str]:
        """FSDP and ZeRO-3 shard weights of a floating type, and gather each layer for its products only."""
        if self.quant_bits != 4:
            yield (
                f"{subject}: {way} shards only 4-bit weights that are made while loading; use --quant_bits 4 with a "
                f"model that is not quantised, --deepspeed zero2, or leave {way} out"
            )
        if self.use_dora:
            yield f"--use_dora: true: is computed from whole weights; use false, or leave {way} out"
        storage = self.bnb_4bit_quant_storage
        if storage not in (None, self.torch_dtype):
            yield f"--bnb_4bit_quant_storage: {storage}: {way} needs the type of --torch_dtype; leave it out"


@dataclass(kw_only=True)
class ModelArguments(TunerArguments):
    """The policy and the frozen models beside it."""

    ref_model: str | None = flag(everyday=False, needs="beta", unset="the policy as it starts", resume="fixed")
    """Model or adapter folder of the KL reference."""

    teacher_model: str | None = flag(everyday=False, unset="none", resume="fixed")
    """Model or adapter folder of a teacher with the policy's tokenizer, for on-policy distillation (arXiv:2306.13649).
    Then `--reward_funcs` may be left out."""

    teacher_model_server: str | None = flag(aliases=("teacher_server",), everyday=False, unset="none", resume="free")
    """URL of a server with the teacher, in place of `--teacher_model`: `swift rollout`, or an OpenAI API that returns
    prompt log-probs."""

    teacher_deepspeed: Literal["zero0", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload"] | None = flag(
        everyday=False, needs="teacher_model", unset="sharded if the policy is"
    )
    """Sharding of the teacher, by FSDP: zero3 over the processes, zero3_offload on their hosts, whole with others."""

    teacher_device: list[str] = flag([], everyday=False, needs="teacher_model", resume="free")
    """Devices of the teacher alone, such as `cuda:7`, each with a copy in a Ray actor; else it is in the trainer's
    processes."""

    @property
    def teaches_here(self) -> bool:
        """Whether a teacher is in the trainer's processes."""
        return bool(self.teacher_model) and not self.teacher_device

    @property
    def has_teacher(self) -> bool:
        """Whether a teacher is named."""
        return bool(self.teacher_model or self.teacher_model_server)
