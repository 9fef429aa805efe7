#!/usr/bin/env bash
# A reward function of your own: the countdown task of plugin/plugin.py (reach `target` from `nums` with + - * /).
#
# plugin/plugin.py registers names (`orms["countdown"] = countdown`); --external_plugins loads the file, --reward_funcs
# picks names from it and from the built-in ones. Columns of the data (`nums`, `target`) arrive as keyword arguments.
#
# First without a model: what does the function pay for? Then the training, in which `countdown` counts three times as
# much as `format`. A call that takes longer than --reward_timeout seconds is killed and its samples are left out.
set -euo pipefail
cd "$(dirname "$0")/../../.."

work=output/countdown
mkdir -p "$work"
python - "$work/countdown.jsonl" <<'PYTHON'
import json, random, sys

draw = random.Random(0)
with open(sys.argv[1], "w") as lines:
    for _ in range(2000):
        a, b, c = (draw.randint(1, 25) for _ in range(3))
        target, gold = draw.choice([(a + b - c, f"{a}+{b}-{c}"), (a * b + c, f"{a}*{b}+{c}"), (a * (b - c), f"{a}*({b}-{c})")])
        query = f"Use each of the numbers {a}, {b}, {c} exactly once, with + - * / and brackets, to get {target}."
        lines.write(json.dumps({"query": query, "nums": [a, b, c], "target": target, "gold": gold}) + "\n")
PYTHON

swift reward-test \
    --dataset "$work/countdown.jsonl" \
    --external_plugins examples/train/grpo/plugin/plugin.py \
    --reward_funcs countdown \
    --gold_column gold

swift rlhf \
    --rlhf_type grpo \
    --loss_type dapo \
    --model Qwen/Qwen2.5-1.5B-Instruct \
    --dataset "$work/countdown.jsonl" \
    --system examples/train/grpo/prompt.txt \
    --external_plugins examples/train/grpo/plugin/plugin.py \
    --reward_funcs countdown format \
    --reward_weights 3 1 \
    --reward_timeout 5 \
    --train_type lora \
    --torch_dtype bfloat16 \
    --num_generations 8 \
    --temperature 1.0 \
    --max_completion_length 512 \
    --per_device_train_batch_size 8 \
    --gradient_accumulation_steps 4 \
    --max_steps 200 \
    --learning_rate 1e-4 \
    --beta 0.01 \
    --save_steps 100 \
    --output_dir "$work/run" \
    "$@"
