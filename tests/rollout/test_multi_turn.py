"""Rollouts of several turns: tokens and masks of a sample, and environments that wait, fail and end it."""

import asyncio
import contextlib
import statistics
import threading
import time
from dataclasses import replace

import pytest
import torch
from oracle import load, logprobs_of
from small_runs import SmallRun

from swift.errors import ConfigError, EngineError, RewardError
from swift.models.arguments import CheckpointArguments
from swift.models.tokenizer import load_chat
from swift.plugin import Env, MultiTurnScheduler, envs, multi_turns
from swift.rewards.contract import group_keywords
from swift.rollout.batches import BatchConfig, BatchMaker
from swift.rollout.engines.transformers import TransformersEngine
from swift.rollout.multi_turn.engine import TrajectoryEngine
from swift.rollout.multi_turn.environments import _opening, find, of_envs, of_function, of_scheduler
from swift.rollout.multi_turn.loop import Loop
from swift.rollout.multi_turn.trajectory import OUT_OF_TURNS, REWRITTEN, Excluded, Limits, OutOfRoom, Trajectory
from swift.rollout.round_result import fault
from swift.types import Completion, Prompt, Request, RolloutGroup, SamplingParams

TURN = 5
BATCHES = BatchMaker(BatchConfig(num_generations=1, generation_batches=1, num_global_batches=1, num_iterations=1))
LIMITS = Limits(max_turns=3, scope="per_round", max_model_len=2000)


@pytest.fixture(scope="module")
def policy(nano_folders):
    folder = nano_folders["qwen2"]
    return load(folder), load_chat(CheckpointArguments(model=str(folder)))


@pytest.fixture
def engine_of(policy, nano_folders):
    """Makes an engine of trajectories; no token ends an answer."""
    model, template = load(nano_folders["qwen2"]), policy[1]
    made = []

    def make(play, limits=LIMITS, name="--gym_env: mine", limit_s=600.0):
        inner = TransformersEngine(model, eos_token_ids=(), tokenizer=template.tokenizer)
        made.append(TrajectoryEngine(inner, template, limits, play, name, limit_s))
        return made[-1]

    yield make
    for one in made:
        one.close()


def requests(template, count=4, **columns):
    messages = [{"role": "user", "content": "How many?"}]
    prompt = Prompt("p", messages, template.encode_prompt(messages), {"solution": "3", **columns})
    sampling = [SamplingParams(max_new_tokens=TURN, temperature=0.8, seed=seed) for seed in range(count)]
    return [Request(f"p-0/{i}", prompt.token_ids, one, prompt) for i, one in enumerate(sampling)]


def run(engine, wanted):
    done = {one.request_id: one for one in engine.generate(wanted)}
    assert set(done) == {one.request_id for one in wanted}
    return [done[one.request_id] for one in wanted]


class Again(MultiTurnScheduler):
    """Asks again, whatever the answer."""

    def check_finished(self, request, choice, turn):
        return False

    def step(self, request, choice, turn):
        request.messages.append({"role": "user", "content": f"And now? {turn}"})
        return {"infer_request": request, "rollout_infos": {"asked": turn}}


class Once(Env):
    """Over after an answer; what it does in `step` is the test's."""

    closed = asleep = 0

    async def reset(self, request):
        return None, {}, None

    async def step(self, messages):
        return "", 1.0, True, {}

    async def close(self):
        Once.closed += 1


def sleepy(seconds):
    """An environment whose step takes so long."""

    class Sleepy(Once):
        async def step(self, messages):
            Once.asleep += 1
            await asyncio.sleep(seconds)
            return "", 1.0, True, {}

    return Sleepy


@pytest.fixture(autouse=True)
def none_closed():
    Once.closed = Once.asleep = 0


# --- tokens and masks -----------------------------------------------------------------------------------------


