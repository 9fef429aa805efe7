#!/usr/bin/env bash
# A tiny model that imitates the teacher of an example, and the example's data, made once: prints their folder.
#
#   bash examples/train/grpo/environments/student.sh calculator|guess
set -euo pipefail
cd "$(dirname "$0")/../../../.."

name=${1:-guess}
here=examples/train/grpo/environments
key=$(cat "$here/student.sh" "$here/$name.py" "$here/tools.jinja" swift/models/tiny.py | cksum | cut -d ' ' -f 1)
student=.cache/environments/$name-$key
if [ ! -d "$student" ]; then
    building=.cache/environments/.building-$$
    trap 'rm -rf "$building"' EXIT
    python examples/tiny/build.py "$building/base" --arch qwen2 --size tiny >&2
    python "$here/$name.py" "$building/data" >&2
    swift sft \
        --model "$building/base" \
        --dataset "$building/data/sft.jsonl" \
        --template "$here/tools.jinja" \
        --train_type full \
        --gradient_checkpointing false \
        --per_device_train_batch_size 64 \
        --gradient_accumulation_steps 1 \
        --num_train_epochs 1 \
        --learning_rate 2e-3 \
        --warmup_ratio 0.05 \
        --logging_steps 50 \
        --report_to none \
        --save_only_model true \
        --add_version false \
        --output_dir "$building/run" >&2
    mv "$building/run/checkpoint-400" "$building/model"
    rm -rf "$building/base" "$building/run"
    mv "$building" "$student"
fi
echo "$student"
