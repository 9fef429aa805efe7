"""One of two gloo processes that go through the scenarios below: `python rank_of_small_runs.py <folder> <rank>`.

Each scenario is a small run that fails, or not, on one of the ranks; `<folder>/rank-<rank>.json` says how it ended.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))

import torch.distributed as dist
from scripted_engine import ScriptedEngine, lost
from small_runs import SlowScorer, SmallRun

from swift.errors import EngineDead, EngineError, RewardError
from swift.rollout.replay import ReplayBuffer
from swift.rollout.round import EngineShare
from swift.rollout.scheduler import RerollConfig
from swift.trainers.distributed import Collectives

STEPS = 6


class TiedDown(Exception):
    """An error that no other process can make again."""

    def __init__(self):
        super().__init__("tied to this process")
        self.lock = threading.Lock()


def engine_on(rank, me, **script):
    """An engine on this rank, or none."""
    return ScriptedEngine(**script) if rank == me else None


def alone(me, ranks):
    """Rank 0 owns the engine, as in dedicated mode; nothing fails."""
    return SmallRun(engine_on(0, me), depth=1, ranks=ranks, share=EngineShare() if me == 0 else None)


def shared(me, ranks, **script):
    """Each rank has an engine for half of every round."""
    return SmallRun(ScriptedEngine(**script), depth=1, ranks=ranks)


def equal(group):
    """Groups of this prompt teach nothing, every second time."""
    return group.prompt.prompt_id in ("p1", "p4") and group.launch % 2 == 0


def replaying(me, ranks):
    buffer = ReplayBuffer(4, max_age=8, seed=3, recompute=True)
    return SmallRun(ScriptedEngine(), depth=1, ranks=ranks, replay=buffer, scorer=SlowScorer(equal=equal))


def trying_again(me, ranks):
    again = RerollConfig(start_step=1, max_groups=1)
    return SmallRun(ScriptedEngine(), depth=1, ranks=ranks, reroll=again, scorer=SlowScorer(equal=equal))


def every_third_step(me, ranks):
    return SmallRun(ScriptedEngine(), depth=2, interval=3, windows=2, ranks=ranks)


def in_flight(me, ranks):
    """Completions of 40 tokens at 5 ms each: several steps end while they are sampled."""
    return SmallRun(ScriptedEngine(step_s=0.005), depth=2, in_flight=True, ranks=ranks, max_tokens=40)


SUCCESSFUL = [alone, shared, replaying, trying_again, every_third_step]
"""These end as they do on one rank."""


def owner_dies(me, ranks):
    return SmallRun(engine_on(0, me, fail_after=9), depth=1, ranks=ranks, share=EngineShare() if me == 0 else None)


def other_dies(me, ranks):
    return shared(me, ranks, fail_after=5) if me == 1 else shared(me, ranks, step_s=0.01)


def other_dies_at_once(me, ranks):
    return shared(me, ranks, fail_after=0) if me == 1 else shared(me, ranks)


def other_breaks_down(me, ranks):
    run = shared(me, ranks)
    if me == 1:

        def decode(ids):
            if run.step >= 2:
                raise TiedDown
            return ""

        run.pipeline.collector.decode = decode
    return run


def rewards_break(me, ranks):
    failure = RewardError("--reward_funcs: hash: failed on every sample")
    return SmallRun(ScriptedEngine(), depth=1, ranks=ranks, scorer=SlowScorer(fail_at="p6-0", failure=failure))


def update_lost_once(me, ranks):
    return shared(me, ranks, update_failures=[None, None, ("send", lost())] if me == 1 else [])


def update_lost_twice(me, ranks):
    failures = [None, None, ("begin", lost()), ("commit", lost())] if me == 1 else []
    return shared(me, ranks, update_failures=failures)


def owner_cannot_pause(me, ranks):
    run = SmallRun(
        engine_on(0, me, step_s=0.05), depth=2, in_flight=True, ranks=ranks, share=EngineShare() if me == 0 else None
    )
    if me == 0:

        def pause(mode):
            raise EngineDead("engine: scripted: does not answer")

        run.engine.pause = pause
    return run


SCENARIOS = [
    *SUCCESSFUL, in_flight, owner_dies, other_dies, other_dies_at_once, other_breaks_down, rewards_break,
    update_lost_once, update_lost_twice, owner_cannot_pause,
]  # fmt: skip


def story(run):
    """What the rounds of a run say about what was replaced, and how old tokens were."""
    return {
        "replayed": sum(scored.metrics.get("replay/groups", 0) for scored in run.rounds),
        "again": [group.launch_index for scored in run.rounds for group in scored.groups if group.launch],
        "ages": [step.staleness["off_policy/max"] for step in run.steps],
        "mixed": sum(len(versions) > 1 for step in run.steps for versions in step.versions),
    }


def play(scenario, me, ranks):
    """How a scenario ends on this rank."""
    began = time.monotonic()
    run = scenario(me, ranks)
    ended = {"error": None, "line": ""}
    try:
        run.train(STEPS)
    except (EngineError, RewardError) as error:
        ended = {"error": type(error).__name__, "line": str(error)}
    run.close()
    ranks.barrier()
    thread = run.pipeline._thread._thread
    return {
        **ended,
        "steps": [(step.step, step.tokens, step.value) for step in run.steps],
        **story(run),
        "seconds": time.monotonic() - began,
        "thread_left": bool(thread and thread.is_alive()),
        "events": [event[0] for event in (run.engine.events if run.engine else [])],
    }


def main(folder, rank):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    ranks = Collectives(60.0)
    results = {scenario.__name__: play(scenario, rank, ranks) for scenario in SCENARIOS}
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
