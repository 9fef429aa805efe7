"""Measures one row: the sides in turns, the machine's rate in the same turns, and whether the gradients agree."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swift.bench import ms_swift, swift_side, trl_side
from swift.bench.contest import alternate, ask, place, processor_seconds, seconds
from swift.bench.flops import Dimensions, StepFlops, step_flops
from swift.bench.ratios import ratio_of_medians, spread
from swift.bench.rollouts import frozen
from swift.bench.work import Work, prepare
from swift.bench.works import Row

START_LIMIT_S = 300.0
NORM_TOLERANCE = 0.01
AGREED = ("cosine", "norm_ratio", "loss_swift", "loss_trl")


@dataclass(slots=True)
class Bench:
    """What the rows of one command share.

    folder: for models and runs. peers: against whom. ms_swift_python: the interpreter of the peer ms-swift. pairs,
    warmup: None is the row's own. profile: whether swift's steps are profiled. changes: of every row's work.
    """

    folder: str
    peers: Sequence[str] = ("trl",)
    ms_swift_python: str | None = None
    pairs: int | None = None
    warmup: int | None = None
    profile: bool = False
    changes: dict[str, Any] = field(default_factory=dict)
    _agreements: dict[Work, dict[str, float]] = field(default_factory=dict)

    def row(self, name: str, row: Row) -> dict[str, Any]:
        """Measure a row; everything that its line and its JSON say."""
        work = row.work(self.folder, **self.changes)
        prepare(work)
        peers = [peer for peer in self.peers if peer != "ms-swift" or _takes_ms_swift(row, work)]
        without = [peer for peer in self.peers if peer not in peers]
        result: dict[str, Any] = {
            "row": name,
            "kind": row.kind,
            "title": row.title,
            "work": work.name,
            "changed": self.changes,
            "at_least": row.at_least,
            "aim": row.aim,
            "figure": row.figure,
            "not_measured": dict.fromkeys(without, "this row is not among those that ms-swift takes part in"),
        }
        if "trl" in peers and row.kind != "publish":
            result["agreement"] = self._agreement(work)
        sides = ["swift", *peers]
        reports = self._starts(row, work, sides) if row.kind == "start" else self._turns(row, work, sides)
        machine = reports.pop("machine", None)
        result |= compared(reports, per_token=work.lengths == "natural" and row.kind == "step")
        result["void"] = "agreement" in result and not agrees(result["agreement"])
        if machine is not None:
            result |= floor(counted(row, work, machine[0]["prompt_tokens"]), machine, reports["swift"])
        if self.profile and row.kind == "step":
            result["profile"] = profiled(work, turns=2 * (self.pairs or 3))
        return result

    def _agreement(self, work: Work) -> dict[str, float]:
        if work not in self._agreements:
            answer = ask("both", "agreement", work)
            self._agreements[work] = {name: answer[name] for name in (*AGREED, "required")}
        return self._agreements[work]

    def _turns(self, row: Row, work: Work, sides: list[str]) -> dict[str, list[dict[str, Any]]]:
        machine = {"machine": "gemm"} if row.kind != "publish" else {}
        return alternate(
            row.kind,
            work,
            pairs=self.pairs or row.pairs,
            warmup=row.warmup if self.warmup is None else self.warmup,
            sides=[*sides, *machine],
            kinds=machine,
            pythons={"ms-swift": self.ms_swift_python} if self.ms_swift_python else {},
        )

    def _starts(self, row: Row, work: Work, sides: list[str]) -> dict[str, list[dict[str, Any]]]:
        """Commands from their start to their first finished step, in turns; the first round fills the disk cache."""
        reports: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
        warmup = row.warmup if self.warmup is None else self.warmup
        for number in range(warmup + (self.pairs or row.pairs)):
            for side in sides if number % 2 == 0 else sides[::-1]:
                report = self._start_once(side, work)
                if number >= warmup:
                    reports[side].append(report)
        return reports

    def _start_once(self, side: str, work: Work) -> dict[str, float]:
        """Seconds from the start of a process until its first step is logged, and those it computed (any core).

        Raises:
            RuntimeError: it ended without a step, or took longer than `START_LIMIT_S`.
        """
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
            if side == "ms-swift":
                command, done = (
                    ms_swift.start_command(str(self.ms_swift_python), work, folder),
                    ms_swift.first_step_done,
                )
            else:
                module = swift_side if side == "swift" else trl_side
                command, done = module.start_command(work, folder), module.first_step_done
            began = time.perf_counter()
            where = place(work, other_interpreter=side == "ms-swift")
            process = subprocess.Popen(command, stdout=output, stderr=output, **where)
            try:
                while not done(folder):
                    ended, took = process.poll() is not None, time.perf_counter() - began
                    if (ended and not done(folder)) or took > START_LIMIT_S:
                        output.seek(0)
                        raise RuntimeError(
                            f"{side}: no first step after {took:.0f} s:\n{output.read().decode()[-4000:]}"
                        )
                    time.sleep(0.005)
                return {"seconds": time.perf_counter() - began, "processor_s": processor_seconds(process.pid)}
            finally:
                process.terminate()
                process.wait()


def _takes_ms_swift(row: Row, work: Work) -> bool:
    """ms-swift is driven by its command: whole steps are what it can show, and lengths cannot be cut to a tail."""
    plain = work.lengths == "forced" and work.beta == 0 and work.vocab_size is None and work.device == "cpu"
    return row.kind in ("step", "start") and plain


def agrees(agreement: Mapping[str, float]) -> bool:
    """Whether both trainers compute the same gradient: its direction, and its length to 1 %."""
    return agreement["cosine"] >= agreement["required"] and abs(agreement["norm_ratio"] - 1) <= NORM_TOLERANCE


def compared(reports: Mapping[str, list[dict[str, Any]]], *, per_token: bool) -> dict[str, Any]:
    """Figures of each side, and each peer's ratio to swift, above 1 where swift is better.

    Args:
        reports: turns of each side, pairwise.
        per_token: the sides sampled different lengths, so that seconds per completion token are what compares.
    """

    def figure(side: str, name: str) -> list[float]:
        values = seconds(reports[side], name)
        if per_token and name != "peak_mib":
            return [value / tokens for value, tokens in zip(values, seconds(reports[side], "tokens"), strict=True)]
        return values

    ratios: dict[str, dict[str, Any]] = {}
    for peer in reports:
        if peer == "swift":
            continue
        ratios[peer] = {}
        for name in ("seconds", "processor_s", "peak_mib"):
            if all(name in report for side in ("swift", peer) for report in reports[side]):
                ratio = ratio_of_medians(figure(peer, name), figure("swift", name))
                ratios[peer][name] = {"value": ratio.value, "low": ratio.low, "high": ratio.high}
    return {
        "compared": "per completion token" if per_token else "per turn",
        "sides": {side: summarised(turns) for side, turns in reports.items()},
        "ratios": ratios,
    }


def summarised(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Figures of one side."""
    took = seconds(reports)
    figures: dict[str, Any] = {
        "seconds": spread(took),
        "processor_s": spread(seconds(reports, "processor_s")),
        "all_seconds": [round(value, 4) for value in took],
    }
    if all("tokens" in report for report in reports):
        figures["tokens_per_s"] = sum(seconds(reports, "tokens")) / sum(took)
    for name in ("peak_mib", "workers_mib"):
        if all(name in report for report in reports):
            figures[name] = max(seconds(reports, name))
    for name in ("prefill_s", "nbytes", "tensors"):
        if all(name in report for report in reports):
            figures[name] = spread(seconds(reports, name))["median"]
    return figures


