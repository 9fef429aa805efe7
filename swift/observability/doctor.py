"""`swift doctor`: whether the machine can train; `swift doctor RUN`: why a run is sick, its time, its alerts."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift.errors import ConfigError, ResourceError, counted, printable, unusable
from swift.observability.curves import ALERTS, IMAGES, LOGGING
from swift.observability.diagnosis import diagnose
from swift.observability.evidence import Evidence, Row, ends_of, gather
from swift.observability.findings import CAUSES, Finding, percent
from swift.observability.jsonl import read_jsonl
from swift.observability.leftovers import leftovers
from swift.observability.machine import Check, accelerators, disks, hubs, memory, ports, python, torch_build
from swift.observability.packages import packages
from swift.observability.run_dir import ARGS, ATTEMPTS, list_versions
from swift.observability.time_spent import time_of

if TYPE_CHECKING:
    from swift.arguments import Resolved

COMPLETIONS = "completions.jsonl"
_PLACE: dict[str, type] = {"step": int, "attempt": int}
_ALERT = {**_PLACE, "rule": str, "sentence": str}
_COMPLETION = {
    "group_id": str,
    "prompt_id": str,
    **_PLACE,
    "completion_tokens": int,
    "finish_reason": str,
    "split": str,
    "prompt": str,
    "completion": str,
    "rewards": dict,
    "columns": dict,
}


def run(resolved: Resolved) -> int:
    """The mode; returns 0, or for a machine with an error 3."""
    args: Any = resolved.args
    return machine(as_json=args.json) if args.run is None else of_run(args.run, as_json=args.json)


def examine() -> list[Check]:
    """All checks of the machine, in the order of the table; takes seconds, most of them for importing torch."""
    parts = (python, torch_build, accelerators, packages, memory, disks, ports)
    with ThreadPoolExecutor(1) as pool:  # hubs may take their whole time limit
        asked = pool.submit(lambda: list(hubs(clock=time.time)))
        found = [check for part in parts for check in part()]
        return [*found, *asked.result(), *leftovers()]


def machine(*, as_json: bool) -> int:
    """Prints the table of checks."""
    checks = examine()
    if as_json:
        print(json.dumps({"checks": [asdict(check) for check in checks]}, indent=2))
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            print(printable(f"{check.status:<7}  {check.name:<{width}}  {check.found}"))
            if check.fix:
                print(printable(f"{'':7}  {'':{width}}  fix: {check.fix}"))
        errors, warnings = (sum(check.status == status for check in checks) for status in ("error", "warning"))
        print(f"{counted(errors, 'error')}, {counted(warnings, 'warning')}")
    return ResourceError.exit_code if any(check.status == "error" for check in checks) else 0


@dataclass(frozen=True, slots=True)
class Examined:
    """A run that was examined. alerts: those that count, oldest first. num_steps: how many were logged."""

    folder: Path
    evidence: Evidence
    findings: Sequence[Finding]
    alerts: Sequence[Row]
    num_steps: int

    def command(self, finding: Finding) -> str:
        """The command line of a new run like this one with the settings of a finding, in the same working folder.

        "" if settings alone do not mend it.
        """
        args = self.evidence.args  # all that the mode has
        found = re.findall(r"--(\S+)((?: (?!--)\S+)*)", finding.settings)
        settings = [word for name, values in found if name in args for word in (f"--{name}", *values.split())]
        if not settings or not self.evidence.command:
            return ""
        words = ["swift", self.evidence.command, str(self.folder / ARGS), *settings]
        if args.get("resume_from_checkpoint"):  # of the last attempt
            words += ["--resume_from_checkpoint", "none"]
        if not self.evidence.arg("add_version", True):  # its folder is taken
            folders = (Path(f"{self.folder.resolve()}-mended{number or ''}") for number in itertools.count())
            words += ["--output_dir", str(next(path for path in folders if not path.exists()))]
        attempts = (self.folder / "logs").glob("attempt-*")
        ranks = max((len(list(attempt.glob("rank-*.log"))) for attempt in attempts), default=1)
        return f"NPROC_PER_NODE={ranks} {shlex.join(words)}" if ranks > 1 else shlex.join(words)

    def causes(self) -> list[dict[str, Any]]:
        """The findings, as `--json true` has them."""
        return [
            {
                "cause": one.cause,
                "confidence": one.confidence,
                "evidence": list(one.evidence),
                "fix": one.fix,
                "command": self.command(one),
                "steps": list(one.steps),
            }
            for one in self.findings
        ]


def examined(folder: Path) -> Examined:
    """The diagnosis of a run's folder, of which nothing is changed.

    Raises ConfigError: no step is logged yet and no cause is found, or a file is none of swift's.
    """
    log = newest_attempts(list(checked_rows(folder / LOGGING, _PLACE)))
    attempts = {row["step"]: row["attempt"] for row in log}
    rows = checked_rows(folder / ALERTS, _ALERT)
    alerts = newest_attempts([alert for alert in rows if alert["attempt"] >= attempts.get(alert["step"], 0)])
    completions = ends_of(folder / COMPLETIONS, lambda path: list(checked_rows(path, _COMPLETION)))
    with unusable(f"--run: {folder}: args.json, attempts.jsonl or rollouts cannot be read", "; choose another run"):
        evidence = gather(folder, log, newest_attempts(completions))
    findings = diagnose(evidence)
    if not log and not findings:
        ended = "".join(f"; the run ended with: {printable(reason)}" for reason in evidence.reasons[-1:])
        raise ConfigError(f"--run: {folder / LOGGING}: no step is logged; wait for one, or choose another run{ended}")
    return Examined(folder, evidence, findings, alerts, len(attempts))


def of_run(given: str, *, as_json: bool) -> int:
    """Prints the diagnosis of a run and its alerts, and draws `images/doctor.png`."""
    folder = newest_run(given, LOGGING, ATTEMPTS)
    run = examined(folder)
    alerts, spent = run.alerts, time_of(run.evidence)
    try:
        draw(folder, run)
    except ResourceError as error:  # the folder of somebody else
        print(f"not drawn: {error}", file=sys.stderr)
    if as_json:
        print(json.dumps({"causes": run.causes(), "time": spent, "alerts": alerts}, indent=2))
        return 0
    if folder != Path(given).expanduser():
        print(f"run: {folder}")
    for line in (*report(run, spent), *(f"step {a['step']}: {a['rule']}: {a['sentence']}" for a in alerts)):
        print(printable(line))
    print(f"{counted(len(alerts), 'alert')} in {counted(run.num_steps, 'logged step')}")
    return 0


def draw(folder: Path, run: Examined) -> None:
    """Draw the curves with the steps of each finding. Raises ResourceError: the folder cannot be written."""
    from swift.observability.plots import Marks, write_diagnosis  # imports matplotlib

    regions = [(finding.cause, finding.steps[0], finding.steps[1]) for finding in run.findings if finding.steps]
    marks = Marks(folder.name, [alert["step"] for alert in run.alerts], regions=regions)
    write_diagnosis([*run.evidence.log, *run.evidence.evals], folder / IMAGES / "doctor.png", marks)


def report(run: Examined, spent: Mapping[str, Any]) -> Iterator[str]:
    """The lines of a diagnosis: the verdict with evidence and fix, the next candidates, the time."""
    if not run.findings:
        yield "healthy"
    for number, finding in enumerate(run.findings):
        if number == 1:
            yield "less likely:"
        yield f"{finding.cause} ({percent(finding.confidence)}): {CAUSES[finding.cause]}"
        yield from (f"  {said}" for said in finding.evidence)
        yield f"  fix: {finding.fix}"
        if command := run.command(finding):
            yield f"  command: {command}"
    if spent:
        parts = ", ".join(f"{name} {percent(share)}" for name, share in spent["shares"].items() if share >= 0.01)
        yield f"time: {spent['step_s']:.2f} s a step; {parts}"
        yield f"  {spent['setting']}: {spent['why']}"


def newest_attempts(rows: Sequence[Row]) -> list[Row]:
    """The rows that count: of each step those of its latest attempt, by step."""
    newest: dict[int, int] = {}
    for row in rows:
        newest[row["step"]] = max(row["attempt"], newest.get(row["step"], 0))
    return sorted((row for row in rows if row["attempt"] == newest[row["step"]]), key=lambda row: row["step"])


def newest_run(given: str, *files: str) -> Path:
    """The folder of a run, which has one of these files; of a folder of runs the newest one."""
    folder = Path(given).expanduser()
    found = [
        path for path in (folder, *reversed(list_versions(folder))) if any((path / file).exists() for file in files)
    ]
    if not found:
        raise ConfigError(
            f"--run: {given}: no {files[0]} in it; give the folder of a run, such as output/<model>/v0-..."
        )
    return found[0]


def checked_rows(path: Path, kinds: Mapping[str, type]) -> Iterator[dict[str, Any]]:
    """The rows of a file, if there is one, each with values of these kinds."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"--run: {path}: not a regular file; choose another run")
    with unusable(f"--run: {path}: cannot be read", "; choose another run"):
        for row in read_jsonl(path):
            if not isinstance(row, dict) or not all(isinstance(row.get(name), kind) for name, kind in kinds.items()):
                shown = printable(json.dumps(row))[:60]
                raise ConfigError(f"--run: {path}: {shown}: no line of swift's, which has {', '.join(kinds)}")
            yield row
