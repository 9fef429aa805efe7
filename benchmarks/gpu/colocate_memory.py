"""What the colocate cycle frees on a real device, and that it changes no bit of the training.

    python benchmarks/gpu/colocate_memory.py                          # vLLM, a model of 0.5B parameters, one GPU
    python benchmarks/gpu/colocate_memory.py --backend transformers   # where vLLM is not installed

For each sleep level, with and without offloading, a process of its own trains a few steps: publish, sample greedily,
sleep, one AdamW step in bfloat16 with float32 masters on token ids that do not depend on what was sampled. It prints a
table, writes benchmarks/results/colocate_memory-<date>.json and fails when

    parameters differ from those of level 0 without offloading, in any bit
    the model or the optimizer was on the device while the engine sampled although they should have been out
    sleeping or offloading freed less than half of what was expected
    the greedy samples differ (the engine woke with other weights)

Without an accelerator it runs the same steps on the CPU, for which `--backend transformers --size nano` is enough;
tensors then move within main memory, and the figures say little.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import record

LIMIT_S = 900.0
RESULT = "result: "
MEM = re.compile(r"(\w+)=(\S+)")
PROMPTS, PROMPT_TOKENS, TRAIN_TOKENS = 8, 64, 512


def main() -> int:
    """Measure, print, record; the exit code."""
    options = parse(sys.argv[1:])
    if options.variant:
        print(RESULT + json.dumps(one_variant(options)))
        return 0
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        options.model = options.model or build_model(Path(folder) / "model", options.size)
        for level in options.levels:
            for offload in (False, True):
                rows.append(in_a_process(options, level, offload))
                print(f"level {level}, offload {'on' if offload else 'off'}: done", flush=True)
    header = ["variant", "trainer", "optim", "engine_w", "engine_kv", "freed by trainer", "by engine",
              "free: training", "sampling", "seconds"]  # fmt: skip
    print(record.table(header, [cells(row) for row in rows]))
    problems = verdict(rows)
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    path = record.write("colocate_memory", rows, options.results, backend=options.backend, size=options.size)
    print(f"MiB while sampling; recorded in {path}")
    return 1 if problems else 0


def parse(words: list[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="vllm", choices=["vllm", "transformers"])
    parser.add_argument("--size", default="0.5b", help="0.5b, or a size of swift.models.tiny")
    parser.add_argument(
        "--levels", type=int, nargs="+", default=[0, 1, 2], help="sleep levels; the first is compared with"
    )
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps of a variant")
    parser.add_argument("--completions", type=int, default=64, help="samples of a step")
    parser.add_argument("--completion_tokens", type=int, default=128)
    parser.add_argument("--memory_share", type=float, default=0.4, help="of the device, for vLLM")
    parser.add_argument("--results", type=Path, help="folder of the JSON file")
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    return parser.parse_args(words)


def build_model(folder: Path, size: str) -> str:
    """A decoder with random weights."""
    from swift.models import tiny

    tiny.SHAPES["0.5b"] = tiny.Shape(hidden=1024, layers=32, heads=16, kv_heads=4, intermediate=4096, context=4096)
    return str(tiny.build_tiny(folder, size=size))


def in_a_process(options: argparse.Namespace, level: int, offload: bool) -> dict[str, Any]:
    """One variant, on a device that nothing was on before."""
    command = [
        sys.executable, __file__, "--variant", f"{level} {int(offload)}", "--model", options.model,
        "--backend", options.backend, "--steps", str(options.steps), "--completions", str(options.completions),
        "--completion_tokens", str(options.completion_tokens), "--memory_share", str(options.memory_share),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    found = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
    if done.returncode or not found:
        raise SystemExit(f"level {level}, offload {offload}: ended with {done.returncode}\n{done.stderr[-6000:]}")
    row: dict[str, Any] = json.loads(found[-1].removeprefix(RESULT))
    return row


def one_variant(options: argparse.Namespace) -> dict[str, Any]:
    """Train with one setting of the cycle; what was seen."""
    import torch

    from swift.observability.metrics import MetricStore
    from swift.rollout.engines.spec import EngineSpec, build_engine
    from swift.rollout.weight_sync.policy import PolicyWeights
    from swift.rollout.weight_sync.publisher import WeightPublisher
    from swift.trainers.colocate import ColocateCycle
    from swift.trainers.distributed import Collectives
    from swift.trainers.master_weights import keep_master_weights

    level, offload = map(int, options.variant.split())
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    dtype = torch.bfloat16
    torch.use_deterministic_algorithms(True, warn_only=True)
    model = load(options.model, dtype, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    keep_master_weights(optimizer)
    spec = EngineSpec(
        backend=options.backend, model=options.model, dtype="bfloat16", devices=(str(device),), eos_token_ids=(),
        max_model_len=PROMPT_TOKENS + options.completion_tokens + 1, memory_share=options.memory_share,
        sleep=level > 0, enforce_eager=True,
    )  # fmt: skip
    engine = build_engine(spec)
    ranks, metrics, lines = Collectives(), MetricStore(), []
    publisher = WeightPublisher(engine, source=lambda: PolicyWeights(model), ranks=ranks, timer=metrics.timer)
    cycle = ColocateCycle(
        engine,
        publisher,
        sleep_level=level,
        offload_model=bool(offload),
        offload_optimizer=bool(offload),
        gc_collect_after_offload=True,
        log=lines.append,
        metrics=metrics,
        ranks=ranks,
        device=device,
        copies_on_host=True,
    )
    cycle.attach(model, lambda: optimizer)
    cycle.rest()
    samples, values = [], {}
    began = time.monotonic()
    for step in range(options.steps):
        with cycle(step), metrics.timer("generate"):
            samples.append(sample(engine, step, options))
        with metrics.timer("train"):
            train(model, optimizer, step, device)
        values = metrics.commit(step + 1)
    engine.close()
    on_device = device.type != "cpu"
    return {
        "level": level,
        "offload": bool(offload),
        "device": torch.cuda.get_device_name(device) if on_device else "cpu",
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": time.monotonic() - began,
        "hand_over_s": metrics.flush().get("time/memory", 0.0),
        "peak_alloc_mib": torch.cuda.max_memory_allocated(device) / 2**20 if on_device else None,
        "metrics": {name: value for name, value in values.items() if name.startswith(("memory/", "health/"))},
        "last": {phase: figures(lines, phase) for phase in ("before", "generate", "after")},
        "lines": lines,
        "weights": digest(model),
        "samples": samples,
    }


def load(folder: str, dtype: Any, device: Any) -> Any:
    """The policy, in memory of its own: what is mapped from a file cannot be released."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    return model.train()


