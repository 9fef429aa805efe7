"""A round over several engines and ranks: who samples what, who scores it when, and what every rank ends up with."""

import contextlib
import threading
from collections import Counter

import pytest
from scripted_engine import ScriptedEngine
from small_runs import NumberedPrompts, OneRank, SlowScorer
from sources import source_of
from threaded_ranks import on_ranks

from swift.errors import EngineDead, EngineError
from swift.rollout.collector import RolloutCollector, launches_of
from swift.rollout.round import EngineShare
from swift.rollout.round_result import fault
from swift.rollout.runner import RoundRunner
from swift.rollout.scheduler import LaunchLog, RolloutScheduler
from swift.types import Completion, SamplingParams, TrainerProgress


def decode(ids):
    return " ".join(map(str, ids))


def collector(ranks, engine=None, *, share=None, scorer=None):
    share = share or (EngineShare(ranks.rank, ranks.world_size) if engine else None)
    return RolloutCollector(source_of(engine), SamplingParams(16), 7, decode, scorer or SlowScorer(), ranks, share)


def launches(groups):
    scheduler = RolloutScheduler(NumberedPrompts(), groups_per_batch=groups, batches_per_epoch=None)
    return scheduler.launch_batch(scheduler.begin_round(1))


def run(made, groups, generations=2):
    """One round, as every rank sees it: texts of each group and their scores."""
    log, progress = LaunchLog(launches=launches(groups)), TrainerProgress(0, 9, 0.0)
    current = made.prepare(log, num_generations=generations, progress=progress)
    RoundRunner(made).sample(current)
    ended = made.finish(current, timer=lambda phase: contextlib.nullcontext())
    return [([c.text for c in g.completions], g.scores.values, g.scores.excluded) for g in ended.groups], ended.metrics


def test_the_tally_of_a_round_counts_completions_and_scores():
    made, progress = collector(OneRank(), ScriptedEngine()), TrainerProgress(0, 9, 0.0)
    current = made.prepare(LaunchLog(launches=launches(3)), num_generations=2, progress=progress)
    assert made.current is current and current.tally() == "sampling 0/6, rewards 0/6"
    RoundRunner(made).sample(current)
    assert current.tally().startswith("sampling 6/6, ")
    made.finish(current, timer=lambda phase: contextlib.nullcontext())
    assert current.tally() == "sampling 6/6, rewards 6/6"


def test_the_tally_of_a_rank_says_whose_completions_it_counts():
    def work(ranks):
        made = collector(ranks, ScriptedEngine(), scorer=SlowScorer())
        progress = TrainerProgress(0, 9, 0.0)
        current = made.prepare(LaunchLog(launches=launches(4)), num_generations=2, progress=progress)
        before = current.tally()
        RoundRunner(made).sample(current)
        made.finish(current, timer=lambda phase: contextlib.nullcontext())
        return before, current.tally().partition(",")[0]

    assert on_ranks(2, work) == [("sampling 0/4 on this rank, rewards 0/8", "sampling 8/8")] * 2


def asked(engine):
    return [event[1] for event in engine.events if event[0] == "submit"]


def prompts_of(engine):
    return sorted({name.split("-")[0] for name in asked(engine)})


def alone(groups, generations=2):
    return run(collector(OneRank(), ScriptedEngine()), groups, generations)[0]


@pytest.mark.parametrize(
    ("groups", "generations", "shares"),
    [
        (4, 2, [{"p0": 2, "p1": 2}, {"p2": 2, "p3": 2}]),
        (3, 4, [{"p0": 4, "p1": 2}, {"p1": 2, "p2": 4}]),
        (1, 2, [{"p0": 1}, {"p0": 1}, {}]),
    ],
)
def test_each_engine_samples_a_consecutive_part_and_rank_0_scores_each_group_once(groups, generations, shares):
    engines, scorer = [ScriptedEngine() for _ in shares], SlowScorer()

    def work(ranks):
        made = collector(ranks, engines[ranks.rank], scorer=scorer if ranks.rank == 0 else None)
        return run(made, groups, generations)[0]

    assert on_ranks(len(shares), work) == [alone(groups, generations)] * len(shares)
    assert [Counter(name.split("-")[0] for name in asked(engine)) for engine in engines] == shares
    assert sorted(group for group, _ in scorer.submitted) == [f"p{i}-0" for i in range(groups)]


