#!/usr/bin/env bash
# Three machines with eight GPUs each; start it on all of them:
#
#   NODE_RANK=0 MASTER_ADDR=10.0.0.1 bash examples/train/grpo/multi_node/node.sh     on 10.0.0.1
#   NODE_RANK=1 MASTER_ADDR=10.0.0.1 bash examples/train/grpo/multi_node/node.sh     on the second
#   NODE_RANK=2 MASTER_ADDR=10.0.0.1 bash examples/train/grpo/multi_node/node.sh     on the third
#
# Every node trains on seven devices and gives its eighth to one Ray cluster of the run, which ends with it. Node 0 sends
# weights to all engines and collects what they sample. The machines need the same versions, the same files under the
# same paths (or hub ids), and open ports between them. --output_dir is written by node 0 only; --save_total_limit and
# resuming need it shared. NNODES and MASTER_PORT may be set too.
#
# Batch: 1 per device x 21 processes x 2 micro-batches = 42 completions = 6 prompts x 7 completions per step.
set -euo pipefail
cd "$(dirname "$0")/../../../.."

export NNODES=${NNODES:-3}
export NODE_RANK=${NODE_RANK:?0 on the first machine, 1 on the second, 2 on the third}
export MASTER_ADDR=${MASTER_ADDR:?the address of the first machine}
export MASTER_PORT=${MASTER_PORT:-29500}
export NPROC_PER_NODE=${NPROC_PER_NODE:-7}

swift rlhf \
    --rlhf_type grpo \
    --loss_type dapo \
    --model "${MODEL:-Qwen/Qwen2.5-7B-Instruct}" \
    --dataset "${DATASET:-AI-MO/NuminaMath-TIR#5000}" \
    --system examples/train/grpo/prompt.txt \
    --reward_funcs accuracy format \
    --use_vllm true \
    --vllm_mode dedicated \
    --num_infer_workers 1 \
    --async_generate true \
    --train_type full \
    --deepspeed zero3 \
    --num_generations 7 \
    --temperature 1.0 \
    --max_length 2048 \
    --max_completion_length 2048 \
    --per_device_train_batch_size 1 \
    --gradient_accumulation_steps 2 \
    --num_train_epochs 1 \
    --learning_rate 1e-6 \
    --warmup_ratio 0.05 \
    --beta 0 \
    --save_steps 200 \
    --save_total_limit 2 \
    --output_dir output/grpo-three-nodes \
    "$@"
