import json

import pytest
import yaml

from swift.arguments import docs
from swift.arguments.imports import axolotl, axolotl_keys, ms_swift, trl
from swift.arguments.imports.command import import_file, problems_of
from swift.cli.main import main
from tests.imports import foreign, published


@pytest.fixture
def imported(tmp_path, monkeypatch):
    """Writes a configuration, imports it, and returns what became of it, and our file as YAML."""
    monkeypatch.chdir(tmp_path)

    def take(config, name="theirs.yaml", method=None):
        text = config if isinstance(config, str) else yaml.safe_dump(config, sort_keys=False)
        (tmp_path / name).write_text(text, encoding="utf-8")
        result = import_file(name, method)
        (tmp_path / "ours.yaml").write_text(result.to_yaml(name, "ours.yaml"), encoding="utf-8")
        return result, yaml.safe_load((tmp_path / "ours.yaml").read_text())

    return take


def lost(result):
    return {key for key, fate, _ in result.draft.lines if fate == "no counterpart"}


def said(result, key):
    return [(fate, why) for one, fate, why in result.draft.lines if one == key]


def script(path):
    variables, mode, flags = published.MS_SWIFT[path]
    lines = flags.replace(" --", " \\\n    --")
    return "# a comment: it's ignored\n" + " \\\n".join([*variables.split(), f"swift {mode} \\\n    {lines}"]) + "\n"


