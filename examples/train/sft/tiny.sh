#!/usr/bin/env bash
# Everything from nothing on a laptop: build a tiny model, teach it, ask it. Run it in the repository's root.
set -euo pipefail
out=output/tiny-sft
mkdir -p "$out"
python examples/tiny/build.py "$out/base" --arch qwen2 --size tiny
python examples/train/sft/make_sums.py "$out/sums.jsonl" --rows 13440
swift sft \
    --model "$out/base" \
    --dataset "$out/sums.jsonl" \
    --tuner_type full \
    --gradient_checkpointing false \
    --learning_rate 2e-3 \
    --warmup_ratio 0.05 \
    --num_train_epochs 1 \
    --per_device_train_batch_size 64 \
    --gradient_accumulation_steps 1 \
    --logging_steps 20 \
    --add_version false \
    --output_dir "$out/run"
python examples/train/sft/make_sums.py "$out/questions.jsonl" --rows 50 --seed 1
swift infer \
    --model "$out/run/checkpoint-210" \
    --dataset "$out/questions.jsonl" \
    --max_completion_length 64 \
    --temperature 0 \
    --result_path "$out/answers.jsonl"