def test_tokens_go_on_over_turns_and_only_answers_are_trained_on(policy, engine_of):
    model, template = policy
    wanted = requests(template)
    for request, one in zip(wanted, run(engine_of(of_scheduler(Again(), "again")), wanted), strict=True):
        assert (one.episode.num_turns, sum(one.mask), fault(one)) == (3, 3 * TURN, None)
        expected = logprobs_of(model, request.prompt_ids, one.token_ids, 0.8)
        sampled = torch.tensor(one.mask, dtype=torch.bool)
        assert float((torch.tensor(one.logprobs) - expected)[sampled].abs().max()) < 1e-5
        assert not any(value for value, kept in zip(one.logprobs, one.mask, strict=True) if not kept)
        assert [message["role"] for message in one.episode.messages] == [
            "user",
            *["assistant", "user"] * 2,
            "assistant",
        ]
        assert one.text == one.episode.messages[-1]["content"]
        written = [token for token, kept in zip(one.token_ids, one.mask, strict=True) if not kept]
        assert "And now? 1" in template.decode(written)
        assert one.columns == {"asked": 2}
        assert len({tuple(one.token_ids[start : start + TURN]) for start in starts(one.mask)}) == 3, "a seed per turn"
        [sample] = BATCHES._samples([RolloutGroup("p-0", 0, 0, request.prompt, [one])])
        assert sample.trained.tolist() == sampled.tolist()


def starts(mask):
    return [i for i, kept in enumerate(mask) if kept and (i == 0 or not mask[i - 1])]


def test_equal_seeds_give_equal_trajectories_whatever_the_company(policy, engine_of):
    _, template = policy
    wanted = requests(template, 6)
    together = run(engine_of(of_scheduler(Again(), "again")), wanted)
    alone = [run(engine_of(of_scheduler(Again(), "again")), [one])[0] for one in wanted[:2]]
    assert [one.token_ids for one in alone] == [one.token_ids for one in together[:2]]


@pytest.mark.parametrize(("scope", "most"), [("total", TURN), ("per_round", 3 * TURN)])
def test_what_the_length_limit_bounds(policy, engine_of, scope, most):
    _, template = policy
    engine = engine_of(of_scheduler(Again(), "again"), Limits(3, scope, 2000))
    assert {sum(one.mask or [1] * TURN) for one in run(engine, requests(template))} == {most}


def test_a_full_context_ends_a_trajectory(policy, engine_of):
    _, template = policy
    wanted = requests(template, 2)
    limit = len(wanted[0].prompt_ids) + 30
    for one in run(engine_of(of_scheduler(Again(), "again"), Limits(9, "per_round", limit)), wanted):
        assert (one.finish_reason, fault(one)) == ("length", None)
        assert one.episode.messages[-1]["role"] == "assistant"
        assert len(one.token_ids) <= 30


def test_another_end_of_an_answer_keeps_the_tokens_both_have(policy, engine_of):
    _, template = policy
    seen = []

    class Tip(MultiTurnScheduler):
        def check_finished(self, request, choice, turn):
            return turn == 2

        def step(self, request, choice, turn):
            kept = template.decode(choice.token_ids[:2])
            seen.append(choice.token_ids[:2])
            request.messages[-1]["content"] = kept + " wait,"
            return {"infer_request": request}

    (one,) = run(engine_of(of_scheduler(Tip(), "tip")), requests(template, 1))
    added = template.encode_text(" wait,")
    assert one.token_ids[:2] == seen[0]
    assert one.token_ids[2 : 2 + len(added)] == added
    assert one.mask == [1, 1, *[0] * len(added), *[1] * TURN]
    assert one.versions == [(0, 0, 2), (0, 2 + len(added), len(one.mask))]
    assert [message["role"] for message in one.episode.messages] == ["user", "assistant"]


@pytest.mark.parametrize("more", [" wait,", ""], ids=["longer", "unchanged"])
def test_an_answer_that_goes_on_loses_its_end_token(policy, more):
    _, template = policy
    end = template.stop_token_ids[-1]
    spoken = iter([[*template.encode_text("four"), end], [*template.encode_text("five"), end]])
    first, second = template.encode_text("four"), template.encode_text("five")

    async def sample(request):
        ids = next(spoken)
        return Completion(request.request_id, ids, [-1.0] * len(ids), "stop", versions=[(0, 0, len(ids))])

    async def play():
        await trajectory.answer()
        *earlier, last = trajectory.messages
        trajectory.become([*earlier, {**last, "content": last["content"] + more}])
        await trajectory.answer()

    (request,) = requests(template, 1)
    trajectory = Trajectory(request, template, sample, LIMITS, list(request.prompt.messages))
    asyncio.run(play())
    added = template.encode_text(more)
    assert trajectory.token_ids == [*first, *added, *second, end]
    assert trajectory.mask == [1] * len(first) + [0] * len(added) + [1] * len([*second, end])
    assert [message["role"] for message in trajectory.messages] == ["user", "assistant"]