PUBLISHED = {
    "axolotl: page on GRPO": (published.AXOLOTL_GRPO, "rlhf", {"datasets[0].type"}),
    **{
        f"axolotl: {path}": (published.AXOLOTL[path], mode, expected)
        for path, mode, expected in (
            ("llama-3/lora-1b.yml", "sft", set()),
            ("llama-3/instruct-dpo-lora-8b.yml", "dpo", set()),
            ("llama-3/qlora-1b-kto.yaml", "kto", {"eval_max_new_tokens"}),
            ("gemma2/reward-model.yaml", "rm", set()),
            ("qwen2/prm.yaml", "prm", set()),
            ("gkd/qwen3-0.6B-gkd.yaml", "gkd", {"plugins"}),
        )
    },
    "trl: grpo": (
        published.TRL["open-r1/recipes/Qwen2.5-1.5B-Instruct/grpo/config_demo.yaml"],
        "rlhf",
        {"hub_strategy"},
    ),
    "trl: dpo": (
        published.TRL["alignment-handbook/recipes/zephyr-7b-beta/dpo/config_full.yaml"],
        "dpo",
        {"max_prompt_length", "dataset_mixture[1].split", "dataset_mixture.seed"},
    ),
    "trl: sft": (published.TRL["trl/examples/cli_configs/example_config.yaml"], "sft", set()),
    **{
        f"ms-swift: {path}": (script(path), mode, expected)
        for path, mode, expected in (
            ("grpo/internal/gspo.sh", "rlhf", set()),
            ("grpo/external/grpo_7b.sh", "rlhf", set()),
            ("grpo/internal/transformers.sh", "rlhf", set()),
            ("demo.sh", "sft", set()),
            ("rlhf/dpo/lora.sh", "dpo", set()),
            ("rlhf/rm.sh", "rm", set()),
        )
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_becomes_one_that_we_read_and_every_key_is_accounted_for(imported, name):
    config, mode, without = PUBLISHED[name]
    project = name.partition(":")[0]
    is_script = isinstance(config, str)
    method = {"trl: dpo": "dpo", "trl: sft": "sft"}.get(name)
    result, ours = imported(config, "theirs.sh" if is_script else "theirs.yaml", method)
    assert (result.project.lower(), result.draft.mode) == (project, mode)
    assert without <= lost(result)
    paths = "--external_plugins", "--reward_funcs"  # which lie where the configuration was written
    assert not [one for one in problems_of(result.command, "ours.yaml") if not one.startswith(paths)]
    assert ours["model"] and ours.get("rlhf_type") == {"rlhf": "grpo", "sft": None}.get(mode, mode)
    if is_script:
        keys = {word[2:] for word in config.split() if word.startswith("--")}
    else:
        keys = {key for key, _ in axolotl.flattened(config)}
    assert not keys - {key for key, _, _ in result.draft.lines}
    unknown = {key for key in lost(result) if "unknown" in dict(said(result, key)).get("no counterpart", "")}
    assert not unknown - {"local_rank", "eval_max_new_tokens", "vllm_device"}  # of theirs alone


def test_the_options_of_axolotls_grpo_page_arrive(imported):
    config = {**published.AXOLOTL_GRPO, "trl": {**published.AXOLOTL_GRPO["trl"], **published.GRPO_PAGE}}
    result, ours = imported({**config, "deepspeed": "deepspeed_configs/zero3_bf16.json"})
    assert not any(key.startswith("trl.") for key in lost(result))
    assert "scale_rewards" not in ours and ours["sleep_level"] == 1 and ours["deepspeed"] == "zero3"
    assert ours["async_generate"] is True and ours["off_policy_sequence_mask_delta"] == 0.5
    assert ours["reward_workers"] == 4 and ours["dataset"] == ["openai/gsm8k:main"]


def test_values_become_ours(imported):
    result, ours = imported(
        {
            "base_model": "m", "rl": "dpo", "rl_beta": 0.3, "learning_rate": "1e-5", "fsdp": ["full_shard"],
            "datasets": [{"path": "d", "type": "alpaca", "field_chosen": "good"}], "wandb_project": "p",
            "saves_per_epoch": 1, "val_set_size": 200, "flash_attention": True, "hub_token": "hunter2",
        }
    )  # fmt: skip
    assert ours["columns"] == {"good": "chosen"} and ours["beta"] == 0.3 and ours["fsdp"] == "full_shard"
    assert ours["ENV"] == {"WANDB_PROJECT": "p"} and ours["save_strategy"] == "epoch"
    assert ours["tuner_type"] == "full" and ours["weight_decay"] == 0.0 and ours["use_hf"] is True
    assert {"val_set_size", "hub_token"} <= lost(result) and "hunter2" not in str(result)


def test_reward_functions_and_models_keep_their_order(imported):
    _, ours = imported(
        {"model_name_or_path": "m", "dataset_name": "d", "reward_funcs": ["org/rm", "a.b"]}, method="grpo"
    )
    assert ours["reward_funcs"] == ["org/rm", "a.b"]


SILENT = {
    "report_to", "logging_first_step", "dataset_num_proc", "dataloader_num_workers", "debug", "data_seed",
    "vllm_server_host", "vllm_server_port", "ddp_find_unused_parameters", "dtype", "assistant_only_loss", "run_name",
    "router_aux_loss_coef", "model_revision", "dataloader_drop_last", "vllm_importance_sampling_correction",
}  # fmt: skip
"""Settings that change no training, or mean the same under another value."""
THEIR_NAMES = {
    "lora_rank": "lora_r", "rollout_importance_sampling_mode": "vllm_importance_sampling_mode",
    "rollout_importance_sampling_threshold": "vllm_importance_sampling_clip_max",
    "kl_bias_correction": "use_bias_correction_kl", "bnb_4bit_use_double_quant": "use_bnb_nested_quant",
}  # fmt: skip


def classes_of_trl():
    from trl import DPOConfig, GRPOConfig, KTOConfig, RewardConfig, SFTConfig
    from trl.experimental.cpo import CPOConfig
    from trl.experimental.gkd import GKDConfig
    from trl.experimental.orpo import ORPOConfig

    return {
        "grpo": GRPOConfig, "sft": SFTConfig, "dpo": DPOConfig, "rm": RewardConfig, "kto": KTOConfig, "cpo": CPOConfig,
        "orpo": ORPOConfig, "gkd": GKDConfig,
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:You are importing from 'trl.experimental'")
@pytest.mark.parametrize("method", ["grpo", "sft", "dpo", "rm", "kto", "cpo", "orpo", "gkd"])
def test_a_silent_configuration_of_trl_trains_with_the_defaults_of_trl(imported, method):
    """Each setting that both have is theirs after all layers, whatever our own default is."""
    from dataclasses import MISSING, fields

    from trl import ModelConfig

    from swift.arguments.parse import parse

    more = {"grpo": {"reward_funcs": ["accuracy"]}, "gkd": {"teacher_model_name_or_path": "t"}}.get(method, {})
    vllm = {"use_vllm": True, "beta": 0.1} if method == "grpo" else {}
    given = {"model_name_or_path": "m", "dataset_name": "d", "use_peft": True, "load_in_4bit": True, **more, **vllm}
    result, _ = imported(given, method=method)
    args = parse(result.command, ["ours.yaml"], {}).args
    theirs = {
        one.name: one.default if one.default is not MISSING else one.default_factory()
        for cls in (ModelConfig, classes_of_trl()[method])
        for one in fields(cls)
        if one.default is not MISSING or one.default_factory is not MISSING
    }
    compared = 0
    for name in vars(args):
        their = THEIR_NAMES.get(name, name)
        if (
            their not in theirs
            or name in {*SILENT, *given, *getattr(type(args), "REPLACED", ())}
            or theirs[their] in (None, {}, "")
        ):
            continue
        compared += 1
        ours = getattr(args, name)
        same_off = {(-1, 0), (0.0, None), (None, False)}
        assert ours == theirs[their] or (ours, theirs[their]) in same_off or ours == [theirs[their]], (name, ours)
    assert compared > 20
    lora = {"lora_rank": 16, "lora_alpha": 32, "lora_dropout": 0.05, "target_modules": ["q_proj", "v_proj"]}
    assert {name: getattr(args, name) for name in lora} == lora


AXOLOTL_DEFAULTS = {
    "num_train_epochs": 1.0, "lr_scheduler_type": "cosine", "optim": "adamw_torch_fused", "weight_decay": 0.0,
    "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "max_grad_norm": 1.0, "seed": 42, "data_seed": 42,
    "per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "gradient_accumulation_steps": 1,
    "gradient_checkpointing": False, "tuner_type": "full", "save_strategy": "epoch", "save_total_limit": 4,
    "eval_strategy": "no", "split_dataset_ratio": 0.0, "warmup_ratio": 0.03, "use_hf": True,
}  # fmt: skip
"""Of its schemas and of the trainer builders."""


@pytest.mark.parametrize(
    ("rl", "more"),
    [
        (None, {"max_length": 512, "packing": False, "router_aux_loss_coef": 0.0}),
        ("dpo", {"max_length": 512, "beta": 0.1, "loss_type": ["sigmoid"]}),
        ("kto", {"max_length": 512, "beta": 0.1, "desirable_weight": 1.0}),
        ("orpo", {"beta": 0.1}),
        ("simpo", {"beta": 0.1, "simpo_gamma": 0.5, "cpo_alpha": 1.0}),
        ("grpo", {"beta": 0.0, "loss_type": "dapo", "temperature": 1.0, "scale_rewards": "group"}),
        ("gdpo", {"multi_objective_aggregation": "normalize_then_sum", "beta": 0.0}),
    ],
)
def test_a_silent_configuration_of_axolotl_trains_with_its_defaults(imported, rl, more):
    from swift.arguments.parse import parse

    size = {"grpo": 8, "gdpo": 8, "kto": 2}.get(rl, 1)
    rewards = {"trl": {"reward_funcs": ["accuracy"]}} if size == 8 else {}
    method = {"rl": rl} if rl else {}
    given = {"base_model": "m", "learning_rate": 1e-5, "datasets": [{"path": "d"}], "micro_batch_size": size}
    result, _ = imported({**given, **method, **rewards})
    args = parse(result.command, ["ours.yaml"], {}).args
    sizes = {"per_device_train_batch_size": size, "per_device_eval_batch_size": size}
    expected = {**AXOLOTL_DEFAULTS, **sizes, **more}
    assert {name: getattr(args, name) for name in expected} == expected


def test_the_warm_up_that_axolotl_ends_after_100_steps_is_told(imported):
    result, ours = imported({"base_model": "m", "datasets": [{"path": "d"}]})
    assert ours["warmup_ratio"] == 0.03
    ((fate, why),) = said(result, "warmup_ratio")
    assert fate == "added"
    assert "at most 100 steps: give --warmup_steps 100 to a run of more than 3,333 steps" in why
    result, ours = imported({"base_model": "m", "datasets": [{"path": "d"}], "warmup_steps": 5})
    assert "warmup_ratio" not in ours


LORA, EVAL = {"adapter": "lora"}, {"val_set_size": 0.1}
KEYS = {  # what a configuration of Axolotl says -> our settings, and the keys that are stated as lost
    "saves per epoch": ({"saves_per_epoch": 4, "num_epochs": 2}, {"save_strategy": "steps",
        "save_steps": 0.125}, set()),
    "one save per epoch": ({"saves_per_epoch": 1}, {"save_strategy": "epoch"}, set()),
    "evaluations": ({"evals_per_epoch": 2, **EVAL}, {"eval_steps": 0.5, "eval_on_start": True}, set()),
    "nothing to evaluate": ({"evals_per_epoch": 2}, {"eval_strategy": "no"}, set()),
    "batch size": ({"batch_size": 8, "micro_batch_size": 2}, {"gradient_accumulation_steps": 4}, set()),
    "warm-up as a share": ({"warmup_steps": 0.1}, {"warmup_ratio": 0.1}, set()),
    "warm-up": ({"warmup_steps": 10}, {"warmup_steps": 10}, set()),
    "least rate": (
        {"lr_scheduler": "cosine", "cosine_min_lr_ratio": 0.1, "cosine_constant_lr_ratio": 0},
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}}, set(),
    ),
    "another schedule": ({"lr_scheduler": "rex"}, {}, {"lr_scheduler"}),
    **{name: ({"optimizer": name}, {"optim": ours}, set()) for name, ours in {
        "adamw_bnb_8bit": "adamw_8bit", "paged_adamw_8bit": "paged_adamw_8bit", "adamw_torch_8bit": "adamw_torch_8bit",
        "paged_adamw_32bit": "paged_adamw_32bit", "adamw_torch_4bit": "adamw_torch_4bit",
    }.items()},
    "muon": ({"optimizer": "muon"}, {"optim": "muon"}, set()),
    "full precision": ({"bf16": False, "fp16": False}, {"torch_dtype": "float32"}, set()),
    "half precision": ({"bf16": False, "fp16": True}, {"torch_dtype": "float16"}, set()),
    "the machine's precision": ({"bf16": "auto"}, {"torch_dtype": None}, set()),
    "tf32": ({"tf32": True}, {"tf32": True}, set()),
    "attention": ({"attn_implementation": "flash_attention_2"}, {"attn_impl": "flash_attn"}, set()),
    "another kernel": ({"attn_implementation": "xformers"}, {"attn_impl": None}, set()),
    "inputs": ({"train_on_inputs": True}, {"loss_scale": "all"}, set()),
    "linear layers": ({**LORA, "lora_target_linear": True, "lora_target_modules": ["q_proj"]},
                      {"target_modules": ["all-linear"]}, set()),
    "on parameters": ({**LORA, "lora_target_modules": ["q_proj"], "lora_target_parameters": ["experts.down_proj"]},
                      {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"]}, set()),
    "qlora": ({"adapter": "qlora", "load_in_4bit": True}, {"quant_bits": 4, "quant_method": "bnb"}, set()),
    "parameters": ({"unfrozen_parameters": ["lm_head", "^model.layers.1[0-9]"]},
                   {"freeze_parameters_ratio": 1.0,
                   "trainable_parameters_regex": r"lm_head|^model\.layers\.1[0-9]"}, set()),
    "rows of a parameter": ({"unfrozen_parameters": ["embed$[:10]"]}, {}, {"unfrozen_parameters"}),
    "templates": ({"chat_template": "qwen_25"}, {"template": "qwen2_5"}, set()),
    "end of turn": ({"chat_template": "gemma3", "eot_tokens": ["<end_of_turn>"]},
        {"template": "gemma3_training"}, set()),
    "another end of turn": ({"chat_template": "gemma3", "eot_tokens": ["<|x|>"]}, {}, {"eot_tokens"}),
    "a template of theirs": ({"chat_template": "exaone"}, {"template": None}, {"chat_template"}),
    "the tokenizer's end of turn": ({"eot_tokens": ["<|x|>"]}, {"eot_tokens": ["<|x|>"]}, set()),
    "unused end of turn": ({"eot_tokens": ["<|x|>"], "chat_template": "llama3",
        "datasets": [{"path": "d", "type": "alpaca"}]}, {"template": "alpaca", "eot_tokens": None}, set()),
    "a format of pairs": ({"rl": "dpo", "chat_template": "llama3", "datasets": [{"path": "d", "type": {
        "field_prompt": "q", "prompt_format": "{prompt}"}}]}, {"template": "llama3", "columns": {"q": "prompt"}},
        {"datasets[0].type"}),
    "pad token": ({"special_tokens": {"pad_token": "<pad>"}}, {"special_tokens": None}, set()),
    "end token": ({"special_tokens": {"eos_token": "<end>", "unk_token": None}},
        {"special_tokens": {"eos_token": "<end>"}}, set()),
    "added tokens": ({"tokens": ["<x>"], "special_tokens": {"additional_special_tokens": ["<y>"]}}, {},
        {"tokens", "special_tokens"}),
    "long rows cut": ({"excess_length_strategy": "truncate"}, {"truncation_strategy": "right"}, set()),
    "long rows refused": ({"excess_length_strategy": "raise"}, {}, {"excess_length_strategy"}),
    "documents": ({"datasets": [{"path": "d", "type": "completion", "field": "body"}], "min_sample_len": 9},
        {"truncation_strategy": "split", "columns": {"body": "text"}, "min_length": 9}, set()),
    "duplicates": ({"dataset_exact_deduplication": True}, {"drop_duplicates": True}, set()),
    "packed files": ({"model_quantization_config": "Mxfp4Config",
        "model_quantization_config_kwargs": {"dequantize": True}}, {}, set()),
    "packed weights": ({"model_quantization_config": "Mxfp4Config"}, {}, {"model_quantization_config"}),
    "another tokenizer": ({"tokenizer_use_mistral_common": True}, {}, {"tokenizer_use_mistral_common"}),
    "recomputed twice": ({"fsdp_config": {"activation_checkpointing": True}, "gradient_checkpointing": False,
        "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"gradient_checkpointing": False, "gradient_checkpointing_kwargs": None}, set()),
    "compiled": ({"torch_compile": True}, {"torch_compile": True}, set()),
    "packed and compiled": ({"torch_compile": True, "sample_packing": True}, {"torch_compile": None}, set()),
    "swanlab": ({"use_swanlab": True, "swanlab_project": "p", "swanlab_description": "x"},
        {"report_to": ["swanlab"], "ENV": {"SWANLAB_PROJECT": "p"}}, set()),
    "images": ({"processor_type": "AutoProcessor", "sequence_len": 2048},
        {"freeze_vit": False, "freeze_aligner": False, "loss_scale": "all", "max_length": None}, set()),
    "images beside what is adapted": ({"processor_type": "AutoProcessor", **LORA,
        "lora_target_modules": "model.language_model.layers.[\\d]+.mlp.up_proj"}, {"freeze_vit": None}, set()),
    "images with masks": ({"processor_type": "AutoProcessor", "chat_template": "qwen2_vl", "freeze_mm_modules": True},
        {"freeze_vit": True, "freeze_aligner": True, "loss_scale": None, "template": "qwen2_5_vl"}, set()),
    "sizes of images": ({"processor_type": "AutoProcessor", "image_size": 224}, {}, {"image_size"}),
    "a typo that Axolotl ignores": ({"context_parapllel_size": 2}, {"sequence_parallel_size": None}, set()),
    "experts": ({"plugins": ["axolotl.integrations.expert_parallel.ExpertParallelPlugin"], "expert_parallel_size": 4},
        {}, set()),
    "experts that drop tokens": ({"expert_parallel_token_capacity": 64}, {}, {"expert_parallel_token_capacity"}),
    "sharding": ({"fsdp_version": 2, "fsdp_config": {"reshard_after_forward": False, "activation_checkpointing": True}},
                 {"fsdp": "shard_grad_op", "gradient_checkpointing": True}, set()),
    "offload": ({"fsdp_config": {"fsdp_offload_params": True}}, {"fsdp": "full_shard", "fsdp_offload_params": True},
        set()),
    "layers on the host": ({"fsdp_config": {"reshard_after_forward": True}, "layer_offloading": True},
        {"fsdp": "full_shard", "fsdp_offload_params": True}, set()),
    "layers of one process": ({"layer_offloading": True}, {}, {"layer_offloading"}),
    "layers that stay": ({"layer_offloading": False}, {}, set()),
    "activations": ({"gradient_checkpointing": "offload"},
        {"gradient_checkpointing": True, "activation_offloading": True}, set()),
    "recomputation": ({"gradient_checkpointing": "unsloth"},
        {"gradient_checkpointing": True, "activation_offloading": None}, set()),
    "copies": ({"fsdp_version": 2, "fsdp_config": {"reshard_after_forward": True}, "dp_replicate_size": 2,
        "dp_shard_size": 4}, {"fsdp": "full_shard", "fsdp_replicas": 2}, set()),
    "copies of the whole": ({"dp_replicate_size": 2}, {"fsdp_replicas": None}, set()),
    "sizes": ({"context_parallel_size": 1}, {}, set()),
    "more sizes": ({"tensor_parallel_size": 2, "context_parallel_size": 2}, {"sequence_parallel_size": 4}, set()),
    "long rows": ({"context_parallel_size": 2, "ring_attn_func": "batch_ring"}, {"sequence_parallel_size": 2}, set()),
    "long rows of a group": ({"rl": "grpo", "context_parallel_size": 2}, {"sequence_parallel_size": 2},
        {"context_parallel_size"}),
    "curriculum": ({"curriculum_sampling": True, "shuffle_merged_datasets": False}, {"dataset_shuffle": False}, set()),
    "router loss": ({"model_config": {"output_router_logits": True}}, {"router_aux_loss_coef": None}, set()),
    "a project": ({"wandb_project": "p"}, {"report_to": ["wandb"]}, set()),
    "false of another mode": ({"rl": "kto", "sample_packing": False}, {"packing": None}, set()),
    "orpo": ({"rl": "orpo", "orpo_alpha": 0.3}, {"beta": 0.3}, set()),
    "packing": ({"sample_packing": True, "pad_to_sequence_len": True}, {"packing": True}, set()),
    "plugins": ({"plugins": ["axolotl.integrations.liger.LigerPlugin"], "liger_rope": True}, {}, set()),
    "plugin of one's own": ({"plugins": ["mine.Plugin"]}, {}, {"plugins"}),
}  # fmt: skip


@pytest.mark.parametrize("name", KEYS)
def test_a_key_of_axolotl_is_carried_or_stated(imported, name):
    config, expected, without = KEYS[name]
    result, ours = imported({"base_model": "m", "learning_rate": 1e-5, "datasets": [{"path": "d"}], **config})
    assert lost(result) == without
    assert {key: ours.get(key) for key in expected} == expected
    assert not foreign.silent(result, config)
    text = result.to_yaml("theirs.yaml", "ours.yaml").split("model:")[0] + "|".join(result.report())
    assert all(text.count(key) >= 2 for key in without), "in the file and on the console"


DATASETS = {  # an entry of theirs -> ours, and what of it is stated as lost
    "a part": ({"path": "d", "split": "train[:10%]"}, {"dataset": ["d#:10%"]}, set()),
    "a subset's part": ({"path": "d", "name": "main", "split": "train[100:200]"},
        {"dataset": ["d:main#100:200"]}, set()),
    "another split": ({"path": "d", "split": "test[:5]"}, {"dataset": ["d#:5"], "split": "test"}, set()),
    "two splits": ({"path": "d", "split": "train+test"}, {"dataset": ["d"]}, {"split"}),
    "files": ({"path": "json", "data_files": ["a.jsonl", "b.jsonl"]}, {"dataset": ["a.jsonl", "b.jsonl"]}, set()),
    "files of a hub": ({"path": "d", "data_files": ["a.jsonl"]}, {"dataset": ["d:a.jsonl"]}, set()),
    "chats": ({"path": "d", "type": "chat_template", "field_messages": "talk",
               "message_property_mappings": {"role": "from", "content": "value"}},
               {"columns": {"talk": "messages"}}, set()),
    "other properties": ({"path": "d", "message_property_mappings": {"role": "who"}}, {},
        {"message_property_mappings"}),
    "roles": ({"path": "d", "roles": {"user": ["human"], "assistant": ["gpt"]}, "roles_to_train": ["gpt"]}, {}, set()),
    "other roles": ({"path": "d", "roles_to_train": ["user"], "train_on_eos": "all"}, {}, {"roles_to_train",
        "train_on_eos"}),
    "end tokens": ({"path": "d", "train_on_eos": "turn"}, {}, set()),
    "alpaca": ({"path": "d", "type": "alpaca"}, {"template": "alpaca", "dataset_transform": "alpaca"}, set()),
    "alpaca in another style": ({"path": "d", "type": "alpaca:phi"}, {"template": "alpaca_phi"}, set()),
    "alpaca in other columns": ({"path": "d", "type": "gpteacher"},
        {"template": "alpaca", "columns": {"response": "output"}}, set()),
    "jeopardy": ({"path": "d", "type": "jeopardy"}, {"dataset_transform": None}, {"type"}),
    "a function": ({"path": "d", "type": "mine.transform"}, {}, {"type"}),
    "a format": ({"path": "d", "type": {"field_instruction": "q", "format": "{instruction}"}},
                 {"columns": {"q": "instruction"}, "dataset_transform": "alpaca"}, set()),
    "a format of other fields": ({"path": "d", "type": {"field_instruction": "q", "format": "{question}"}},
                 {"columns": {"q": "instruction"}}, {"type"}),
    "thoughts": ({"path": "d", "field_thinking": "t", "template_thinking_key": "t"}, {}, set()),
    "moved thoughts": ({"path": "d", "field_thinking": "t"}, {}, {"field_thinking"}),
    "dropped turns": ({"path": "d", "drop_system_message": True}, {}, {"drop_system_message"}),
}  # fmt: skip


@pytest.mark.parametrize("name", DATASETS)
def test_a_dataset_of_axolotl_is_carried_or_stated(imported, name):
    entry, expected, without = DATASETS[name]
    result, ours = imported({"base_model": "m", "datasets": [entry]})
    assert lost(result) == {f"datasets[0].{key}" for key in without}
    assert {key: ours.get(key) for key in expected} == expected
    assert not foreign.silent(result, {"datasets": [entry]})


@pytest.mark.parametrize(
    ("method", "kind", "expected"),
    [
        ("dpo", "chatml.intel", {"template": "chatml"}),
        ("dpo", "llama3.icr", {"template": "llama3", "columns": {"input": "prompt"}}),
        ("kto", "llama3.ultra", {"template": "llama3"}),
        ("ebft", "ebft_opencode.transform", {"dataset_transform": "opencode"}),
    ],
)
def test_a_type_of_preferences_is_a_template_and_one_of_ebft_a_transform(imported, method, kind, expected):
    result, ours = imported({"base_model": "m", "rl": method, "datasets": [{"path": "d", "type": kind}]})
    assert not lost(result)
    assert {key: ours.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("config", "without"),
    [
        ({"rl": "gdpo", "trl": {"scale_rewards": True, "reward_funcs": ["accuracy"]}}, set()),
        ({"rl": "ebft", "trl": {"scale_rewards": True, "loss_type": "grpo", "epsilon": 0.2}}, set()),
        ({"rl": "ebft", "trl": {"scale_rewards": False}}, {"trl.scale_rewards"}),
    ],
)
def test_what_a_method_does_not_read_does_not_stop_its_run(imported, config, without):
    given = {"base_model": "m", "learning_rate": 1e-5, "micro_batch_size": 8, "datasets": [{"path": "d"}]}
    result, _ = imported({**given, **config})
    assert lost(result) == without and not problems_of(result.command, "ours.yaml")


PROMPTS = {  # a type -> what its rows look like to the model
    "alpaca": "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\nQ\n\n### Input:\nI\n\n### Response:\n",
    "alpaca:chat": "SYSTEM: Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\nUSER: Q\nI\nASSISTANT:",
    "alpaca_w_system.load_open_orca": "### System:\nS\n### Human:\nQ\n### Additional Context:\nI\n### Assistant:\n",
    "alpaca_instruct.load_no_prompt": "### Instruction:\nQ\n\n### Input:\nI\n\n### Response:\n",
    "summarizetldr": "USER: Summarize the following article as a TL;DR.\nQ\nASSISTANT:",
}


@pytest.mark.parametrize("kind", [*PROMPTS, "format"])
def test_a_type_with_a_prompt_of_its_own_is_a_template(imported, kind):
    from swift.models.rendering import render
    from swift.models.templates import read_template

    own = {"format": "[INST] {instruction} {input} [/INST]", "no_input_format": "[INST] {instruction} [/INST]",
           "system_format": "{system}!", "system_prompt": "S"}  # fmt: skip
    entry = {"path": "d", "type": own if kind == "format" else kind}
    result, ours = imported({"base_model": "m", "datasets": [entry], "chat_template": "chatml"})
    chat = [{"role": "user", "content": "Q", "input": "I"}, {"role": "assistant", "content": "A"}]
    if "orca" in kind or kind == "format":
        chat = [{"role": "system", "content": "S"}, *chat]
    variables = {"messages": chat, "text_start": "<s>", "eos_token": "</s>"}
    text, spans = render(read_template(ours["template"]), variables, marks=True)
    expected = PROMPTS.get(kind, "S![INST] Q I [/INST]")
    assert not lost(result) and text == f"<s>{expected}A</s>" and [text[a:b] for a, b in spans] == ["A</s>"]
    assert ours.get("system") == ("S" if kind == "format" else None)


def test_the_block_ebft_becomes_settings_of_its_mode(imported):
    block = {"mode": "strided", "stride": 4, "temperature": 0.5, "advantage_estimator": "reinforce", "ce_coef": 0.03}
    result, ours = imported({"base_model": "m", "rl": "ebft", "ebft": block, "datasets": [{"path": "d"}]})
    assert result.draft.mode == "ebft_strided" and not lost(result) and ours["ebft_mode"] == "strided"
    assert (ours["ebft_stride"], ours["ebft_temperature"], ours["ebft_ce_coef"]) == (4, 0.5, 0.03)


REFUSED = {
    "processor_type": {"processor_type": "VoxtralProcessor"},
    "qat": {"qat": {"weight_dtype": "int4"}},
    "gptq": {"gptq": True},
    "adapter": {"adapter": "llama-adapter"},
    "plugins": {"plugins": ["axolotl.integrations.diffusion.DiffusionPlugin"]},
    "relora": {"relora": True},
    "lora_target_parameters": {"adapter": "lora", "lora_target_parameters": ["experts.down_proj"]},
    "use_eaft": {"use_eaft": True},
    "reinit_weights": {"reinit_weights": True},
    "model_type": {"model_type": "AutoModelForImageTextToText", "rl": "ebft"},
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_would_be_another_run_is_refused_in_one_line(tmp_path, monkeypatch, capsys, key):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(yaml.safe_dump({"base_model": "m", "datasets": [{"path": "d"}], **REFUSED[key]}))
    assert main(["import-config", "a.yaml"]) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"swift: error: {key}: ") and line.endswith("the file is not imported")
    assert not (tmp_path / "a-swift.yaml").exists()


def test_a_part_of_a_split_is_carried_from_trl(imported):
    grpo = {"model_name_or_path": "m", "dataset_name": "d", "reward_funcs": ["accuracy"]}
    split = {"dataset_train_split": "train[:10%]", "dataset_config": "main"}
    assert imported({**grpo, **split}, method="grpo")[1]["dataset"] == ["d:main#:10%"]
    mixture = {"model_name_or_path": "m", "dataset_mixture": {"datasets": [{"path": "d", "split": "train[:5]"}]}}
    assert imported(mixture, method="sft")[1]["dataset"] == ["d#:5"]


def test_a_configuration_of_trl_with_images_is_imported(imported):
    config = {
        "model_name_or_path": "Qwen/Qwen2.5-VL-3B-Instruct", "dataset_name": "lmms-lab/multimodal-open-r1-8k-verified",
        "reward_funcs": ["accuracy"], "use_peft": True, "lora_target_modules": ["q_proj", "v_proj"],
        "max_completion_length": 1024, "use_vllm": True, "vllm_mode": "colocate",
    }  # fmt: skip
    result, ours = imported(config, method="grpo")
    assert not lost(result)
    assert ours["model"] == config["model_name_or_path"] and ours["dataset"] == [config["dataset_name"]]
    assert (ours["tuner_type"], ours["target_modules"]) == ("lora", ["q_proj", "v_proj"])


@pytest.mark.parametrize(
    ("given", "trained"),
    [({}, True), ({"use_peft": True, "lora_target_modules": "all-linear"}, True), ({"use_peft": True}, False),
     ({"use_peft": True, "lora_target_modules": ["q_proj"]}, False)],
)  # fmt: skip
def test_towers_are_trained_where_trl_trains_them_or_the_report_says_so(imported, given, trained):
    config = {"model_name_or_path": "m", "dataset_name": "d", **given}
    result, ours = imported(config, method="sft")
    assert ours.get("freeze_vit", True) == ours.get("freeze_aligner", True) == (not trained)
    told = [why for key, _, why in result.draft.lines if key in ("target_modules", "lora_target_modules")]
    assert sum("in a vision tower, too: --freeze_vit false" in why for why in told) == (not trained)
    assert "freeze_vit" not in imported(config, method="prm")[1]


def test_secrets_stay_where_they_are(imported):
    ours = {"model": "m", "dataset": ["d"], "ENV": {"HF_TOKEN": "hunter2", "A": "1"}}
    theirs = {
        "base_model": "m", "vllm_server_api_key": "hunter2",
        "datasets": [{"path": "d", "storage_options": {"secret": "hunter2"}}],
    }  # fmt: skip
    for config in (ours, theirs):
        result, _ = imported(config)
        assert "hunter2" not in result.to_yaml("theirs.yaml", "ours.yaml") + "\n".join(result.report())
    assert imported(ours)[1]["ENV"] == {"A": "1"}


def test_targets_that_are_a_regular_expression_are_one_here(imported):
    regex = r"model.layers.[\d]+.(mlp|self_attn).(up|q)_proj"
    _, ours = imported({"base_model": "m", "adapter": "lora", "lora_target_modules": regex})
    assert ours["target_regex"] == regex and "target_modules" not in ours


def test_what_trl_does_beside_a_setting_is_added_with_it(imported):
    grpo = {"model_name_or_path": "m", "dataset_name": "d", "reward_funcs": ["accuracy"]}
    _, alone = imported(grpo, method="grpo")
    more = {"use_vllm": True, "beta": 0.1, "model_init_kwargs": {"torch_dtype": "bfloat16"}, "load_in_4bit": True}
    _, beside = imported({**grpo, **more}, method="grpo")
    assert not {"rollout_importance_sampling_mode", "kl_bias_correction", "bnb_4bit_use_double_quant"} & alone.keys()
    assert beside["rollout_importance_sampling_mode"] == "sequence_mask" and beside["kl_bias_correction"] is True
    assert beside["torch_dtype"] == "bfloat16" and beside["bnb_4bit_use_double_quant"] is False


def test_a_value_that_we_do_not_have_is_named_with_the_choices(imported):
    result, ours = imported({"base_model": "m", "datasets": [{"path": "d"}], "optimizer": "came_pytorch"})
    [(fate, why)] = said(result, "optimizer")
    assert fate == "no counterpart" and "adamw_torch" in why and "optim" not in ours


def test_the_command_writes_the_file_once_and_tells(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(yaml.safe_dump({"base_model": "m", "micro_batch_size": 2, "bogus": 1}))
    assert main(["import-config", "a.yaml"]) == 0
    text = capsys.readouterr().out
    assert "micro_batch_size -> per_device_train_batch_size: 2" in text and "bogus" in text
    assert "to settle" in text and "--dataset" in text  # it has none
    assert yaml.safe_load((tmp_path / "a-swift.yaml").read_text())["per_device_train_batch_size"] == 2
    assert main(["import-config", "a.yaml"]) == 2  # it exists
    capsys.readouterr()
    assert main(["import-config", "a.yaml", "--output", "b.yaml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["output"] == "b.yaml"


WRONG = {
    "no file": (None, ["missing.yaml"], "cannot be read"),
    "nothing given": (None, [], "--file: missing"),
    "no swift in it": ("echo hello\n", ["f.sh"], "none"),
    "two commands": ("swift sft --model a\nswift sft --model b\n", ["f.sh"], "one command"),
    "images": (
        "swift rlhf --rlhf_type prm --model Qwen/Qwen2.5-VL-3B-Instruct\n",
        ["f.sh"],
        "images are not supported",
    ),
    "sound": ("swift sft --model Qwen/Qwen3-Omni-30B-A3B-Instruct\n", ["f.sh"], "sound is not supported"),
    "GPTQ": ("swift sft --model Qwen/Qwen2-7B-Instruct-GPTQ-Int4\n", ["f.sh"], "quantised weights"),
    "AWQ": ("model: m\nquant_method: awq\n", ["f.yaml"], "--quant_method: awq: not supported"),
    "megatron": ("megatron sft --model a\n", ["f.sh"], "Megatron"),
    "open quote": ("swift sft --model 'a\n", ["f.sh"], "quotes"),
    "no map": ("- a\n", ["f.yaml"], "not a map"),
    "duplicate key": ("base_model: a\nbase_model: b\n", ["f.yaml"], "duplicate"),
    "method unknown": ("base_model: a\nrl: ppo\n", ["f.yaml"], "valid: sft, grpo"),
    "method not told": ("model_name_or_path: a\n", ["f.yaml"], "--method: missing"),
    "method of ours unknown": ("model_name_or_path: a\n", ["f.yaml", "--method", "ppo"], "--method: ppo"),
    "output no yaml": ("base_model: a\n", ["f.yaml", "--output", "b.txt"], "--output: b.txt"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_imported_is_one_line(tmp_path, monkeypatch, capsys, name):
    text, words, expected = WRONG[name]
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / words[0]).write_text(text)
    assert main(["import-config", *words]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("swift: error: ") and expected in lines[0]


@pytest.mark.parametrize("folder", ["/data/audio_team", "/mnt/ocr-project"])
def test_a_folder_above_a_model_does_not_make_it_multimodal(tmp_path, folder):
    (tmp_path / "f.yaml").write_text(f"model: {folder}/Qwen3-8B\n")
    assert import_file(str(tmp_path / "f.yaml")).draft.settings["model"] == f"{folder}/Qwen3-8B"


def test_names_of_rules_are_settings_of_ours():
    """Or known, as a flag that a later version may have."""
    from swift.arguments.imports.draft import Renamed
    from swift.arguments.known import is_known
    from swift.arguments.modes import MODES
    from swift.arguments.plugins import settings_class
    from swift.flags import spellings_of

    ours = {name for mode in MODES for name in spellings_of(settings_class(mode))}
    named = {
        rule.name for table in (axolotl, trl, ms_swift) for rule in table.RULES.values() if isinstance(rule, Renamed)
    }
    assert not {name for name in named - ours if not is_known(name)}


def test_the_page_on_migration_has_the_names_as_they_are():
    page = docs.MIGRATION.read_text(encoding="utf-8")
    assert docs.with_names(page) == page, "python -m swift.arguments.docs --write"


@pytest.mark.parametrize(("text", "number"), [(".05", 0.05), ("1E-5", 1e-5), ("5.", 5.0), ("none", 0.0)])
def test_a_number_of_axolotl_is_read_as_yaml_writes_it(text, number):
    assert axolotl_keys.number(text) == number


def test_a_script_of_a_classifier_becomes_its_own_mode(tmp_path):
    script = tmp_path / "train.sh"
    script.write_text("swift sft --model m --dataset d --task_type seq_cls --num_labels 3\n")
    draft = import_file(str(script)).draft
    assert (draft.mode, draft.settings["num_labels"]) == ("seq_cls", 3)
    assert not [key for key, fate, _ in draft.lines if fate == "no counterpart"]
