"""Groups of the Atropos message API become completions; what cannot be trained on is excluded, with a reason."""

from __future__ import annotations

import math
import queue

import msgspec
import pytest
from message_api import StandIn, group
from scripted_engine import ScriptedEngine
from sources import leave, sampled
from test_atropos_api import Time, opened, post

from swift.errors import ConfigError, EngineError, NumericError
from swift.rollout.batches import BatchConfig, BatchMaker
from swift.rollout.round_result import fault, set_scores
from swift.rollout.sources.atropos import source as source_module
from swift.rollout.sources.atropos.api import Group
from swift.rollout.sources.atropos.groups import GroupReader
from swift.rollout.sources.atropos.source import AtroposSource
from swift.types import GroupScores, Prompt, Request, RolloutGroup, SamplingParams

NAMES = ["a-0/0", "a-0/1"]


def reader(**settings):
    usual = {
        "group_size": 2, "vocab_size": 100, "max_token_len": 33, "temperature": 1.0, "require_logprobs": False,
        "use_advantages": False, "end_token_ids": frozenset({11}), "decode": lambda ids: " ".join(map(str, ids)),
    }  # fmt: skip
    return GroupReader(**{**usual, **settings})


def read(given, versions=lambda asked: [None] * len(asked), **settings):
    made = reader(**settings)
    made._accepted = True
    return made.completions(msgspec.convert(given, Group), NAMES, versions)


def edited(name, row, *places):
    """A group of which one row is changed at places, as (index, value)."""
    made = group()
    for index, value in places:
        made[name][row][index] = value
    return made


# --- what a sequence becomes ------------------------------------------------------------------------------------------


def test_prompt_answer_and_score():
    first, second = read(group(2))
    assert (first.token_ids, first.episode.prompt_ids[1:]) == ([10, 11], [1, 2])
    assert (first.logprobs, first.mask, first.finish_reason) == ([-0.5, -0.5], [], "stop")
    assert (second.request_id, second.episode.rewards, second.finish_reason) == ("a-0/1", [1.0], "length")
    assert first.columns == {"env_id": 0}
    assert fault(first) is None


def test_several_turns_are_masked_between_answers():
    made = group()
    for row in range(2):
        made["masks"][row] = [-100, 1, -100, made["tokens"][row][3], -100]
        made["inference_logprobs"][row] = [1.0, -0.1, 1.0, -0.2, 1.0]
    asked = []

    def versions(pairs):
        asked.extend(pairs)
        return [[(4, 0, 1)], None]

    first, _ = read(made, versions)
    assert (first.token_ids, first.mask, first.logprobs) == ([1, 2, 10], [1, 0, 1], [-0.1, 0.0, -0.2])
    assert [one["role"] for one in first.episode.messages] == ["prompt", "assistant", "environment", "assistant"]
    assert (first.episode.num_turns, first.text, first.versions) == (2, "10", [(4, 0, 1)])
    head = made["tokens"][0][0]
    assert asked[:2] == [([head], [1], [-0.1]), ([head, 1, 2], [10], [-0.2])]


def test_a_first_token_has_no_logprob_and_is_never_trained():
    made = group()
    made["masks"] = [list(row) for row in made["tokens"]]
    first, _ = read(made)
    assert first.episode.problem == "positive log-probs"  # 1.0 says that these were masked
    made["inference_logprobs"] = [[-0.1] * 5] * 2
    first, _ = read(made)
    assert (first.episode.prompt_ids, len(first.token_ids), first.mask) == ([made["tokens"][0][0]], 4, [])


