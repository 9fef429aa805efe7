"""Ranks that share a round of dynamic sampling: failures in lockstep, and who notices an engine that stands still."""

from __future__ import annotations

import threading
import time

import pytest
from scripted_engine import ScriptedEngine
from small_runs import SlowScorer, on_two_ranks

from swift.errors import EngineError
from swift.rollout.round import EngineShare
from swift.trainers.supervision.watchdog import Watchdog

LIMIT_S = 1.0


class PartOfAnEngine(ScriptedEngine):
    """One of the ranks of an engine: a step needs all of them, with the same requests, as its collectives would."""

    def __init__(self, meeting, held, rank):
        super().__init__(tensor_parallel_size=2)
        self.meeting, self.held, self.rank = meeting, held, rank

    def _step(self):
        self.held[self.rank] = sorted(self._outstanding)
        self.meeting.wait()
        assert self.held[0] == self.held[1], "the ranks of one engine were asked for different things"
        self.meeting.wait()
        return super()._step()


def equal(group):
    return group.launch_index % 2 == 0


class RefusingScorer(SlowScorer):
    """Cannot even take the group `fail_at`."""

    def submit_group(self, group, progress):
        if group.group_id == self.fail_at:
            raise self.failure
        return super().submit_group(group, progress)


SETTINGS = {"dynamic": 3, "groups": 4, "prompts": 50}


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("scorer", [SlowScorer, RefusingScorer])
@pytest.mark.parametrize("fail_at", ["p0-0", "p5-0"])
def test_a_scorer_that_fails_ends_all_ranks_of_a_shared_engine_alike(scorer, fail_at, depth):
    held, meeting = {}, threading.Barrier(2, timeout=10)

    def settings(rank):
        return {
            "engine": PartOfAnEngine(meeting, held, rank), "share": EngineShare(reports=rank == 0, lockstep=True),
            "scorer": scorer(equal=equal, fail_at=fail_at, failure=EngineError("reward: broken")), "depth": depth,
            **SETTINGS,
        }  # fmt: skip

    ends = on_two_ranks(settings, lambda small: small.train(9))
    assert [str(end) for end in ends] == ["reward: broken"] * 2
    assert not meeting.broken, "a rank left the engine in the middle of a step"


def watched_run(folder, engines):
    """Two ranks with an engine and a watchdog each; what the watchdogs said, and how the ranks ended."""
    said = []

    def settings(rank):
        return {"engine": engines[rank], "share": EngineShare(rank, 2), "scorer": SlowScorer(equal=equal), **SETTINGS}

    def work(small):
        def ended(error):
            said.append(str(error))
            small.engine.abort()

        rank, rows = small.ranks.rank, small.engine._outstanding
        meter = lambda: [len(row.tokens) for row in rows.values()]  # noqa: E731
        watch = Watchdog(LIMIT_S, log_file=folder / "log", tick_s=0.05, end=ended, rank=rank, meters=[meter])
        small.ranks.waiting, small.pipeline.collector.progress = watch.waiting, watch.touch
        watch.start()
        try:
            small.train(1, max_steps=1)
        finally:
            watch.stop()

    return said, on_two_ranks(settings, work)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_engine_that_stands_still_is_noticed_by_its_own_rank(tmp_path, rank):
    engines = [ScriptedEngine(), ScriptedEngine()]
    engines[rank] = ScriptedEngine(stuck="abort")
    said, _ = watched_run(tmp_path, engines)
    assert [f"rank {rank} made no progress" in line for line in said] == [True]


def test_a_slow_engine_is_waited_for_as_long_as_it_gets_on(tmp_path):
    slow = ScriptedEngine(step_s=0.45 * LIMIT_S)
    began = time.monotonic()
    said, ends = watched_run(tmp_path, [ScriptedEngine(), slow])
    assert not said and ends == [None, None]
    assert time.monotonic() - began > 1.5 * LIMIT_S, "the slow engine was not waited for, so nothing is shown"
