"""A soak: runs of `swift rlhf` with engines ahead, reward workers and a rollout server, while faults are injected.

    python benchmarks/soak.py --hours 2 --faults 500 --seed 1 --out output/soak

A run that a fault ends is resumed as its user would do it; a server is started again. After its faults each run is
brought to its end, and its books are audited (`soak_books.py`): every launched group was trained once, or left out for
a reason; no process, port or segment of shared memory is left; each fault was over within its bound. The seed decides
what is drawn. `--out` gets `faults.jsonl`, `report.md`, and the files of each run; the exit code is 1 if anything was
found.

Everything happens in namespaces of its own (mounts, processes, network), which root has, and other users where the
system lets them: a disk can be full, a network cut, and what is left is visible.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from soak_books import Books, Plan, audit, slope_per_hour
from soak_faults import NETWORK, Fault, Injector, draw, join_network, processes, there

from swift.models.tiny import build_tiny
from swift.observability.jsonl import JsonlWriter, read_log
from swift.rollout.engines.guard import is_tracker

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "tests" / "support"))

from preloaded import Program, make_ready  # noqa: E402

PROMPTS, GENERATIONS, BATCH = 48, 4, 16
GROUPS = BATCH // GENERATIONS
DISK_MIB = 192
FLAGS = {
    "rlhf_type": "grpo", "external_plugins": HERE / "soak_plugin.py", "reward_funcs": "odd later",
    "reward_workers": 2, "tuner_type": "full", "num_generations": GENERATIONS, "max_completion_length": 12,
    "max_length": 40, "learning_rate": 1e-4, "lr_scheduler_type": "constant", "warmup_ratio": 0, "beta": 0,
    "logging_steps": 1, "save_steps": 5, "save_total_limit": 2, "report_to": "none", "add_version": "false",
    "gradient_checkpointing": "false", "async_generate": "true", "record_rollouts": "all", "reward_timeout": 5,
    "stall_timeout": 20, "vllm_server_timeout": 300, "engine_restarts": 1000, "max_excluded_frac": 1,
    "engine_timeout": 60,
}  # fmt: skip
DEDICATED = {"vllm_mode": "dedicated", "infer_backend": "soaked"}
PHASES: dict[str, dict[str, Any]] = {
    "actors": DEDICATED,
    "server": {"vllm_server_base_url": "http://10.211.0.2:8000"},
    "dynamic": {**DEDICATED, "dynamic_sample": "true", "num_infer_workers": 2, "engine_restarts": 3},
    "ranks": DEDICATED,
}
"""Runs that take turns, and their settings. `ranks` has two training processes below a launcher."""
SAYS = re.compile(
    r"lost \(|error: |signal: |ran out|not finite|time-out|worker |excluded|starts? again|no space|failed"
)
OF_TRACKER = re.compile(r'Traceback.*\n  File ".*/resource_tracker.py".*\n.*\nKeyError: .*')
"""Of Python's tracker of semaphores that was started again after a SIGKILL: it does not know the former ones."""
POLL_S = 0.1
MEMORY_S = 1800.0
"""Least age of a process of which growth is told."""
MAX_GROWTH = 0.01
STARTS = 4
"""Starts in a row without a step after which a run is given up."""


