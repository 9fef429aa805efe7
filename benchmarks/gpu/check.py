"""The checks of `check.sh`, in order; each is made of commands, and a line of JSON says what it showed.

kernels     packed attention by masked SDPA, FlexAttention and flash-attn in bf16, against float64
gradients   a step of SGD on recorded completions, by attention and dtype, against float64 rows of our own
parity      trainer against transformers engine, float32 and bf16
packed      training tokens per second, FLOP utilisation and peak of 16k packed tokens, recomputed; beside `swift plan`
step        whole steps against TRL, where it is installed, and the cosine of both gradients
ahead       training alone against the trainer of TRL's AsyncGRPO on the same rollouts, and the cosine of both gradients
lora        LoRA steps in bf16; beside `swift plan`
memory      sleep levels and offloading change no bit of the weights, and what they free
profile     the 15 operations that take most of a step
hybrid      steps of Qwen3.5's linear attention, where flash-linear-attention is installed; beside `swift plan`
vision      steps of a Qwen3-VL with an image in each prompt, tower and aligner trained
vllm        steps with vLLM in the trainer's process at sleep levels 1 and 2, where it is installed
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from harness import record  # noqa: E402
from harness.agreement import NORM_TOLERANCE, agreement, compared, write_recorded  # noqa: E402
from harness.sides import Command, command, environment, recorded_command, recorded_run_command  # noqa: E402
from harness.turns import Run, measure  # noqa: E402
from harness.works import ROWS, Row, Work, prepare  # noqa: E402

LIMIT_S = 530.0
LEAST_COSINE = 0.9999
RATES = {"float32": 1.0, "bfloat16": 2.0**12}
"""Of the step that shows a gradient: saved in bf16, a change of rate 1 would be lost in the rounding of the weights."""
VLLM = ("--use_vllm", "true", "--vllm_mode", "colocate", "--vllm_enforce_eager", "true")
PLAIN_STEP = (
    "--optim sgd --learning_rate 1 --max_grad_norm 1e9 --weight_decay 0 --lr_scheduler_type constant --warmup_ratio 0"
)
SHORT: dict[str, Any] = {"completion_tokens": 256, "mean_tokens": 128}
PROBE = """
import json, time, torch
cuda = torch.cuda.is_available()
found = {"device": torch.cuda.get_device_name() if cuda else "cpu", "torch": torch.__version__}
size = 8192 if cuda else 512
a = torch.randn(size, size, dtype=torch.bfloat16, device="cuda" if cuda else "cpu")
for turn in range(4):
    began = time.perf_counter()
    for _ in range(8):
        a @ a
    if cuda:
        torch.cuda.synchronize()
    found["bf16_flops"] = 16 * size**3 / (time.perf_counter() - began)
