#!/usr/bin/env bash
# Everything that makes tokens older than the weights they train, on a CPU in a minute: sampling a batch ahead in a
# process of its own, groups without signal replaced while others decode, training on groups as they are scored, a
# replay buffer, and second tries for prompts that failed. The correction (mismatch/...) and the ages
# (off_policy/mean, off_policy/max) in the log show what that costs; docs/algorithms.md explains each setting.
#
# The model is random and knows nothing, so the reward is one that it can earn by chance: short completions.
set -euo pipefail
cd "$(dirname "$0")/../../.."

work=output/off-policy
mkdir -p "$work"
python examples/tiny/build.py "$work/model" --arch qwen2 --size tiny
python examples/demo/problems.py "$work/data" --train_rows 200

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

swift rlhf \
    --rlhf_type grpo \
    --loss_type dapo \
    --model "$work/model" \
    --dataset "$work/data/train.jsonl" \
    --external_plugins examples/train/grpo/plugin/plugin.py \
    --reward_funcs short_answer \
    --train_type full \
    --gradient_checkpointing false \
    --num_generations 8 \
    --temperature 1.0 \
    --max_completion_length 32 \
    --per_device_train_batch_size 32 \
    --beta 0 \
    --infer_backend transformers \
    --vllm_mode dedicated \
    --async_generate true \
    --dynamic_sample true \
    --streaming_partial_batch true \
    --replay_buffer_size 16 \
    --reroll_start_fraction 0.5 \
    --rollout_importance_sampling_mode token_truncate \
    --off_policy_sequence_mask_delta 0.1 \
    --learning_rate 1e-3 \
    --max_steps 20 \
    --logging_steps 2 \
    --report_to none \
    --output_dir "$work/run" \
    "$@"
