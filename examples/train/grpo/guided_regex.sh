#!/usr/bin/env bash
# Completions that match a regular expression: here one digit between tags, which `accuracy` reads.
#
# The model (0.6M parameters) is random. Without the expression it writes noise and is never right; with it one answer in
# ten is, and it soon finds that sums here are 7, 8 or 9. Guided sampling biases the gradient, which the run says
# (docs/sampling_extras.md). Runs on a CPU in half a minute; needs the package xgrammar, which vLLM brings along.
set -euo pipefail
cd "$(dirname "$0")/../../.."

work=output/guided-regex
mkdir -p "$work"
python examples/tiny/build.py "$work/model" --arch qwen2 --size tiny
python - "$work/sums.jsonl" <<'PYTHON'
import json, random, sys

draw = random.Random(0)
with open(sys.argv[1], "w") as lines:
    for _ in range(2000):
        total = draw.choice((7, 8, 9))
        part = draw.randint(0, total)
        lines.write(json.dumps({"query": f"{part}+{total - part}=", "solution": str(total)}) + "\n")
PYTHON

swift rlhf \
    --rlhf_type grpo \
    --loss_type dapo \
    --model "$work/model" \
    --dataset "$work/sums.jsonl" \
    --vllm_guided_decoding_regex '<answer>\d</answer>' \
    --reward_funcs accuracy \
    --train_type full \
    --num_generations 8 \
    --temperature 1.0 \
    --max_length 64 \
    --max_completion_length 20 \
    --per_device_train_batch_size 64 \
    --learning_rate 1e-3 \
    --beta 0 \
    --max_steps 60 \
    --logging_steps 10 \
    --report_to none \
    --output_dir "$work/run" \
    "$@"
