"""The settings of each mode: the groups of its components, composed by inheritance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from swift.arguments.common import CommonArguments, backend_problems, model_missing
from swift.arguments.ebft import EBFTArguments
from swift.arguments.ebft_strided import StridedArguments
from swift.arguments.gkd import GKDArguments
from swift.arguments.preferences import settings_of
from swift.arguments.rlhf import RLHFArguments
from swift.arguments.sft import ClassifierArguments, PTArguments, SFTArguments
from swift.arguments.values import show
from swift.data.arguments import DataArguments
from swift.flags import REQUIRED, flag
from swift.models.arguments import CheckpointArguments, ImageArguments, QuantArguments
from swift.plugin.registry import methods
from swift.rewards.arguments import RewardArguments
from swift.rollout.arguments import LEAST_TEMPERATURE, EngineArguments, GenerationArguments

if TYPE_CHECKING:
    from swift.arguments.layers import Given


@dataclass(kw_only=True)
class InferArguments(CommonArguments, GenerationArguments, DataArguments, ImageArguments, QuantArguments):
    """`swift infer`: answers of a model, at the terminal or for every row of a dataset."""

    SEES: ClassVar[bool] = True

    temperature: float = flag(0.9, at_least=0, group="Sampling")
    """Sampling temperature; 0 is greedy."""

    infer_backend: Literal["transformers", "vllm"] = flag("transformers", values={"pt": "transformers"}, group="Engine")
    """Inference library. Scores of a reward model and quantised bases need transformers."""

    vllm_gpu_memory_utilization: float = flag(0.9, above=0, at_most=1, group="Engine", needs="infer_backend=vllm")
    """Share of a device's memory for vLLM."""

    vllm_max_model_len: int | None = flag(
        at_least=1, group="Engine", everyday=False, needs="infer_backend=vllm", unset="the model's context"
    )
    """Maximum length of prompt and completion, in tokens."""

    vllm_engine_kwargs: dict[str, Any] = flag({}, group="Engine", everyday=False, needs="infer_backend=vllm")
    """Further arguments of vLLM's engine; not checked."""

    result_path: str | None = flag(unset="output/infer/<model>-<time>.jsonl")
    """File for the answers to a dataset, one JSON object per row; must not exist."""

    def problems(self) -> Iterator[str]:
        yield from model_missing(self)
        yield from self.quant_problems()
        if 0 < self.temperature < LEAST_TEMPERATURE:
            yield f"--temperature: {self.temperature:g}: out of range; valid: 0, or at least {LEAST_TEMPERATURE:g}"
        if self.quant_method and self.infer_backend == "vllm":
            yield "--quant_method: bnb: vLLM gets merged, unquantised weights; use --infer_backend transformers"


@dataclass(kw_only=True)
class ExportArguments(CommonArguments, CheckpointArguments):
    """`swift export`: merge an adapter into its model."""

    SEES: ClassVar[bool] = True

    merge_lora: bool = flag(False, group="Model")
    """Whether adapters are merged into the weights, as an ordinary model folder."""

    output_dir: str | None = flag(unset="<adapter folder>-merged")
    """Folder for the result; must be new or empty."""

    def problems(self) -> Iterator[str]:
        if not self.adapters:
            yield "--adapters: missing: there is nothing to merge; give the checkpoint folder of a run with an adapter"
        if not self.merge_lora:
            yield "--merge_lora: false: merging is the only conversion in this version; use --merge_lora true"


@dataclass(kw_only=True)
class MergeLoraArguments(ExportArguments):
    """`swift merge-lora`: `swift export --merge_lora true`."""

    merge_lora: bool = flag(True, group="Model", everyday=False)
    """Whether adapters are merged into the weights, as an ordinary model folder."""


