"""`--rollout_func`: what a function gets, what it may return, and what happens when it hangs or fails."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from dataclasses import replace

import oracle
import pytest
import sources
import torch
from function_parts import TOKENIZER, passing, wrap
from scripted_engine import VOCABULARY, ScriptedEngine

from swift.errors import ConfigError, EngineDead, EngineError, RequestRefused, Unsupported
from swift.plugin import rollout_funcs
from swift.rollout.sources.function import Rollout, load_rollout_func
from swift.types import Prompt, Request, SamplingParams

SAMPLING = SamplingParams(max_new_tokens=8)
PROMPTS = [
    Prompt("p", [{"role": "user", "content": "one"}], [3, 4, 5], {"solution": "1"}),
    Prompt("q", [{"role": "user", "content": "two"}], [6, 7], {"solution": "2"}),
]


def requests(count=2, prompts=PROMPTS):
    return [
        Request(f"{prompt.prompt_id}-0/{s}", prompt.token_ids, replace(SAMPLING, seed=10 * p + s), prompt)
        for p, prompt in enumerate(prompts)
        for s in range(count)
    ]


def fixed(**entries):
    """A function that returns two tokens for each of the completions, with further entries."""

    def function(prompts, rollout):
        count = len(prompts) * rollout.num_generations
        return {"completion_ids": [[5, 6]] * count, "logprobs": [[-0.5, -0.25]] * count, **entries}

    return function


def run(source, wanted=None):
    return sources.sampled(source, wanted or requests())


# --- what it gets -------------------------------------------------------------------------------------------


def test_a_function_that_passes_everything_on_samples_what_the_engine_would():
    plain, passed = oracle.run(ScriptedEngine(), requests()), run(wrap(passing))
    assert [(one.request_id, one.token_ids, one.logprobs) for one in passed] == [
        (one.request_id, one.token_ids, one.logprobs) for one in plain
    ]


def test_it_gets_the_rows_of_the_round_and_the_settings():
    seen = []

    def look(prompts, rollout):
        seen.append((prompts, rollout))
        return fixed()(prompts, rollout)

    run(wrap(look), requests(3))
    ((prompts, rollout),) = seen
    assert prompts == [prompt.messages for prompt in PROMPTS]
    assert (rollout.prompt_ids, rollout.num_generations) == ([[3, 4, 5], [6, 7]], 3)
    assert rollout.columns == [{"solution": "1"}, {"solution": "2"}]
    assert rollout.sampling.max_new_tokens == 8
    assert rollout.processing_class is rollout.tokenizer is TOKENIZER
    assert (rollout.args.temperature, rollout.end_token_ids, rollout.version) == (1.0, (1,), 0)
    prompts[0][0]["content"] = "changed"
    assert PROMPTS[0].messages[0]["content"] == "one"


def test_groups_of_different_sizes_come_in_calls_of_their_own():
    """A rank may be asked for a part of a group only."""
    sizes = []

    def count(prompts, rollout):
        sizes.append((len(prompts), rollout.num_generations))
        return fixed()(prompts, rollout)

    done = run(wrap(count), [*requests(3, PROMPTS[:1]), *requests(1, PROMPTS[1:])])
    assert sizes == [(1, 3), (1, 1)]
    assert len(done) == 4


def test_every_turn_has_seeds_of_its_own_that_a_second_run_repeats():
    def turns(prompts, rollout):
        first = rollout.generate(rollout.repeated_prompt_ids)
        more = [[*ids, *one.token_ids] for ids, one in zip(rollout.repeated_prompt_ids, first, strict=True)]
        second = rollout.generate(more, replace(rollout.sampling, max_new_tokens=3))
        return {
            "completion_ids": [(a.token_ids + b.token_ids)[:8] for a, b in zip(first, second, strict=True)],
            "logprobs": [(a.logprobs + b.logprobs)[:8] for a, b in zip(first, second, strict=True)],
        }

    assert [one.token_ids for one in run(wrap(turns))] == [one.token_ids for one in run(wrap(turns))]
    seeds = []
    engine = ScriptedEngine()
    submit = engine.submit
    engine.submit = lambda request: (seeds.append(request.sampling.seed), submit(request))
    run(wrap(turns, engine=engine))
    assert len(set(seeds)) == len(seeds) == 8


# --- what it returns ----------------------------------------------------------------------------------------


def test_a_completion_has_its_version_reason_and_columns():
    (one, *_) = run(wrap(fixed(tries=[1, 2, 3, 4], task="sum")))
    assert (one.token_ids, one.logprobs, one.finish_reason) == ([5, 6], [-0.5, -0.25], "stop")
    assert one.versions == [(0, 0, 2)]
    assert one.columns == {"tries": 1, "task": "sum"}


def test_what_fills_its_room_without_an_end_token_was_cut():
    full = {"completion_ids": [[5] * 8, [5] * 7 + [1], [5], [5] * 8], "logprobs": [[-1.0] * n for n in (8, 8, 1, 8)]}
    assert [one.finish_reason for one in run(wrap(lambda p, r: full))] == ["length", "stop", "stop", "length"]
    told = {**full, "finish_reasons": ["stop", "length", "length", "stop"]}
    assert [one.finish_reason for one in run(wrap(lambda p, r: told))] == told["finish_reasons"]


def test_log_probs_of_several_candidates_are_read_as_trl_returns_them():
    found = run(wrap(fixed(logprobs=[[[-0.5], [-0.25]]] * 4)))
    assert found[0].logprobs == [-0.5, -0.25]
    two = {"logprobs": [[[-3.0, -0.5], [-0.25, -4.0]]] * 4, "logprob_token_ids": [[[9, 5], [6, 2]]] * 4}
    assert run(wrap(fixed(**two)))[0].logprobs == [-0.5, -0.25]


def test_trls_prompt_ids_are_accepted_where_they_are_those_of_the_prompt():
    same = [prompt.token_ids for prompt in PROMPTS for _ in range(2)]
    assert [one.mask for one in run(wrap(fixed(prompt_ids=same, env_mask=[[1, 1]] * 4)))] == [[]] * 4
    masked = run(wrap(fixed(env_mask=[[1, 0]] * 4, logprobs=[[-0.5, None]] * 4)))
    assert [(one.mask, one.logprobs) for one in masked] == [([1, 0], [-0.5, 0.0])] * 4


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([], "returned list; return a dict"),
        ({"completion_ids": None}, "returned no completion_ids; return a dict with both"),
        ({"logprobs": None}, "returned no logprobs (the log-prob of each token under the sampler"),
        ({"completion_ids": [[5]]}, "completion_ids has 1 entries where 4 are wanted (2 prompts x 2 completions"),
        ({"completion_ids": [[5, VOCABULARY]] * 4}, f"completion_ids[0] has {VOCABULARY}, no token of the model"),
        ({"completion_ids": [[5, -1]] * 4}, "completion_ids[0] has -1, no token of the model"),
        ({"completion_ids": [["5", 6]] * 4}, "completion_ids[0] is no list of token ids ('5')"),
        ({"completion_ids": [{5, 6}] * 4}, "completion_ids[0] is set; return a list or an array"),
        ({"completion_ids": [itertools.count()] * 4}, "completion_ids[0] is count; return a list or an array"),
        ({"completion_ids": [torch.ones(2, 2)] * 4}, "completion_ids[0] is no list of token ids"),
        ({"logprobs": [-1.0] * 4}, "logprobs[0] is float; return a list or an array"),
        ({"logprobs": [{-1.0, -2.0}] * 4}, "logprobs[0] is set; return a list or an array"),
        ({"logprobs": [[-1.0, -(10**400)]] * 4}, "a log-prob is a finite number, at most 0"),
        ({"logprobs": [["-1", -1.0]] * 4}, "logprobs[0][0] is -1; a log-prob is a finite number"),
        (
            {"logprobs": [[[-1.0]] * 2] * 4, "logprob_token_ids": [[[7, 5]] * 2] * 4},
            "has no entry for the sampled token",
        ),
        ({"logprobs": [[[-1.0, -2.0]] * 2] * 4, "logprob_token_ids": [[7]] * 4}, "has no entry for the sampled token"),
        ({"env_mask": [[0.5, 1]] * 4}, "env_mask[0] has to be 1 or 0 for each of 2 tokens"),
        ({"env_mask": [["1", 1]] * 4}, "env_mask[0] has to be 1 or 0 for each of 2 tokens"),
        ({"env_mask": [["a", 1]] * 4}, "env_mask[0] has to be 1 or 0 for each of 2 tokens"),
        ({"env_mask": [1] * 4}, "env_mask[0] is int; return a list or an array"),
        ({"prompt_ids": ["345"] * 4}, "prompt_ids[0] is str; return a list or an array"),
        ({"prompt_ids": [[None]] * 4}, "prompt_ids[0] are not the ids of its prompt"),
        ({"completion_ids": [[5] * 9] * 4}, "completion_ids[0] has 9 tokens; valid: 1 to 8"),
        ({"completion_ids": [[]] * 4}, "completion_ids[0] has 0 tokens; valid: 1 to "),
        ({"logprobs": [[-1.0]] * 4}, "logprobs[0] has 1 for 2 tokens; return one per token"),
        ({"logprobs": [[-1.0, float("nan")]] * 4}, "logprobs[0][1] is nan; a log-prob is a finite number, at most 0"),
        ({"logprobs": [[-1.0, 0.5]] * 4}, "logprobs[0][1] is 0.5; a log-prob is a finite number, at most 0"),
        ({"logprobs": [[-1.0, None]] * 4}, "logprobs[0][1] is None"),
        ({"logprobs": [[[-1.0, -2.0], [-1.0]]] * 4}, "logprobs[0][0] has no entry for the sampled token"),
        ({"prompt_ids": [[3, 4]] * 4}, "prompt_ids[0] are not the ids of its prompt"),
        ({"env_mask": [[1]] * 4}, "env_mask[0] has to be 1 or 0 for each of 2 tokens"),
        ({"env_mask": [[0, 0]] * 4}, "env_mask[0] has to be 1 or 0"),
        ({"finish_reasons": ["eos"] * 4}, "finish_reasons[0] is 'eos'; valid: stop, length"),
        ({"score": [1, 2]}, "the column 'score' has 2 entries where 4 are wanted"),
        ({"request_id": [1] * 4}, "the column 'request_id' has a name that swift gives to reward functions"),
        ({"score": [object()] * 4}, "the column 'score' cannot be encoded as JSON"),
    ],
)
def test_a_wrong_result_is_an_error_that_names_the_place(entries, said):
    function = fixed(**entries) if isinstance(entries, dict) else lambda prompts, rollout: entries
    with pytest.raises(EngineError) as raised:
        run(wrap(function))
    assert str(raised.value).startswith("--rollout_func: mine: ")
    assert said in str(raised.value)


# --- failures and time --------------------------------------------------------------------------------------


def test_an_exception_carries_its_place_in_the_function():
    def broken(prompts, rollout):
        return prompts[99]

    with pytest.raises(EngineError, match=r"mine: test_rollout_function\.py:\d+: raised IndexError: list index"):
        run(wrap(broken))


def test_an_error_of_the_engine_stays_what_it_is():
    with pytest.raises(EngineDead, match="scripted: it died"):
        run(wrap(passing, engine=ScriptedEngine(fail_after=1)))


def test_a_call_over_its_time_ends_its_completions_with_error_and_the_next_one_goes_on():
    release, calls = threading.Event(), []

    def hangs_once(prompts, rollout):
        calls.append(rollout)
        if len(calls) == 1:
            release.wait(30)
        return fixed()(prompts, rollout)

    engine = wrap(hangs_once, limit_s=0.2)
    assert {one.finish_reason for one in run(engine)} == {"error"}
    assert engine.late == 4
    assert {one.finish_reason for one in run(engine)} == {"stop"}
    release.set()
    with pytest.raises(EngineError, match="this call was given up"):
        calls[0].generate([[3]])


def test_a_call_that_is_given_up_leaves_the_engine_before_the_next_one():
    """It waits inside of the engine, which `abort` ends."""
    inner = ScriptedEngine(step_s=0.02)
    engine = wrap(passing, engine=inner, limit_s=0.05)
    assert {one.finish_reason for one in run(engine)} == {"error"}
    engine.limit_s = 30
    assert len(run(engine)) == 4
    assert not inner.overlaps


def test_a_function_that_always_hangs_ends_the_run():
    release = threading.Event()
    engine = wrap(lambda prompts, rollout: release.wait(30), limit_s=0.05)
    run(engine)
    run(engine)
    with pytest.raises(EngineError, match=r"3 calls in a row took longer than --rollout_timeout 0\.05 s"):
        run(engine)
    release.set()


@pytest.mark.parametrize("where", ["the function", "the engine"])
def test_who_leaves_early_leaves_nothing_behind(where):
    begun, release = threading.Event(), threading.Event()

    def hangs(prompts, rollout):
        if begun.is_set():
            return passing(prompts, rollout)
        begun.set()
        return release.wait(30) if where == "the function" else passing(prompts, rollout)

    source = wrap(hangs, engine=ScriptedEngine(step_s=0.05))
    began = time.monotonic()
    sources.leave(source, requests(), begun.is_set)
    assert time.monotonic() - began < 10
    assert len(run(source)) == 4
    release.set()


def test_what_is_asked_for_between_the_calls_joins_in():
    source, later = wrap(passing), requests(2, [Prompt("late", [], [9, 9], {})])

    async def join():
        first = [asyncio.create_task(source.generate(request)) for request in requests()]
        while not source._calls:
            await asyncio.sleep(0.001)
        more = [asyncio.create_task(source.generate(request)) for request in later]
        return await asyncio.gather(*first, *more)

    assert len({one.request_id for one in sources.on_a_loop(join)}) == 6
    assert source._calls == 2


def test_a_call_cannot_be_kept_over_a_change_of_weights():
    release, begun = threading.Event(), threading.Event()

    def slow(prompts, rollout):
        begun.set()
        release.wait(30)
        return fixed()(prompts, rollout)

    source = wrap(slow)

    async def hold():
        tasks = [asyncio.create_task(source.generate(request)) for request in requests()]
        while not begun.is_set():
            await asyncio.sleep(0.01)
        with pytest.raises(Unsupported, match="--in_flight_updates false"):
            source.hold()
        release.set()
        return await asyncio.gather(*tasks)

    assert len(sources.on_a_loop(hold)) == 4


def test_a_refused_request_ends_the_others_of_its_call():
    class Choosy(ScriptedEngine):
        def submit(self, request):
            if request.request_id.endswith("-0/0"):
                raise RequestRefused(request.request_id, "refused, as told")
            super().submit(request)

    def catching(prompts, rollout):
        with pytest.raises(RequestRefused):
            rollout.generate(rollout.repeated_prompt_ids)
        return fixed()(prompts, rollout)

    engine = Choosy(step_s=0.05)
    assert len(run(wrap(catching, engine=engine))) == 4
    assert not engine._outstanding


def test_a_call_that_is_given_up_before_it_samples_never_does(monkeypatch):
    begun, release = threading.Event(), threading.Event()
    seed = Rollout._seed

    def slow(self, place):
        begun.set()
        release.wait(30)
        return seed(self, place)

    monkeypatch.setattr(Rollout, "_seed", slow)
    engine = ScriptedEngine(step_s=0.05)
    assert {one.finish_reason for one in run(wrap(passing, engine=engine, limit_s=0.2))} == {"error"}
    assert begun.is_set()
    release.set()
    time.sleep(0.3)
    assert not engine.events


def test_reward_functions_get_the_columns_of_a_completion_beside_those_of_its_row():
    from swift.rewards.contract import group_keywords
    from swift.types import Completion, RolloutGroup

    made = [Completion(f"p-0/{n}", [5], [-1.0], "stop", columns={"tries": n, "solution": "own"}) for n in range(2)]
    keywords = group_keywords([RolloutGroup("p-0", 0, 0, PROMPTS[0], made)], [False])
    assert (keywords["tries"], keywords["solution"]) == ([0, 1], ["own", "own"])


# --- how it is found ----------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rounds.py"
    path.write_text("def my_rollout(prompts, rollout):\n    return {}\n\n\nnumber = 3\n")
    return path


def test_a_function_is_found_by_file_or_by_name(file, monkeypatch):
    assert load_rollout_func(f"{file}:my_rollout")([], None) == {}
    monkeypatch.setitem(rollout_funcs, "registered", passing)
    assert load_rollout_func("registered") is passing


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{file}:my_rolout", "has no function 'my_rolout'; nearest: my_rollout"),
        ("{file}:number", "is int, not a function"),
        ("{file}x.py:my_rollout", "no such file; nearest"),
        ("passnig", "no such rollout function; nearest: passing, or write path.py:function"),
    ],
)
def test_a_function_that_cannot_be_found_is_an_error(file, monkeypatch, text, said):
    monkeypatch.setitem(rollout_funcs, "passing", passing)
    with pytest.raises(ConfigError) as raised:
        load_rollout_func(text.replace("{file}", str(file)[:-3] if "x.py" in text else str(file)))
    assert raised.value.problems[0].startswith("--rollout_func: ")
    assert said in raised.value.problems[0]
