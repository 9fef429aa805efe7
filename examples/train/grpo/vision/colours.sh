#!/usr/bin/env bash
# A model learns to see, on a CPU, without a network:
#
#   1. build a tiny model that sees, with random weights                      examples/tiny/build.py
#   2. it imitates a teacher who knows red and guesses other colours          colours.py teach
#   3. swift rlhf --rlhf_type grpo: it is rewarded for the right colour of a dot, and learns the other three; eval_reward
#      is the share of right answers to held-out images
#
# Share of right answers to held-out images, before -> after: 0.41 -> 0.98 with seeds 0 and 1. Four and a half minutes on two
# cores of an AMD EPYC, beside other work.
#
#   bash examples/train/grpo/vision/colours.sh --max_steps 20    further flags come last and win
set -euo pipefail
cd "$(dirname "$0")/../../../.."

OUT=${OUT:-output/grpo-colours}
SEED=${SEED:-0}                 # of everything: images, weights, order, sampling
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}

python examples/train/grpo/vision/colours.py --seed "$SEED" data "$OUT/data"
python examples/tiny/build.py "$OUT/model" --arch qwen3_vl --size tiny --seed "$SEED"
python examples/train/grpo/vision/colours.py --seed "$SEED" teach "$OUT/model" "$OUT/data"

swift rlhf \
    --rlhf_type grpo \
    --loss_type dapo \
    --model "$OUT/model" \
    --dataset "$OUT/data/train.jsonl" \
    --val_dataset "$OUT/data/held_out.jsonl" \
    --external_plugins examples/train/grpo/vision/colours.py \
    --reward_funcs named \
    --tuner_type full \
    --freeze_vit false \
    --freeze_aligner false \
    --gradient_checkpointing false \
    --num_generations 8 \
    --num_generations_eval 2 \
    --max_completion_length 2 \
    --per_device_train_batch_size 192 \
    --max_steps 200 \
    --learning_rate 5e-4 \
    --warmup_ratio 0.05 \
    --entropy_coef 0.01 \
    --beta 0 \
    --logging_steps 10 \
    --eval_strategy steps \
    --eval_steps 50 \
    --save_strategy no \
    --report_to none \
    --seed "$SEED" \
    --data_seed "$SEED" \
    --output_dir "$OUT" \
    "$@"