@dataclass(kw_only=True)
class RewardTestArguments(CommonArguments, RewardArguments, DataArguments):
    """`swift reward-test`: reward functions on true, adversarial or given completions; no model."""

    GROUP: ClassVar[str] = "Reward"

    rows: int = flag(20, at_least=1)
    """Number of rows to try."""

    gold_column: str | None = flag(unset="solution, else answer")
    """Column of the ground truth."""

    completions: str | None = flag()
    """File completions.jsonl whose completions are scored again."""

    tokenizer: str | None = flag(unset="lengths are counted in words")
    """Folder of a tokenizer, to count lengths in tokens."""

    min_gold: float = flag(0.0, at_least=0, at_most=1)
    """Minimum share of rows whose ground truth reaches the function's best score."""

    max_completion_length: int = flag(512, at_least=1, aliases=("max_new_tokens", "response_length"), everyday=False)
    """Length in tokens of the longest completion, for the length rewards."""

    def problems(self) -> Iterator[str]:
        if not self.dataset and not self.completions:
            yield "--dataset: missing: nothing to score; give --dataset or --completions"


UNUSED_BY_SERVERS = (
    "vllm_mode", "num_infer_workers", "vllm_server_host", "vllm_server_base_url", "vllm_server_api_key",
    "async_generate", "offload_model", "offload_optimizer", "gc_collect_after_offload", "move_model_batches",
)  # fmt: skip
"""Settings of the trainer's side of an engine."""


@dataclass(kw_only=True)
class RolloutServerArguments(CommonArguments, EngineArguments, GenerationArguments, ImageArguments):
    """`swift rollout`: a generation server for trainers on other machines."""

    SEES: ClassVar[bool] = True

    use_vllm: bool | None = flag(  # type: ignore[assignment]
        group="Engine", unset="true unless another backend is named"
    )
    """Whether vLLM serves. If false, transformers does."""

    vllm_max_model_len: int | None = flag(at_least=1, group="Engine", everyday=False, unset="the model's context")
    """Maximum length of prompt and completion in tokens, for every backend."""

    vllm_max_num_seqs: int | None = flag(
        at_least=1, group="Engine", everyday=False, unset="that of vLLM; 256 on a CPU and for other backends"
    )
    """Maximum number of sequences decoded at a time, for every backend."""

    system: str | None = flag(unset="that of the training, else none")
    """System prompt of chats without one: text, a text file or a shipped example. `''` for none."""

    served_model_name: list[str] = flag([], unset="the model")
    """Names of the model in the OpenAI API. Replies without a name in the request have the first."""

    host: str = flag("127.0.0.1")
    """Address to listen on. Other addresses than loopback need `--api_key`."""

    port: int = flag(8000, at_least=0, at_most=65535)
    """Port to listen on; 0 takes a free one, which the ready line names."""

    api_key: str | None = flag(secret=True, unset="no authentication")
    """Bearer token of clients. SWIFT_API_KEY hides it from other users of the machine."""

    allow_unauthenticated: bool = flag(False, everyday=False)
    """Whether a public address needs no key."""

    weights_folder: str | None = flag(everyday=False, unset="files are not read")
    """Folder shared with the trainer, from which weights and adapters may be read."""

    seed: int = flag(42, at_least=0, group="Sampling", everyday=False)
    """Seed of the engines. Requests bring their own; those without one are random."""

    external_plugins: list[str] = flag([], group="Engine", everyday=False, aliases=("custom_register_path",))
    """Python files that register inference backends."""

    dry_run: bool = flag(False)
    """Whether to check everything, print the plan and end, without loading weights."""

    def problems(self) -> Iterator[str]:
        yield from model_missing(self)
        yield from backend_problems(self)
        if not is_local(self.host) and not self.api_key and not self.allow_unauthenticated:
            yield (
                f"--host: {self.host}: reachable by others without a key; set SWIFT_API_KEY, or give --api_key, "
                "or --allow_unauthenticated true"
            )

    def notes(self) -> Iterator[str]:
        if not is_local(self.host) and not self.api_key and self.allow_unauthenticated:
            yield (
                f"warning: --allow_unauthenticated: true: everybody who reaches {self.host} can use this server and "
                "replace its weights"
            )
        for name in UNUSED_BY_SERVERS:
            if getattr(self, name):
                yield f"--{name}: given: not used by swift rollout"


