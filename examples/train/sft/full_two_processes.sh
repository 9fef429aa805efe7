#!/usr/bin/env bash
# Full tuning in two processes (two GPUs, or two CPU processes). A signal saves a checkpoint and ends with
# exit code 75; the same command with `--resume_from_checkpoint last` goes on from there.
NPROC_PER_NODE=2 swift sft \
    --model Qwen/Qwen2.5-0.5B \
    --template chatml \
    --dataset data/train.jsonl \
    --val_dataset data/val.jsonl \
    --tuner_type full \
    --learning_rate 1e-5 \
    --num_train_epochs 3 \
    --per_device_train_batch_size 2 \
    --gradient_accumulation_steps 8 \
    --eval_steps 50 \
    --save_steps 50 \
    --load_best_model_at_end true \
    --output_dir output/sft-full
