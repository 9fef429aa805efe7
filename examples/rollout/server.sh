#!/usr/bin/env bash
# A generation server for `bash examples/train/grpo/vllm/server.sh` on another machine (docs/rollout_server.md).
#
#   SWIFT_API_KEY=... bash examples/rollout/server.sh                                      one GPU
#   SWIFT_API_KEY=... bash examples/rollout/server.sh --vllm_data_parallel_size 4          four engines
#   SWIFT_API_KEY=... bash examples/rollout/server.sh --vllm_tensor_parallel_size 2        one engine on two GPUs
#   SWIFT_API_KEY=... bash examples/rollout/server.sh --vllm_enable_lora true --vllm_max_lora_rank 32    for adapters up to rank 32
#
# It prints `ready <url> ...` when it can be used. Everybody who has the key can use it and replace its weights, so the key
# belongs to the trainer alone; without a key the server listens on this machine only.
set -euo pipefail
cd "$(dirname "$0")/../.."

: "${SWIFT_API_KEY:?set SWIFT_API_KEY to a long random text, the same for server and trainer}"
export SWIFT_API_KEY  # the server reads it there: a command line can be read by other users of the machine

swift rollout \
    --model Qwen/Qwen2.5-7B-Instruct \
    --torch_dtype bfloat16 \
    --host 0.0.0.0 \
    --port "${PORT:-8000}" \
    --vllm_max_model_len 3072 \
    --vllm_gpu_memory_utilization 0.9 \
    "$@"
