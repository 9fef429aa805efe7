"""Settings of rollouts: how completions are sampled, how many, and by which engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from swift.flags import flag
from swift.types import SamplingParams


@dataclass(kw_only=True)
class GenerationArguments:
    """The sampling distribution of one completion."""

    GROUP: ClassVar[str] = "Sampling"

    max_completion_length: int = flag(512, at_least=1, aliases=("max_new_tokens", "response_length"))
    """Most new tokens of a completion."""

    max_length: int | None = flag(at_least=1, unset="the model's context minus max_completion_length")
    """Longest prompt in tokens. Longer ones are treated by `--truncation_strategy`."""

    truncation_strategy: Literal["left", "right", "delete"] = flag("left", everyday=False)
    """What happens to prompts over `--max_length`: cut on the left, cut on the right, or leave the row out.
    Either is counted and reported."""

    temperature: float = flag(0.9, above=0)
    """Sampling temperature. The loss uses log-probs of logits / temperature too."""

    top_p: float = flag(1.0, above=0, at_most=1)
    """Sample from the smallest set of tokens with this share of the probability; 1.0 is off. Truncated sampling
    biases the gradient, because the trainer uses the whole vocabulary; 3.x used 0.9."""

    top_k: int = flag(-1, at_least=-1)
    """Sample from the k likeliest tokens; -1 or 0 is off. Biases the gradient like `--top_p`; 3.x used 50."""

    min_p: float = flag(0.0, at_least=0, at_most=1, everyday=False)
    """Leave out tokens less likely than this share of the likeliest one's probability; 0.0 is off. Biases the
    gradient like `--top_p`."""

    repetition_penalty: float = flag(1.0, above=0, everyday=False)
    """Divides the logits of tokens already seen; 1.0 is off. Biases the gradient like `--top_p`."""

    stop_words: list[str] = flag([], everyday=False)
    """Texts that end a completion, besides the end token."""

    def sampling_params(self) -> SamplingParams:
        """These settings as a request carries them; the seed is filled in per sample."""
        return SamplingParams(
            max_new_tokens=self.max_completion_length,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            stop=tuple(self.stop_words),
        )


@dataclass(kw_only=True)
class SamplingArguments(GenerationArguments):
    """Groups of completions, and how they fill generation batches."""

    num_generations: int = flag(8, at_least=2)
    """Completions per prompt, the G of GRPO (arXiv:2402.03300). Must divide the completions of an optimizer
    step: per_device_train_batch_size x processes x gradient_accumulation_steps."""

    num_generations_eval: int | None = flag(at_least=1, everyday=False)
    """Completions per prompt in evaluation."""

    steps_per_generation: int | None = flag(at_least=1, group="Optimization", everyday=False)
    """Micro-steps fed by one generation batch; a multiple or a divisor of gradient_accumulation_steps. More
    than gradient_accumulation_steps makes several optimizer steps of one batch."""

    generation_batch_size: int | None = flag(
        at_least=1, group="Optimization", everyday=False, unset="follows from steps_per_generation"
    )
    """Completions of a generation batch over all processes, the other way to give steps_per_generation."""

    mini_batch_size: int | None = flag(
        at_least=1, group="Optimization", everyday=False, unset="per_device_train_batch_size"
    )
    """Completions of one forward and backward pass; divides per_device_train_batch_size. Less memory, same loss
    and gradients."""

    max_tokens_per_micro_batch: int | None = flag(
        at_least=1, group="Optimization", everyday=False, unset="no limit but the batch sizes"
    )
    """Token budget of one forward and backward pass."""


@dataclass(kw_only=True)
class EngineArguments:
    """The inference engine and where it runs."""

    GROUP: ClassVar[str] = "Engine"

    use_vllm: bool = flag(False)
    """Generate with vLLM instead of in the trainer."""

    infer_backend: str | None = flag(values={"pt": "transformers"}, everyday=False)
    """The inference library: transformers, vllm, lmdeploy, or one that a plugin registers in `inference_backends`.
    transformers with `--vllm_mode dedicated` or a server samples in a process of its own, without vLLM."""

    vllm_mode: Literal["colocate", "server", "dedicated"] | None = flag(
        values={"async": "dedicated"}, unset="inferred from devices, NPROC_PER_NODE and num_infer_workers"
    )
    """Where vLLM runs: on the trainer's devices, on devices of its own, or behind a server address. Giving it
    implies `--use_vllm true`."""

    num_infer_workers: int | None = flag(at_least=1, unset="NPROC_PER_NODE if that is the number of devices, else 1")
    """Devices for inference on each node."""

    vllm_device: list[str] = flag(["auto"], everyday=False)
    """Devices of the engines, such as `cuda:7`; auto takes the last ones, or each process's own in colocate."""

    vllm_gpu_memory_utilization: float = flag(0.9, above=0, at_most=1, needs="use_vllm")
    """Share of a device's memory that vLLM may use."""

    vllm_max_model_len: int | None = flag(
        at_least=1, needs="use_vllm", everyday=False, unset="max_length + max_completion_length"
    )
    """Longest prompt and completion together, in tokens."""

    vllm_max_num_seqs: int = flag(256, at_least=1, needs="use_vllm", everyday=False)
    """Sequences that vLLM decodes at the same time."""

    vllm_enforce_eager: bool = flag(False, needs="use_vllm", everyday=False)
    """Do without CUDA graphs."""

    vllm_limit_mm_per_prompt: dict[str, Any] | None = flag(needs="use_vllm", everyday=False)
    """Images and the like per prompt, as JSON; passed on to vLLM."""

    vllm_enable_prefix_caching: bool = flag(True, needs="use_vllm", everyday=False)
    """Keep the computation of shared prompt starts; dropped at each weight change."""

    vllm_tensor_parallel_size: int = flag(
        1, at_least=1, aliases=("tensor_parallel_size",), needs="use_vllm", everyday=False
    )
    """Devices that share one engine."""

    vllm_data_parallel_size: int = flag(1, at_least=1, needs="use_vllm", everyday=False)
    """Engines of a `swift rollout` server."""

    vllm_server_host: list[str] = flag([], everyday=False)
    """Addresses of `swift rollout` servers. Giving one implies `--use_vllm true --vllm_mode server`."""

    vllm_server_port: list[int] = flag([8000], at_least=1, at_most=65535, everyday=False)
    """Ports of the servers, one for all or one each."""

    vllm_server_base_url: list[str] = flag([], everyday=False)
    """URLs of the servers, instead of hosts and ports."""

    vllm_server_timeout: float = flag(120.0, above=0, everyday=False)
    """Seconds to wait until a server is healthy."""

    vllm_server_api_key: str | None = flag(everyday=False, unset="the environment variable SWIFT_API_KEY, if set")
    """The servers' `--api_key`."""

    vllm_enable_lora: bool = flag(False, aliases=("vllm_lora_sync",), everyday=False)
    """Send the adapter alone to the engine instead of the merged weights."""

    vllm_max_lora_rank: int | None = flag(at_least=1, needs="vllm_enable_lora", everyday=False)
    """Largest adapter rank that the engine accepts."""

    vllm_engine_kwargs: dict[str, Any] = flag({}, needs="use_vllm", everyday=False)
    """More arguments of vLLM's engine, as JSON; passed on unchecked."""

    async_generate: bool = flag(False, aliases=("async_prefetch",), everyday=False)
    """Generate the next batch while this one trains, with weights one update old. Needs dedicated or server
    mode."""

    sleep_level: Literal[0, 1, 2] = flag(0, everyday=False)
    """Engine memory released while training, in colocate: 1 moves the weights to the CPU, 2 drops them."""

    offload_model: bool = flag(False, everyday=False)
    """Move the trainer's model to the CPU while an engine on the same device generates."""

    offload_optimizer: bool = flag(False, everyday=False)
    """Move the optimizer's state to the CPU while an engine on the same device generates."""

    gc_collect_after_offload: bool = flag(False, everyday=False)
    """Collect garbage and empty the device's cache after offloading."""

    move_model_batches: int | None = flag(at_least=1, everyday=False, unset="all weights in one pass")
    """Send the weights to the engine in this many groups of layers, and one of the rest."""

    ds3_gather_for_generation: bool = flag(True, everyday=False)
    """With ZeRO-3, gather the whole weights once per rollout. false is not possible with vLLM."""

    parity_check: str = flag("start")
    """When the sampler's log-probs are compared with the trainer's: start, every:N steps, warn (at the start,
    without stopping the run), or off."""

    cpu_devices: int | None = flag(at_least=1, everyday=False, unset="as many as are needed")
    """Groups of CPU cores that stand for devices on a machine without accelerator."""

    engine_restarts: int = flag(3, at_least=0, everyday=False)
    """Restarts of dead engine processes per hour before the run ends."""

    rollout_timeout: float = flag(600.0, above=0, everyday=False)
    """Seconds for one request to an engine."""

    stall_timeout: float = flag(300.0, above=0, everyday=False)
    """Seconds without any progress after which the run ends and names the culprit."""

    use_lmdeploy: bool = flag(False, everyday=False)
    """Generate with LMDeploy. Excludes `--use_vllm`."""

    lmdeploy_device: list[str] = flag(["auto"], needs="use_lmdeploy", everyday=False)
    """Devices of the LMDeploy engines."""

    lmdeploy_session_len: int | None = flag(
        at_least=1, needs="use_lmdeploy", everyday=False, unset="max_length + max_completion_length"
    )
    """Longest prompt and completion together, in tokens."""

    lmdeploy_cache_max_entry_count: float = flag(0.8, above=0, at_most=1, needs="use_lmdeploy", everyday=False)
    """Share of the free memory that LMDeploy's KV cache takes."""
