#!/usr/bin/env bash
# Three machines: two sample as servers, one trains.
#
#   ROLE=server  SWIFT_API_KEY=... bash .../trainer_and_server.sh                                  on 10.0.0.1 and 10.0.0.2
#   ROLE=trainer SWIFT_API_KEY=... SERVER="10.0.0.1 10.0.0.2" bash .../trainer_and_server.sh       on the third
#
# A server can be stopped and started again at any time; the trainer waits for it (--vllm_server_timeout seconds), sends
# it the present weights and goes on. SERVER may name any number of addresses. ENGINES: one for each GPU of a server.
#
# Batch: 1 per device x 8 processes x 2 micro-batches = 16 completions = 2 prompts x 8 completions per step.
set -euo pipefail
cd "$(dirname "$0")/../../../.."

: "${SWIFT_API_KEY:?set SWIFT_API_KEY to a long random text, the same on both machines}"
export SWIFT_API_KEY  # server and trainer read it there: a command line can be read by other users of the machine
MODEL=${MODEL:-Qwen/Qwen2.5-7B-Instruct}

if [ "${ROLE:?server or trainer}" = server ]; then
    exec swift rollout \
        --model "$MODEL" \
        --host 0.0.0.0 \
        --port "${PORT:-8000}" \
        --vllm_max_model_len 4096 \
        --vllm_data_parallel_size "${ENGINES:-8}" \
        "$@"
fi

export NPROC_PER_NODE=${NPROC_PER_NODE:-8}
swift rlhf \
    --rlhf_type grpo \
    --loss_type dapo \
    --model "$MODEL" \
    --dataset "${DATASET:-AI-MO/NuminaMath-TIR#5000}" \
    --system examples/train/grpo/prompt.txt \
    --reward_funcs accuracy format \
    --vllm_server_host ${SERVER:?addresses of the machines with ROLE=server} \
    --vllm_server_port "${PORT:-8000}" \
    --vllm_server_timeout 600 \
    --async_generate true \
    --train_type full \
    --deepspeed zero2 \
    --num_generations 8 \
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
    --output_dir output/grpo-trainer \
    "$@"
