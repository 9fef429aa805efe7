"""What other projects do and swift does not, by feature: docs/not_supported.md and the flags that `known` refuses.

`python -m swift.arguments.docs --write` renews the page.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature elsewhere.

    about: why it is not here, or what is, for the page. fix: what to do instead, at the end of an error line. flags:
    names of its flags. instead: names of further flags -> what to do instead of each. families: beginnings of names.
    values: of flags that swift has. modes: commands elsewhere.
    """

    title: str
    about: str
    fix: str = "leave it out"
    flags: str = ""
    instead: dict[str, str] = field(default_factory=dict)
    families: tuple[str, ...] = ()
    values: dict[str, str] = field(default_factory=dict)
    modes: tuple[str, ...] = ()


FEATURES = (
    Feature(
        "PPO with a value model",
        "Groups of completions take the place of a value model: `grpo`, `rloo`, `--advantage_estimator`.",
        "use --rlhf_type grpo or rloo, which have no value model",
        "cliprange cliprange_value gamma lam missing_eos_penalty num_mini_batches num_ppo_epochs "
        "num_sample_generations vf_coef whiten_rewards local_rollout_forward_batch_size",
        values={"rlhf_type": "ppo"},
        modes=("ppo",),
    ),
    Feature(
        "Embedding models and rerankers",
        "Their losses compare rows of a batch, which is another kind of trainer: use sentence-transformers or "
        "ms-swift. Classifiers and regression are here: `swift sft --task_type seq_cls`.",
        values={"task_type": "embedding reranker generative_reranker"},
    ),
    Feature(
        "Megatron, pipeline and expert parallelism",
        "Models are sharded by FSDP2 or ZeRO, and long rows by `--sequence_parallel_size`.",
        "use --deepspeed or --fsdp",
        "to_hf to_mcore deepspeed_autotp_size",
        families=("megatron_",),
        modes=("megatron",),
    ),
    Feature(
        "Sound and video",
        "Rows with them are refused, and so are models that need them. Images are here: [images](vision.md).",
        flags="bbox_format norm_bbox",
    ),
    Feature(
        "Losses REAL, CHORD, RLSD and SDAR",
        "Each compares or mixes whole groups inside of the loss, which is cut into micro-batches here.",
        "use another --loss_type",
        "real_tau",
        families=("chord_", "rlsd_", "sdar_"),
        values={"loss_type": "real"},
    ),
    Feature(
        "Tuners outside of PEFT, AdaLoRA, and unsloth",
        "AdaLoRA moves ranks between layers during a run; LongLoRA, LLaMA-Pro, ReFT and adapters are code of ms-swift.",
        "use --tuner_type lora, vera, boft, ia3 or miss",
        "unsloth lora_modules lora_bias lora_dtype",
        families=("adalora_", "reft_", "llamapro_", "fourier_", "lora_ga_"),
        values={"tuner_type": "adalora longlora llamapro fourierft reft adapter", "init_weights": "lora-ga eva"},
    ),
    Feature(
        "GaLore and LISA",
        "`--optim` has optimizers that take as little memory: adamw_8bit, adafactor, muon and others.",
        "leave it out, or choose an --optim",
        "use_galore use_q_galore optim_target_modules",
        families=("galore_", "lisa_"),
    ),
    Feature(
        "Quantisation of finished models, and training on GPTQ, AWQ, HQQ",
        "bitsandbytes quantises the base while it is loaded (QLoRA).",
        "use --quant_method bnb",
        "hqq_axis quant_batch_size quant_n_samples to_ollama to_peft_format",
    ),
    Feature(
        "SGLang", "Engines are vLLM, LMDeploy, transformers, or your own.", "use --use_vllm true", families=("sglang_",)
    ),
    Feature(
        "vLLM's own switches",
        "`--vllm_engine_kwargs` hands any argument to vLLM's engine.",
        "give it to vLLM by --vllm_engine_kwargs '{\"name\": value}'",
        "vllm_disable_cascade_attn vllm_disable_custom_all_reduce vllm_mm_processor_cache_gb vllm_quantization "
        "vllm_reasoning_parser vllm_speculative_config vllm_server_group_port",
    ),
    Feature(
        "Training processes in Ray",
        "NPROC_PER_NODE and NNODES start them, or torchrun; dedicated engines are Ray actors.",
        "set NPROC_PER_NODE and NNODES",
        "use_ray device_groups",
    ),
    Feature(
        "Settings of trackers",
        "Trackers read variables of their own, such as SWANLAB_PROJECT and WANDB_PROJECT.",
        "set the tracker's own variable",
        "swanlab_exp_name swanlab_mode swanlab_project swanlab_token swanlab_workspace",
    ),
    Feature(
        "Benchmarks during training",
        "An evaluation measures the loss of `--val_dataset`; `--predict_with_generate` and grpo score answers.",
        instead={"eval_use_evalscope": "benchmarks of EvalScope are not run; --val_dataset has rows for evaluation"},
    ),
    Feature(
        "Packed rows of other preference methods and reward models",
        "Their batches are padded, and `--padding_free` changes nothing. sft, pt, dpo, ipo and grpo pack rows.",
        modes=("rlhf --rlhf_type kto --packing true",),
    ),
    Feature(
        "Other sources and shapes of data",
        "[Data](data.md) has the formats; ms-swift's registered data sets and preprocessors are Python of its own.",
        flags="custom_dataset_info dataset_sample train_dataset_sample val_dataset_shuffle download_mode tools_prompt "
        "train_on_prompt truncation response_prefix channels write_batch_size template_mode",
        instead={
            "to_cached_dataset": "training tokenises the rows of --dataset once, and keeps them in HF_DATASETS_CACHE"
        },
        values={"loss_scale": "agentflan alpha_umi ignore_think_prefix"},
    ),
    Feature(
        "Other ways to load models",
        "A second model is named by its folder or hub id alone.",
        flags="load_args load_data_args local_repo_path max_memory merge_device_map model_kwargs "
        "ref_adapters ref_model_revision ref_model_type reward_model_type teacher_adapters "
        "teacher_model_revision teacher_model_type exist_ok max_concurrency",
        instead={
            "device_map": "leave it out; --deepspeed zero3 or --fsdp full_shard shards a model",
            "offload_teacher_model": "leave it out; in grpo --offload_model takes it to the host while an engine "
            "samples",
        },
    ),
    Feature(
        "Further settings of transformers' trainer",
        "What a run does without them is in [arguments](arguments.md).",
        flags="acc_strategy callbacks create_checkpoint_symlink ddp_backend disable_tqdm dynamic_sampling "
        "eval_accumulation_steps eval_delay fsdp_config ignore_data_skip include_num_input_tokens_seen label_names "
        "label_smoothing_factor liger_loss logging_dir metric no_cuda profile resume_only_model save_on_each_node "
        "sequence_classification top_entropy torch_empty_cache_steps use_cpu zero_hpz_partition_size",
        instead={"hub_strategy": "leave it out; --push_to_hub uploads the model at the end"},
    ),
)


