#!/usr/bin/env bash
# vLLM without a GPU, on a laptop with two cores, in the mode of your choice; no network needed.
#
#   bash examples/train/grpo/vllm/cpu.sh                                                    colocate: one process
#   bash examples/train/grpo/vllm/cpu.sh --vllm_mode dedicated --async_generate true        vLLM on a core of its own
#   bash examples/train/grpo/vllm/cpu.sh --sleep_level 1                                    its KV cache is given back
#
# Without an accelerator groups of CPU cores stand for devices (`cpu:0`, `cpu:1`), so every mode of a large machine can be
# tried here. The model (0.6M parameters) is random and knows nothing, so the reward is one that it can earn by chance: short completions.
# To see vLLM train a model that calculates: `sh examples/demo.sh --use_vllm true`.
set -euo pipefail
cd "$(dirname "$0")/../../../.."

work=output/vllm-cpu
mkdir -p "$work"
python examples/tiny/build.py "$work/model" --arch qwen2 --size tiny
python examples/demo/problems.py "$work/data" --train_rows 200

swift rlhf \
    --rlhf_type grpo \
    --loss_type dapo \
    --model "$work/model" \
    --dataset "$work/data/train.jsonl" \
    --external_plugins examples/train/grpo/plugin/plugin.py \
    --reward_funcs short_answer \
    --use_vllm true \
    --vllm_enforce_eager true \
    --train_type full \
    --num_generations 8 \
    --temperature 1.0 \
    --max_length 64 \
    --max_completion_length 32 \
    --per_device_train_batch_size 32 \
    --learning_rate 1e-3 \
    --beta 0 \
    --max_steps 20 \
    --logging_steps 5 \
    --report_to none \
    --output_dir "$work/run" \
    "$@"