@dataclass
class Soak:
    """A run, resumed whenever a fault has ended it. bound_s: for each fault, set after the first start."""

    phase: str
    folder: Path
    rng: random.Random
    report: Callable[[dict[str, Any]], None]
    model: Path
    bound_s: float = 900.0
    best: int = 0
    server: Program | None = None
    proxy: Program | None = None
    problems: list[str] = field(default_factory=list)
    memory: dict[tuple[str, int], list[tuple[float, float]]] = field(default_factory=dict)
    ends: list[str] = field(default_factory=list)
    open: list[Fault] = field(default_factory=list)
    barren: int = 0
    tracker_killed: bool = False
    best_at_start: int = 0
    sampled_at: float = 0.0
    max_steps: int = 10**6

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        self.faults, self.disk = self.folder / "faults", self.folder / "disk"
        self.run = self.disk / "run"
        self.console = self.folder / "console.txt"
        for folder in (self.faults, self.disk):
            folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(self.disk)], check=True)
        self.injector = Injector(self.faults, self.disk, self.rng)
        self.spared = set(psutil.pids())  # of this namespace: the first process, this one, and those that it forks from
        self.begun = time.monotonic()
        if self.phase == "server":
            self.start_server()
        self.start()

    # --- commands -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the trainer, from its last checkpoint if there is one."""
        ranks = 2 if self.phase == "ranks" else 1
        flags = {
            "model": self.model, "dataset": self.model.parent / "train.jsonl", "output_dir": self.run, **FLAGS,
            "per_device_train_batch_size": BATCH // ranks, **PHASES[self.phase], "max_steps": self.max_steps,
            **({"resume_from_checkpoint": "last"} if any(self.run.glob("checkpoint-*")) else {}),
        }  # fmt: skip
        words = [word for name, value in flags.items() for word in (f"--{name}", *str(value).split())]
        self.printed = self.console.stat().st_size if self.console.exists() else 0
        self.trainer = self.program(["-m", "swift", "rlhf", *words], "console.txt", NPROC_PER_NODE=str(ranks))
        self.started_at, self.best_at_start = time.monotonic(), self.best

    def program(self, words: list[str], output: str, **variables: str) -> Program:
        """`python <words>`, which appends what it prints to a file of the folder."""
        variables = {**os.environ, "SOAK_FAULTS": str(self.faults), **variables}
        return Program(words, env=variables, cwd=self.folder, output=self.folder / output)

    def start_server(self) -> None:
        """Start the server in its namespace, and once the proxy before it."""
        inside = [str(HERE / "soak_inside.py"), f"/run/netns/{NETWORK}"]
        if self.proxy is None:
            words = [str(HERE / "soak_proxy.py"), "8000", "8001", str(self.faults / "replies")]
            self.proxy = self.program([*inside, *words], "proxy.txt")
            self.spared.add(self.proxy.pid)
        words = (
            f"-m swift rollout --model {self.model} --infer_backend soaked --port 8001 --torch_dtype float32".split()
        )
        more = f"--external_plugins {FLAGS['external_plugins']} --stall_timeout 20 --engine_restarts 1000".split()
        self.server = self.program([*inside, *words, *more], "server.txt")

    @property
    def tops(self) -> dict[int, str]:
        """Process ids of the commands that faults may meet, and their kinds."""
        kind = "launcher" if self.phase == "ranks" else "trainer"
        return {self.trainer.pid: kind, **({self.server.pid: "server"} if self.server else {})}

    def step(self) -> int:
        """The last logged step."""
        path = self.run / "logging.jsonl"
        with contextlib.suppress(OSError, ValueError, IndexError), path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 20000))
            return int(json.loads(log.read().splitlines()[-1])["step"])
        return 0

    def watch(self) -> bool:
        """Look once: samples memory, starts what has ended. False when the run is given up, or at its end."""
        time.sleep(POLL_S)
        self.best = max(self.best, self.step())
        self.sample_memory()
        if self.server and self.server.poll() is not None:
            self.start_server()
        if (code := self.trainer.poll()) is None:
            return True
        self.look_for_processes(f"exit code {code}")  # the last of them may say why
        said = [line for line in self.text(self.printed).splitlines() if "error: " in line or "signal: " in line]
        self.ends.append(f"exit code {code}{': ' + said[0] if said else ''}")
        self.look_for_tracebacks()
        if code == 0:
            return False
        if not said and code != -signal.SIGKILL:
            self.problems.append(f"exit code {code} without a word")
        self.barren = 0 if self.best > self.best_at_start else self.barren + 1
        if self.barren >= STARTS:
            self.problems.append(f"{STARTS} starts without a step; the last: {self.ends[-1]}")
            return False
        self.start()
        return True

    def sample_memory(self) -> None:
        """Resident memory of each process, at most every five seconds."""
        now = time.monotonic()
        if now < self.sampled_at + 5:
            return
        self.sampled_at = now
        for kind, found in processes(self.tops).items():
            for process in found:
                with contextlib.suppress(psutil.Error):
                    self.memory.setdefault((kind, process.pid), []).append((now, process.memory_info().rss))

    # --- faults -------------------------------------------------------------------------------------------------------

    def targets(self) -> list[str]:
        """Kinds of process that faults meet."""
        kinds = ["reward worker", "resource tracker"]
        if self.phase == "server":
            return ["trainer", "server", *kinds]
        own = ["launcher", "rank"] if self.phase == "ranks" else ["trainer"]
        return [*own, "engine actor", "engine actor", "raylet", "gcs_server", "guard", *kinds]

    def strike(self, wanted: int) -> bool:
        """Inject one fault, or two at once if so many are wanted; False if the run was given up."""
        drawn = [draw(self.rng, self.targets(), server=self.phase == "server")]
        if wanted > 1 and self.rng.random() < 0.2:
            drawn.append(draw(self.rng, self.targets(), server=self.phase == "server"))
            if drawn[1].target == drawn[0].target:
                drawn.pop()
        self.pause(self.rng.uniform(0, 2))
        at, before = time.monotonic(), (self.best, self.console.stat().st_size, len(self.ends))
        begun = [fault for fault in drawn if self.injector.begin(fault, self.tops)]
        print(f"{self.phase}, step {self.best}: {begun}", flush=True)
        self.tracker_killed |= any((fault.kind, fault.target) == ("kill", "resource tracker") for fault in begun)
        self.open, alive = list(begun), True
        while self.open:
            since_s = time.monotonic() - at
            for fault in list(self.open):
                if not (alive and self.injector.lasts(fault, since_s)) or since_s > self.bound_s:
                    self.injector.end(fault)
                    fault.lasted_s = since_s
                    self.open.remove(fault)
            alive = alive and self.watch()
        over = time.monotonic()
        recovered = alive and self.reach(self.best + 2, self.bound_s)
        self.tell(begun, at, time.monotonic() - over if recovered else None, before)
        if alive and not recovered:
            self.problems.append(f"{begun}: not over within {self.bound_s:.0f} s")
            self.trainer.kill()
            alive = self.reach(self.best + 1, self.bound_s)
        return alive

    def tell(self, faults: list[Fault], at: float, recovery_s: float | None, before: tuple[int, int, int]) -> None:
        """Report faults that are over. before: step, size of the console and number of ends when they began."""
        step, place, ended = before
        said = self.said(place, ended, step)
        for fault in faults:
            self.report(
                {
                    "phase": self.phase, "time_s": round(at - self.begun, 1), "step": step, "kind": fault.kind,
                    "target": fault.target, "seconds": fault.seconds, "lasted_s": round(fault.lasted_s, 2),
                    "recovery_s": recovery_s and round(recovery_s, 2), "bound_s": round(self.bound_s),
                    "together": len(faults) > 1, "said": fault.remark or said, "exits": self.ends[ended:],
                }
            )  # fmt: skip

    def said(self, place: int, ended: int, step: int) -> str:
        """What the run said about it: its end, or a line on the console, or counts in logging.jsonl."""
        if self.ends[ended:]:
            return self.ends[ended]
        lines = [line.strip() for line in self.text(place).splitlines() if SAYS.search(line)]
        later = [row for row in read_log(self.run / "logging.jsonl") if row["step"] > step]
        counts = Counter({name: row[name] or 0 for row in later for name in row if name.startswith("health/")})
        return (lines[0] if lines else ", ".join(f"{name} {count:g}" for name, count in counts.items() if count))[:300]

    def pause(self, seconds: float) -> None:
        """Watch for so long."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and self.watch():
            pass

    def reach(self, step: int, limit_s: float) -> bool:
        """Whether a step is logged within the limit."""
        deadline = time.monotonic() + limit_s
        while self.best < step and time.monotonic() < deadline:
            if not self.watch():
                break
        return self.best >= step

    # --- the end ------------------------------------------------------------------------------------------------------

    def finish(self) -> dict[str, Any]:
        """Stop the run as its user would, let it come to its end, and audit it; the books."""
        self.max_steps = self.best + 8
        self.trainer.send_signal(signal.SIGTERM)
        if not self.reach(self.max_steps, 2 * self.bound_s):
            self.problems.append("the run did not come to its end")
        while self.watch():
            if time.monotonic() - self.started_at > 2 * self.bound_s:
                self.problems.append("the run did not end after its last step")
                break
        for process in filter(None, (self.server, self.proxy)):
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
        self.server = None
        self.look_for_processes("the end")
        self.look_for_leftovers()
        saved = any(self.run.glob("checkpoint-*"))
        books = audit(self.run, self.plan()) if saved else Books(["the run has no checkpoint"])
        self.problems += [*books.problems, *self.growth()]
        shutil.copytree(self.run, self.folder / "run", ignore=shutil.ignore_patterns("checkpoint-*", "images"))
        subprocess.run(["umount", str(self.disk)], check=True)
        return {"phase": self.phase, "problems": self.problems, **books.totals}

    def plan(self) -> Plan:
        """What the books are audited with."""
        sizes = {"prompts": PROMPTS, "groups": GROUPS, "completions": GENERATIONS}
        return Plan(**sizes, dynamic=self.phase == "dynamic", wait_s=self.bound_s)

    def text(self, since: int) -> str:
        """What the trainers have printed from this place on."""
        return self.console.read_bytes()[since:].decode(errors="replace")

    def look_for_processes(self, after: str) -> None:
        """Within a while, no process of the trainer may be there any more, but stopped ones and their trackers."""
        server = {one.pid for found in processes(self.tops).values() for one in found} if self.server else set()
        spared = self.spared | server | {fault.pid for fault in self.open}  # stopped ones end when they go on
        deadline = time.monotonic() + 20
        while True:
            left = [pid for pid in psutil.pids() if pid not in spared and there(pid)]
            left = [pid for pid in left if not (self.open and is_tracker(pid))]
            if not left or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        for pid in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                line = " ".join(psutil.Process(pid).cmdline())[:160]
                self.problems.append(f"left behind after {after}: process {pid}: {line}")
                os.kill(pid, signal.SIGKILL)

    def look_for_leftovers(self) -> None:
        """No port is open, and no shared memory is there, but for semaphores of a tracker that was killed."""
        ports = [one.laddr.port for one in psutil.net_connections("inet") if one.status == psutil.CONN_LISTEN]
        self.problems += [f"left behind: port {port}" for port in ports]
        for path in Path("/dev/shm").iterdir():
            if not (self.tracker_killed and path.name.startswith("sem.mp-")):
                self.problems.append(f"left behind: /dev/shm/{path.name}")
            path.unlink()  # or the next run would have left it

    def look_for_tracebacks(self) -> None:
        """An end that was not foreseen keeps its traceback."""
        text = OF_TRACKER.sub("", self.text(self.printed)) if self.tracker_killed else self.text(self.printed)
        if "Traceback (most recent call last)" in text:
            last = [line for line in text.splitlines() if re.match(r"\S*(Error|Exception)\b", line)][-1:]
            self.problems.append(f"a traceback: {last}")

    def growth(self) -> list[str]:
        """Processes whose memory grew; the first tenth of their life does not count."""
        found = []
        for (kind, pid), samples in self.memory.items():
            later = samples[len(samples) // 10 :]
            if len(later) > 10 and later[-1][0] - later[0][0] > MEMORY_S and slope_per_hour(later) > MAX_GROWTH:
                found.append(f"memory of {kind} {pid} grew by {slope_per_hour(later):.1%} an hour")
        return found


def table(rows: list[dict[str, Any]]) -> str:
    """Recovery times by kind of fault."""
    kinds: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if not row["together"]:
            kinds.setdefault((row["target"], row["kind"]), []).append(row)
    lines = ["| target | fault | times | ended the run | recovery: median s | longest s |", "|---|---|---|---|---|---|"]
    for (target, kind), found in sorted(kinds.items()):
        times = [row["recovery_s"] for row in found if row["recovery_s"] is not None]
        median, longest = (f"{f(times):.1f}" if times else "-" for f in (statistics.median, max))
        ended = sum(bool(row["exits"]) for row in found)
        lines.append(f"| {target} | {kind} | {len(found)} | {ended} | {median} | {longest} |")
    return "\n".join(lines)


def write_report(out: Path, title: str, rows: list[dict[str, Any]], books: list[dict[str, Any]]) -> None:
    """report.md: recovery times by kind, the books of each run, and each fault."""
    parts = [f"# Soak\n\n{title}\n", table(rows), "\n## Books\n"]
    parts += [
        f"* {' · '.join(f'{name} {value}' for name, value in one.items() if name != 'problems')}" for one in books
    ]
    parts += ["\n## Problems\n", *(f"* {one['phase']}: {problem}" for one in books for problem in one["problems"])]
    parts += [
        "\n## Faults\n",
        "| run | s | step | fault | lasted s | recovery s | said |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        said = row["said"].replace("|", "\\|")
        seconds = f" {row['seconds']:g} s" if row["seconds"] else ""
        what = f"{row['target']}: {row['kind']}{seconds}"
        parts.append(
            f"| {row['phase']} | {row['time_s']} | {row['step']} | {what} | {row['lasted_s']} | {row['recovery_s']} "
            f"| {said} |"
        )
    (out / "report.md").write_text("\n".join(parts) + "\n")


def material(folder: Path) -> Path:
    """A tiny model, with the prompts beside it."""
    model = folder / "model"
    if not model.exists():
        build_tiny(model, size="nano")
        rows = [{"prompt": f"prompt {n}" + "?" * (n % 4), "solution": str(n)} for n in range(PROMPTS)]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return model


def enter_namespaces() -> None:
    """Begin again in namespaces of its own, unless this is already the case."""
    if os.environ.pop("SOAK_INSIDE", ""):
        for words in ("mount -t tmpfs tmpfs /dev/shm", "mount -t tmpfs tmpfs /run", "ip link set lo up"):
            subprocess.run(words.split(), check=True)
        return
    words = f"unshare {'-r' if os.getuid() else ''} -m -n -i -p --fork --mount-proc --kill-child".split()
    tried = subprocess.run([*words, "ip", "link", "set", "lo", "up"], capture_output=True, text=True, check=False)
    if tried.returncode:
        sys.exit(f"soak: needs namespaces of its own (root, or user namespaces), and `ip`: {tried.stderr.strip()}")
    os.environ["SOAK_INSIDE"] = "1"
    os.execvp(words[0], [*words, "sh", "-c", '"$@"; exit $?', "sh", sys.executable, *sys.argv])


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--hours", type=float, default=1.0, help="no fault begins later; then the run is brought to its end"
    )
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", nargs="+", choices=list(PHASES), default=list(PHASES), help="the runs that take turns"
    )
    parser.add_argument("--per_run", type=int, default=25, help="faults of a run before it is brought to its end")
    parser.add_argument("--out", type=Path, default=Path("output/soak"))
    args = parser.parse_args()
    enter_namespaces()
    out = args.out.absolute()
    out.mkdir(parents=True)
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    make_ready()
    if "server" in args.only:
        join_network()
    rows: list[dict[str, Any]] = []
    books: list[dict[str, Any]] = []
    log = JsonlWriter(out / "faults.jsonl")

    def report(row: dict[str, Any]) -> None:
        rows.append({"fault": len(rows) + 1, **row})
        log.write(rows[-1])
        print(json.dumps(rows[-1]), flush=True)

    begun, number = time.monotonic(), 0
    title = f"`--faults {args.faults} --seed {args.seed} --only {' '.join(args.only)}`"
    while len(rows) < args.faults and time.monotonic() - begun < 3600 * args.hours:
        phase = args.only[number % len(args.only)]
        rng = random.Random(f"{args.seed}-{number}")
        soak = Soak(phase, out / f"{number:02}-{phase}", rng, report, material(out))
        number += 1
        alive = soak.reach(2, soak.bound_s)
        soak.bound_s = 120 + 6 * (time.monotonic() - soak.begun)
        until = min(args.faults, len(rows) + args.per_run)
        while alive and len(rows) < until and time.monotonic() - begun < 3600 * args.hours:
            alive = soak.strike(until - len(rows))
        books.append(soak.finish())
        print(json.dumps(books[-1]), flush=True)
        write_report(out, f"{title}, {len(rows)} faults in {(time.monotonic() - begun) / 3600:.2f} h", rows, books)
    return int(any(one["problems"] for one in books))


if __name__ == "__main__":
    sys.exit(main())