def is_local(host: str) -> bool:
    """Whether only this machine reaches an address."""
    return host in ("localhost", "::1") or host.startswith("127.")


@dataclass(kw_only=True)
class DoctorArguments(CommonArguments):
    """`swift doctor`: whether the machine can train, or why a run is sick."""

    run: str | None = flag(unset="the machine is examined")
    """Folder of the run that is diagnosed, or of runs, of which it is the newest."""


@dataclass(kw_only=True)
class ReplayArguments(CommonArguments):
    """`swift replay`: the loss of a recorded step again, and under other settings."""

    run: str | None = flag(unset=REQUIRED)
    """Folder of the run, or of runs, of which it is the newest."""

    step: int | None = flag(at_least=1, unset="the newest on record")
    """Optimizer step."""

    set: list[str] = flag([], joins=True)
    """Other settings, as name=value: loss_type=dapo epsilon_high=0.28. Several values have commas between them."""

    model: str | None = flag(unset="log-probs are those on record")
    """Checkpoint of the run, such as checkpoint-12, or its first model: computes log-probs, loss and gradient norm."""

    group: str | None = flag(unset="no completions are shown")
    """Group whose completions are shown, by its group_id in completions.jsonl."""


@dataclass(kw_only=True)
class ShowArguments(CommonArguments):
    """`swift show`: the best and worst completions of a run."""

    run: str | None = flag(unset=REQUIRED)
    """Folder of the run, or of runs, of which it is the newest."""

    step: int | None = flag(at_least=0, unset="the last one")
    """Optimizer step whose completions are shown."""

    split: Literal["train", "eval"] = flag("train")
    """Whether completions of training or of evaluations are shown."""

    num_completions: int = flag(2, at_least=1)
    """Number of the best completions, and of the worst ones."""


@dataclass(kw_only=True)
class AgentDocsArguments(CommonArguments):
    """`swift agent-docs`: the pages of the documentation as plain text."""

    topic: str | None = flag(unset="the list of pages")
    """Page to print."""


@dataclass(kw_only=True)
class ViewArguments(CommonArguments):
    """`swift view`: a local page over the files of runs."""

    run: list[str] = flag([], unset=REQUIRED)
    """Folders of runs, finished or live, or of several runs, of which the newest is meant."""

    host: str = flag("127.0.0.1")
    """Address to listen on. Whoever reaches another than loopback and has the URL reads the runs."""

    port: int = flag(0, at_least=0, at_most=65535)
    """Port to listen on; 0 takes a free one, which the ready line names."""

    def notes(self) -> Iterator[str]:
        if not is_local(self.host):
            yield f"warning: --host: {self.host}: not encrypted; whoever reads the URL on its way reads the runs, too"


@dataclass(kw_only=True)
class PlanArguments(CommonArguments):
    """`swift plan`: memory and time of a run before it starts; the other flags are those of the run."""

    device: str = flag("here")
    """GPU to plan for: the one of this machine, or h100-80gb, h200, a100-80gb, l40s, rtx4090 and others."""

    num_devices: int | None = flag(at_least=1, unset="NPROC_PER_NODE times NNODES, else 1")
    """Number of training processes, each on a GPU."""

    prompt_tokens: int | None = flag(at_least=1, unset="512 beside its images, of a row without rollouts at most half")
    """Length of a prompt in tokens, those of its images included; completions are planned at their longest."""

    row_tokens: int | None = flag(at_least=1, unset="--max_length, else 2048")
    """Length in tokens of the rows of sft, pt and preferences, prompts included; of a pair, each answer has it."""

    images_per_prompt: int | None = flag(at_least=0, unset="1 if the model has a vision tower")
    """Number of images in each prompt."""

    image_pixels: int | None = flag(at_least=1, unset="--max_pixels, else 1024 x 1024")
    """Pixels of an image, which is square, before the model's processor scales it."""

    num_rows: int | None = flag(at_least=1, unset="only --max_steps tells how long the run is")
    """Rows of the dataset, which is not read."""

    fit: bool = flag(False)
    """Whether to look for a command line that fits, if the given one does not."""

    compare: bool = flag(False)
    """Whether to compare placements of vLLM on the devices: beside the trainer, and on some of its own."""

    price_per_hour: float | None = flag(above=0, unset="no price is shown")
    """Price of a GPU for an hour."""

    measured: str | None = flag(unset="times are estimated")
    """Folder of a run of this command on the same devices, or its logging.jsonl, whose times replace the estimates."""


