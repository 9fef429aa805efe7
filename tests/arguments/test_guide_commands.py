"""The command lines of the 3.x GRPO guide parse unchanged."""

import shlex

import pytest

from swift.arguments import parse

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
        " --num_generations 7"
    ),
    "colocate on 8 devices": (
        COMMON + MULTI_GPU + OFFLOAD + " --model Qwen/Qwen2.5-1.5B --vllm_gpu_memory_utilization 0.5"
        " --num_infer_workers 8 --num_generations 8 --log_completions true"
    ),
    "one device, PyTorch": COMMON + ONE_GPU,
    "one device, vLLM": (COMMON + ONE_GPU + OFFLOAD + " --vllm_gpu_memory_utilization 0.5 --use_vllm true"),
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
        """
    ),
    "external server": (
        COMMON + ONE_GPU + "--vllm_server_host 10.0.0.1 --vllm_server_port 8001 --vllm_server_timeout 60"
    ),
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_command_of_the_guide_parses(command):
    resolved = parse("rlhf", shlex.split(command), {})
    assert not [note for note in resolved.notes if "known in ms-swift" in note]
