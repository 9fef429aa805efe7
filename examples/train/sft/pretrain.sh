#!/usr/bin/env bash
# Pre-training from nothing on a laptop: a tiny model reads stories. Run it in the repository's root.
set -euo pipefail
out=output/tiny-pt
mkdir -p "$out"
python examples/tiny/build.py "$out/base" --arch qwen2 --size tiny
python examples/train/sft/make_stories.py "$out/stories.jsonl" --rows 2000
python examples/train/sft/make_stories.py "$out/held_out.jsonl" --rows 100 --seed 1
swift pt \
    --model "$out/base" \
    --dataset "$out/stories.jsonl" \
    --val_dataset "$out/held_out.jsonl" \
    --tuner_type full \
    --max_length 512 \
    --packing true \
    --packing_strategy bfd_split \
    --gradient_checkpointing false \
    --learning_rate 2e-3 \
    --warmup_ratio 0.05 \
    --num_train_epochs 2 \
    --per_device_train_batch_size 8 \
    --gradient_accumulation_steps 1 \
    --per_device_eval_batch_size 8 \
    --eval_steps 50 \
    --logging_steps 10 \
    --add_version false \
    --output_dir "$out/run"
