#!/usr/bin/env bash
# A mixture of experts of 30B parameters on eight GPUs of 80 GB: LoRA on attention and on all experts, weights sharded by
# FSDP, two vLLM engines of four devices each, which take turns with the trainer.
#
#   target_parameters      experts are one parameter of three dimensions per projection and layer; an adapter on it has
#                          rank lora_rank for each expert. Engines get it merged
#   router_aux_loss_coef   load-balancing loss (none: the coefficient of the model's config); watch aux_loss
#   moe_router_replay      the trainer's passes use the experts that vLLM chose (vLLM of at least 0.30). trainer: those of
#                          the trainer's first pass, for several updates of a rollout batch. Watch
#                          routing/tokens_differ_frac, and mismatch/k3 against a run with off
#
# Batch: 1 per device x 8 processes x 4 micro-batches = 32 completions = 4 prompts x 8 completions per step.
#
#   bash examples/train/grpo/vllm/experts_lora_8gpu.sh --dry_run true    checks everything, prints the plan, loads no weights
set -euo pipefail
cd "$(dirname "$0")/../../../.."

export NPROC_PER_NODE=${NPROC_PER_NODE:-8}

swift rlhf \
    --rlhf_type grpo \
    --loss_type dapo \
    --model Qwen/Qwen3-30B-A3B-Instruct-2507 \
    --dataset 'AI-MO/NuminaMath-TIR#5000' \
    --system examples/train/grpo/prompt.txt \
    --reward_funcs accuracy format \
    --use_vllm true \
    --num_infer_workers 8 \
    --vllm_tensor_parallel_size 4 \
    --vllm_gpu_memory_utilization 0.5 \
    --vllm_max_model_len 8192 \
    --sleep_level 1 \
    --fsdp full_shard \
    --gradient_checkpointing true \
    --tuner_type lora \
    --lora_rank 8 \
    --lora_alpha 16 \
    --target_modules q_proj k_proj v_proj o_proj \
    --target_parameters experts.gate_up_proj experts.down_proj \
    --router_aux_loss_coef 0.001 \
    --moe_router_replay rollout \
    --torch_dtype bfloat16 \
    --num_generations 8 \
    --temperature 1.0 \
    --max_length 4096 \
    --max_completion_length 2048 \
    --per_device_train_batch_size 1 \
    --gradient_accumulation_steps 4 \
    --num_train_epochs 1 \
    --learning_rate 1e-4 \
    --warmup_ratio 0.05 \
    --beta 0.0 \
    --save_steps 200 \
    --save_total_limit 2 \
    --log_completions true \
    --output_dir output/grpo-experts \
    "$@"