@pytest.mark.parametrize(("on_break", "reason"), [("exclude", "environment: history_rewritten"), ("truncate", None)])
def test_a_scheduler_that_changes_what_was_said_before(policy, engine_of, on_break, reason):
    _, template = policy

    class Forger(Again):
        def step(self, request, choice, turn):
            request.messages[0]["content"] = "something else"
            return {"infer_request": request}

    engine = engine_of(of_scheduler(Forger(), "x"), Limits(3, "per_round", 2000, on_break))
    for one in run(engine, requests(template)):
        assert (fault(one), one.episode.num_turns, one.episode.metrics[REWRITTEN]) == (reason, 1, 1)


@pytest.mark.parametrize(("on_break", "reason"), [("exclude", "environment: history_rewritten"), ("truncate", None)])
def test_a_template_that_rewrites_earlier_turns(policy, engine_of, on_break, reason):
    _, template = policy
    tokenizer = type(template.tokenizer).from_pretrained(template.tokenizer.name_or_path)
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>"
        "{{ m.content if loop.last or m.role != 'assistant' else '(cut)' }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    rewriting = type(template)(tokenizer)
    engine = engine_of(of_scheduler(Again(), "again"), Limits(3, "per_round", 2000, on_break))
    engine.template = rewriting
    for one in run(engine, requests(rewriting)):
        assert fault(one) == reason
        assert (one.episode.num_turns, len(one.token_ids)) == (1, TURN)


class Endless(Once):
    """Never over."""

    async def step(self, messages):
        return "again", 0.0, False, {}


class Twice(Again):
    """Over after two answers."""

    def check_finished(self, request, choice, turn):
        return turn == 2


def never(rows):
    return [{**rows[0], "finished": False, "messages": [*rows[0]["messages"], {"role": "user", "content": "on"}]}]


@pytest.mark.parametrize(
    ("play", "counted"),
    [
        (of_scheduler(Again(), "again"), 1),
        (of_scheduler(Twice(), "twice"), 0),
        (of_function(never, "never"), 1),
        (of_envs({"endless": Endless}, "endless"), 1),
        (of_envs({"once": Once}, "once"), 0),
    ],
)
def test_a_sample_that_ends_only_for_its_turns_is_counted(policy, engine_of, play, counted):
    done = run(engine_of(play, Limits(2, "per_round", 2000)), requests(policy[1], 2))
    assert [one.episode.metrics[OUT_OF_TURNS] for one in done] == [counted] * 2


@pytest.mark.parametrize("key", ["response_token_ids", "response_loss_mask", "rollout_logprobs"])
def test_a_scheduler_that_returns_its_own_tokens_ends_the_run(policy, engine_of, key):
    class Own(Again):
        def step(self, request, choice, turn):
            return {**super().step(request, choice, turn), key: [1] * TURN}

    with pytest.raises(RewardError, match=f"--multi_turn_scheduler: own: step returned {key}, which is not supported"):
        run(engine_of(of_scheduler(Own(), "own")), requests(policy[1], 1))


# --- the other doors ------------------------------------------------------------------------------------------


def test_a_function_gets_rows_and_says_what_follows(policy, engine_of):
    _, template = policy
    rows = []

    def follow(given):
        rows.extend(given)
        for row in given:
            row["finished"] = len(row["messages"]) > 3
            row["messages"].append({"role": "user", "content": "more"})
        return given

    done = run(engine_of(of_function(follow, "follow")), requests(template))
    assert {one.episode.num_turns for one in done} == {2}
    assert {(row["index"], row["solution"], row["finish_reason"]) for row in rows} == {
        (i, "3", "length") for i in range(4)
    }


@pytest.mark.parametrize("answer", [None, [], [{}], [{}, {}]])
def test_a_function_that_returns_other_rows_ends_the_run(policy, engine_of, answer):
    _, template = policy
    with pytest.raises(RewardError, match="--multi_turn_scheduler: short: must return"):
        run(engine_of(of_function(lambda rows: answer, "short"), name="x"), requests(template))