@pytest.mark.parametrize("nothing", [None, []])
def test_nulls_and_empty_lists_are_the_same(nothing):
    """BaseEnv sends [] for what no trajectory had."""
    names = ("inference_logprobs", "ref_logprobs", "advantages", "overrides")
    first, _ = read(group(**dict.fromkeys(names, nothing), generation_params=None, group_overrides=None))
    assert all(math.isnan(one) for one in first.logprobs)
    assert first.episode.logprobs_known is False
    assert (first.episode.problem, fault(first)) == ("", None)
    assert read(group(inference_logprobs=nothing), require_logprobs=True)[0].episode.problem == "no log-probs"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (edited("tokens", 0, (4, 100)), "vocabulary"),
        (edited("tokens", 0, (4, -1)), "vocabulary"),
        (edited("masks", 0, (4, 99)), "mask"),
        (edited("masks", 0, (3, -100), (4, -100)), "empty"),
        (edited("inference_logprobs", 0, (4, 1.0)), "positive log-probs"),
        (edited("inference_logprobs", 0, (4, math.nan)), "misaligned"),
        (edited("inference_logprobs", 0, (4, -math.inf)), "misaligned"),
        (group(masks=[[-100] * 4, [-100, -100, -100, 11, 12]]), "misaligned"),
        (group(inference_logprobs=[[-0.5] * 4, [-0.5] * 5]), "misaligned"),
        (group(ref_logprobs=[[-0.5] * 6, [-0.5] * 5]), "misaligned"),
        (group(scores=[math.nan, 1.0]), "score"),
        (group(overrides=[{"temperature": 0.5}, {}]), "temperature"),
        (group(overrides=[{"temperature": "hot"}, {}]), "temperature"),
        (group(overrides=[{"temperature": [1]}, {}]), "temperature"),
        (group(overrides=[{"temperature": 10**400}, {}]), "temperature"),
        (group(prompt=40, answer=1), "too long"),
    ],
)
def test_a_sequence_that_does_not_hold_is_excluded_alone(given, problem):
    first, second = read(given)
    assert first.episode.problem == problem
    assert fault(first) == f"environment: {problem}"
    assert second.episode.problem == ("too long" if problem == "too long" else "")


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (group(1), "group size"),
        (group(3), "group size"),
        (group(scores=[1.0, 2.0, 3.0]), "misaligned"),
        (group(masks=[]), "misaligned"),
        (group(scores=[]), "misaligned"),
        (group(inference_logprobs=[[-0.5] * 5]), "misaligned"),
        (group(overrides=[{}]), "misaligned"),
    ],
)
def test_a_group_whose_rows_cannot_be_told_apart_is_excluded(given, problem):
    assert [one.episode.problem for one in read(given)] == [problem] * 2


def test_advantages_of_the_environment():
    rows = [[0.0, 0.0, 0.0, 2.0, 2.0], [0.0, 0.0, 0.0, -1.0, -1.0]]
    assert [one.episode.advantage for one in read(group(advantages=rows), use_advantages=True)] == [2.0, -1.0]
    assert [one.episode.advantage for one in read(group(advantages=rows))] == [None, None]
    zero = group(overrides=[{"set_advantage_to_zero": True}, {}])
    assert [one.episode.advantage for one in read(zero)] == [0.0, None]
    by_token = group(advantages=[[math.nan, 0.0, 0.0, 1.0, 2.0], rows[1]])
    one, other = (done.episode for done in read(by_token, use_advantages=True))
    assert (one.advantage, one.advantages, other.advantages) == (1.5, [1.0, 2.0], [])
    unknown = group(advantages=[[0.0, 0.0, 0.0, 1.0, math.nan], rows[1]])
    assert read(unknown, use_advantages=True)[0].episode.problem == "advantages"


def test_advantages_by_token_are_those_of_trained_tokens():
    given = edited("masks", 0, (3, -100))
    given["tokens"][0] += [9, 9]
    given["masks"][0] += [-100, 9]
    given["inference_logprobs"] = None
    given["advantages"] = [[5.0] * 4 + [1.0, 7.0, 3.0], [0.0] * 5]
    one = read(given, use_advantages=True)[0]
    assert (one.mask, one.episode.advantages, one.episode.advantage) == ([1, 0, 1], [1.0, 0.0, 3.0], 2.0)


def test_what_the_environment_gives_reaches_the_samples():
    advantages = [[0.0] * 3 + [2.0] * 2, [0.0] * 3 + [-1.0, 0.5]]
    given = group(advantages=advantages, ref_logprobs=[[1.0] * 3 + [-0.25, -0.75]] * 2)
    completions = read(given, use_advantages=True)
    made = RolloutGroup("a-0", 0, 0, Prompt("a", [], [1]), completions)
    set_scores(made, GroupScores([[one.episode.rewards[0]] for one in completions], [None, None]))
    maker = BatchMaker(BatchConfig(num_generations=2, generation_batches=1, num_global_batches=1, num_iterations=1))
    samples = maker.make([made], 0).batch.samples
    assert [one.advantage for one in samples] == [2.0, -0.25]
    assert samples[0].token_advantages is None
    assert samples[1].token_advantages.tolist() == [-1.0, 0.5]
    assert samples[0].ref_logprobs.tolist() == [-0.25, -0.75]
    assert samples[0].prompt_ids.tolist() == completions[0].episode.prompt_ids


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (group(4), "--num_generations: 2: environment 0 sends groups of 4 sequences; --num_generations 4"),
        (
            group(generation_params={"temperature": 0.7}),
            "--temperature: 1: environment 0 samples at 0.7; --temperature 0.7",
        ),
        (group(group_overrides={"temperature": 0.5}), "--temperature: 1: environment 0 samples at 0.5"),
    ],
)
def test_settings_that_no_group_fits_end_the_run_at_the_first(given, said):
    with pytest.raises(ConfigError, match=said):
        reader().completions(msgspec.convert(given, Group), NAMES, lambda asked: [None] * len(asked))


def test_temperatures_that_are_no_numbers_exclude_their_group():
    given = msgspec.convert(group(generation_params={"temperature": "hot"}), Group)
    made = reader().completions(given, NAMES, lambda asked: [None] * len(asked))
    assert [one.episode.problem for one in made] == ["temperature"] * 2


