#!/usr/bin/env bash
# Supervised tuning with packed rows: no padding, and no row sees another. Give your model, data and folder.
set -euo pipefail
swift sft \
    --model "${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}" \
    --dataset "${DATASET:-AI-ModelScope/alpaca-gpt4-data-en#5000}" \
    --split_dataset_ratio 0.01 \
    --packing true \
    --max_length 4096 \
    --learning_rate 1e-4 \
    --num_train_epochs 1 \
    --per_device_train_batch_size 1 \
    --gradient_accumulation_steps 8 \
    --early_stopping_patience 3 \
    --load_best_model_at_end true \
    --eval_steps 100 \
    --save_steps 100 \
    --output_dir "${OUTPUT:-output/packing}"
