"""`--rope_scaling` and `--max_model_len`: another context, in training and wherever an adapter is loaded afterwards."""

import json

import pytest
import torch
from trl_runs import argv_of, chats, rows, trained, written

from swift.arguments import parse
from swift.arguments.sft import SFTArguments
from swift.errors import ConfigError
from swift.models.arguments import CheckpointArguments, TunerArguments
from swift.models.export import merge_adapter
from swift.models.policy import context_length, load_config, load_for_inference, load_policy
from swift.models.rope import recorded
from swift.models.tiny import build_tiny
from swift.rollout.engines.spec import EngineSpec, build_engine

IDS = (torch.arange(90) * 7 % 200)[None]


def config_of(folder, **settings):
    return load_config(folder, SFTArguments(model=str(folder), **settings)).get_text_config()


def test_logits_are_those_of_a_model_whose_config_says_so(nano_folders, tmp_path):
    folder = nano_folders["qwen2"]
    own = config_of(folder).max_position_embeddings
    scaled = load_policy(
        TunerArguments(model=str(folder), tuner_type="full", rope_scaling="yarn", max_model_len=3 * own)
    )
    written_there = json.loads((folder / "config.json").read_text())
    theta = config_of(folder).rope_parameters["rope_theta"]
    yarn = {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": own, "rope_theta": theta}
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    changed = {**written_there, "rope_parameters": yarn, "max_position_embeddings": 3 * own}
    (copy / "config.json").write_text(json.dumps({n: v for n, v in changed.items() if n != "rope_theta"}))
    plain, expected = (load_for_inference(CheckpointArguments(model=str(one))) for one in (folder, copy))
    assert torch.equal(scaled.eval()(IDS).logits, expected(IDS).logits)
    assert not torch.allclose(plain(IDS).logits, expected(IDS).logits, atol=1e-3)


@pytest.mark.parametrize(
    ("settings", "factor", "context"),
    [
        ({"rope_scaling": "linear", "max_model_len": 2500}, 3.0, 2500),
        ({"rope_scaling": '{"type": "yarn", "factor": 4}'}, 4, 4096),
        ({"rope_scaling": '{"rope_type": "yarn", "factor": 2, "beta_fast": 16}', "max_model_len": 1500}, 2, 1500),
        ({"max_model_len": 100}, None, 100),
    ],
)
def test_factor_and_context_follow_from_each_other(tmp_path, settings, factor, context):
    folder = build_tiny(tmp_path / "model", size="nano")
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(json.dumps({**json.loads(text), "max_position_embeddings": 1024}))
    found = config_of(folder, **settings)
    assert found.rope_parameters.get("factor") == factor
    assert found.max_position_embeddings == max(context, 1024), "a limit within the model's own is no change of it"
    assert context_length(TunerArguments(model=str(folder), **settings)) == context


def test_a_limit_is_no_other_context_of_an_adapter(tmp_path):
    (tmp_path / "args.json").write_text('{"max_model_len": 100}')
    assert recorded([tmp_path]) == (None, None)


def test_what_scaling_leaves_alone_stays(vlm_folders):
    own = config_of(vlm_folders("qwen3_vl")).rope_parameters
    scaled = config_of(vlm_folders("qwen3_vl"), rope_scaling='{"rope_type":"yarn","factor":2}').rope_parameters
    kept = {"rope_theta", "mrope_section"} & own.keys()
    assert len(kept) == 2 and {name: scaled[name] for name in kept} == {name: own[name] for name in kept}


WRONG = [
    ({"rope_scaling": "dynamic", "max_model_len": 9000}, "dynamic depends on the longest row of a batch; use yarn"),
    ({"rope_scaling": "ntk"}, "--rope_scaling: ntk: not a choice; valid: linear, yarn"),
    ({"rope_scaling": "{yarn"}, "--rope_scaling: {yarn: not JSON"),
    ({"rope_scaling": "yarn"}, "--rope_scaling: yarn: by which factor"),
    ({"max_model_len": 2**20}, "--max_model_len: 1048576: the model's context is .*; give --rope_scaling yarn, too"),
    ({"rope_scaling": '{"type":"yarn","factor":2}', "max_model_len": 2**20}, "above .* x the factor 2"),
]


@pytest.mark.parametrize(("settings", "problem"), WRONG)
def test_settings_that_do_not_fit_are_one_line(nano_folders, settings, problem):
    with pytest.raises(ConfigError, match=problem):
        config_of(nano_folders["qwen2"], **settings)


def test_an_adapter_keeps_the_context_that_it_was_trained_with(nano_folders, tmp_path):
    folder, data = nano_folders["qwen2"], written(tmp_path / "rows.jsonl", chats(8))
    own = {"--model": folder, "--dataset": data, "--output_dir": tmp_path / "out", "--max_steps": 2}
    scaling = ["--rope_scaling", '{"rope_type":"linear","factor":4}']
    argv = argv_of(own, "--tuner_type lora --learning_rate 1e-1", scaling)
    run_dir = trained(parse("sft", argv, {}))
    adapter = str(run_dir / "checkpoint-2")
    policy = load_policy(TunerArguments(adapters=[adapter], rope_scaling=scaling[1])).eval()
    loaded = load_for_inference(CheckpointArguments(adapters=[adapter]))
    merged = merge_adapter(CheckpointArguments(adapters=[adapter]), tmp_path / "merged")
    alone = load_for_inference(CheckpointArguments(model=str(merged)))
    for one in (loaded, alone):
        assert one.config.rope_parameters["factor"] == 4
        assert torch.allclose(one(IDS).logits, policy(IDS).logits, atol=1e-4)
    with pytest.raises(ConfigError, match=r"the adapter was trained with --rope_scaling .*; give the same"):
        load_policy(TunerArguments(adapters=[adapter]))
    with pytest.raises(ConfigError, match="merge it with swift merge-lora"):
        build_engine(EngineSpec(backend="vllm", model=str(folder), adapters=(adapter,)))
    assert rows(run_dir / "logging.jsonl")


def test_an_engine_with_the_models_own_config_is_refused():
    argv = ["--rlhf_type grpo --model m --dataset d --reward_funcs format --use_vllm true"]
    argv = argv_of({}, *argv, "--rope_scaling yarn --max_model_len 9")
    with pytest.raises(ConfigError, match=r"--rope_scaling: yarn: an engine reads the files of --model alone"):
        parse("rlhf", argv, {})
