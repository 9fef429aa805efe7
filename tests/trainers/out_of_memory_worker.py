"""Gradients made while memory runs out: `python out_of_memory_worker.py <folder>` is one of two ranks."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from invariance_worker import Bench, Layout, settings
from preloaded import run_ranks
from ranks import joined

from swift.trainers.grpo import logprobs


class Case(NamedTuple):
    """A setting, a layout, and which passes fail, in their `place`, "forward" or "backward".

    room: tokens for which memory of each rank suffices. numbers: passes, from 0, that fail in any case, on one device.
    """

    name: str
    layout: Layout
    place: str
    room: tuple[int, ...]
    numbers: tuple[int, ...] = ()


class ShortBench(Bench):
    """A bench with passes for which memory does not suffice."""

    def __init__(self, folder, output, rank=0):
        super().__init__(folder, output)
        self.rank = rank
        self.lines = []
        self.trainer.planner._report = self.lines.append
        self.made = self.failed = 0

    def of(self, batch, case: Case):
        """The gradient of a case, and how many passes have failed."""
        planner = self.trainer.planner
        planner.fitting_tokens, planner.survived, self.made, self.failed = None, 0, 0, 0
        with self._failing(case):
            gradient = self.gradient(batch, settings()[case.name], case.layout)
        return gradient, self.failed

    @contextmanager
    def _failing(self, case):
        parameters = list(self.model.parameters())
        middle, usual = parameters[len(parameters) // 2], logprobs.score_tokens

        def fail(*_):
            self.failed += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

        def score_tokens(model, tokens, **settings):
            fails = tokens.inputs["input_ids"].numel() > case.room[self.rank] or self.made in case.numbers
            self.made += 1
            found = usual(model, tokens, **settings)
            if fails and (case.place == "forward" or not torch.is_grad_enabled()):
                fail()
            if fails:
                handle = middle.register_hook(lambda _: (handle.remove(), fail()))
            return found

        logprobs.score_tokens = score_tokens
        try:
            yield
        finally:
            logprobs.score_tokens = usual


def on_two_ranks(folder: Path, model, batch, cases) -> list:
    """Gradient and failures of each case, of rank 0; and whether the other rank has the same gradient."""
    folder.mkdir()
    torch.save((model, batch, cases), folder / "task")
    run_ranks([__file__, folder], folder)
    return torch.load(folder / "found")


def main(folder: str) -> None:
    place = Path(folder)
    with joined():
        model, batch, cases = torch.load(place / "task", weights_only=False)
        bench = ShortBench(model, place / f"rank-{dist.get_rank()}", dist.get_rank())
        found = []
        for case in cases:
            gradient, failed = bench.of(batch, case)
            both = bench.trainer.collectives.all_gather((gradient, failed, bench.trainer.planner.fitting_tokens))
            found.append(
                (gradient, sum(one[1] for one in both), torch.equal(both[0][0], both[1][0]), both[0][2] == both[1][2])
            )
        if dist.get_rank() == 0:
            torch.save(found, place / "found")


if __name__ == "__main__":
    main(*sys.argv[1:])
