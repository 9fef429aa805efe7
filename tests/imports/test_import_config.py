import json

import pytest
import yaml

from swift.arguments import docs
from swift.arguments.imports import axolotl, ms_swift, trl
from swift.arguments.imports.command import import_file, problems_of
from swift.cli.main import main
from tests.imports import published


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
    "axolotl: page on GRPO": (published.AXOLOTL_GRPO, "rlhf", {"special_tokens", "datasets[0].type"}),
    **{
        f"axolotl: {path}": (published.AXOLOTL[path], mode, expected)
        for path, mode, expected in (
            ("llama-3/lora-1b.yml", "sft", {"evals_per_epoch", "special_tokens"}),
            ("llama-3/instruct-dpo-lora-8b.yml", "dpo", {"evals_per_epoch"}),
            ("llama-3/qlora-1b-kto.yaml", "kto", {"eval_max_new_tokens"}),
            ("gemma2/reward-model.yaml", "rm", {"tf32"}),
            ("qwen2/prm.yaml", "prm", set()),
            ("gkd/qwen3-0.6B-gkd.yaml", "gkd", {"plugins", "datasets[0].split"}),
        )
    },
    "trl: grpo": (
        published.TRL["open-r1/recipes/Qwen2.5-1.5B-Instruct/grpo/config_demo.yaml"],
        "rlhf",
        {"hub_model_id"},
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
    blocked = {key.removeprefix("trl.") for key in lost(result) if key.startswith("trl.")}
    assert blocked == {"num_completions_to_print"}
    assert ours["scale_rewards"] == "group" and ours["sleep_level"] == 1 and ours["deepspeed"] == "zero3"
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


def test_what_trl_does_by_default_is_written_down():
    from dataclasses import fields

    from trl import DPOConfig, GRPOConfig, KTOConfig, ModelConfig, RewardConfig, SFTConfig

    methods = {"rlhf": GRPOConfig, "sft": SFTConfig, "dpo": DPOConfig, "rm": RewardConfig, "kto": KTOConfig}
    names = {
        "lora_rank": "lora_r",
        "rollout_importance_sampling_mode": "vllm_importance_sampling_mode",
        "rollout_importance_sampling_threshold": "vllm_importance_sampling_clip_max",
        "kl_bias_correction": "use_bias_correction_kl",
        "bnb_4bit_use_double_quant": "use_bnb_nested_quant",
    }
    for mode, config in methods.items():
        theirs = {one.name: one.default for cls in (config, ModelConfig) for one in fields(cls)}
        for name, value in trl.defaults(mode, {"use_vllm": True, "beta": 0.1, "quant_method": "bnb"}).items():
            if (their_name := names.get(name, name)) in theirs:
                assert theirs[their_name] == value, (mode, name)


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
    result, ours = imported({"base_model": "m", "datasets": [{"path": "d"}], "optimizer": "paged_adamw_8bit"})
    [(fate, why)] = said(result, "optimizer")
    assert fate == "no counterpart" and "adamw_8bit" in why and "optim" not in ours


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
    "images": ("swift rlhf --rlhf_type grpo --model Qwen/Qwen2.5-VL-3B-Instruct\n", ["f.sh"], "images and sound"),
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
