#!/usr/bin/env bash
# KTO: single answers, each good or bad. The KL term needs several rows in a batch.
# From nothing, on a CPU in a minute. Run it in the repository's root.
set -euo pipefail
out=output/preference
python examples/tiny/build.py "$out/base" --arch qwen2 --size nano
python examples/train/preference/make_pairs.py "$out/labels.jsonl" --labels
python examples/train/preference/make_pairs.py "$out/held_out.jsonl" --held_out
swift rlhf \
    --rlhf_type kto \
    --model "$out/base" \
    --dataset "$out/labels.jsonl" \
    --val_dataset "$out/held_out.jsonl" \
    --tuner_type full \
    --desirable_weight 1.0 \
    --undesirable_weight 1.0 \
    --learning_rate 3e-3 \
    --max_steps 200 \
    --per_device_train_batch_size 16 \
    --gradient_accumulation_steps 1 \
    --per_device_eval_batch_size 64 \
    --eval_steps 100 \
    --logging_steps 20 \
    --output_dir "$out/kto" \
    "$@"
