#!/usr/bin/env bash
# Distillation of a tuned tiny model into a fresh one, on a CPU in a minute. Run it in the repository's root.
set -euo pipefail
out=output/preference
python examples/tiny/build.py "$out/base" --arch qwen2 --size nano
python examples/train/preference/make_pairs.py "$out/chats.jsonl" --chats
swift sft \
    --model "$out/base" \
    --dataset "$out/chats.jsonl" \
    --tuner_type full \
    --learning_rate 3e-3 \
    --max_steps 400 \
    --per_device_train_batch_size 16 \
    --gradient_accumulation_steps 1 \
    --logging_steps 100 \
    --output_dir "$out/teacher" \
    --add_version false
swift rlhf \
    --rlhf_type gkd \
    --model "$out/base" \
    --teacher_model "$out/teacher/checkpoint-400" \
    --dataset "$out/chats.jsonl" \
    --split_dataset_ratio 0.1 \
    --tuner_type full \
    --lmbda 0.5 \
    --max_completion_length 4 \
    --learning_rate 3e-3 \
    --max_steps 200 \
    --per_device_train_batch_size 16 \
    --gradient_accumulation_steps 1 \
    --per_device_eval_batch_size 64 \
    --eval_on_start true \
    --eval_steps 100 \
    --logging_steps 20 \
    --output_dir "$out/gkd" \
    "$@"