def test_an_environment_opens_rewards_and_is_closed(policy, engine_of):
    model, template = policy

    class Game(Once):
        async def reset(self, request):
            self.left = int(request.data_dict["solution"])
            return f"Round {self.left}", {"opened": True}, "Play well."

        async def step(self, messages):
            self.left -= 1
            await asyncio.sleep(0.001)
            return f"{self.left} left", 0.5, self.left == 0, {"left": self.left}

    wanted = requests(template)
    for one in run(engine_of(of_envs({"game": Game}, "game")), wanted):
        assert one.episode.messages[:2] == [
            {"role": "system", "content": "Play well."},
            {"role": "user", "content": "Round 3"},
        ]
        assert (one.episode.start, one.episode.rewards) == (2, [0.5] * 3)
        assert one.columns == {"opened": True, "left": 0}
        assert one.episode.prompt_ids == template.encode_prompt(one.episode.messages[:2]) != wanted[0].prompt_ids
        expected = logprobs_of(model, one.episode.prompt_ids, one.token_ids, 0.8)
        gaps = (torch.tensor(one.logprobs) - expected)[torch.tensor(one.mask, dtype=torch.bool)]
        assert float(gaps.abs().max()) < 1e-5
        group = RolloutGroup("p-0", 0, 0, wanted[0].prompt, [one])
        keywords = group_keywords([group], [False])
        assert (keywords["turn_rewards"], keywords["environment_reward"]) == ([[0.5] * 3], [1.5])
        [sample] = BATCHES._samples([group])
        assert sample.prompt_ids.tolist() == one.episode.prompt_ids
    assert Once.closed == 4


def test_a_row_may_name_its_own_environment(policy, engine_of):
    _, template = policy

    class Other(Once):
        async def step(self, messages):
            return "", float(self.config["worth"]), True, {}

    wanted = requests(template, 2, env_config={"name": "other", "worth": 7})
    done = run(engine_of(of_envs({"once": Once, "other": Other}, "once")), wanted)
    assert [one.episode.rewards for one in done] == [[7.0], [7.0]]
    with pytest.raises(ConfigError, match="--gym_env: third"):
        run(engine_of(of_envs({"once": Once}, "once")), requests(template, 1, env_config={"name": "third"}))


# --- time and failures ----------------------------------------------------------------------------------------


def test_an_environment_that_waits_holds_nobody_up(policy, engine_of):
    _, template = policy

    began = time.monotonic()
    assert len(run(engine_of(of_envs({"slow": sleepy(0.3)}, "slow")), requests(template, 20))) == 20
    assert time.monotonic() - began < 3.0, "one after the other they take six seconds"


def asking(wait):
    """Two answers, with `wait` between them."""

    async def play(trajectory):
        await trajectory.answer()
        await wait()
        trajectory.say({"role": "user", "content": "and?"})
        await trajectory.answer()

    return play


def on_a_thread(seconds):
    return lambda: asyncio.to_thread(time.sleep, seconds)


def test_what_a_thread_does_at_once_meets_the_engine_at_the_same_step(policy, engine_of):
    _, template = policy
    steps = set()
    for _ in range(5):
        engine = engine_of(asking(on_a_thread(0.0)))
        run(engine, requests(template, 8))
        steps.add(engine.engine.counters.decode_steps)
    assert len(steps) == 1


@pytest.mark.long
@pytest.mark.parametrize("wait", [on_a_thread, lambda seconds: lambda: asyncio.sleep(seconds)], ids=["sync", "async"])
def test_64_trajectories_with_a_slow_tool_take_hardly_longer(policy, engine_of, wait):
    _, template = policy
    wanted = requests(template, 64)
    sized = [replace(one.sampling, max_new_tokens=20 + 5 * number) for number, one in enumerate(wanted)]
    wanted = [replace(request, sampling=sampling) for request, sampling in zip(wanted, sized, strict=True)]

    def seconds(asked):
        engine = engine_of(asking(wait(asked)))
        began = time.monotonic()
        run(engine, wanted)
        return time.monotonic() - began

    seconds(0.0)
    pairs = [(seconds(0.0), seconds(0.2)) for _ in range(5)]
    print(pairs)
    assert statistics.median(slow / fast for fast, slow in pairs) < 1.3


