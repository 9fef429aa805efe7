#!/usr/bin/env bash
# Three machines with eight GPUs each: one samples as a Ray cluster that runs already, two train.
#
#   ROLE=engines                            bash examples/train/grpo/multi_node/ray_cluster.sh      on 10.0.0.1
#   ROLE=trainer NODE_RANK=0 ENGINES=10.0.0.1 MASTER_ADDR=10.0.0.2 bash .../ray_cluster.sh          on 10.0.0.2
#   ROLE=trainer NODE_RANK=1 ENGINES=10.0.0.1 MASTER_ADDR=10.0.0.2 bash .../ray_cluster.sh          on 10.0.0.3
#
# RAY_TOKEN_FILE holds the shared secret of the cluster, the same file content on 10.0.0.1 and 10.0.0.2:
#   python -c 'import secrets; print(secrets.token_hex(16), end="")' > token; chmod 600 token
#
# The first trainer drives the engines, so its machine joins the cluster, without devices: engines are placed on 10.0.0.1
# only, --num_infer_workers for each trainer machine. The cluster keeps running after the run. Further machines may join it
# with `ray start --address`.
#
# Batch: 1 per device x 16 processes x 2 micro-batches = 32 completions = 4 prompts x 8 completions per step.
set -euo pipefail
cd "$(dirname "$0")/../../../.."

export RAY_AUTH_MODE=token
export RAY_AUTH_TOKEN_PATH=${RAY_TOKEN_FILE:?file with the secret of the cluster}
export RAY_USAGE_STATS_ENABLED=0

if [ "${ROLE:?engines or trainer}" = engines ]; then
    exec ray start --head --block --port "${PORT:-6379}" --include-dashboard=false
fi

export NNODES=${NNODES:-2}
export NODE_RANK=${NODE_RANK:?0 on the first trainer, 1 on the second}
if [ "$NODE_RANK" = 0 ]; then
    ray start --address "${ENGINES:?address of the machine with ROLE=engines}:${PORT:-6379}" --num-cpus 0 --num-gpus 0
    trap 'ray stop' EXIT
fi

export MASTER_ADDR=${MASTER_ADDR:?the address of the first trainer}
export NPROC_PER_NODE=${NPROC_PER_NODE:-8}

swift rlhf \
    --rlhf_type grpo \
    --loss_type dapo \
    --model "${MODEL:-Qwen/Qwen2.5-7B-Instruct}" \
    --dataset "${DATASET:-AI-MO/NuminaMath-TIR#5000}" \
    --system examples/train/grpo/prompt.txt \
    --reward_funcs accuracy format \
    --use_vllm true \
    --vllm_mode dedicated \
    --num_infer_workers 4 \
    --ray_address "$ENGINES:${PORT:-6379}" \
    --ray_token_file "$RAY_TOKEN_FILE" \
    --async_generate true \
    --train_type full \
    --deepspeed zero3 \
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
    --output_dir output/grpo-ray \
    "$@"
