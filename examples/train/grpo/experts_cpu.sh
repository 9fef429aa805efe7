#!/usr/bin/env bash
# GRPO of a tiny mixture of experts on a CPU, without a network: LoRA on attention and on all experts, the load-balancing
# loss of the routers, and routing replay: the trainer's passes use the experts that the engine chose.
#
# Log lines have aux_loss (at least 2, the number of experts of a token, where all experts have equal shares) and
# routing/tokens_differ_frac (share of tokens for which the trainer's router would choose others: 0 as long as both are
# float32). The model is random and knows nothing, so the reward is one that it can earn by chance: short completions.
set -euo pipefail
cd "$(dirname "$0")/../../.."

work=output/experts
mkdir -p "$work"
python examples/tiny/build.py "$work/model" --arch qwen3_moe --size nano
python examples/demo/problems.py "$work/data" --train_rows 200

swift rlhf \
    --rlhf_type grpo \
    --loss_type dapo \
    --model "$work/model" \
    --dataset "$work/data/train.jsonl" \
    --external_plugins examples/train/grpo/plugin/plugin.py \
    --reward_funcs short_answer \
    --tuner_type lora \
    --target_modules q_proj k_proj v_proj o_proj \
    --target_parameters experts.gate_up_proj experts.down_proj \
    --router_aux_loss_coef 0.001 \
    --moe_router_replay rollout \
    --num_generations 8 \
    --max_completion_length 32 \
    --per_device_train_batch_size 32 \
    --learning_rate 1e-2 \
    --beta 0 \
    --max_steps 20 \
    --logging_steps 5 \
    --report_to none \
    --output_dir "$work/run" \
    "$@"