def test_a_sample_whose_environment_fails_is_left_out(policy, engine_of, caplog):
    _, template = policy

    class Shaky(Once):
        async def step(self, messages):
            if self.config["worth"] == "bad":
                raise KeyError("the board")
            return "", 1.0, True, {}

    wanted = requests(template, 4)
    for request, worth in zip(wanted, ["good", "bad", "good", "bad"], strict=True):
        object.__setattr__(
            request, "prompt", Prompt("p", request.prompt.messages, [1], {"env_config": {"worth": worth}})
        )
    done = run(engine_of(of_envs({"shaky": Shaky}, "shaky")), wanted)
    assert [fault(one) for one in done] == [None, "environment: KeyError", None, "environment: KeyError"]
    assert Once.closed == 4


def test_an_environment_that_never_works_ends_the_run(policy, engine_of, caplog):
    _, template = policy

    class Broken(Once):
        async def step(self, messages):
            raise KeyError("the board")

    with pytest.raises(
        EngineError, match=r"--gym_env: mine: raised KeyError: 'the board' \(.*test_multi_turn.py:\d+\)"
    ):
        run(engine_of(of_envs({"broken": Broken}, "broken")), requests(template, 40))
    assert len([line for line in caplog.messages if "KeyError" in line]) == 1


def full(trajectory):
    raise OutOfRoom


def left_out(trajectory):
    raise Excluded("for a reason")


@pytest.mark.parametrize("end", [full, left_out], ids=["full", "excluded"])
def test_a_trajectory_that_came_to_any_end_shows_that_the_environment_works(policy, engine_of, end):
    _, template = policy

    async def play(trajectory):
        if trajectory.request.request_id == "p-0/0":
            end(trajectory)
        await asyncio.sleep(0.01)
        raise KeyError("the board")

    assert [fault(one) for one in run(engine_of(play), requests(template, 40))][1:] == ["environment: KeyError"] * 39


@pytest.mark.parametrize("waits", ["for its environment", "for its turn"])
def test_a_trajectory_that_takes_too_long_is_left_out_and_counted(policy, engine_of, waits):
    _, template = policy

    class Long(Once):
        async def step(self, messages):
            if self.config["long"]:
                await asyncio.sleep(100)
            return await super().step(messages)

    engine = engine_of(of_envs({"long": Long}, "long"), limit_s=1.0)
    wanted = [requests(template, 2, env_config={"long": bool(i)})[i] for i in range(2)]
    if waits == "for its turn":
        wanted[1] = replace(wanted[1], sampling=replace(wanted[1].sampling, max_new_tokens=900))
        engine.between_steps = lambda: time.sleep(0.005)
    assert [fault(one) for one in run(engine, wanted)] == [None, "environment: timeout"]
    assert (engine.late, Once.closed) == (1, 2)
    assert engine.engine.counters.decode_rows < 900


def test_an_environment_that_is_always_late_ends_the_run(policy, engine_of):
    _, template = policy
    engine = engine_of(of_envs({"slow": sleepy(100)}, "slow"), limit_s=0.3)
    with pytest.raises(EngineError, match=r"--gym_env: mine: took over --rollout_timeout 0.3 s; the first 32"):
        run(engine, requests(template, 32))


def test_an_environments_own_timeout_is_its_failure(policy, engine_of):
    _, template = policy

    class Impatient(Once):
        async def step(self, messages):
            async with asyncio.timeout(0.01):
                await asyncio.sleep(1)

    engine = engine_of(of_envs({"impatient": Impatient}, "impatient"))
    assert [fault(one) for one in run(engine, requests(template, 1))] == ["environment: TimeoutError"]
    assert engine.late == 0


@pytest.mark.parametrize("message", [{"role": "assistant"}, {"content": "?"}, "no message"])
def test_whatever_an_environment_makes_of_its_messages_every_request_ends(policy, engine_of, message):
    _, template = policy

    async def play(trajectory):
        trajectory.messages.append(message)

    engine = engine_of(play)
    for request in requests(template, 2):
        engine.submit(request)
    ended, stream = [], engine.stream()
    with contextlib.suppress(AttributeError):
        for one in stream:
            ended.append(one.request_id)
    assert {*ended, *(one.request_id for one in engine.stream())} == {"p-0/0", "p-0/1"}


def test_an_environment_that_exits_fails_its_sample_alone(policy, engine_of):
    _, template = policy

    class Leaves(Once):
        async def step(self, messages):
            raise SystemExit(1)

    engine = engine_of(of_envs({"leaves": Leaves}, "leaves"))
    assert {fault(one) for one in run(engine, requests(template, 2))} == {"environment: SystemExit"}


