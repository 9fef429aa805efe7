"""Settings of `swift bench`. They are here and not in `swift/bench`, which itself reads the settings of other modes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from swift.flags import flag

RowName = Literal[
    "tiny", "tiny-kl", "tiny-natural", "small", "small-prompt", "small-tail", "train", "train-prompt", "generate",
    "head", "publish", "start", "gpu", "gpu-train", "gpu-generate", "gpu-packed",
]  # fmt: skip
"""The rows of `swift.bench.works`."""

Axis = Literal["completions", "length", "prompt", "group", "vocabulary", "workers"]
"""What `swift.bench.scaling` varies."""


@dataclass(kw_only=True)
class BenchSettings:
    """What is measured, against whom, and where results go."""

    GROUP: ClassVar[str] = "Run"

    work: list[RowName] = flag([], unset="all that this machine can do")
    """Rows to measure; docs/benchmarks.md describes each."""

    peers: list[Literal["trl", "ms-swift", "none"]] = flag(["trl"])
    """Trainers that swift is measured against, or none. ms-swift needs `--ms_swift_python`."""

    ms_swift_python: str | None = flag()
    """Python interpreter of an environment that has ms-swift, for `--peers ms-swift`."""

    scaling: list[Axis] = flag([])
    """Measure step time against these instead of the rows, with a plot each."""

    pairs: int | None = flag(at_least=1, unset="that of the row")
    """Measured turns of each side."""

    warmup: int | None = flag(at_least=0, unset="that of the row")
    """Turns of each side before those that count."""

    size: Literal["nano", "tiny", "small", "half"] | None = flag(everyday=False, unset="that of the row")
    """Size of the model of every row: 0.04M, 0.6M, 24M or 0.4B parameters. For trying the command out."""

    completion_tokens: int | None = flag(at_least=2, everyday=False, unset="that of the row")
    """Longest completions of every row, in tokens. For trying the command out."""

    vocab_size: int | None = flag(at_least=300, everyday=False, unset="that of the row")
    """Vocabulary of every row's model. For trying the command out."""

    threads: int | None = flag(at_least=1, unset="torch's own choice")
    """Threads of each side. On a machine that others use, 1 gives steadier figures."""

    profile_steps: bool = flag(False)
    """Profile swift's whole steps too: seconds of each phase, and the operators that take most."""

    results: str = flag("output/bench")
    """Folder for results: a JSON file and a Markdown table."""

    baseline: str | None = flag(unset="ratios are not compared")
    """File with recorded ratios, those of each family of processors. The command fails when one has fallen 15 % below;
    a family without any is compared with the lowest of the others."""

    record_baseline: bool = flag(False, needs="baseline")
    """Write the ratios of this run, for this family of processors, to `--baseline` instead of comparing them."""

    @property
    def rivals(self) -> list[str]:
        """`peers` without "none"."""
        return [peer for peer in self.peers if peer != "none"]

    def bench_problems(self) -> Iterator[str]:
        """What is wrong with these settings, one line each."""
        if "none" in self.peers and len(self.peers) > 1:
            yield f"--peers: {' '.join(self.peers)}: none excludes the others; leave it out"
        if "ms-swift" in self.peers and self.ms_swift_python is None:
            yield (
                "--ms_swift_python: missing: --peers ms-swift runs in an interpreter of its own; give the python of an "
                "environment that has ms-swift"
            )
        if self.ms_swift_python is not None and "ms-swift" not in self.peers:
            yield f"--ms_swift_python: {self.ms_swift_python}: no peer uses it; add --peers trl ms-swift"
        if self.record_baseline and self.baseline is None:
            yield "--record_baseline: true: no file is named; give --baseline benchmarks/baseline.json"
        if self.baseline is not None and not self.record_baseline and not Path(self.baseline).is_file():
            yield f"--baseline: {self.baseline}: no such file; write it with --record_baseline true"
        if self.baseline is not None and "trl" not in self.peers:
            yield f"--baseline: {self.baseline}: holds ratios to TRL; add trl to --peers"
        changed = [name for name in ("size", "completion_tokens", "vocab_size") if getattr(self, name) is not None]
        if self.baseline is not None and changed:
            yield f"--{changed[0]}: {getattr(self, changed[0])}: the ratios of --baseline are of the rows as they are"
        if self.work and self.scaling:
            yield f"--scaling: {' '.join(self.scaling)}: measures no rows; leave --work out"
