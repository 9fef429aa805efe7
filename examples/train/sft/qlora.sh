#!/usr/bin/env bash
# QLoRA: the base in 4 bits, a LoRA adapter on top. Needs bitsandbytes; `swift merge-lora` merges into the 16-bit base.
swift sft \
    --model Qwen/Qwen2.5-7B-Instruct \
    --dataset 'AI-MO/NuminaMath-TIR#2000' \
    --tuner_type lora \
    --lora_rank 16 \
    --quant_method bnb \
    --quant_bits 4 \
    --learning_rate 1e-4 \
    --num_train_epochs 1 \
    --max_length 2048 \
    --per_device_train_batch_size 1 \
    --gradient_accumulation_steps 16 \
    --save_steps 100 \
    --output_dir output/sft-qlora
