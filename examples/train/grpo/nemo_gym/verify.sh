#!/usr/bin/env bash
# A server in NeMo Gym's protocol scores completions: digits.py gives the share of digits in the answer.
#
# The model (0.6M parameters) is random and knows nothing; its reward rises from 0.04 to above 0.9 in half a minute on a CPU.
#
# With a clone of NeMo Gym, instead of the last four lines before --model:
#     --nemo_gym_dir ~/Gym --nemo_gym_auto_start true \
#     --nemo_gym_config_paths resources_servers/reasoning_gym/configs/resources_only.yaml \
#     --nemo_gym_datasets '{"path": "resources_servers/reasoning_gym/data/example.jsonl", "server_name": "reasoning_gym"}'
# Agents of several turns also need `swift rollout --model MODEL --port 8000`, and here
#     --nemo_gym_mode run --vllm_server_base_url http://127.0.0.1:8000
set -euo pipefail
cd "$(dirname "$0")/../../../.."

work=output/nemo-gym
here=examples/train/grpo/nemo_gym
mkdir -p "$work"
python examples/tiny/build.py "$work/model" --arch qwen2 --size tiny
python "$here/digits.py" --rows "$work/rows.jsonl"

swift rlhf \
    --rlhf_type grpo \
    --loss_type dapo \
    --rollout_source nemo_gym \
    --reward_funcs environment \
    --nemo_gym_head http://127.0.0.1:11000 \
    --nemo_gym_command "python $here/digits.py --port 11000" \
    --dataset "$work/rows.jsonl" \
    --model "$work/model" \
    --train_type full \
    --num_generations 8 \
    --temperature 1.0 \
    --max_length 64 \
    --max_completion_length 16 \
    --per_device_train_batch_size 32 \
    --learning_rate 2e-3 \
    --beta 0 \
    --max_steps 60 \
    --logging_steps 10 \
    --report_to none \
    --output_dir "$work/run" \
    "$@"
