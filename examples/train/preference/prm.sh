#!/usr/bin/env bash
# A process reward model from a tiny model, on a CPU in a minute. Run it in the repository's root.
set -euo pipefail
out=output/preference
python examples/tiny/build.py "$out/base" --arch qwen2 --size nano
python examples/train/preference/make_pairs.py "$out/steps.jsonl" --steps
python examples/train/preference/make_pairs.py "$out/held_out_steps.jsonl" --steps --held_out
swift rlhf \
    --rlhf_type prm \
    --model "$out/base" \
    --dataset "$out/steps.jsonl" \
    --val_dataset "$out/held_out_steps.jsonl" \
    --tuner_type full \
    --learning_rate 3e-3 \
    --max_steps 600 \
    --per_device_train_batch_size 16 \
    --gradient_accumulation_steps 1 \
    --per_device_eval_batch_size 64 \
    --eval_steps 200 \
    --logging_steps 20 \
    --output_dir "$out/prm" \
    "$@"