@dataclass(kw_only=True)
class ConfigSchemaArguments(CommonArguments):
    """`swift config-schema`: the JSON schema of a mode's settings."""

    mode: Literal[
        "rlhf", "sft", "seq_cls", "pt", "infer", "export", "reward-test", "rollout", "gkd", "ebft", "ebft_strided"
    ] = flag("rlhf", registry="methods")
    """Mode, or method of rlhf, whose settings are described."""

    external_plugins: list[str] = flag([], aliases=("custom_register_path",))
    """Python files whose settings are described, too."""


@dataclass(kw_only=True)
class ImportConfigArguments(CommonArguments):
    """`swift import-config`: a configuration of another project as one of ours."""

    file: str | None = flag(unset=REQUIRED)
    """Configuration of Axolotl (YAML) or TRL (YAML or JSON), or shell script of ms-swift."""

    method: str | None = flag(unset="told by the file")
    """Method of a TRL configuration: sft, grpo, dpo, ..."""

    output: str | None = flag(unset="<file>-swift.yaml in the working folder")
    """File for our configuration; must not exist."""


MODES: dict[str, type] = {
    "rlhf": RLHFArguments,
    "ebft": EBFTArguments,
    "ebft_strided": StridedArguments,
    "gkd": GKDArguments,
    "sft": SFTArguments,
    "seq_cls": ClassifierArguments,
    "pt": PTArguments,
    "infer": InferArguments,
    "export": ExportArguments,
    "merge-lora": MergeLoraArguments,
    "reward-test": RewardTestArguments,
    "rollout": RolloutServerArguments,
    "doctor": DoctorArguments,
    "replay": ReplayArguments,
    "show": ShowArguments,
    "agent-docs": AgentDocsArguments,
    "view": ViewArguments,
    "plan": PlanArguments,
    "config-schema": ConfigSchemaArguments,
    "import-config": ImportConfigArguments,
    **{name: settings_of(name) for name in methods},
}
"""Mode -> its settings; a method of `swift rlhf` beside grpo is a mode of its own, named as its `--rlhf_type`."""

METHODS: tuple[str, ...] = (*methods, "gkd", "ebft", "ebft_strided")
"""The modes that `swift rlhf --rlhf_type <name>` starts without a plugin."""


def is_method(mode: str) -> bool:
    """Whether `swift rlhf --rlhf_type <mode>` starts a mode, or a method of a plugin."""
    return mode in METHODS or mode in methods


def mode_of(command: str, layers: Sequence[Sequence[Given]]) -> str:
    """The mode of a command: `rlhf` is that of its `--rlhf_type`; strided EBFT and classifiers are modes of their own.

    As in ms-swift, a number of labels is enough to ask for a classifier.
    """
    given = {item.spelling: show(item.raw) for layer in layers for item in layer}  # the highest layer is the last
    if command == "sft" and given.get("task_type", "seq_cls" if "num_labels" in given else "") == "seq_cls":
        return "seq_cls"
    if command != "rlhf":
        return command
    mode = given.get("rlhf_type", command)
    if (mode, given.get("ebft_mode")) == ("ebft", "strided"):
        mode = "ebft_strided"
    return mode if is_method(mode) else command


def command_of(mode: str) -> str:
    """The words after `swift` that start a mode."""
    if not is_method(mode):
        return "sft --task_type seq_cls" if mode == "seq_cls" else mode
    return f"rlhf --rlhf_type {'ebft --ebft_mode strided' if mode == 'ebft_strided' else mode}"
