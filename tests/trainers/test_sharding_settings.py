"""`--deepspeed` and `--fsdp` become configurations, or one line that says what is wrong, before anything is loaded."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest

from swift.errors import ConfigError, ResourceError
from swift.trainers.parallel import deepspeed
from swift.trainers.parallel.deepspeed import (
    PRESETS,
    deepspeed_config,
    stage_of,
)
from swift.trainers.parallel.sharding import describe, require_sharding


def args(deepspeed=None, **others):
    given = {
        "fsdp": None,
        "fsdp_replicas": 1,
        "fsdp_offload_params": False,
        "torch_dtype": "float32",
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 1.0,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {},
        "save_only_model": False,
        "load_best_model_at_end": False,
        **others,
    }
    return SimpleNamespace(deepspeed=None if deepspeed is None else str(deepspeed), **given)


@pytest.fixture
def file(tmp_path):
    def write(**content):
        path = tmp_path / "ds.json"
        path.write_text(json.dumps(content))
        return path

    return write


def problems(given):
    with pytest.raises(ConfigError) as caught:
        deepspeed_config(given)
    return caught.value.problems


@pytest.mark.parametrize(("name", "stage"), [(name, int(name[4])) for name in PRESETS])
def test_a_preset_is_a_stage_and_leaves_the_rest_to_the_flags(name, stage):
    config = deepspeed_config(args(name))
    assert config["zero_optimization"]["stage"] == stage == stage_of(args(name))
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        assert config[key] == "auto"
    assert config["gradient_clipping"] == "auto"
    assert config["zero_force_ds_cpu_optimizer"] is False, "nothing needs a compiler"
    offloads = {key for key in config["zero_optimization"] if key.startswith("offload")}
    expected = {"zero2_offload": {"offload_optimizer"}, "zero3_offload": {"offload_optimizer", "offload_param"}}
    assert offloads == expected.get(name, set())


def test_weights_of_16_bits_have_masters_and_are_checked_for_overflow_and_stage_3_saves_a_model():
    config = deepspeed_config(args("zero2", torch_dtype="bfloat16"))
    assert config["bf16"] == {"enabled": True, "check_grad_overflow": True}
    assert "fp16" not in config
    assert deepspeed_config(args("zero2", torch_dtype="float16"))["fp16"] == {"enabled": True}
    assert not {"bf16", "fp16"} & set(deepspeed_config(args("zero2")))
    assert deepspeed_config(args("zero3"))["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] is True


def test_stage_0_is_refused_where_it_would_lose_updates():
    (line,) = problems(args("zero0", torch_dtype="bfloat16"))
    assert line.startswith("--deepspeed: zero0: zero_optimization: stage 0 loses small updates of bfloat16 weights")


def test_what_a_file_tunes_is_kept_and_auto_values_stay_auto(file):
    path = file(
        zero_optimization={"stage": 2, "reduce_bucket_size": 1e6, "overlap_comm": True},
        optimizer={"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        bf16={"enabled": "auto"},
        train_batch_size="auto",
        gradient_accumulation_steps=2,
        gradient_clipping=1.0,
        wall_clock_breakdown=False,
    )
    config = deepspeed_config(args(path))
    assert config["zero_optimization"] == {"stage": 2, "reduce_bucket_size": 1e6, "overlap_comm": True}
    assert config["wall_clock_breakdown"] is False
    assert config["gradient_accumulation_steps"] == "auto", "a global batch is one batch of the trainer"
    assert "optimizer" not in config


def test_every_key_that_cannot_be_used_is_named(file):
    path = file(
        zero_optimization={"stage": 2, "reduce_bucket": 5, "compute_grad_norm": False},
        optimizer={"type": "AdamW", "params": {"lr": 3e-4}},
        scheduler={"type": "WarmupLR"},
        tensorboard={"enabled": True},
        gradient_acumulation_steps=2,
        pipeline={"stages": 2},
    )
    lines = problems(args(path))
    assert all(line.startswith(f"--deepspeed: {path}: ") for line in lines)
    found = [re.sub("; (nearest|valid): .*", "", line.removeprefix(f"--deepspeed: {path}: ")) for line in lines]
    assert found == [
        "tensorboard: cannot be used; remove it and use --report_to tensorboard",
        "gradient_acumulation_steps: swift cannot use this key; remove it",
        "pipeline: swift cannot use this key; remove it",
        "optimizer: cannot be used; remove it and use --optim, --learning_rate and --adam_*",
        "scheduler: cannot be used; remove it and use --lr_scheduler_type and --warmup_ratio",
        "zero_optimization: compute_grad_norm false: a non-finite gradient would go unnoticed; remove it",
        "zero_optimization: reduce_bucket: Extra inputs are not permitted",
    ]


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ({"train_micro_batch_size_per_gpu": 8}, "train_micro_batch_size_per_gpu 8: --per_device_train_batch_size is 4"),
        ({"gradient_accumulation_steps": 1}, "gradient_accumulation_steps 1: --gradient_accumulation_steps is 2"),
        ({"train_batch_size": 4}, "train_batch_size 4: per device x accumulation x processes is 8"),
        ({"gradient_clipping": 0.5}, "gradient_clipping 0.5: --max_grad_norm is 1.0"),
        ({"bf16": {"enabled": True}}, "bf16.enabled true: the weights are float32"),
    ],
)
def test_a_file_that_says_something_else_than_the_flags_is_refused(file, monkeypatch, content, line):
    monkeypatch.setenv("WORLD_SIZE", "1")
    (found,) = problems(args(file(zero_optimization={"stage": 2}, **content)))
    assert line in found


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ({"bf16": True}, "bf16 true: not an object"),
        ({"zero_optimization": True}, "zero_optimization true: not an object"),
        ({"zero_optimization": {"stage": "auto"}}, 'zero_optimization.stage "auto": not a stage; valid: 0, 1, 2, 3'),
        ({"zero_optimization": {"stage": True}}, "zero_optimization.stage true: not a stage"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage 4: not a stage"),
        ({"optimizer": {"params": []}}, "optimizer.params: not an object"),
    ],
)
def test_a_value_of_another_type_is_one_line(file, content, line):
    (problem,) = problems(args(file(**content)))
    assert line in problem and problem.startswith("--deepspeed: ")


def test_a_name_that_is_no_preset_and_no_file(tmp_path):
    (line,) = problems(args("zero4"))
    assert line.startswith("--deepspeed: zero4: neither a preset nor a file; nearest: zero")
    (tmp_path / "broken.json").write_text("{")
    assert "not JSON" in problems(args(tmp_path / "broken.json"))[0]


def test_a_missing_package_is_one_line(monkeypatch):
    monkeypatch.setattr(deepspeed.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ResourceError, match=r"--deepspeed: zero2: needs the package deepspeed") as caught:
        deepspeed.require_deepspeed(args("zero2"))
    assert caught.value.exit_code == 3
    require_sharding(args())


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"deepspeed": "zero2"}, "--fsdp: full_shard: both shard the model"),
        ({"torch_dtype": "float16"}, "--torch_dtype: float16"),
        ({"gradient_checkpointing_kwargs": {"use_reentrant": True}}, "--gradient_checkpointing_kwargs: use_reentrant"),
    ],
)
def test_fsdp_says_what_it_does_not_go_with(settings, line):
    with pytest.raises(ConfigError) as caught:
        require_sharding(args(fsdp="full_shard", **settings))
    assert [one for one in caught.value.problems if one.startswith(line)]


def test_the_best_of_checkpoints_without_state_cannot_be_loaded():
    wrong = {"save_only_model": True, "load_best_model_at_end": True}
    require_sharding(args(**wrong))
    with pytest.raises(ConfigError, match="--deepspeed zero2 cannot load"):
        require_sharding(args("zero2", **wrong))
    with pytest.raises(ConfigError, match="--fsdp full_shard cannot load"):
        require_sharding(args(fsdp="full_shard", **wrong))


def test_the_plan_says_how_the_model_is_sharded():
    ways = args(), args("zero3"), args(fsdp="full_shard"), args(fsdp="full_shard", fsdp_replicas=2)
    assert [describe(one) for one in ways] == ["", ", ZeRO-3", ", FSDP", ", FSDP of 2 copies"]
