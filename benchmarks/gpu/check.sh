#!/bin/sh
# What one GPU says of swift: sh benchmarks/gpu/check.sh OUT [--small] [--only NAME ...]
#
# Needs a clone, Python with torch, transformers, peft and accelerate, and no network; at most nine minutes. Other packages that
# swift needs come from WHEELS, a folder of wheels; a wheel may lie there in parts, NAME.whl.part-aa, NAME.whl.part-ab, ...
# Each check appends a line to OUT/check.jsonl as it ends; OUT/gpu-<device>-<date>.json holds all of them.
# --small: a small model, on the CPU where there is no GPU.
set -eu
if [ $# -lt 1 ]; then echo "usage: sh benchmarks/gpu/check.sh OUT [--small] [--only NAME ...]" >&2; exit 2; fi
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
out=$(cd "$1" && pwd)
shift
PYTHON=${PYTHON:-python3}
PYTHONPATH=$(cd "$here/../.." && pwd)${PYTHONPATH:+:$PYTHONPATH}
if [ -n "${WHEELS:-}" ]; then
    place=$(mktemp -d)
    trap 'rm -rf "$place"' EXIT
    for part in "$WHEELS"/*.whl "$WHEELS"/*.whl.part-*; do
        if [ -e "$part" ]; then cat "$part" >> "$place/$(basename "${part%.part-*}")"; fi
    done
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --target "$place/site" "$place"/*.whl
    PYTHONPATH=$PYTHONPATH:$place/site
fi
export PYTHONPATH HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE=1
"$PYTHON" "$here/check.py" "$out" "$@"
