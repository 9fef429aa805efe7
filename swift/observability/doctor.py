"""`swift doctor --run DIR`: the health alerts of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift.errors import ConfigError, counted
from swift.observability.curves import LOGGING
from swift.observability.jsonl import read_log

if TYPE_CHECKING:
    from swift.arguments import Resolved

ALERTS = "alerts.jsonl"


def run(resolved: Resolved) -> int:
    """The mode: prints the alerts that count, oldest first; returns 0."""
    args: Any = resolved.args
    folder = Path(args.run).expanduser()
    if not (folder / LOGGING).is_file():
        raise ConfigError(
            f"--run: {args.run}: no {LOGGING} in it; give the folder of a run, such as output/<model>/v0-..."
        )
    alerts, lines = read_log(folder / ALERTS), read_log(folder / LOGGING)
    attempts = {line["step"]: line["attempt"] for line in lines}
    alerts = [alert for alert in alerts if alert["attempt"] >= attempts.get(alert["step"], 0)]  # others were redone
    if args.json:
        print(json.dumps(alerts, indent=2))
        return 0
    for alert in alerts:
        print(f"step {alert['step']}: {alert['rule']}: {alert['sentence']}")
    print(f"{counted(len(alerts), 'alert')} in {counted(len(lines), 'log line')}")
    return 0