def test_a_temperature_of_zero_counts_as_one():
    assert [one.episode.problem for one in read(group(overrides=[{"temperature": 0}, {"temperature": -1}]))] == ["", ""]


# --- the source -------------------------------------------------------------------------------------------------------


@pytest.fixture
def server():
    return StandIn()


@pytest.fixture
def made(server):
    return AtroposSource(ScriptedEngine(), opened(server), reader())


def requests(*launches):
    prompt = Prompt("a", [], [1, 2])
    return [
        Request(f"{launch}/{index}", [1, 2], SamplingParams(4), prompt) for launch in launches for index in range(2)
    ]


def test_groups_go_to_launches_in_order(server, made):
    sent = post(server, group(), group())
    done = sampled(made, requests("a-0", "a-1"))
    assert [one.request_id for one in done] == ["a-0/0", "a-0/1", "a-1/0", "a-1/1"]
    assert [one.episode.prompt_ids[0] for one in done[::2]] == [one["tokens"][0][0] for one in sent]
    metrics = made.drain_metrics()
    assert (metrics["atropos/groups/0"], metrics["atropos/queue_groups"]) == (2.0, 0.0)


def test_the_group_of_who_has_left_waits_for_another_launch(server, made):
    leave(made, requests("a-0", "a-1"), lambda: made._waiting)
    sent = post(server, group(), group())
    done = sampled(made, requests("a-2"))
    assert done[0].episode.prompt_ids[0] == sent[0]["tokens"][0][0]


def test_a_held_policy_server_is_told_nothing(server, made):
    """Its weights are being changed; groups that are there are taken all the same."""
    calls = []
    made.max_batches, made.hold_back = 0, calls.append
    made.hold()
    post(server, group(), group())
    assert len(sampled(made, requests("a-0", "a-1"))) == 4
    assert calls == []
    made.release()
    post(server, group(), group())
    sampled(made, requests("a-2", "a-3"))
    assert calls == [True]
    made._closed.set()


def test_a_process_that_has_died_ends_the_stream(made):
    def died():
        raise EngineError("environment-0: ended with code 1")

    made.check = died
    with pytest.raises(EngineError, match="environment-0"):
        sampled(made, requests("a-0"))


def test_positive_logprobs_in_more_than_one_of_a_hundred_sequences_end_the_run(server, made):
    post(server, *(edited("inference_logprobs", 0, (4, 1.0)) for _ in range(2)))
    with pytest.raises(NumericError, match="2 of 4 sequences have log-probs above 0"):
        sampled(made, requests("a-0", "a-1"))


def test_groups_without_any_good_sequence_are_counted(server, made):
    post(server, group(), group(scores=[math.nan, math.nan]))
    server.state["queue"][-1]["scores"] = [1.0, 2.0, 3.0]  # the API does not look
    sampled(made, requests("a-0", "a-1"))
    assert made.drain_metrics()["atropos/invalid_groups"] == 1


@pytest.mark.parametrize(("most", "held"), [(None, []), (0, [True, False, True]), (1, [True, False]), (2, [])])
def test_environments_are_held_back_while_enough_batches_are_there(server, made, most, held, monkeypatch):
    monkeypatch.setattr(source_module, "IDLE_LOOK_S", 60.0)
    calls = []
    made.max_batches, made.hold_back = most, calls.append
    post(server, *(group() for _ in range(4)))  # two make a batch
    sampled(made, requests("a-0", "a-1"))  # leaves one batch
    sampled(made, requests("a-2"))  # leaves half of one
    assert calls == held
    made._closed.set()


def test_environments_are_held_back_when_enough_batches_come_while_the_trainer_trains(server, made, monkeypatch):
    monkeypatch.setattr(source_module, "IDLE_LOOK_S", 0.01)
    calls = queue.Queue()
    made.max_batches, made.hold_back = 1, calls.put
    post(server, group(), group())
    assert len(sampled(made, requests("a-0", "a-1"))) == 4
    assert calls.empty()
    post(server, group(), group())
    assert [calls.get(timeout=10), calls.get(timeout=10)] == [True, True]  # a server that was restarted has forgotten
    sampled(made, requests("a-2"))
    made.close()
    said = [calls.get() for _ in range(calls.qsize())]
    assert said[said.index(False) :] == [False]
    assert not made._watching.is_alive()


def test_a_long_step_is_no_time_without_data():
    server, clock = StandIn(), Time()
    made = AtroposSource(ScriptedEngine(), opened(server, clock, timeout_s=100.0), reader())
    clock.now += 700.0
    ready = server.batch
    server.batch = lambda: {"batch": None} if clock.now < 705.0 else ready()
    post(server, group(), group())
    assert len(sampled(made, requests("a-0"))) == 2