def flags() -> Iterator[str]:
    """Names of all flags."""
    for feature in FEATURES:
        yield from (*feature.flags.split(), *feature.instead)


def families() -> tuple[str, ...]:
    """Beginnings of names of further flags."""
    return tuple(beginning for feature in FEATURES for beginning in feature.families)


def fix_of(name: str) -> str:
    """What to do instead of giving this flag."""
    for feature in FEATURES:
        if name in feature.flags.split() or name.startswith(feature.families or ("\0",)):
            return feature.fix
        if name in feature.instead:
            return feature.instead[name]
    return "leave it out"


def is_replaced(name: str) -> bool:
    """Whether a flag has an alternative of its own."""
    return any(name in feature.instead for feature in FEATURES)


def values_of(name: str) -> list[str]:
    """Values elsewhere of a flag that swift has."""
    return [value for feature in FEATURES for value in feature.values.get(name, "").split()]


def page() -> str:
    """docs/not_supported.md."""
    head = """# What swift does not do

This page is generated: `python -m swift.arguments.docs --write`. A command with one of these flags is refused in a
line, in the dry run; a value that switches the feature off is only noted.
"""
    parts = [head]
    for feature in FEATURES:
        names = [f"`--{name}`" for name in feature.flags.split()]
        names += [f"`--{beginning}*`" for beginning in feature.families]
        names += [f"`--{name} {value}`" for name, given in feature.values.items() for value in given.split()]
        names += [f"`swift {mode}`" for mode in feature.modes]
        lines = [", ".join(names)] if names else []
        lines += ["\n".join(f"* `--{name}`: {fix}" for name, fix in feature.instead.items())] if feature.instead else []
        parts.append("\n\n".join([f"## {feature.title}", feature.about, *lines]) + "\n")
    return "\n".join(parts)
