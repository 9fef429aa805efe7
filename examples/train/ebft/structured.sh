#!/usr/bin/env bash
# Structured EBFT on a CPU in three minutes: a tiny model that works some sums step by step and answers others at once
# comes closer to worked solutions, by its features alone. Compare eval_ebft/cfm_loss and eval_ebft/alignment in the two logging.jsonl.
# Run it in the repository's root; the first word is the folder for everything.
set -euo pipefail
out=${1:-output/ebft-structured}
mkdir -p "$out"
python examples/tiny/build.py "$out/tiny" --arch qwen2 --size tiny
python examples/train/sft/make_sums.py "$out/worked.jsonl" --rows 960
python examples/train/sft/make_sums.py "$out/direct.jsonl" --rows 960 --seed 2 --direct
python examples/train/sft/make_sums.py "$out/train.jsonl" --rows 4096 --references
python examples/train/sft/make_sums.py "$out/held_out.jsonl" --rows 64 --references --seed 1
swift sft \
    --model "$out/tiny" \
    --dataset "$out/worked.jsonl" "$out/direct.jsonl" \
    --tuner_type full \
    --gradient_checkpointing false \
    --learning_rate 2e-3 \
    --warmup_ratio 0.05 \
    --num_train_epochs 1 \
    --per_device_train_batch_size 64 \
    --gradient_accumulation_steps 1 \
    --report_to none \
    --add_version false \
    --output_dir "$out/base"
# the first run changes nothing: it measures the model before
for run in before trained; do
    set -- --learning_rate 3e-4 --max_steps 60 --eval_steps 10
    [ "$run" = trained ] || set -- --learning_rate 1e-12 --max_steps 1 --eval_steps 1
    swift rlhf \
        --rlhf_type ebft \
        --model "$out/base/checkpoint-30" \
        --dataset "$out/train.jsonl" \
        --val_dataset "$out/held_out.jsonl" \
        --tuner_type full \
        --gradient_checkpointing false \
        --num_generations 8 \
        --per_device_train_batch_size 64 \
        --max_completion_length 64 \
        --ebft_embed_method completion_mean \
        --report_to none \
        --add_version false \
        --output_dir "$out/$run" \
        "$@"
done
