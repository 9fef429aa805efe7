"""`swift` with its last step under torch's profiler: `python profile_step.py OUT.json rlhf FLAGS...`."""

import json
import sys
from pathlib import Path

import torch
from transformers import TrainerCallback, trainer

MOST = 15


class Profile(TrainerCallback):
    """Starts when the step before the last is logged, ends when the last is."""

    def __init__(self, path):
        self.path, self.profiler = path, None

    def on_log(self, args, state, control, **kwargs):
        """Start or end."""
        if self.profiler is None and state.global_step == state.max_steps - 1:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            kinds += [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self.profiler = torch.profiler.profile(activities=kinds)
            self.profiler.start()
        elif self.profiler is not None and not self.path.exists():
            self.profiler.stop()
            self.path.write_text(json.dumps(summary(self.profiler)))


def summary(profiler):
    """The operations that take most, on the device where there is one, and the share of time it had nothing to do."""
    cuda, rows = torch.cuda.is_available(), profiler.key_averages()
    took = {row.key: (row.self_device_time_total if cuda else row.self_cpu_time_total, row.count) for row in rows}
    whole = sum(us for us, _ in took.values())
    top = sorted(took.items(), key=lambda item: -item[1][0])[:MOST]
    found = {"top": [{"name": name, "ms": us / 1e3, "share": us / whole, "count": n} for name, (us, n) in top]}
    spans = sorted((e.time_range.start, e.time_range.end) for e in profiler.events() if "CUDA" in str(e.device_type))
    if spans:
        busy, end = 0.0, spans[0][0]
        for start, stop in spans:
            busy += max(0.0, stop - max(start, end))
            end = max(end, stop)
        found |= {"device_busy_ms": busy / 1e3, "device_idle_share": 1 - busy / (end - spans[0][0])}
    return found


def main():
    """See the module."""
    out, *words = sys.argv[1:]
    trainer.DEFAULT_CALLBACKS.append(Profile(Path(out)))
    from swift.cli.main import main as swift

    sys.exit(swift(words))


if __name__ == "__main__":
    main()