print(json.dumps(found))
"""


@dataclass(slots=True)
class Checks:
    """What the checks share: folders, the device, its rate of bf16 products, and the end of the time."""

    folder: Path
    small: bool
    device: dict[str, Any]
    deadline: float

    @property
    def on_cpu(self) -> bool:
        """Whether there is no GPU."""
        return bool(self.device["device"] == "cpu")

    def work(self, name: str, **changes: Any) -> Work:
        """A row of `run.py` as files; in small, the same with a nano model and short lengths."""
        row: Row = replace(
            ROWS[name], **{"warmup": 1, "steps": 2, "device": "cpu" if self.on_cpu else "cuda", **changes}
        )
        if self.small:
            row = replace(
                row, size="nano", vocab_size=row.vocab_size and 512, prompt_tokens=32, completion_tokens=16,
                num_completions=16, mean_tokens=row.mean_tokens and 8, per_device=8, steps=1,
            )  # fmt: skip
        return prepare(row, self.folder / "works")

    def run(self, work: Work, *flags: str, side: str = "swift") -> tuple[Run, Path]:
        """A run of one side, and its folder."""
        output, row = self.output(), replace(work.row, flags=(*work.row.flags, *flags))
        steps, work = 1 + row.warmup + row.steps, replace(work, row=row)
        return measure(command(side, work, output, steps, 0), steps, work, limit_s=self.left()), output

    def output(self) -> Path:
        """A new folder."""
        return Path(tempfile.mkdtemp(dir=self.folder))

    def left(self) -> float:
        """Seconds until the end."""
        return max(0.0, self.deadline - time.monotonic())


def kernels(checks: Checks) -> dict[str, Any]:
    """Relative distance of values and gradients."""
    words = [sys.executable, str(HERE / "kernels.py")]
    done = subprocess.run(words, check=True, timeout=checks.left(), stdout=subprocess.PIPE, text=True)
    return dict(json.loads(done.stdout))


def gradients(checks: Checks) -> dict[str, Any]:
    """Cosine and length of each gradient against that of float64 rows."""
    work = write_recorded(checks.work("small", completion_tokens=256, per_device=64))
    expected = checks.output()
    words = [sys.executable, str(HERE / "float64_rows.py"), str(work.model), str(work.recorded), str(expected)]
    subprocess.run(words, check=True, timeout=checks.left(), env=environment(work.row.device))
    kinds = [("float32", "sdpa"), ("float32", "flex_attention"), ("bfloat16", "sdpa"), ("bfloat16", "flash_attn")]
    found: dict[str, Any] = {}
    for dtype, kind in kinds:
        if kind == "flash_attn" and find_spec("flash_attn") is None:
            found[f"{kind} {dtype}"] = "left out: flash-attn is not installed"
            continue
        if kind == "flex_attention" and checks.on_cpu:
            found[f"{kind} {dtype}"] = "left out: FlexAttention has no backward pass on a CPU"
            continue
        recorded = replace(work, row=replace(work.row, dtype=dtype))
        wanted = recorded_command("swift", recorded, checks.output(), RATES[dtype])
        wanted.words.extend(["--attn_impl", kind])
        measure(wanted, 1, limit_s=checks.left())
        saved = next(wanted.folder.rglob("model.safetensors")).parent
        shown = compared(work.model, saved, expected)
        found[f"{kind} {dtype}"] = {"cosine": shown["cosine"], "norm_ratio": shown["norm_ratio"] / RATES[dtype]}
    exact = [one["cosine"] for name, one in found.items() if name.endswith("float32") and isinstance(one, dict)]
    return {**found, "ok": min(exact) > LEAST_COSINE}


def parity(checks: Checks) -> dict[str, Any]:
    """Differences of log-probs in the steps of a run."""
    found: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16"):
        _, output = checks.run(checks.work("small", dtype=dtype))
        found[dtype] = largest(output, "mismatch/")
    return {**found, "ok": found["float32"]["mismatch/logp_abs_diff_max"] < 1e-3}


def packed(checks: Checks) -> dict[str, Any]:
    """Training alone: `time/train` of the log. Recomputation is no useful work."""
    work = checks.work("gpu-packed", warmup=0, steps=1)
    run, output = checks.run(work)
    rate = median(run.tokens) / run.log["time/train"]
    mfu = 6 * parameters(work.model) * rate / checks.device["bf16_flops"]
    return {"train_tokens_per_s": rate, "mfu": mfu, **speed(run), **largest(output, "memory/"), **planned(checks, work)}


def step(checks: Checks) -> dict[str, Any]:
    """Both sides; then their gradients. Two steps of each, since the time is short."""
    work, found = checks.work("gpu", **SHORT, warmup=0, steps=1), {}
    for side in ("swift", *(["trl"] if find_spec("trl") else [])):
        run, output = checks.run(work, side=side)
        found[side] = {**speed(run), **largest(output, "memory/")}
    if "trl" in found:
        found["agreement"] = agreement(work)
    return {**found, "ok": found.get("agreement", {"agrees": True})["agrees"]}


def ahead(checks: Checks) -> dict[str, Any]:
    """Both train on what swift sampled. Gradients are of one batch in float32, TRL's loss is a mean over its tokens."""
    if find_spec("trl") is None:
        return {"left_out": "trl is not installed"}
    work = checks.work("gpu", **SHORT)
    run, output = checks.run(work, "--record_rollouts", "all")
    theirs, steps = checks.output(), 1 + work.row.warmup + work.row.steps
    rows = logged(recorded_run_command(work, run_folder(output), theirs, steps), checks.left())
    spent = [row["perf/fwd_bwd_s"] + row["perf/optimizer_s"] for row in rows if "perf/fwd_bwd_s" in row]
    trl = {"train_s": median(spent[-work.row.steps :]), "attention": rows[-1]["attention"]}
    whole = checks.work("gpu", **SHORT, dtype="float32", warmup=0, steps=0, recompute=True)
    flags = f"{PLAIN_STEP} --loss_type dapo --record_rollouts all --save_strategy steps --save_steps 1".split()
    _, ours = checks.run(whole, *flags, "--save_only_model", "true")
    whole, theirs = replace(whole, row=replace(whole.row, per_device=whole.row.num_completions)), checks.output()
    logged(recorded_run_command(whole, run_folder(ours), theirs, 1, 1.0), checks.left())
    shown = compared(work.model, next(ours.rglob("checkpoint-1")), theirs)
    agrees = shown["cosine"] > LEAST_COSINE and abs(shown["norm_ratio"] - 1) < NORM_TOLERANCE
    return {"swift": {"train_s": run.log["time/train"]}, "trl": trl, "agreement": shown, "ok": agrees}


