"""The command lines of the 3.x GRPO guide parse unchanged; what they need of later parts is one line per part."""

import shlex

import pytest

from swift.arguments import later, parse
from swift.arguments.later import FEATURES, Feature
from swift.arguments.modes import MODES
from swift.flags import flags_of

COMMON = """
    --rlhf_type grpo --reward_funcs accuracy format --torch_dtype bfloat16 --num_train_epochs 1
    --save_total_limit 2 --logging_steps 5 --output_dir output --warmup_ratio 0.05 --dataloader_num_workers 4
    --dataset_num_proc 4 --temperature 0.9 --system 'examples/train/grpo/prompt.txt' --log_completions true
"""

MULTI_GPU = """
    --use_vllm true --vllm_device auto --vllm_max_model_len 8192 --train_type full --dataset 'AI-MO/NuminaMath-TIR#5000'
    --max_completion_length 2048 --per_device_train_batch_size 1 --per_device_eval_batch_size 1 --learning_rate 1e-6
    --gradient_accumulation_steps 2 --eval_steps 200 --save_steps 200 --max_length 4096 --deepspeed zero2
"""

ONE_GPU = """
    --model Qwen/Qwen2.5-7B --train_type lora --lora_rank 8 --lora_alpha 32 --target_modules all-linear
    --dataset 'AI-MO/NuminaMath-TIR#1000' --max_completion_length 1024 --per_device_train_batch_size 4
    --per_device_eval_batch_size 4 --learning_rate 1e-5 --gradient_accumulation_steps 1 --eval_steps 100
    --save_steps 100 --max_length 2048 --num_generations 4
"""

OFFLOAD = "--sleep_level 1 --offload_model true --offload_optimizer true --gc_collect_after_offload true"

COMMANDS = {
    "async on 7 + 1 devices": (
        COMMON + MULTI_GPU + "--model Qwen/Qwen2.5-7B --vllm_gpu_memory_utilization 0.7 --num_infer_workers 1"
        " --num_generations 7",
        [],
    ),
    "colocate on 8 devices": (
        COMMON + MULTI_GPU + OFFLOAD + " --model Qwen/Qwen2.5-1.5B --vllm_gpu_memory_utilization 0.5"
        " --num_infer_workers 8 --num_generations 8 --log_completions true",
        [],
    ),
    "one device, PyTorch": (COMMON + ONE_GPU, []),
    "one device, vLLM": (
        COMMON + ONE_GPU + OFFLOAD + " --vllm_gpu_memory_utilization 0.5 --use_vllm true",
        [],
    ),
    "DAPO on 8 devices": (
        """
        --rlhf_type grpo --model Qwen/Qwen2.5-1.5B --reward_funcs accuracy soft_overlong --max_completion_length 4096
        --soft_cache_length 819 --epsilon 0.2 --epsilon_high 0.28 --dynamic_sample true --overlong_filter true
        --max_resample_times 3 --use_vllm true --vllm_gpu_memory_utilization 0.6 --num_infer_workers 8
        --train_type full --torch_dtype bfloat16 --dataset AI-MO/NuminaMath-TIR#5000 --num_train_epochs 1
        --per_device_train_batch_size 4 --per_device_eval_batch_size 4 --learning_rate 1e-6 --eval_steps 1000
        --save_steps 1000 --save_total_limit 2 --logging_steps 5 --warmup_ratio 0.05 --dataloader_num_workers 4
        --dataset_num_proc 4 --num_generations 8 --temperature 1.0 --top_p 1.0 --deepspeed zero2
        --log_completions true --num_iterations 1 --report_to tensorboard wandb --beta 0.0
        """,
        [],
    ),
    "external server": (
        COMMON + ONE_GPU + "--vllm_server_host 10.0.0.1 --vllm_server_port 8001 --vllm_server_timeout 60",
        [],
    ),
}