def counted(row: Row, work: Work, prompt_tokens: Sequence[int]) -> int:
    """Operations of a turn (`swift.bench.flops`).

    Args:
        row: what is measured.
        work: on what.
        prompt_tokens: of each prompt of a step behind the chat template; frozen rollouts have prompts without one.
    """
    model = Dimensions.of(json.loads((Path(work.model) / "config.json").read_text(encoding="utf-8")))
    groups, G = range(work.num_prompts), work.num_generations
    if row.kind == "train":
        rollouts = frozen(work)
        prompt_tokens = [rollouts[g * G].prompt_ids.size for g in groups]
    limits = work.limits
    lengths = [limits[g * G : (g + 1) * G] for g in groups]
    flops: StepFlops = step_flops(model, prompt_tokens, lengths, reference=work.beta > 0)
    return {"step": flops.total, "train": flops.training, "generate": flops.generation}[row.kind]


def floor(flops: int, machine: Sequence[dict[str, Any]], swift: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the machine's own rate of matrix products makes of the operations, and swift's share of it.

    Args:
        flops: of a turn.
        machine: turns of `swift.bench.machine_side.gemm`.
        swift: turns of swift.
    """
    rate = spread(seconds(machine, "flops_per_s"))["median"]
    found = {
        "flops": flops,
        "gemm_flops_per_s": rate,
        "threads": machine[0]["threads"],
        "floor_s": flops / rate,
        "floor_share": flops / rate / spread(seconds(swift, "seconds"))["median"],
    }
    if "flops_per_processor_s" in machine[0]:
        processor_rate = spread(seconds(machine, "flops_per_processor_s"))["median"]
        found["floor_share_processor"] = flops / processor_rate / spread(seconds(swift, "processor_s"))["median"]
    return found


def profiled(work: Work, *, turns: int) -> dict[str, Any]:
    """Median share of a step that each phase takes, and the operators of one turn under torch's profiler."""
    reports = alternate("profile", work, pairs=turns, warmup=2, sides=["swift"])["swift"]
    plain = [report for report in reports if "operators" not in report]
    names = plain[0]["phases"]
    took = {name: spread([report["phases"][name] for report in plain])["median"] for name in names}
    whole = sum(took.values())
    return {
        "phases": {name: {"seconds": value, "share": value / whole} for name, value in took.items()},
        "operators": next(report["operators"] for report in reports if "operators" in report),
    }


def ratios_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The ratios that are recorded: of each row the figure that it is judged by, against TRL; void rows have none."""
    found = {}
    for row in rows:
        ratio = row["ratios"].get("trl", {}).get(row["figure"])
        if ratio is not None and not row["void"]:
            found[row["row"] if row["figure"] == "seconds" else f"{row['row']}, {row['figure']}"] = ratio["value"]
    return found