def test_ranks_of_one_engine_sample_the_same_and_one_of_them_reports():
    class Garbled(ScriptedEngine):
        """What a rank says that does not report must not count."""

        def _step(self):
            ended = super()._step()
            for completion in ended:
                completion.token_ids[0] += 1
            return ended

    engines = [ScriptedEngine(), Garbled(), ScriptedEngine(), Garbled()]

    def work(ranks):
        share = EngineShare(ranks.rank // 2, 2, reports=ranks.rank % 2 == 0)
        return run(collector(ranks, engines[ranks.rank], share=share), 2)[0]

    assert on_ranks(4, work) == [alone(2)] * 4
    assert [prompts_of(engine) for engine in engines] == [["p0"], ["p0"], ["p1"], ["p1"]]


def test_every_sample_has_a_seed_of_its_own_that_depends_on_nothing_else_and_evaluation_has_others():
    def seeds(ranks, launched=None, namespace=""):
        asked, engine = {}, ScriptedEngine()
        engine.submit = lambda request: asked.update({request.request_id: request.sampling.seed})
        made = collector(ranks, engine)
        log, progress = LaunchLog(launches=launched or launches(4)), TrainerProgress(5, 9, 0.0)
        current = made.prepare(log, num_generations=3, progress=progress, seed_namespace=namespace)
        RoundRunner(made).sample(current)
        assert "never came back" in str(current.failure)
        return asked

    one = on_ranks(1, seeds)[0]
    first, second = on_ranks(2, seeds)
    assert first | second == one
    evaluated = seeds(OneRank(), launches_of(NumberedPrompts().prompts[:4]), "eval:")
    assert evaluated.keys() == one.keys()
    assert len({*one.values(), *evaluated.values()}) == 24


class Watching(SlowScorer):
    """Notes how many completions the engine had delivered when each group came."""

    def __init__(self, engine):
        super().__init__()
        self.engine, self.delivered = engine, {}

    def submit_group(self, group, progress):
        assert all(completion.text for completion in group.completions)
        self.delivered[group.group_id] = self.engine.delivered
        return super().submit_group(group, progress)


def test_a_group_is_scored_when_its_last_completion_ends():
    engine = ScriptedEngine()
    scorer = Watching(engine)
    run(collector(OneRank(), engine, scorer=scorer), 7)
    assert len(scorer.delivered) == 7
    assert min(scorer.delivered.values()) < 14, "all groups waited for the end of the round"
    assert max(scorer.delivered.values()) == 14


def test_rank_0_scores_its_own_groups_early_and_those_of_others_when_they_arrive():
    engine = ScriptedEngine()
    scorers = [Watching(engine), SlowScorer()]
    done = threading.Event()

    def late():
        assert done.wait(20)
        return 0.0

    engines = [engine, ScriptedEngine(step_s=late)]

    def work(ranks):
        made = collector(ranks, engines[ranks.rank], scorer=scorers[ranks.rank])
        current = made.prepare(LaunchLog(launches=launches(4)), num_generations=2, progress=TrainerProgress(0, 9, 0.0))
        RoundRunner(made).sample(current)
        submitted = set(scorers[0].delivered)
        done.set()
        made.finish(current, timer=lambda phase: contextlib.nullcontext())
        return submitted

    early, _ = on_ranks(2, work)
    assert early == {"p0-0", "p1-0"}, "its own groups wait for the other engine"
    assert set(scorers[0].delivered) == {"p0-0", "p1-0", "p2-0", "p3-0"}
    assert scorers[1].submitted == []


def test_functions_of_the_whole_batch_see_it_at_once():
    batches = []

    class Whole(SlowScorer):
        needs_whole_batch = True

        def submit(self, groups, progress):
            batches.append([group.group_id for group in groups])
            return super().submit(groups, progress)

    run(collector(OneRank(), ScriptedEngine(), scorer=Whole()), 3)
    assert batches == [["p0-0", "p1-0", "p2-0"]]


def test_what_may_be_trained_on():
    def completion(reason, logprobs):
        return Completion("x/0", [1, 2], logprobs, reason)

    assert fault(completion("stop", [-1.0, -1.0])) is None
    assert fault(completion("length", [-1.0, -1.0])) is None
    assert fault(completion("error", [-1.0, -1.0])) == "engine: error"
    assert fault(completion("abort", [-1.0, -1.0])) == "engine: abort"
    assert fault(completion("stop", [-1.0])) == "engine: log-probs"


@pytest.mark.parametrize("wrong", [{"lose": ["p2-0/1"]}, {"twice": ["p2-0/1"]}])
def test_a_completion_that_is_lost_or_comes_twice_ends_every_rank(wrong):
    def work(ranks):
        made = collector(ranks, ScriptedEngine(**wrong) if ranks.rank == 1 else ScriptedEngine())
        with pytest.raises(EngineError, match="p2-0/1"):
            run(made, 4)
        return True

    assert on_ranks(2, work) == [True, True]


def test_of_several_failures_the_first_ranks_counts_everywhere():
    def work(ranks):
        failure = EngineDead(f"engine {ranks.rank}: gone")
        with pytest.raises(EngineDead) as caught:
            run(collector(ranks, ScriptedEngine(fail_after=0, failure=failure)), 3)
        return str(caught.value)

    assert set(on_ranks(3, work)) == {"engine 0: gone"}


def test_a_failure_of_a_single_process_keeps_its_traceback():
    made = collector(OneRank(), ScriptedEngine(fail_after=1, failure=ZeroDivisionError("half a token")))
    with pytest.raises(ZeroDivisionError) as caught:
        run(made, 2)
    assert any(entry.name == "advance" for entry in caught.traceback)
