"""A rollout pipeline with everything around it scripted, and a policy whose weights depend on all it was trained on.

run = SmallRun(engine, depth=1)
run.train(6)            -> run.steps: what each optimizer step trained on
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from scripted_engine import CountingSource, two_layers
from sources import source_of
from threaded_ranks import ThreadedMailbox, on_ranks

from swift.rollout.collector import RolloutCollector
from swift.rollout.pipeline import PipelineConfig, PipelineState, RolloutPipeline
from swift.rollout.round import EngineShare
from swift.rollout.saved_state import decode, encode
from swift.rollout.scheduler import RolloutScheduler
from swift.rollout.sources.base import Source
from swift.rollout.weights.sync import WeightSync
from swift.trainers.distributed import Collectives
from swift.types import GroupScores, Prompt, SamplingParams, TrainerProgress


class NumberedPrompts:
    """An endless stream over `count` prompts of 3 to 9 tokens, in order."""

    def __init__(self, count=7):
        self.prompts = [Prompt(f"p{i}", [], [40 + i] * (3 + i % 7)) for i in range(count)]
        self.drawn = 0

    def next(self):
        self.drawn += 1
        return self.prompts[(self.drawn - 1) % len(self.prompts)]

    def skip_to_epoch_end(self):
        self.drawn += -self.drawn % len(self.prompts)

    def state_dict(self):
        return {"drawn": self.drawn}

    def load_state_dict(self, state):
        self.drawn = state["drawn"]


OneRank = Collectives
"""The collectives of a run in a single process, which do nothing."""


class Scorer:
    """What a round asks of its scorer; a subclass has `submit_group`."""

    needs_whole_batch = False

    def submit(self, groups, progress):
        return [self.submit_group(group, progress) for group in groups]

    def add_model_scores(self, groups, scores):
        return list(scores)

    def end_batch(self, groups=None):
        pass

    def drain_metrics(self, groups=None):
        return {}


class SlowScorer(Scorer):
    """Scores groups on threads of its own, after `delay()` seconds; `fail_at` is a group that cannot be scored.

    equal: group -> whether all of its rewards are 0.
    """

    def __init__(self, delay=lambda: 0.0, fail_at=None, failure=None, equal=lambda group: False):
        self.delay, self.fail_at, self.failure, self.equal = delay, fail_at, failure, equal
        self.pool = ThreadPoolExecutor(2)
        self.submitted = []
        """(group id, monotonic seconds)."""

    def submit_group(self, group, progress):
        self.submitted.append((group.group_id, time.monotonic()))
        return self.pool.submit(self._score, group)

    def _score(self, group):
        time.sleep(self.delay())
        if group.group_id == self.fail_at:
            raise self.failure
        if self.equal(group):
            return GroupScores([[0.0] for _ in group.completions], [None] * len(group.completions))
        values = [[sum(token * (t + 1) for t, token in enumerate(c.token_ids)) / 1000] for c in group.completions]
        return GroupScores(values, [None] * len(values))

    def drain_metrics(self, groups=None):
        return {"rewards/hash/mean": float(len(groups or []))}


@dataclass
class Step:
    """What one optimizer step saw: the samples of its window, how old they were, and the weights it ended with."""

    step: int
    versions: list
    tokens: list
    groups: list
    staleness: dict
    value: float
    books: tuple


class SmallRun:
    """A run of `windows` x `iterations` optimizer steps per round; batches hold `groups` groups of G = 2.

    depth, interval, in_flight: as in the settings of a run. dynamic: `max_resample_times` of dynamic sampling, or
    None. source: makes the weight source of a value.
    """

    def __init__(
        self,
        engine,
        *,
        depth=0,
        interval=1,
        groups=2,
        windows=1,
        iterations=1,
        in_flight=False,
        scorer=None,
        ranks=None,
        share=EngineShare(),  # noqa: B008
        max_tokens=16,
        prompts=7,
        dynamic=None,
        replay=None,
        reroll=None,
        mailbox=None,
        streaming=0,
        max_excluded_frac=1.0,
    ):
        self.value, self.steps, self.rounds, self.parts = 1.0, [], [], []
        self.ranks = ranks or OneRank()
        self.scorer = scorer or SlowScorer()
        self.updates, self.dynamic = windows * iterations, dynamic is not None
        self.source = source = engine if isinstance(engine, Source) else source_of(engine)
        self.engine = engine = source.engine if source is not None else None
        collector = RolloutCollector(
            source, SamplingParams(max_tokens), 7, str, self.scorer, self.ranks, share, mailbox=mailbox
        )
        self.weight_sync = WeightSync(
            engine, source=lambda: CountingSource(two_layers(self.value)), interval=interval, ranks=self.ranks
        )
        config = PipelineConfig(
            max_excluded_frac=max_excluded_frac,
            num_generations=2,
            num_generations_eval=2,
            generation_batches=1,
            num_global_batches=windows,
            num_iterations=iterations,
            reward_weights=[1.0],
            prefetch_depth=depth,
            in_flight_updates=in_flight,
            streaming_groups=streaming,
            dynamic_sample=dynamic is not None,
            max_resample_times=dynamic or 0,
        )
        self.scheduler = RolloutScheduler(
            NumberedPrompts(prompts), groups_per_batch=groups, batches_per_epoch=None, reroll=reroll
        )
        self.synced = []
        self._note_syncs()
        self.pipeline = RolloutPipeline(
            self.scheduler,
            collector,
            config,
            timer=lambda phase: contextlib.nullcontext(),
            observer=self.rounds.append,
            weight_sync=self.weight_sync,
            replay=replay,
        )

    def _note_syncs(self):
        sync = self.weight_sync.sync

        def noted(step):
            ack = sync(step)
            self.synced.append(step)
            return ack

        self.weight_sync.sync = noted

    @property
    def step(self):
        return self.steps[-1].step if self.steps else self.start

    start = 0

    def train(self, until, *, max_steps=10**6, pause=lambda: 0.0):
        """Optimizer steps up to number `until`; `pause()` seconds of work in each."""
        windows = self.pipeline.steps(lambda: TrainerProgress(self.step, max_steps, 0.0))
        while self.step < until:
            self._one_step(next(windows), pause)
        return self

    def _one_step(self, batch, pause):
        time.sleep(pause())
        parts = []
        for part in batch.arriving or ():
            parts.append([batch.samples[i].group for i in part.samples])
            time.sleep(pause())
        self.parts.append(parts)
        samples = [batch.samples[i] for i in batch.global_batch()]
        staleness = self.pipeline.staleness(self.step)
        text = repr([(self.value, s.token_ids.tolist(), s.advantage) for s in samples])
        self.value = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=3).digest()) / 64
        books = self.scheduler
        assert books.launched == books.trained + books.excluded + books.dropped + len(books.carried) + books.in_flight
        asked = len(self.pipeline._ahead) * books.groups_per_batch
        assert self.dynamic or books.in_flight == asked, "a launch is neither ended nor on its way"
        done = Step(
            self.step + 1,
            [s.versions for s in samples],
            [s.token_ids.tolist() for s in samples],
            [s.group for s in samples],
            staleness,
            self.value,
            (books.launched, books.trained, books.excluded),
        )
        self.steps.append(done)
        self.pipeline.step_done(done.step)

    def save(self):
        """What a checkpoint holds, after its way through the files."""
        state = decode(encode(self.pipeline.state()), PipelineState)
        return {"pipeline": state, "value": self.value, "step": self.step}

    def load(self, state):
        self.pipeline.load(state["pipeline"])
        self.value, self.start, self.steps = state["value"], state["step"], []
        return self

    def close(self):
        self.pipeline.close()
        if self.engine is not None:
            self.engine.close()
        self.scorer.pool.shutdown()


def on_two_ranks(settings, work):
    """`work(run)` on each of two ranks with a mailbox; `settings(rank)` are those of its run, the engine among them."""
    channels = {}

    def rank(ranks):
        run = SmallRun(ranks=ranks, mailbox=ThreadedMailbox(channels), **settings(ranks.rank))
        try:
            return work(run)
        finally:
            run.close()

    return on_ranks(2, rank)
