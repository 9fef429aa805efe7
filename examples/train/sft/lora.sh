#!/usr/bin/env bash
# Supervised LoRA tuning of a 0.5B model on one GPU, or slowly on a CPU.
# The loss counts what the assistant says; rows longer than max_length are left out and counted.
swift sft \
    --model Qwen/Qwen2.5-0.5B-Instruct \
    --dataset 'AI-MO/NuminaMath-TIR#2000' \
    --split_dataset_ratio 0.01 \
    --tuner_type lora \
    --lora_rank 16 \
    --lora_alpha 32 \
    --learning_rate 1e-4 \
    --warmup_ratio 0.05 \
    --num_train_epochs 1 \
    --max_length 2048 \
    --per_device_train_batch_size 4 \
    --gradient_accumulation_steps 4 \
    --save_steps 100 \
    --save_total_limit 2 \
    --output_dir output/sft-lora
