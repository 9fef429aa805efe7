"""Where a value comes from, how it is spelled, and what follows from it."""

import json
import math
import shlex

import pytest
from command_lines import RLHF, problems, rlhf

from swift.arguments import parse
from swift.arguments.derived import Machine
from swift.arguments.imports import axolotl, ms_swift, trl
from swift.errors import ConfigError
from swift.observability.secrets import mask_argv, mask_config
from swift.plugin import envs
from swift.rollout.arguments import most_tokens


def value(name, *words, **kwargs):
    return getattr(rlhf(*words, **kwargs).args, name)


@pytest.fixture
def config(tmp_path):
    def write(text, name="run.yaml"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


# How values are written


@pytest.mark.parametrize(
    ("words", "meant"), [("true True 1 YES on", True), ("false FALSE 0 no Off", False)], ids=["true", "false"]
)
def test_booleans_have_many_spellings(words, meant):
    assert {value("overlong_filter", "--overlong_filter", word) for word in words.split()} == {meant}


WRITTEN = {
    "a bare boolean is true": ("--overlong_filter --strict", {"overlong_filter": True, "strict": True}),
    "a share of steps to warm up": ("--warmup_steps 0.1", {"warmup_steps": 0.1}),
    "maps as one JSON list": (
        """--nemo_gym_datasets '[{"path": "a"}, {"path": "b"}]'""",
        {"nemo_gym_datasets": [{"path": "a"}, {"path": "b"}]},
    ),
    "dashes and equal signs": ("--num-generations=4", {"num_generations": 4}),
    "underscores and spaces": ("--num_generations 4", {"num_generations": 4}),
    "negative numbers are values": (
        "--top_k -1 --repetition_max_penalty -.5 --reward_weights -1e-1",
        {"top_k": -1, "repetition_max_penalty": -0.5, "reward_weights": [-0.1]},
    ),
    "lists are separated by spaces": ("--target_modules q_proj v_proj", {"target_modules": ["q_proj", "v_proj"]}),
    "maps are JSON": ("""--columns '{"answer": "solution"}'""", {"columns": {"answer": "solution"}}),
    "none unsets what may be absent": ("--deepspeed none", {"deepspeed": None}),
    "none is a choice where it is one": ("--scale_rewards none", {"scale_rewards": "none"}),
    "a value with dashes and equal signs": ("'--system=--be brief, a=b'", {"system": "--be brief, a=b"}),
    "a value that begins with a dash": ("--system '- be brief'", {"system": "- be brief"}),
    "two spellings with equal values": ("--train_type full --tuner_type full", {"tuner_type": "full"}),
    "plugins of both spellings are joined": (
        "--external_plugins a.py b.py --custom_register_path c.py", {"external_plugins": ["a.py", "b.py", "c.py"]}
    ),
    "a correction beside its mode": (
        "--vllm_importance_sampling_correction true --vllm_importance_sampling_mode sequence_mask",
        {"rollout_importance_sampling_mode": "sequence_mask"},
    ),
    "a restart interval is that of syncs": (
        "--weight_bridge lora_only --vllm_server_host a --vllm_restart_interval 5", {"vllm_sync_interval": 5}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_is_what_is_meant(name):
    words, meant = WRITTEN[name]
    args = rlhf(*shlex.split(words)).args
    assert {setting: getattr(args, setting) for setting in meant} == meant


# Spellings


@pytest.mark.parametrize(
    ("alias", "word", "name", "expected"),
    [
        ("train_type", "full", "tuner_type", "full"),
        ("dtype", "float32", "torch_dtype", "float32"),
        ("torch_dtype", "bf16", "torch_dtype", "bfloat16"),
        ("max_new_tokens", "7", "max_completion_length", 7),
        ("response_length", "7", "max_completion_length", 7),
        ("custom_register_path", "p.py", "external_plugins", ["p.py"]),
        ("reward_num_workers", "3", "reward_workers", 3),
        ("evaluation_strategy", "no", "eval_strategy", "no"),
        ("tensor_parallel_size", "2", "vllm_tensor_parallel_size", 2),
        ("vllm_lora_sync", "true", "vllm_enable_lora", True),
        ("async_prefetch", "true", "async_generate", True),
        ("use_bias_correction_kl", "true", "kl_bias_correction", True),
        ("scale_rewards", "true", "scale_rewards", "group"),
        ("scale_rewards", "False", "scale_rewards", "none"),
        ("vllm_mode", "async", "vllm_mode", "dedicated"),
        ("optim", "adamw", "optim", "adamw_torch_fused"),
        ("attn_implementation", "eager", "attn_impl", "eager"),
        ("mask_truncated_completions", "true", "overlong_filter", True),
        ("vllm_enable_sleep_mode", "true", "sleep_level", 1),
        ("vllm_importance_sampling_mode", "token_mask", "rollout_importance_sampling_mode", "token_mask"),
        ("vllm_importance_sampling_cap", "3", "rollout_importance_sampling_threshold", 3.0),
        ("vllm_importance_sampling_clip_min", "0.5", "rollout_importance_sampling_lower", 0.5),
        ("off_policy_mask_threshold", "0.5", "off_policy_sequence_mask_delta", 0.5),
    ],
)
def test_other_spellings_of_names_and_values(alias, word, name, expected):
    resolved = rlhf(f"--{alias}", word)
    assert getattr(resolved.args, name) == expected
    assert resolved.provenance[name]["given_as"] == f"--{alias}"


def test_one_spelling_twice_takes_the_last_value_with_one_note():
    resolved = rlhf("--beta", "0.1", "--beta", "0.2", "--beta", "0.3", "--tuner_type", "full")
    assert resolved.args.beta == 0.3
    assert resolved.notes == ["--beta: given more than once; the last value counts: 0.3"]


# Layers


def test_each_layer_overrides_the_one_below(config):
    path = config("use_hf: false\nbeta: 0.5\nepsilon: 0.3\n")
    argv = [path, *RLHF, "--beta", "0.1"]
    resolved = parse("rlhf", argv, {"USE_HF": "1", "SWIFT_DEBUG": "1"})
    assert resolved.args.debug is True
    sources = {name: resolved.provenance[name]["source"] for name in ("use_hf", "beta", "epsilon", "delta")}
    assert sources == {"use_hf": "env", "beta": "command line", "epsilon": "file", "delta": "default"}
    assert (resolved.args.use_hf, resolved.args.beta, resolved.args.epsilon) == (True, 0.1, 0.3)
    assert parse("rlhf", [*argv, "--use_hf", "false"], {"USE_HF": "1"}).args.use_hf is False


def test_pixels_come_from_the_variable_of_ms_swift(monkeypatch):
    monkeypatch.setenv("IMAGE_MAX_TOKEN_NUM", "1024")
    resolved = rlhf(environ={"MAX_PIXELS": "1003520"})
    assert resolved.args.max_pixels == 1003520
    assert rlhf("--max_pixels", "1024", environ={"MAX_PIXELS": "1003520"}).args.max_pixels == 1024
    assert [line for line in resolved.notes if line.startswith("IMAGE_MAX_TOKEN_NUM: 1024: not read")]


def test_layers_meet_after_spellings_became_canonical(config):
    resolved = parse("rlhf", [config("train_type: full\n"), *RLHF, "--tuner_type", "lora"], {})
    assert resolved.args.tuner_type == "lora"


def test_the_type_of_the_flag_decides_what_a_config_value_means(config):
    text = """
        learning_rate: 1e-6
        eval_strategy: no
        save_only_model: no
        run_name: 007
        reward_funcs: [accuracy, format]
        stop_words: "###"
        lr_scheduler_kwargs: {power: 1e-3, cycles: 2, on: true}
        deepspeed: null
        report_to:
          - tensorboard
          - wandb
    """
    args = parse("rlhf", ["--config", config(text), *RLHF[:6]], {}).args
    assert args.learning_rate == 1e-6
    assert args.eval_strategy == "no"
    assert args.save_only_model is False
    assert args.run_name == "007"
    assert args.reward_funcs == ["accuracy", "format"]
    assert args.stop_words == ["###"]
    assert args.lr_scheduler_kwargs == {"power": 1e-3, "cycles": 2, True: True}
    assert args.deepspeed is None
    assert args.report_to == ["tensorboard", "wandb"]


def test_json_configs_read_like_yaml_ones(config):
    path = config('{\n\t"beta": 1e-2,\n\t"system": "be \\ud83d\\ude00",\n\t"columns": {"a": "b"}\n}', "run.json")
    args = parse("rlhf", [path, *RLHF], {}).args
    assert (args.beta, args.system, args.columns) == (0.01, "be 😀", {"a": "b"})


RUNS = {
    "in process": ["rlhf", *RLHF, "--beta", "0.5", "--columns", '{"a": "b"}'],
    "evaluation": ["rlhf", *RLHF, "--eval_steps", "5", "--stop_words", "a", "b"],
    "colocate": ["rlhf", *RLHF, "--vllm_mode", "colocate", "--sleep_level", "1", "--tuner_type", "lora"],
    "dedicated": ["rlhf", *RLHF, "--use_vllm", "true", "--vllm_mode", "dedicated", "--num_infer_workers", "2"],
    "ahead": ["rlhf", *RLHF, "--vllm_mode", "dedicated", "--async_generate", "true", "--prefetch_depth", "2"],
    "server": [
        "rlhf",
        *RLHF,
        "--vllm_server_host",
        "h",
        "--vllm_server_port",
        "9",
        "--generation_kwargs",
        '{"top_k":5}',
    ],
    "preset": ["rlhf", *RLHF, "--preset", "dapo", "--epsilon_high", "0.3"],
    "sft": ["sft", "--model", "org/tiny", "--dataset", "d.jsonl", "--tuner_type", "lora", "--lora_rank", "4"],
}


@pytest.mark.parametrize("run", RUNS)
def test_an_args_json_starts_the_same_run_again(config, run):
    mode, *words = RUNS[run]
    first = parse(mode, words, {"CUDA_VISIBLE_DEVICES": ""})
    path = config(json.dumps(first.to_json()), "args.json")
    again = parse(mode, [path], {"CUDA_VISIBLE_DEVICES": ""})
    assert again.args == first.args
    assert again.given == first.given
    assert len(again.notes) == len(first.notes)
    content = again.to_json() | {"world_size": 2}  # as in a checkpoint
    third = parse(mode, [config(json.dumps(content), "again.json")], {"CUDA_VISIBLE_DEVICES": ""})
    assert third.args == first.args


def test_values_that_follow_from_others_follow_from_what_is_changed_unless_they_are_edited(config):
    content = json.loads(json.dumps(rlhf("--epsilon", "0.1").to_json()))

    def again(**edited):
        path = config(json.dumps(content | edited), "args.json")
        resolved = parse("rlhf", [path, "--epsilon", "0.3"], {"CUDA_VISIBLE_DEVICES": ""})
        return resolved.args.epsilon_high, resolved.args.num_iterations, resolved.args.learning_rate

    assert again() == (0.3, 1, 1e-5 if content["tuner_type"] == "full" else 1e-4)
    assert again(epsilon_high=0.2, num_iterations=2, learning_rate=5e-6) == (0.2, 2, 5e-6)


def test_a_secret_must_be_given_again(config):
    words = ["--vllm_server_host", "h", "--vllm_server_api_key", "hunter2"]
    path = config(json.dumps(rlhf(*words).to_json()), "args.json")
    assert "vllm_server_api_key" in problems("rlhf", path)[0]
    assert parse("rlhf", [path, "--vllm_server_api_key", "other"], {}).args.vllm_server_api_key == "other"


def test_the_env_block_sets_what_is_not_set_and_counts_as_environment(config):
    path = config("ENV:\n  USE_HF: 1\n  PORT: 5\n  TAKEN: new\n")
    resolved = parse("rlhf", [path, *RLHF], {"TAKEN": "old"})
    assert resolved.environment == {"USE_HF": "1", "PORT": "5"}
    assert resolved.args.use_hf is True
    assert resolved.config == path


def test_provenance_names_file_and_line(config):
    path = config("\ntrain-type: full\n")
    origin = parse("rlhf", [path, *RLHF], {}).provenance["tuner_type"]
    assert origin == {"source": "file", "given_as": f"train-type ({path}:2)", "rule": None}


# Derived defaults


@pytest.mark.parametrize(
    ("words", "name", "expected", "rule"),
    [
        ("", "learning_rate", 1e-4, "an adapter"),
        ("--tuner_type full", "learning_rate", 1e-5, "tuner_type full"),
        ("--gradient_accumulation_steps 4", "steps_per_generation", 4, "= gradient_accumulation_steps"),
        ("--generation_batch_size 16", "steps_per_generation", None, None),
        ("--num_generations 4", "num_generations_eval", 4, "= num_generations"),
        ("--save_strategy epoch --split_dataset_ratio 0.1", "eval_strategy", "epoch", "= save_strategy"),
        ("", "gradient_accumulation_steps", 1, "1 in online reinforcement learning"),
        ("--epsilon 0.1", "epsilon_high", 0.1, "= epsilon"),
        ("", "lora_dropout", 0.0, "rlhf"),
        ("", "torch_dtype", "float32", "on a CPU"),
        ("", "ref_model", "org/tiny", "= model"),
        ("", "output_dir", "output/tiny", "output/<model name>"),
        ("--max_completion_length 9", "soft_max_length", 9, "= max_completion_length"),
        ("--max_completion_length 9", "cosine_max_len", 9, "= max_completion_length"),
        ("--max_completion_length 9", "rollout_timeout", 600.0, "600, or 0.2 per token of max_completion_length if"),
        (
            "--max_completion_length 32000",
            "rollout_timeout",
            6400.0,
            "600, or 0.2 per token of max_completion_length if",
        ),
        ("--advantage_estimator rloo", "scale_rewards", "none", "rloo"),
        ("--advantage_estimator reinforce_plus_plus", "scale_rewards", "batch", "reinforce_plus_plus"),
        ("--advantage_estimator rloo", "kl_in_reward", True, "rloo"),
        ("--scale_rewards gdpo", "multi_objective_aggregation", "normalize_then_sum", "gdpo"),
        ("--multi_objective_aggregation normalize_then_sum", "scale_rewards", "gdpo", "normalize_then_sum"),
        ("--loss_type gspo", "importance_sampling_level", "sequence", "gspo"),
        ("", "rollout_importance_sampling_mode", "none", "none"),
        ("--async_generate true", "rollout_importance_sampling_mode", "token_truncate", "older"),
        ("--vllm_importance_sampling_correction true", "rollout_importance_sampling_mode", "token_truncate", "true"),
        ("--vllm_importance_sampling_correction false", "rollout_importance_sampling_mode", "none", "false"),
        ("", "per_device_train_batch_size", 8, "multiple of num_generations"),
        ("--gradient_accumulation_steps 2", "per_device_train_batch_size", 4, "multiple of num_generations"),
        ("--gradient_accumulation_steps 16", "per_device_train_batch_size", 1, "multiple of num_generations"),
        ("--val_dataset v.jsonl --save_steps 40", "eval_steps", 40, "= save_steps"),
        ("", "eval_strategy", "no", "no evaluation data"),
        ("--lora_rank 4", "vllm_max_lora_rank", 4, "= lora_rank"),
        ("--vllm_server_host h", "use_vllm", True, "vllm_server_host"),
        ("--vllm_server_host h", "vllm_mode", "server", "address"),
    ],
)
def test_derived_defaults_say_their_rule(words, name, expected, rule):
    resolved = rlhf(*words.split())
    assert getattr(resolved.args, name) == expected
    found = resolved.provenance[name]
    assert found["source"] == "default"
    assert found["rule"] is None if rule is None else rule in found["rule"]


@pytest.mark.parametrize(
    ("chosen", "machine", "kernel", "gap"),
    [
        ("flash_attention_2", Machine(True, 1), "flash_attn", None),
        ("flash_attention_3", Machine(True, 1), "flash_attn", "not used here"),
        ("flash_attention_3 --torch_dtype float32", Machine(True, 1), "sdpa", "no kernels for --torch_dtype float32"),
        ("flash_attn", Machine(True, 1, has_flash_attn=False), "sdpa", "the package flash_attn"),
        ("flash_attn", Machine(False, 1), "sdpa", "needs a GPU"),
        ("flex_attention", Machine(True, 1), "flex_attention", None),
        ("flex_attention", Machine(False, 1), "sdpa", "no backward pass on a CPU"),
        ("eager", Machine(False, 1), "eager", None),
    ],
)
def test_another_kernel_takes_the_place_of_one_that_the_machine_lacks(chosen, machine, kernel, gap):
    resolved = parse("rlhf", [*RLHF, "--attn_impl", *chosen.split()], {}, machine=machine)
    assert resolved.args.attn_impl == kernel
    notes = [note for note in resolved.notes if "attn_impl" in note]
    assert [f"{gap}" in note and note.endswith(f"{kernel} computes the same attention") for note in notes] == (
        [True] if gap else []
    )


def test_the_batch_size_follows_from_the_processes_too():
    launches = {"NPROC_PER_NODE": "2"}, {"NPROC_PER_NODE": "4", "NNODES": "2"}, {"RANK": "1", "WORLD_SIZE": "4"}
    assert [value("per_device_train_batch_size", environ=environ) for environ in launches] == [4, 1, 2]


def test_a_given_value_is_never_replaced_by_a_rule():
    resolved = rlhf("--learning_rate", "0.5", "--epsilon_high", "0.28")
    assert (resolved.args.learning_rate, resolved.args.epsilon_high) == (0.5, 0.28)
    assert resolved.provenance["learning_rate"]["rule"] is None
    assert value("rollout_timeout", "--rollout_timeout", "30", "--max_completion_length", "32000") == 30


def test_dropout_of_supervised_tuning_is_on():
    args = parse("sft", ["--model", "m", "--dataset", "d"], {}).args
    assert args.lora_dropout == 0.05
    assert args.metric_for_best_model == "loss"
    assert args.greater_is_better is False


# What is printed and stored


@pytest.mark.parametrize(
    "words",
    [
        "--eval_steps 5",
        "--eval_steps 5 --split_dataset_ratio 0",
        "--eval_strategy steps",
        "--eval_steps 5 --streaming true --max_steps 9",
    ],
)
def test_evaluation_without_data_is_off_and_noted_when_it_was_asked_for(words):
    resolved = rlhf(*words.split())
    assert (resolved.args.split_dataset_ratio, resolved.args.eval_strategy) == (0.0, "no")
    assert any("evaluation: off" in note for note in resolved.notes)
    assert not any("evaluation" in note for note in rlhf().notes)


@pytest.mark.parametrize(
    ("mode", "words", "settings", "note"),
    [
        ("sft", "--model_name_or_path a", {"model": "a"}, "--model_name_or_path: TRL's name of --model a"),
        ("sft", "--base_model a", {"model": "a"}, "--base_model: Axolotl's name of --model a"),
        ("sft", "--model_id_or_path a", {"model": "a"}, "--model_id_or_path: ms-swift's name of --model a"),
        ("sft", "--dataset_name a", {"dataset": ["a"]}, "--dataset_name: TRL's name of --dataset a"),
        ("sft", "--optimizer muon", {"optim": "muon"}, "--optimizer: ms-swift's name of --optim muon"),
        ("sft", "--quant_bits 4", {}, "--quant_bits: 4: no effect without --quant_method"),
        ("sft", "--lora_ga_iters 2", {}, "--lora_ga_iters: 2: known in ms-swift; this value changes nothing here"),
        ("sft", "--use_peft", {"tuner_type": "lora"}, "--use_peft: TRL's name of --tuner_type lora"),
        ("dpo", "--lora_r 4", {"lora_rank": 4}, "--lora_r: TRL's name of --lora_rank 4"),
        ("rlhf", "--max_prompt_length 9", {"max_length": 9}, "--max_prompt_length: TRL's name of --max_length 9"),
        ("sft", "--sequence_len 9", {"max_length": 9}, "--sequence_len: Axolotl's name of --max_length 9"),
        ("sft", "--load_in_4bit true", {"quant_bits": 4}, "--load_in_4bit: TRL's name of --quant_bits 4"),
        ("sft", "--tuner_backend unsloth", {}, "--tuner_backend: unsloth: known in ms-swift; adapters are PEFT's here"),
        ("sft", "--load_in_4bit false", {"quant_bits": None}, "--load_in_4bit: false: false changes nothing here"),
        ("sft", "--bf16 true", {"torch_dtype": "bfloat16"}, "--bf16: ms-swift's name of --torch_dtype bfloat16"),
        (
            "sft",
            "--torch_dtype float32 --bf16 true",
            {"torch_dtype": "float32", "autocast": "bfloat16"},
            "--bf16: ms-swift's name of --autocast bfloat16",
        ),
        (
            "dpo",
            "--bf16 true --dtype float32",
            {"torch_dtype": "float32", "autocast": "bfloat16"},
            "--bf16: ms-swift's name of --autocast bfloat16",
        ),
        ("sft", "--bf16 false", {"torch_dtype": "float32"}, "--bf16: false: --torch_dtype is the precision"),
        ("rlhf", "--fp16 false", {"torch_dtype": "float32"}, "--fp16: false: --torch_dtype is the precision"),
        (
            "sft",
            "--enable_dft_loss true",
            {"loss_type": "dft"},
            "--enable_dft_loss: ms-swift's name of --loss_type dft",
        ),
        (
            "rlhf",
            "--enable_thinking false",
            {"chat_template_kwargs": {"enable_thinking": False}},
            "--enable_thinking: ms-swift's name of --chat_template_kwargs",
        ),
        (
            "rlhf",
            "--vllm_server_pass_dataset true",
            {},
            "--vllm_server_pass_dataset: true: known in ms-swift; here the trainer plays the turns",
        ),
        ("infer", "--max_batch_size 16", {}, "--max_batch_size: 16: known in ms-swift; this value changes nothing"),
        ("rlhf", "--vllm_use_async_engine true", {}, "--vllm_use_async_engine: true: known in ms-swift; this value"),
        ("rlhf", "--padding_free true", {}, "--padding_free: true: known in ms-swift; this value changes nothing"),
        (
            "dpo",
            "--truncation_strategy delete",
            {},
            "--truncation_strategy: delete: known in ms-swift; this value changes",
        ),
        (
            "dpo",
            "--packing true --max_length 64 --packing_strategy binpack --packing_num_proc 4",
            {"packing": True},
            "--packing_strategy: binpack: known in ms-swift; this value changes nothing",
        ),
        ("kto", "--padding_free true", {}, "--padding_free: true: known in ms-swift; this value changes nothing"),
        (
            "rlhf",
            "--use_vllm true --max_length 4000 --max_completion_length 97 --vllm_max_model_len 4096",
            {"vllm_max_model_len": 4096},
            "--vllm_max_model_len: 4096: below --max_length 4000 + --max_completion_length 97: completions of prompts "
            "over 3999 tokens end there",
        ),
        ("rlhf", "--dataloader_drop_last false", {}, "--dataloader_drop_last: false: changes nothing"),
        (
            "sft",
            "--cached_dataset a b --cached_val_dataset c",
            {"dataset": ["a", "b"], "val_dataset": ["c"]},
            "--cached_dataset: ms-swift's name of --dataset a b",
        ),
        (
            "sft",
            "--task_type seq_cls --num_labels 2 --cached_dataset a",
            {"dataset": ["a"]},
            "--cached_dataset: ms-swift's name of --dataset a",
        ),
    ],
)
def test_names_of_other_projects_are_ours_where_they_mean_the_same(mode, words, settings, note):
    needed = {"model": "m", "dataset": "d", **({"reward_funcs": "format"} if mode == "rlhf" else {})}
    rest = [f"--{name} {value}" for name, value in needed.items() if name not in settings]
    method = {"rlhf": "--rlhf_type grpo", "dpo": "--rlhf_type dpo", "kto": "--rlhf_type kto"}.get(mode, "")
    run = parse("rlhf" if method else mode, " ".join([method, *rest, words]).split(), {})
    assert {name: getattr(run.args, name) for name in settings} == settings
    assert any(one.startswith(note) for one in run.notes)


@pytest.mark.parametrize("mode", ["rlhf", "dpo", "sft"])
def test_no_name_of_another_project_is_unknown(mode):
    names = {**ms_swift.RULES, **trl.RULES, **axolotl.RULES}.keys()
    method = [] if mode == "sft" else ["--rlhf_type", mode.replace("rlhf", "grpo")]
    unsuited = []
    for name in names:
        try:
            parse(mode.replace("dpo", "rlhf"), [*method, f"--{name}", "x"], {})
        except ConfigError as error:
            unsuited += [one for one in error.problems if name in one and ("unknown" in one or "not imported" in one)]
    assert unsuited == []


def test_settings_of_axolotl_in_braces_are_read_one_by_one():
    args = rlhf("--fsdp_config", '{"offload_params": true, "reshard_after_forward": false}').args
    assert (args.fsdp, args.fsdp_offload_params) == ("shard_grad_op", True)
    assert rlhf("--sequence_parallel_degree", "2").args.sequence_parallel_size == 2


def test_known_flags_that_change_nothing_are_noted():
    words = "--save_safetensors true --vllm_pipeline_parallel_size 1 --use_liger_loss true"
    notes = rlhf(*words.split(), "--use_data_producer", "true", "--tuner_type", "full").notes
    assert [note.split(":")[0] for note in notes] == [*words.split()[::2], "--use_data_producer"]


def test_settings_of_a_switch_that_is_off_are_noted():
    notes = rlhf("--vllm_max_num_seqs", "4", "--tuner_type", "full", "--lora_rank", "4").notes
    assert "--vllm_max_num_seqs: 4: no effect without --use_vllm" in notes
    assert "--lora_rank: 4: no effect without --tuner_type lora or miss" in notes


IDLE = [
    (
        "sft",
        "--lr_scheduler_type constant --warmup_ratio 0.1",
        "--warmup_ratio: 0.1: no effect with --lr_scheduler_type constant",
    ),
    ("dpo", "--split_dataset_ratio 0.3 --val_dataset d", "--split_dataset_ratio: 0.3: no effect with --val_dataset"),
    ("sft", "--strict true --max_skipped_fraction 0.5", "--max_skipped_fraction: 0.5: no effect with --strict true"),
    (
        "kto",
        "--streaming true --max_steps 1 --dataset_shuffle false --shuffle_buffer_size 5",
        "--shuffle_buffer_size: 5: no effect with --dataset_shuffle false",
    ),
    ("dpo", "--loss_type sft --beta 0.3", "--beta: 0.3: no effect on --loss_type sft alone"),
    ("dpo", "--loss_type sft --ld_alpha 0.3", "--ld_alpha: 0.3: no effect on --loss_type sft alone"),
    (
        "sft",
        "--metric_for_best_model eval_loss",
        "--metric_for_best_model: eval_loss: no effect without --eval_strategy steps or epoch",
    ),
    (
        "kto",
        "--greater_is_better true",
        "--greater_is_better: true: no effect without --eval_strategy steps or epoch",
    ),
    (
        "dpo",
        "--streaming true --max_steps 4 --dataset_num_proc 4",
        "--dataset_num_proc: 4: no effect on a stream, which one process reads",
    ),
    ("dpo", "--loss_type sft --ref_model r", "--ref_model: r: no effect on --loss_type sft alone"),
]


@pytest.mark.parametrize(
    ("mode", "words"),
    [("sft", "--beta 0"), ("sft", "--num_iterations 1"), ("pt", "--reroll_max_groups 1"), ("pt", "--use_vllm false")],
)
def test_a_neutral_value_of_a_flag_of_another_mode_is_noted(mode, words):
    notes = parse(mode, ["--model", "m", "--dataset", "d", *words.split()], {}).notes
    assert f"{words.replace(' ', ': ')}: not used by swift {mode}" in notes


@pytest.mark.parametrize(("mode", "words", "note"), IDLE)
def test_a_setting_that_another_leaves_without_effect_is_noted(mode, words, note):
    line = [mode] if mode == "sft" else ["rlhf", "--rlhf_type", mode]
    notes = parse(line[0], [*line[1:], "--model", "m", "--dataset", "d", *words.split()], {}).notes
    assert [one for one in notes if "no effect" in one] == [note]


def test_args_json_is_flat_json_with_provenance():
    content = json.loads(json.dumps(rlhf("--beta", "0").to_json()))
    assert content["beta"] == 0.0
    assert content["_provenance"]["beta"] == {"source": "command line", "given_as": "--beta", "rule": None}
    assert set(content["_provenance"]) == set(content) - {"_provenance"}


def test_secrets_are_masked_wherever_they_appear():
    resolved = parse("rollout", ["--model", "m", "--api_key", "hunter2"], {})
    assert resolved.args.api_key == "hunter2"
    url = "http://me:hunter2@host/x"
    shown = json.dumps(rlhf("--vllm_server_base_url", url, "--vllm_engine_kwargs", '{"hf_token": "hunter2"}').to_json())
    shown += json.dumps(rlhf("--vllm_server_host", "me:hunter2@host").to_json())
    lines = problems("rollout", "--model", "m", "--api-key", "hunter2", "hunter2", "--swanlab_token", "hunter2")
    for text in (json.dumps(resolved.to_json()), shown, *lines):
        assert "hunter2" not in text
        assert "***" in text


def test_flags_say_themselves_whether_they_are_secret(tmp_path):
    words = ["--columns", '{"answerKey": "solution"}', "--tuner_type", "vera", "--vera_projection_prng_key", "7"]
    content = rlhf(*words).to_json()
    assert (content["columns"], content["vera_projection_prng_key"]) == ({"answerKey": "solution"}, 7)
    assert mask_argv(words) == words
    config = tmp_path / "run.yaml"
    config.write_text("columns: {answerKey: solution}\nvera_projection_prng_key: 7\n")
    assert mask_config(config) == config.read_text()
    file = tmp_path / "plugin.py"
    file.write_text(SECRET_OF_A_PLUGIN)
    words = ["--external_plugins", str(file), "--reward_funcs", "keyed", "--judge_login", "hunter2"]
    assert rlhf(*words).to_json()["judge_login"] == mask_argv(words)[-1] == "***"


SECRET_OF_A_PLUGIN = '''
from dataclasses import dataclass
from swift.flags import flag
from swift.plugin import orms
@dataclass
class Parameters:
    judge_login: str | None = flag(secret=True)
    """Login."""
@orms.register("keyed", parameters=Parameters)
def keyed(completions, **kwargs): ...
'''


def test_a_mask_is_no_secret(tmp_path):
    file = tmp_path / "args.json"
    file.write_text(json.dumps({"vllm_server_api_key": "***", "vllm_server_base_url": ["http://me:***@host"]}))
    address = ["--vllm_server_base_url", "http://me:pw@host"]
    for words in (["--config", str(file), *address], [*address, "--vllm_server_api_key", "***"]):
        (line,) = problems("rlhf", *RLHF, *words)
        assert "vllm_server_api_key: ***: " in line
        assert "SWIFT_API_KEY" in line
        assert rlhf(*words, environ={"SWIFT_API_KEY": "abc"}).args.vllm_server_api_key == "abc"
    assert rlhf("--config", str(file), *address, "--vllm_server_api_key", "abc").args.vllm_server_api_key == "abc"
    assert len(problems("rlhf", *RLHF, "--config", str(file))) == 2
    assert rlhf("--stop_words", "***").args.stop_words == ["***"]
    config = tmp_path / "run.yaml"
    config.write_text("ENV: {HF_TOKEN: '***'}\n")
    (line,) = problems("rlhf", *RLHF, "--config", str(config))
    assert "ENV: HF_TOKEN" in line
    assert rlhf("--config", str(config), environ={"HF_TOKEN": "abc"}).environment == {}


def test_merge_lora_is_export_with_one_answer():
    assert parse("merge-lora", ["--adapters", "a"], {}).args.merge_lora is True
    assert parse("export", ["--adapters", "a", "--merge_lora"], {}).args.torch_dtype is None


# Weight bridges


@pytest.mark.parametrize(
    ("words", "sets"),
    [
        (
            "shared_vllm --tuner_type full",
            {"vllm_mode": "colocate", "vllm_enable_lora": False, "vllm_sync_interval": 1},
        ),
        ("lora_only --vllm_server_host a", {"vllm_enable_lora": True, "vllm_sync_interval": 3}),
        ("lora_restart --vllm_mode dedicated", {"vllm_enable_lora": True, "vllm_sync_interval": 3}),
        ("none --vllm_server_host a", {"vllm_enable_lora": False, "vllm_sync_interval": 3}),
    ],
)
def test_a_weight_bridge_stands_for_settings_and_says_so(words, sets):
    bridge = words.split()[0]
    told = rlhf("--weight_bridge", *words.split())
    assert {name: getattr(told.args, name) for name in sets} == sets
    assert all(told.provenance[name]["rule"] == f"with weight_bridge {bridge}" for name in sets)
    (line,) = [note for note in told.notes if note.startswith(f"--weight_bridge: {bridge}: stands for --")]
    assert "--vllm_sync_interval" in line


# Environments


@pytest.mark.parametrize(
    ("words", "names", "weights"),
    [
        ("", ["accuracy", "environment"], []),
        ("--reward_weights 1 2", ["accuracy", "environment"], [1, 2]),
        ("--reward_weights 1", ["accuracy"], [1]),
        ("--reward_weights 1 2 3 --reward_model org/judge", ["accuracy", "environment"], [1, 3, 2]),
        ("--reward_funcs reward_env", ["reward_env"], []),
    ],
)
def test_the_reward_of_an_environment_is_the_last_column_unless_weights_leave_it_out(words, names, weights):
    envs["guess"] = object
    try:
        told = rlhf("--gym_env", "guess", *words.split())
    finally:
        del envs["guess"]
    assert (told.args.reward_funcs, told.args.reward_weights) == (names, weights)
    assert any("its reward is not used" in note for note in told.notes) == (names == ["accuracy"])


@pytest.mark.parametrize(
    ("words", "most"),
    [
        ("", 7),
        ("--rollout_tools add", math.inf),
        ("--rollout_tools add --completion_length_limit_scope total", 7),
    ],
)
def test_the_most_tokens_of_a_completion(words, most):
    assert most_tokens(rlhf("--max_completion_length", "7", *words.split()).args) == most


def test_stage_0_of_deepspeed_is_a_run_without_it():
    resolved = parse("sft", ["--model", "m", "--dataset", "d", "--deepspeed", "zero0"], {})
    assert resolved.args.deepspeed is None
    assert any(note.startswith("--deepspeed: zero0: stage 0 shards nothing") for note in resolved.notes)
