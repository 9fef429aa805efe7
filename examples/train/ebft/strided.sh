#!/usr/bin/env bash
# Strided EBFT on plain text, from nothing on a laptop: a tiny model reads tales (cross-entropy), then learns to
# continue them so that its continuations have the features of the text. Run it in the repository's root.
set -euo pipefail
out=output/tiny-ebft
seed=${SEED:-42}
mkdir -p "$out"
python examples/tiny/build.py "$out/base" --arch qwen2 --size tiny
python examples/train/ebft/make_tales.py "$out/tales.jsonl" --rows 2000
python examples/train/ebft/make_tales.py "$out/held_out.jsonl" --rows 16 --seed 1
common=(
    --rlhf_type ebft
    --ebft_mode strided
    --val_dataset "$out/held_out.jsonl"
    --tuner_type full
    --gradient_checkpointing false
    --ebft_stride 16
    --per_device_eval_batch_size 16
    --lr_scheduler_type constant
    --add_version false
)
swift rlhf "${common[@]}" \
    --model "$out/base" \
    --dataset "$out/tales.jsonl" \
    --ebft_rl_coef 0 \
    --ebft_ce_coef 1 \
    --learning_rate 2e-3 \
    --per_device_train_batch_size 8 \
    --max_steps 45 \
    --eval_steps 45 \
    --output_dir "$out/read"
swift rlhf "${common[@]}" \
    --model "$out/read/checkpoint-45" \
    --dataset "$out/tales.jsonl" \
    --ebft_rl_coef "${RL:-1}" \
    --ebft_ce_coef "${CE:-1}" \
    --learning_rate 3e-4 \
    --per_device_train_batch_size 4 \
    --seed "$seed" \
    --data_seed "$seed" \
    --max_steps 20 \
    --eval_steps 20 \
    --output_dir "$out/ebft-$seed"
