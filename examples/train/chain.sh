#!/bin/sh
# The whole chain on a CPU: supervised tuning, a reward model, GRPO with that reward model, merge, answers.
#
# A tiny model learns to answer with one of three letters (sft). Pairs teach a reward model which one is right (rm). GRPO
# with it as the only reward trains an adapter, which is merged. Ends with exit code 1 unless the merged model is right
# more often than the first one on held-out rows. Further words go to swift rlhf --rlhf_type grpo.
set -eu
cd "$(dirname "$0")/../.."

OUT=${OUT:-output/chain/$(date +%Y%m%d-%H%M%S)}
SFT_STEPS=${SFT_STEPS:-150}
RM_STEPS=${RM_STEPS:-150}
GRPO_STEPS=${GRPO_STEPS:-80}
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"      # a tiny model is no faster on more

python examples/train/chain/letters.py write "$OUT/data"
python examples/tiny/build.py "$OUT/base" --arch qwen2 --size tiny --seed 0

echo "== sft"
swift sft \
    --model "$OUT/base" \
    --dataset "$OUT/data/sft.jsonl" \
    --tuner_type full \
    --gradient_checkpointing false \
    --per_device_train_batch_size 64 \
    --gradient_accumulation_steps 1 \
    --max_steps "$SFT_STEPS" \
    --learning_rate 2e-3 \
    --logging_steps 50 \
    --report_to none \
    --add_version false \
    --output_dir "$OUT/sft"

echo "== reward model"
swift rlhf \
    --rlhf_type rm \
    --model "$OUT/sft/checkpoint-$SFT_STEPS" \
    --dataset "$OUT/data/rm.jsonl" \
    --tuner_type full \
    --gradient_checkpointing false \
    --per_device_train_batch_size 64 \
    --gradient_accumulation_steps 1 \
    --max_steps "$RM_STEPS" \
    --learning_rate 1e-3 \
    --logging_steps 50 \
    --report_to none \
    --add_version false \
    --output_dir "$OUT/rm"

echo "== grpo"
swift rlhf \
    --rlhf_type grpo \
    --loss_type dapo \
    --model "$OUT/sft/checkpoint-$SFT_STEPS" \
    --reward_model "$OUT/rm/checkpoint-$RM_STEPS" \
    --dataset "$OUT/data/grpo.jsonl" \
    --tuner_type lora \
    --lora_rank 16 \
    --gradient_checkpointing false \
    --num_generations 8 \
    --temperature 1.0 \
    --max_completion_length 8 \
    --per_device_train_batch_size 128 \
    --max_steps "$GRPO_STEPS" \
    --learning_rate 2e-3 \
    --beta 0 \
    --logging_steps 10 \
    --report_to none \
    --add_version false \
    --output_dir "$OUT/grpo" \
    "$@"

echo "== merge"
swift merge-lora --adapters "$OUT/grpo/checkpoint-$GRPO_STEPS" --output_dir "$OUT/merged"

answer() {      # answer MODEL FILE: one answer to each held-out row
    swift infer \
        --model "$1" \
        --dataset "$OUT/data/held_out.jsonl" \
        --temperature 1.0 \
        --max_completion_length 8 \
        --result_path "$2"
}
echo "== answers"
answer "$OUT/sft/checkpoint-$SFT_STEPS" "$OUT/before.jsonl"
answer "$OUT/merged" "$OUT/after.jsonl"
python examples/train/chain/letters.py compare "$OUT/before.jsonl" "$OUT/after.jsonl"
