"""Real `swift rlhf` commands in processes of their own: starting, watching, killing and comparing them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from preloaded import Program, run_ranks
from safetensors.torch import load_file
from timings import is_timing

from swift.observability.jsonl import read_jsonl, read_log
from swift.trainers.checkpoint import list_checkpoints, verify

ROOT = Path(__file__).parents[2]
LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NPROC_PER_NODE")
LIMIT_S = 240
"""Nothing here takes a tenth of it, even on a busy machine; a hang shall fail the test that caused it."""

DEFAULTS = {
    "tuner_type": "full",
    "reward_funcs": "odd",
    "reward_workers": 1,
    "num_generations": 4,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_completion_length": 12,
    "learning_rate": 1e-3,
    "beta": 0,
    "logging_steps": 1,
    "save_steps": 2,
}
EVERYWHERE = {"report_to": "none", "add_version": "false"}


def environment(**more: Any) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCH}
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths}
    return {**kept, **own, **{name: str(value) for name, value in more.items()}}


@dataclass
class Run:
    """A command that was started; `folder` is where it trains."""

    process: Program
    folder: Path
    begun: float = field(default_factory=time.monotonic)

    def wait(self) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        out, err = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, out, err

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def until(self, condition: Any) -> bool:
        """Poll every millisecond; False when the command ended before `condition()` held."""
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            if not self.alive:
                return False
            assert time.monotonic() < deadline, "the run makes no progress"
            time.sleep(0.001)
        return True

    def family(self) -> list[psutil.Process]:
        """The command's process and all below it."""
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(self.process.pid)
            return [top, *top.children(recursive=True)]
        return []

    def ends(self, code: int, act: Callable[[], object] = lambda: None) -> str:
        """Its stderr when it has ended after `act` with this exit code and left no process."""
        family = self.family()
        act()
        found, _, err = self.wait()
        assert found == code, err
        assert_gone(family)
        return err

    def kill(self) -> None:
        """SIGKILL to the command alone; what it started must follow by itself."""
        family = self.family()
        self.process.kill()
        self.wait()
        assert_gone(family)

    @property
    def step(self) -> int:
        """The last one in logging.jsonl."""
        path = self.folder / "logging.jsonl"
        lines = path.read_bytes().splitlines() if path.exists() else []
        for line in reversed(lines):
            with contextlib.suppress(ValueError):  # the line that is being written
                return json.loads(line)["step"]
        return 0

    def reach(self, step: int) -> None:
        """Wait until a step is logged."""
        assert self.until(lambda: self.step >= step), "it ended before"


def assert_gone(processes: list[psutil.Process], seconds: float = 10) -> None:
    """Fails when one of the processes is still there after so many seconds."""
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    left = [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert not left, f"left behind: {[(p.pid, p.name()) for p in left]}"


def engines_of(run: Run) -> list[psutil.Process]:
    """Processes of engines below a command."""
    return [one for one in run.family() if "EngineActor" in " ".join(one.cmdline())]


class Cli:
    """Starts commands and ends, when the test does, those that are left.

    printed: stderr and stdout of the last command that `finish` ran.
    """

    def __init__(self, model: Path, material: Path, folder: Path) -> None:
        self.model, self.material, self.folder = model, material, folder
        self.printed = ""
        self._started: list[Run] = []

    def __enter__(self) -> Cli:
        return self

    def __exit__(self, *_: object) -> None:
        for run in self._started:
            family = run.family()
            if run.alive:
                run.process.kill()
                run.process.communicate()
            for process in family[1:]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

    def words(self, output: str, mode: str = "rlhf", **flags: Any) -> list[str]:
        """`rlhf ...` with the defaults of these tests, or another mode; a flag of None is left out, a list is words."""
        own = {
            "rlhf_type": "grpo",
            "dataset": self.material / "train.jsonl",
            "external_plugins": self.material / "odd_plugin.py",
            **DEFAULTS,
        }
        given = {"model": self.model, "output_dir": self.folder / output, **EVERYWHERE}
        given |= {**(own if mode == "rlhf" else {}), **flags}
        lists = {name: value if isinstance(value, list) else [value] for name, value in given.items()}
        return [
            mode,
            *(str(word) for name, value in lists.items() if value != [None] for word in (f"--{name}", *value)),
        ]

    def start(self, folder: str, *, variables: dict[str, Any] | None = None, **flags: Any) -> Run:
        """`program`, if it is among the flags, instead of `-m swift`; `output`: the console, instead of two files."""
        place = {name: flags.pop(name) for name in ("program", "output") if name in flags}
        return self._popen(self.words(folder, **flags), self.folder / folder, variables or {}, **place)

    def start_printed(self, printed: str, output: str, *, variables: dict[str, Any] | None = None) -> Run:
        """A command as swift prints it: `NAME=value ... swift rlhf ...`."""
        words = shlex.split(printed, comments=True)
        at = words.index("swift")
        named = dict(word.split("=", 1) for word in words[:at])
        return self._popen(words[at + 1 :], self.folder / output, {**(variables or {}), **named})

    def _popen(
        self,
        words: list[str],
        folder: Path,
        variables: dict[str, Any],
        program: Sequence[Any] | None = None,
        output: Path | None = None,
    ) -> Run:
        stdout, stderr = (output or self.folder / f"{name}-{len(self._started)}" for name in ("stdout", "stderr"))
        env = environment(**variables)
        words = [*(program or ["-m", "swift"]), *words]
        process = Program(words, env=env, cwd=self.folder, output=stdout, errors=stderr)
        self._started.append(Run(process, folder))
        return self._started[-1]

    def finish(self, output: str, *, variables: dict[str, Any] | None = None, **flags: Any) -> Path:
        """Run to the end, which must be a good one; the folder.

        NPROC_PER_NODE among the variables starts the ranks without the launcher.
        """
        variables = dict(variables or {})
        if (count := int(variables.pop("NPROC_PER_NODE", 1))) > 1:
            logs = self.folder / f"ranks-{time.monotonic_ns()}"
            words = ["-m", "swift", *self.words(output, **flags)]
            env = environment(**variables)
            self.printed, *_ = run_ranks(words, logs, count=count, limit_s=LIMIT_S, cwd=self.folder, **env)
        else:
            code, out, err = self.start(output, variables=variables, **flags).wait()
            assert code == 0, err
            self.printed = err + out
        return self.folder / output


# --- what a run has left ------------------------------------------------------------------------------------------


def log_rows(folder: Path) -> list[dict]:
    """logging.jsonl, which has some, the highest attempt of each step, without times and attempts."""
    found = read_log(folder / "logging.jsonl")
    assert found
    return [{name: value for name, value in row.items() if name != "attempt" and not is_timing(name)} for row in found]


def completion_rows(folder: Path) -> list[dict]:
    """completions.jsonl likewise."""
    return [{**row, "attempt": None} for row in read_log(folder / "completions.jsonl")]


def sampled(folder: Path) -> list[tuple]:
    """The completions that were trained on."""
    names = ("step", "group_id", "index", "prompt", "completion", "finish_reason", "reward")
    return [tuple(row[name] for name in names) for row in completion_rows(folder) if row["used"]]


def assert_close(ours: Path, theirs: Path, *names: str, steps: int | None = None) -> None:
    """The log rows have the same values, up to the rounding of sums; all of them if none is named."""
    mine, others = log_rows(ours)[:steps], log_rows(theirs)[:steps]
    assert [row["step"] for row in mine] == [row["step"] for row in others] == list(range(1, len(others) + 1))
    for one, other in zip(mine, others, strict=True):
        assert names or one.keys() == other.keys()
        for name in names or other:
            assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), (name, other["step"])


