"""`swift doctor DIR`: the health alerts of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift.errors import ConfigError, counted, printable, unusable
from swift.observability.curves import ALERTS, LOGGING
from swift.observability.jsonl import read_jsonl
from swift.observability.run_dir import list_versions

if TYPE_CHECKING:
    from swift.arguments import Resolved

_PLACE: dict[str, type] = {"step": int, "attempt": int}
_ALERT = {**_PLACE, "rule": str, "sentence": str}


def run(resolved: Resolved) -> int:
    """The mode: prints the alerts that count, oldest first; returns 0."""
    args: Any = resolved.args
    folder, attempts = newest_run(args.run, LOGGING), dict[int, int]()
    for line in checked_rows(folder / LOGGING, _PLACE):
        attempts[line["step"]] = max(line["attempt"], attempts.get(line["step"], 0))
    if not attempts:
        raise ConfigError(f"--run: {folder / LOGGING}: no step is logged; wait for one, or choose another run")
    rows = checked_rows(folder / ALERTS, _ALERT)
    found = [alert for alert in rows if alert["attempt"] >= attempts.get(alert["step"], 0)]
    newest: dict[int, int] = {}
    for alert in found:  # the latest attempt of a step counts
        newest[alert["step"]] = max(alert["attempt"], newest.get(alert["step"], 0))
    current = [alert for alert in found if alert["attempt"] == newest[alert["step"]]]
    alerts = sorted(current, key=lambda alert: alert["step"])
    if args.json:
        print(json.dumps(alerts, indent=2))
        return 0
    if folder != Path(args.run).expanduser():
        print(f"run: {folder}")
    for alert in alerts:
        print(printable(f"step {alert['step']}: {alert['rule']}: {alert['sentence']}"))
    print(f"{counted(len(alerts), 'alert')} in {counted(len(attempts), 'logged step')}")
    return 0


def newest_run(given: str, file: str) -> Path:
    """The folder of a run, which has this file; of a folder of runs the newest one."""
    folder = Path(given).expanduser()
    found = [path for path in (folder, *reversed(list_versions(folder))) if (path / file).exists()]
    if not found:
        raise ConfigError(f"--run: {given}: no {file} in it; give the folder of a run, such as output/<model>/v0-...")
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