def sample(engine: Any, step: int, options: argparse.Namespace) -> str:
    """A digest of greedy completions."""
    from swift.types import Request, SamplingParams

    sampling = SamplingParams(options.completion_tokens, temperature=0.0)
    requests = [
        Request(f"{step}/{i}", prompt(i % PROMPTS), sampling) for i in range(options.completions)
    ]  # fmt: skip
    found = {one.request_id: one.token_ids for one in engine.generate(requests)}
    assert len(found) == options.completions
    return hashlib.blake2b(repr(sorted(found.items())).encode(), digest_size=8).hexdigest()


def prompt(number: int) -> list[int]:
    """Token ids of a prompt."""
    return [33 + (number * 7 + place * 5) % 90 for place in range(PROMPT_TOKENS)]


def train(model: Any, optimizer: Any, step: int, device: Any) -> None:
    """One update on fixed ids."""
    import torch

    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(33, 200, (4, TRAIN_TOKENS), generator=generator).to(device)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def digest(model: Any) -> str:
    """Of all parameters."""
    from swift.rollout.weight_sync.base import StreamDigest

    stream = StreamDigest()
    for name, parameter in model.named_parameters():
        stream.add(name, parameter)
    return stream.hexdigest()


def figures(lines: list[str], phase: str) -> dict[str, str]:
    """The fields of the last line of a phase."""
    found = [line for line in lines if f" phase={phase} " in line]
    return dict(MEM.findall(found[-1]))


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table, of the last step."""
    inside, after = row["last"]["generate"], row["last"]["after"]
    return [
        f"level {row['level']}, offload {'on' if row['offload'] else 'off'}",
        *(inside[name] for name in ("trainer", "optim", "engine_w", "engine_kv", "freed")),
        after["freed"],
        after["free"],
        inside["free"],
        f"{row['hand_over_s']:.2f}",
    ]


def verdict(rows: list[dict[str, Any]]) -> list[str]:
    """What is wrong, one line each."""
    first, problems = rows[0], []
    for row in rows:
        name = f"level {row['level']}, offload {'on' if row['offload'] else 'off'}"
        inside = row["last"]["generate"]
        if row["weights"] != first["weights"]:
            problems.append(f"{name}: the parameters differ from those of the first variant")
        if row["samples"] != first["samples"]:
            problems.append(f"{name}: the greedy samples differ from those of the first variant")
        if row["offload"] and (inside["trainer"], inside["optim"]) != ("0", "0"):
            problems.append(f"{name}: {inside['trainer']} + {inside['optim']} MiB of the trainer were not out")
        if row["metrics"].get("health/memory_not_freed"):
            problems.append(f"{name}: less than half of the expected memory was freed")
    return problems


if __name__ == "__main__":
    sys.exit(main())
