#!/bin/sh
# A model learns to calculate, from nothing, on a CPU: `make demo`, or `sh examples/demo.sh` with swift on the PATH.
#
#   1. build a tiny model with random weights                              examples/tiny/build.py
#   2. swift sft: it imitates a teacher who often writes down a wrong answer; kept in .cache/demo for the next time
#   3. swift rlhf --rlhf_type grpo: it is rewarded for right answers, and leaves the teacher behind
#   4. swift infer before and after, over held-out problems at temperature 1; the table, and the target
#
# Ends with exit code 1 if the accuracy before is above 0.45 or the accuracy after is below 0.75.
#
# Your own model and data: steps 1 and 2 are left out, there is no target, and further words go to swift rlhf:
#
#   MODEL=Qwen/Qwen2.5-1.5B-Instruct DATASET='AI-MO/NuminaMath-TIR#2000' HELD_OUT=my/held_out.jsonl \
#       LENGTH=1024 STEPS=200 SYSTEM=examples/train/grpo/prompt.txt sh examples/demo.sh \
#       --train_type lora --learning_rate 1e-4 --gradient_checkpointing true \
#       --per_device_train_batch_size 8 --gradient_accumulation_steps 8
#
# HELD_OUT must hold no row of DATASET; both need a prompt and a `solution` (docs/data.md).
set -eu
cd "$(dirname "$0")/.."

MODEL=${MODEL:-}                # a folder or hub id; empty: the tiny model
DATASET=${DATASET:-}            # together with HELD_OUT; empty: the problems of examples/demo/problems.py
HELD_OUT=${HELD_OUT:-}
SYSTEM=${SYSTEM:-}              # system prompt, text or file; empty: none
SFT_STEPS=${SFT_STEPS:-400}
STEPS=${STEPS:-200}             # of GRPO
LENGTH=${LENGTH:-48}            # most tokens of a completion
SEED=${SEED:-0}                 # of everything: weights, data, order, sampling
CACHE=${CACHE:-.cache/demo}
OUT=${OUT:-output/demo/$(date +%Y%m%d-%H%M%S)}

if [ -n "$DATASET" ] && [ -z "$HELD_OUT" ]; then
    echo "demo: HELD_OUT: missing: DATASET needs other rows to compare before and after; give both" >&2
    exit 2
fi
target="--at_most 0.45 --at_least 0.75"
if [ -n "$MODEL$DATASET" ]; then target=; fi

mkdir -p "$OUT"
if [ -z "$DATASET" ]; then
    python examples/demo/problems.py "$OUT/data" --sft_rows $((SFT_STEPS * 64)) --seed "$SEED"
    DATASET=$OUT/data/train.jsonl
    HELD_OUT=$OUT/data/held_out.jsonl
fi

if [ -z "$MODEL" ]; then
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"      # a tiny model is no faster on more
    # Everything that decides what comes out of the tuning is in the key.
    key=$(cat examples/demo.sh examples/demo/problems.py examples/tiny/build.py swift/models/tiny.py | cksum | cut -d ' ' -f 1)
    MODEL=$CACHE/$key-$SFT_STEPS-$SEED
fi
if [ ! -d "$MODEL" ] && [ "${MODEL#"$CACHE"/}" != "$MODEL" ]; then
    echo "== supervised tuning of a tiny model on a careless teacher: $SFT_STEPS steps, kept in $MODEL"
    building=$CACHE/.building-$$
    trap 'rm -rf "$building"' EXIT
    trap 'exit 130' INT TERM
    python examples/tiny/build.py "$building/base" --arch qwen2 --size tiny --seed "$SEED"
    swift sft \
        --model "$building/base" \
        --dataset "$OUT/data/sft.jsonl" \
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
        --seed "$SEED" \
        --data_seed "$SEED" \
        --add_version false \
        --output_dir "$building/run"
    mv "$building/run/checkpoint-$SFT_STEPS" "$MODEL"
fi

answer() {      # answer MODEL FILE: one answer to each held-out problem; MODEL may be a LoRA checkpoint
    swift infer \
        --model "$1" \
        --dataset "$HELD_OUT" \
        ${SYSTEM:+--system "$SYSTEM"} \
        --temperature 1.0 \
        --max_completion_length "$LENGTH" \
        --result_path "$2"
}

echo "== before"
answer "$MODEL" "$OUT/before.jsonl"

echo "== reinforcement learning: $STEPS steps"
swift rlhf \
    --rlhf_type grpo \
    --loss_type dapo \
    --model "$MODEL" \
    --dataset "$DATASET" \
    ${SYSTEM:+--system "$SYSTEM"} \
    --reward_funcs accuracy format \
    --train_type full \
    --gradient_checkpointing false \
    --num_generations 8 \
    --temperature 1.0 \
    --max_completion_length "$LENGTH" \
    --per_device_train_batch_size 128 \
    --max_steps "$STEPS" \
    --learning_rate 1e-4 \
    --warmup_ratio 0.05 \
    --beta 0 \
    --logging_steps 10 \
    --log_completions true \
    --seed "$SEED" \
    --data_seed "$SEED" \
    --add_version false \
    --output_dir "$OUT" \
    "$@"

echo "== after"
answer "$OUT/checkpoint-$STEPS" "$OUT/after.jsonl"

echo
python examples/demo/report.py "$OUT/before.jsonl" "$OUT/after.jsonl" --curve "$OUT/images/reward.png" $target
