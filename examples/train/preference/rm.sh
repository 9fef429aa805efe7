#!/usr/bin/env bash
# A reward model. GRPO takes its checkpoint at once: --reward_model output/preference/rm/v0-.../checkpoint-400
# From nothing, on a CPU in a minute. Run it in the repository's root.
set -euo pipefail
out=output/preference
python examples/tiny/build.py "$out/base" --arch qwen2 --size nano
python examples/train/preference/make_pairs.py "$out/pairs.jsonl"
python examples/train/preference/make_pairs.py "$out/held_out.jsonl" --held_out
swift rlhf \
    --rlhf_type rm \
    --model "$out/base" \
    --dataset "$out/pairs.jsonl" \
    --val_dataset "$out/held_out.jsonl" \
    --tuner_type full \
    --center_rewards_coefficient 0.01 \
    --learning_rate 1e-3 \
    --max_steps 400 \
    --per_device_train_batch_size 16 \
    --gradient_accumulation_steps 1 \
    --per_device_eval_batch_size 64 \
    --eval_steps 100 \
    --logging_steps 20 \
    --output_dir "$out/rm" \
    "$@"
