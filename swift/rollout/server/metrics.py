"""Metrics of the server: the text of /metrics for Prometheus, and the throughput for the log."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from swift.rollout.engines.completion_stream import Arrival, Failure
from swift.types import Request

LINE_S = 10.0
"""Interval between two lines of the log, in seconds."""
BOUNDS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 600.0)
"""Upper bounds of the latency histogram, in seconds."""


class Meter:
    """Counters since the start. Used on the event loop only; callers pass the time."""

    def __init__(self) -> None:
        self.requests = self.failed = self.prompt_tokens = self.generated_tokens = 0
        self.latency_sum_s = 0.0
        self.latencies = [0] * (len(BOUNDS_S) + 1)
        self._line_at = 0.0
        self._totals = (0, 0, 0)  # of the last line

    def add_requests(self, requests: Sequence[Request]) -> None:
        """Count samples that enter the queue."""
        self.requests += len(requests)
        self.prompt_tokens += sum(len(request.prompt_ids) for request in requests)

    def add_arrivals(self, arrivals: Sequence[Arrival], latency_s: float) -> None:
        """Count samples that have ended. latency_s: since they entered the queue."""
        for arrival in arrivals:
            if isinstance(arrival, Failure):
                self.failed += len(arrival.request_ids)
                continue
            self.generated_tokens += len(arrival.token_ids)
            self.latency_sum_s += latency_s
            self.latencies[bisect_left(BOUNDS_S, latency_s)] += 1

    def line(self, now: float, load: tuple[int, int]) -> str:
        """Throughput since the last line, for the log; "" if the server is idle or `LINE_S` has not passed.

        load: numbers of running and waiting samples.
        """
        self._line_at = self._line_at or now
        if now - self._line_at < LINE_S:
            return ""
        seconds, self._line_at = now - self._line_at, now
        totals = (self.prompt_tokens, self.generated_tokens, sum(self.latencies))
        prompt, generated, done = (now - before for now, before in zip(totals, self._totals, strict=True))
        self._totals = totals
        if not (prompt or generated or any(load)):
            return ""
        return (
            f"throughput: prompts {prompt / seconds:.0f} tokens/s, completions {generated / seconds:.0f} tokens/s; "
            f"samples: {done} done, {load[0]} running, {load[1]} waiting"
        )

    def text(self, load: tuple[int, int], version: int) -> str:
        """The metrics in the text format of Prometheus. load: numbers of running and waiting samples."""
        lines: list[str] = []
        for name, kind, help_text, value in (
            ("requests_running", "gauge", "Running samples.", load[0]),
            ("requests_waiting", "gauge", "Waiting samples.", load[1]),
            ("weight_version", "gauge", "Policy version of the weights.", version),
            ("requests_total", "counter", "Samples taken into the queue.", self.requests),
            ("requests_failed_total", "counter", "Samples that failed.", self.failed),
            ("prompt_tokens_total", "counter", "Prompt tokens, counted per sample.", self.prompt_tokens),
            ("generation_tokens_total", "counter", "Tokens of ended completions.", self.generated_tokens),
        ):
            lines += [f"# HELP swift_{name} {help_text}", f"# TYPE swift_{name} {kind}", f"swift_{name} {value}"]
        name, count = "swift_request_latency_seconds", 0
        lines += [f"# HELP {name} Seconds from queue to end of a sample.", f"# TYPE {name} histogram"]
        for bound, number in zip((*map(str, BOUNDS_S), "+Inf"), self.latencies, strict=True):
            count += number
            lines.append(f'{name}_bucket{{le="{bound}"}} {count}')
        lines += [f"{name}_sum {self.latency_sum_s:.6f}", f"{name}_count {count}"]
        return "\n".join(lines) + "\n"