@pytest.mark.parametrize(("command", "waiting"), COMMANDS.values(), ids=COMMANDS)
def test_a_command_of_the_guide_parses_and_names_the_parts_it_waits_for(command, waiting):
    resolved = parse("rlhf", shlex.split(command), {})
    lines = resolved.later()
    assert [line.split(":")[0] for line in lines] == waiting
    assert all(" come" in line and "part of swift; " in line and "\n" not in line for line in lines)


@pytest.mark.parametrize(("command", "waiting"), COMMANDS.values(), ids=COMMANDS)
def test_following_the_advice_makes_the_command_run_today(command, waiting):
    words = shlex.split(command)
    for line in parse("rlhf", words, {}).later():
        advice = line.split("; ", 1)[1]
        use = advice.removeprefix("use ").split(" and drop ")[0] if advice.startswith("use") else ""
        drop = advice.split("drop ")[1].split() if "drop " in advice else []
        words += use.split()
        for flag in drop:
            at = words.index(flag)
            del words[at : at + 2]
    resolved = parse("rlhf", words, {})
    assert resolved.later() == []


@pytest.fixture
def unfinished(monkeypatch):
    """A table of its own, because the real one becomes shorter."""
    monkeypatch.setattr(
        later,
        "FEATURES",
        (
            Feature(
                "Speed", "so many things come", {"entropy_coef": (0.0,), "log_entropy": (False,), "delta": (None,)}
            ),
            Feature("Engines", "another loss comes", {"loss_type": ("dapo", "grpo")}),
        ),
    )


@pytest.mark.usefixtures("unfinished")
def test_one_line_lists_everything_that_turns_a_feature_off():
    words = "--entropy_coef 0.1 --log_entropy true --delta 4 --loss_type gspo"
    resolved = parse("rlhf", shlex.split(f"{COMMANDS['one device, vLLM'][0]} {words}"), {})
    assert resolved.later() == [
        "--entropy_coef: 0.1: so many things come with the Speed part of swift; use --entropy_coef 0.0 "
        "--log_entropy false and drop --delta",
        "--loss_type: gspo: another loss comes with the Engines part of swift; use --loss_type dapo",
    ]


@pytest.mark.usefixtures("unfinished")
def test_a_value_of_a_preset_that_comes_later_is_refused_under_its_own_name():
    (line,) = parse("rlhf", shlex.split(f"{COMMANDS['one device, vLLM'][0]} --preset sapo"), {}).later()
    assert line.startswith("--loss_type: sapo: ")


@pytest.mark.parametrize(("feature", "name"), [(item, name) for item in FEATURES for name in item.off])
def test_what_comes_later_parses_and_is_refused_in_one_line(feature, name):
    flag, off = flags_of(MODES["rlhf"])[name], feature.off[name]
    given = {"bool": "true", "int": "7", "float": "0.5", "str": "x"}
    text = next((str(one) for one in flag.choices if one not in off), given[flag.kind])
    good = ["--rlhf_type", "grpo", "--model", "m", "--dataset", "d", "--reward_funcs", "accuracy"]
    models = ["--reward_model", "r"] if name.startswith("reward_model") else []
    lines = parse("rlhf", [*good, *models, f"--{name}", text], {}).later()
    assert len(lines) == 1
    assert lines[0].startswith(f"--{name}: ")
    assert f"with the {feature.part} part of swift" in lines[0]


def test_the_defaults_need_nothing_of_a_later_part():
    good = {
        "rlhf": "--rlhf_type grpo --model m --dataset d --reward_funcs accuracy",
        "sft": "--model m --dataset d",
        "infer": "--model m",
        "reward-test": "--reward_funcs accuracy --dataset d",
        "merge-lora": "--adapters a",
    }
    for mode, words in good.items():
        assert later.check(parse(mode, words.split(), {}).args) == []


def test_the_server_mode_parses():
    resolved = parse("rollout", ["--model", "m", "--vllm_tensor_parallel_size", "2", "--port", "9000"], {})
    assert resolved.args.port == 9000
    assert resolved.later() == []


def test_every_row_of_the_table_names_settings_that_exist():
    names = {name for cls in MODES.values() for name in flags_of(cls)}
    for feature in FEATURES:
        assert set(feature.off) <= names