def state_files(folder: Path) -> dict[str, Any]:
    """The content of the last checkpoint: tensors, states, pipeline."""
    checkpoint = list_checkpoints(folder)[-1]
    verify(checkpoint)
    found: dict[str, Any] = {"name": checkpoint.name, "files": sorted(path.name for path in checkpoint.iterdir())}
    for path in checkpoint.glob("*.safetensors"):
        found[path.name] = load_file(path)
    for name in ("optimizer.pt", "scheduler.pt"):
        found[name] = torch.load(checkpoint / name, weights_only=True)
    found["rng"] = [torch.load(path, weights_only=False)["cpu"] for path in sorted(checkpoint.glob("rng_state*.pth"))]
    if (pipeline := checkpoint / "pipeline_state.msgpack").exists():
        found["pipeline"] = msgspec.msgpack.decode(pipeline.read_bytes())[1]["pipeline"]
    for name in ("adapter_config.json", "config.json"):
        if (checkpoint / name).exists():
            found[name] = (checkpoint / name).read_text()
    return found


def assert_same(ours: Any, theirs: Any, where: str = "") -> None:
    """Equal to the last bit, whatever is nested in whatever."""
    if isinstance(ours, torch.Tensor):
        assert torch.equal(ours, theirs), where
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), (where, ours.keys() ^ theirs.keys())
        for name, value in ours.items():
            assert_same(value, theirs[name], f"{where}/{name}")
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs), (where, len(ours), len(theirs))
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(one, other, f"{where}/{index}")
    else:
        assert ours == theirs or ours != ours, (where, ours, theirs)


def assert_same_run(folder: Path, straight: Path, *, mismatch: float = 0.0) -> None:
    """Two runs have the same weights, optimizer, pipeline state, logs and completions, bit for bit.

    mismatch: by how much the metrics of that name may differ, where turns join a batch of the engine as they come, and
    sums of other shapes round the sampler's log-probs differently.
    """
    ours, theirs = log_rows(folder), log_rows(straight)
    for one, other in zip(ours, theirs, strict=True) if mismatch else ():
        for name in [name for name in other if name.startswith("mismatch/")]:
            assert one.pop(name) == pytest.approx(other.pop(name), abs=mismatch), name
    assert_same(ours, theirs, "logging")
    assert_same(completion_rows(folder), completion_rows(straight), "completions")
    assert_same(state_files(folder), state_files(straight), "checkpoint")


def assert_resumes(cli: Cli, straight: Path, step: int, **flags: Any) -> Path:
    """A run that goes on from this checkpoint of a whole one ends as that did, bit for bit; its folder."""
    half = cli.folder / "half"
    shutil.copytree(straight / f"checkpoint-{step}", half / f"checkpoint-{step}")
    cli.finish("half", **flags, resume_from_checkpoint="last")
    assert_same(log_rows(half), log_rows(straight)[step:], "logging")
    assert_same(state_files(half), state_files(straight), "checkpoint")
    return half


def attempts(folder: Path) -> list[dict]:
    return list(read_jsonl(folder / "attempts.jsonl"))


def error_lines(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith("swift: error: ")]


def printed_command(stderr: str) -> str:
    """The command that an interrupted run prints to go on."""
    found = re.search(r"(?:resume|start again): (.*)$", stderr, re.MULTILINE)
    assert found, stderr
    return found.group(1)


def terminate(run: Run, signum: int = signal.SIGTERM) -> None:
    run.process.send_signal(signum)