def logged(wanted: Command, limit_s: float) -> list[dict[str, Any]]:
    """The lines of a command's log.

    Raises:
        RuntimeError: it failed.
    """
    words, variables = wanted.words, wanted.environment
    done = subprocess.run(words, check=False, env=variables, timeout=limit_s, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    lines = (wanted.folder / "logging.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def run_folder(output: Path) -> Path:
    """The folder of the run that has a record."""
    return next(output.rglob("rollouts")).parent


def lora(checks: Checks) -> dict[str, Any]:
    """Adapters of rank 16 on all linear layers."""
    work, flags = checks.work("gpu", **SHORT), ("--tuner_type", "lora", "--lora_rank", "16")
    run, output = checks.run(work, *flags)
    return {**speed(run), **largest(output, "memory/"), **planned(checks, work, *flags)}


def planned(checks: Checks, work: Work, *flags: str) -> dict[str, Any]:
    """What `swift plan` expects: the most on the device, to be compared with `device_mib`, and a step's seconds."""
    work = replace(work, row=replace(work.row, flags=(*work.row.flags, *flags)))
    wanted = command("swift", work, checks.output(), 1, 0)
    wanted.words.insert(wanted.words.index("rlhf"), "plan")
    device = "h100-80gb" if checks.on_cpu else "here"
    wanted.words.extend(["--prompt_tokens", str(work.row.prompt_tokens), "--device", device, "--json", "true"])
    done = subprocess.run(
        wanted.words, check=True, timeout=checks.left(), stdout=subprocess.PIPE, text=True, env=wanted.environment
    )
    plan = json.loads(done.stdout)
    most = max(phase["total"] for phase in plan["phases"].values())
    return {
        "planned_mib": most / 2**20,
        "planned_step_s": plan["step_seconds"],
        "planned_tokens": plan["micro_batch_tokens"],
    }


def memory(checks: Checks) -> dict[str, Any]:
    """The weights after the same steps at every level; what was freed."""
    with_vllm = find_spec("vllm") is not None and not checks.on_cpu
    settings = [(0, "false"), (0, "true"), *([(1, "true"), (2, "true")] if with_vllm else [])]
    work, saved, found = checks.work("gpu", **SHORT), {}, {}
    for level, offload in settings:
        flags = f"--sleep_level {level} --offload_model {offload} --offload_optimizer {offload} --save_strategy steps"
        flags += f" --save_steps {1 + work.row.warmup + work.row.steps} --save_only_model true"
        _, output = checks.run(work, *(VLLM if with_vllm else ()), *flags.split())
        name = f"level {level}, offload {offload}"
        found[name] = largest(output, "memory/")
        saved[name] = digest(next(output.rglob("model.safetensors")))
    return {**found, "weights": saved, "ok": len(set(saved.values())) == 1}


def profile(checks: Checks) -> dict[str, Any]:
    """The last of three steps under torch's profiler, inside the command."""
    wanted = command("swift", checks.work("gpu", **SHORT), checks.output(), 3, 0)
    script, out = str(HERE / "profile_step.py"), wanted.folder / "profile.json"
    wanted.words[: wanted.words.index("rlhf")] = [sys.executable, script, str(out)]
    measure(wanted, 3, limit_s=checks.left())
    return dict(json.loads(out.read_text(encoding="utf-8")))


def hybrid(checks: Checks) -> dict[str, Any]:
    """Completions that continue from the states of prompts; in small also without the package."""
    if find_spec("fla") is None and not checks.small:
        return {"left_out": "flash-linear-attention is not installed"}
    work = checks.work("gpu", **SHORT, arch="qwen3_5_text")
    run, output = checks.run(work)
    return {**speed(run), **largest(output, "memory/"), **planned(checks, work)}


def vision(checks: Checks) -> dict[str, Any]:
    """The tower runs once for the completions of a prompt; an image is 1,024 patches, in small 64."""
    row = {"arch": "qwen3_vl", "vocab_size": None, "completion_tokens": 256, "mean_tokens": None}
    work = checks.work("gpu", **row, image_side=64 if checks.small else 256)
    run, output = checks.run(work, "--freeze_vit", "false", "--freeze_aligner", "false")
    return {**speed(run), **largest(output, "memory/")}


def vllm(checks: Checks) -> dict[str, Any]:
    """Steps, weight sync and parity at sleep levels 1 and 2."""
    if find_spec("vllm") is None or checks.small:
        return {"left_out": "vLLM is not installed" if find_spec("vllm") is None else "no nano model fits vLLM"}
    found: dict[str, Any] = {}
    for level in ("1", "2"):
        run, output = checks.run(checks.work("gpu", **SHORT), *VLLM, "--sleep_level", level)
        found[f"level {level}"] = {**speed(run), **largest(output, "memory/"), **largest(output, "mismatch/")}
    return found


CHECKS: dict[str, Callable[[Checks], dict[str, Any]]] = {
    check.__name__: check
    for check in (kernels, gradients, parity, packed, step, ahead, lora, memory, profile, hybrid, vision, vllm)
}


def speed(run: Run) -> dict[str, Any]:
    """Of the counted steps."""
    rate = sum(run.tokens) / sum(run.seconds)
    taken = {"peak_mib": run.peak_mib, "device_mib": run.device_mib}
    return {"step_s": median(run.seconds), "tokens_per_s": rate, "start_s": run.start_s, **taken, "log": run.log}


def largest(output: Path, prefix: str) -> dict[str, float]:
    """The largest value of each metric of a run's log whose name begins so."""
    text = next(output.rglob("logging.jsonl")).read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    names = sorted({name for row in rows for name in row if name.startswith(prefix)})
    return {name: max(row[name] for row in rows if name in row) for name in names}


def parameters(model: Path) -> int:
    """Counted from the file of the weights."""
    from safetensors import safe_open

    with safe_open(model / "model.safetensors", "pt") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118 - no mapping


def digest(path: Path) -> str:
    """Of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> int:
    """Run the checks; 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--small", action="store_true", help="a nano model; on the CPU where there is no GPU")
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS))
    options = parser.parse_args()
    deadline = time.monotonic() + LIMIT_S
    probe = subprocess.run([sys.executable, "-c", PROBE], check=True, capture_output=True, text=True, timeout=120)
    device = json.loads(probe.stdout)
    if device["device"] == "cpu" and not options.small:
        print("there is no GPU; --small runs the checks on the CPU", file=sys.stderr)
        return 2
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, (options.out / "check.jsonl").open("w", encoding="utf-8") as lines:
        checks = Checks(Path(folder), options.small, device, deadline)
        for name in options.only:
            rows.append(one_check(name, checks))
            print(json.dumps(rows[-1]), file=lines, flush=True)
            print(f"{name}: {'ok' if rows[-1]['ok'] else 'FAILED'}, {rows[-1]['took_s']:.0f} s", flush=True)
    kind, date = "-".join(device["device"].lower().split()), record.facts()["utc"][:10]
    path = record.write(options.out / f"gpu-{kind}-{date}.json", rows, device=device, small=options.small)
    print(f"written to {path}")
    return int(any(not row["ok"] for row in rows))


def one_check(name: str, checks: Checks) -> dict[str, Any]:
    """What a check showed, or why it failed: the others go on."""
    began = time.monotonic()
    try:
        if not checks.left():
            raise TimeoutError("no time was left")
        found = CHECKS[name](checks)
    except Exception as error:
        found = {"ok": False, "failed": f"{type(error).__name__}: {error}"[-4000:]}
    return {"row": name, "ok": True, **found, "took_s": time.monotonic() - began}


if __name__ == "__main__":
    sys.exit(main())
