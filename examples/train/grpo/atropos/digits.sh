#!/usr/bin/env bash
# An Atropos environment trains a tiny random model on a CPU: message API, policy server and environment from one command.
#
# Needs atroposlib: `make install` has it beside the environment; elsewhere pip install -r requirements/atropos.txt.
set -euo pipefail
cd "$(dirname "$0")/../../../.."

work=output/atropos
mkdir -p "$work"
python examples/tiny/build.py "$work/model" --arch qwen2 --size tiny

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

swift rlhf \
    --rlhf_type grpo \
    --loss_type dapo \
    --rollout_source atropos \
    --atropos_env "python examples/train/grpo/atropos/digits_env.py serve" \
    --model "$work/model" \
    --infer_backend transformers \
    --train_type full \
    --gradient_checkpointing false \
    --num_generations 8 \
    --max_length 64 \
    --max_completion_length 16 \
    --per_device_train_batch_size 32 \
    --beta 0 \
    --learning_rate 1e-3 \
    --max_steps 40 \
    --logging_steps 1 \
    --report_to none \
    --output_dir "$work/run" \
    "$@"