def test_the_end_of_the_pipeline_closes_environments(policy, engine_of):
    _, template = policy
    engine = engine_of(of_envs({"endless": sleepy(100)}, "endless"))
    pipeline = SmallRun(engine).pipeline
    engine.submit(requests(template, 1)[0])
    stream = threading.Thread(target=list, args=(engine.stream(),))
    stream.start()
    while not Once.asleep:
        time.sleep(0.01)
    pipeline.close()
    assert Once.closed == 1
    stream.join(10)
    assert not stream.is_alive()


@pytest.mark.filterwarnings("error")
def test_an_unused_loop_closes_without_a_warning():
    Loop().close()


def test_an_abort_ends_trajectories_where_they_are(policy, engine_of):
    _, template = policy

    engine = engine_of(of_envs({"endless": sleepy(100)}, "endless"))
    wanted = requests(template, 3)
    engine.between_steps = lambda: engine.abort(["p-0/1", "p-0/2"]) if time.monotonic() > begun + 0.5 else None
    begun = time.monotonic()
    for request in wanted:
        engine.submit(request)
    stream = engine.stream()
    ended = [next(stream), next(stream)]
    assert {(one.request_id, one.finish_reason) for one in ended} == {("p-0/1", "abort"), ("p-0/2", "abort")}
    engine.abort()
    assert [one.request_id for one in stream] == ["p-0/0"]
    assert Once.closed == 3
    assert not list(engine.engine.stream())


def test_an_abort_before_the_first_step_ends_every_request(policy, engine_of):
    engine = engine_of(of_envs({"once": Once}, "once"))
    engine._loop = Loop()
    engine._loop.call(time.sleep, 0.2)  # all of what follows runs at once
    for request in requests(policy[1], 3):
        engine.submit(request)
    engine.abort()
    ended = []
    stream = threading.Thread(target=lambda: ended.extend(engine.stream()), daemon=True)
    stream.start()
    stream.join(10)
    assert sorted((one.request_id, one.finish_reason) for one in ended) == [(f"p-0/{i}", "abort") for i in range(3)]


@pytest.mark.parametrize("when", ["while it is deleted", "after what is ready was taken"])
def test_the_last_sample_is_never_lost(policy, engine_of, monkeypatch, when):
    """It ends while the stream looks whether anything is left."""

    class Slow(dict):
        def __delitem__(self, name):
            super().__delitem__(name)
            time.sleep(0.3)

    async def play(trajectory):
        await asyncio.sleep(0.2)

    engine = engine_of(play)
    if when == "while it is deleted":
        monkeypatch.setattr("swift.rollout.multi_turn.engine.LOOK_S", 0.01)
        engine._running = Slow()
    else:
        take = engine._come

        def come():
            yield from take()
            while engine._running:
                time.sleep(0.01)

        monkeypatch.setattr(engine, "_come", come)
    assert len(run(engine, requests(policy[1], 1))) == 1


# --- names ----------------------------------------------------------------------------------------------------


def test_what_is_registered_is_found():
    multi_turns["again"], multi_turns["plain"], multi_turns["seven"], envs["once"] = Again, lambda rows: rows, 7, Once
    multi_turns["runs"] = type("Runs", (Again,), {"run": lambda self: None})
    assert find(None, None, None) is None
    assert all(map(callable, (find("again", None, 2), find("plain", None, None), find(None, "once", None))))
    for wrong, line in (
        (("agian", None), "--multi_turn_scheduler: agian: .*again"),
        (("seven", None), "seven: is int"),
        (("runs", None), "runs: run is never called"),
    ):
        with pytest.raises(ConfigError, match=line):
            find(*wrong, None)
    with pytest.raises(ConfigError, match=r"--gym_env: twice: .*once"):
        find(None, "twice", None)


def test_a_scheduler_that_takes_no_max_turns_is_refused():
    class Old(Again):
        def __init__(self):
            super().__init__()

    multi_turns["old"] = Old
    with pytest.raises(
        ConfigError, match=r"--multi_turn_scheduler: old: Old\(max_turns=2\) raised TypeError: .*max_turns"
    ):
        find("old", None, 2)


def test_an_environment_may_open_after_system_messages_that_are_not_in_front():
    messages = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}, {"role": "user", "content": "c"}]
    opened = _opening(messages, "d", None)
    assert [one["content"] for one in opened] == ["b", "d"]
