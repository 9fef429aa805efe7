"""`python quantised_plan_worker.py MODEL DATASET FLAGS`: bytes with and without numbers, as JSON."""

from __future__ import annotations

import contextlib
import gc
import json
import sys

import torch

from swift.arguments import parse
from swift.arguments.derived import Machine
from swift.models.attention.interface import enable_packed_attention
from swift.models.forward import TokenSequence, pack
from swift.models.policy import check_policy, load_policy
from swift.models.scoring import prepare_scoring, score_tokens
from swift.planning.devices import find_device
from swift.planning.kernels import as_on_gpu
from swift.planning.trace import Trace

STREAM = [TokenSequence(list(range(12)), list(range(200))) for _ in range(4)]


def held(policy, device):
    """Bytes of the weights, and the peaks of two passes."""
    trace = Trace(find_device("h100-80gb"), place=device.type)
    enable_packed_attention(policy)
    assert prepare_scoring(policy) is None
    found = {"parameters": sum(one.nbytes for one in policy.parameters())}
    with trace, as_on_gpu(trace) if device.type == "meta" else contextlib.nullcontext():
        trace.hold(policy)
        found["weights"] = trace.live
        tokens = pack(STREAM, device=device)
        for step in range(2):
            trace.reset_peak()
            score_tokens(policy, tokens)[0].sum().backward()
            gc.collect()
            found[f"peak {step}"], found[f"after {step}"] = trace.peak, trace.live
    return found


def main(model, dataset, *flags):
    words = f"--rlhf_type grpo --reward_funcs accuracy --model {model} --dataset {dataset} --tuner_type lora".split()
    args = parse("rlhf", [*words, *flags], {}, machine=Machine(True, 1)).args
    real = held(load_policy(args, device="cpu"), torch.device("cpu"))  # first: bitsandbytes keeps a table of a device
    meta = held(check_policy(args, weights=False).train(), torch.device("meta"))
    print(json.dumps([meta, real]))


if __name__ == "__main__":
    main(*sys.argv[1:])
