"""Rollouts of several turns: tokens and masks of a sample, and what schedulers, functions and environments bring."""

import asyncio

import pytest
import torch
from oracle import logprobs_of
from sources import sampled
from trajectories import LIMITS, TURN, Again, Once, requests

from swift.errors import ConfigError, RewardError
from swift.plugin import MultiTurnScheduler, RolloutChoice, RolloutInferRequest, envs, multi_turns
from swift.plugin.multi_turn import ChatMessage
from swift.rewards.contract import group_keywords
from swift.rollout.batches import BatchConfig, BatchMaker
from swift.rollout.round_result import fault
from swift.rollout.sources.multi_turn.environments import _opening, find, of_envs, of_function, of_scheduler
from swift.rollout.sources.multi_turn.trajectory import OUT_OF_TURNS, REWRITTEN, Limits, Trajectory
from swift.types import Completion, RolloutGroup

BATCHES = BatchMaker(BatchConfig(num_generations=1, generation_batches=1, num_global_batches=1, num_iterations=1))


def test_tokens_go_on_over_turns_and_only_answers_are_trained_on(policy, source_for):
    model, template = policy
    wanted = requests(template)
    for request, one in zip(wanted, sampled(source_for(of_scheduler(Again(), "again")), wanted), strict=True):
        assert (one.episode.num_turns, sum(one.mask), fault(one)) == (3, 3 * TURN, None)
        expected = logprobs_of(model, request.prompt_ids, one.token_ids, 0.8)
        own = torch.tensor(one.mask, dtype=torch.bool)
        assert float((torch.tensor(one.logprobs) - expected)[own].abs().max()) < 1e-5
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
        [sample] = BATCHES.unscored_samples([RolloutGroup("p-0", 0, 0, request.prompt, [one])])
        assert sample.trained.tolist() == own.tolist()


def starts(mask):
    return [i for i, kept in enumerate(mask) if kept and (i == 0 or not mask[i - 1])]


def test_equal_seeds_give_equal_trajectories_whatever_the_company(template, source_for):
    wanted = requests(template, 6)
    together = sampled(source_for(of_scheduler(Again(), "again")), wanted)
    alone = [sampled(source_for(of_scheduler(Again(), "again")), [one])[0] for one in wanted[:2]]
    assert [one.token_ids for one in alone] == [one.token_ids for one in together[:2]]


@pytest.mark.parametrize(("scope", "most"), [("total", TURN), ("per_round", 3 * TURN)])
def test_what_the_length_limit_bounds(template, source_for, scope, most):
    source = source_for(of_scheduler(Again(), "again"), Limits(3, scope, 2000))
    assert {sum(one.mask or [1] * TURN) for one in sampled(source, requests(template))} == {most}


def test_a_full_context_ends_a_trajectory(template, source_for):
    wanted = requests(template, 2)
    limit = len(wanted[0].prompt_ids) + 30
    for one in sampled(source_for(of_scheduler(Again(), "again"), Limits(9, "per_round", limit)), wanted):
        assert (one.finish_reason, fault(one)) == ("length", None)
        assert one.episode.messages[-1]["role"] == "assistant"
        assert len(one.token_ids) <= 30


def test_another_end_of_an_answer_keeps_the_tokens_both_have(template, source_for):
    seen = []

    class Tip(MultiTurnScheduler):
        def check_finished(self, request, choice, turn):
            return turn == 2

        def step(self, request, choice, turn):
            kept = template.decode(choice.token_ids[:2])
            seen.append(choice.token_ids[:2])
            request.messages[-1]["content"] = kept + " wait,"
            return {"infer_request": request}

    (one,) = sampled(source_for(of_scheduler(Tip(), "tip")), requests(template, 1))
    added = template.encode_text(" wait,")
    assert one.token_ids[:2] == seen[0]
    assert one.token_ids[2 : 2 + len(added)] == added
    assert one.mask == [1, 1, *[0] * len(added), *[1] * TURN]
    assert one.versions == [(0, 0, 2), (0, 2 + len(added), len(one.mask))]
    assert [message["role"] for message in one.episode.messages] == ["user", "assistant"]


@pytest.mark.parametrize("more", [" wait,", ""], ids=["longer", "unchanged"])
def test_an_answer_that_goes_on_loses_its_end_token(template, more):
    end = template.stop_token_ids[-1]
    spoken = iter([[*template.encode_text("four"), end], [*template.encode_text("five"), end]])
    first, second = template.encode_text("four"), template.encode_text("five")

    async def sample(request):
        ids = next(spoken)
        return Completion(request.request_id, ids, [-1.0] * len(ids), "stop", versions=[(0, 0, len(ids))])

    async def play():
        await trajectory.answer()
        *earlier, last = trajectory.messages
        trajectory.replace_chat([*earlier, {**last, "content": last["content"] + more}])
        await trajectory.answer()

    (request,) = requests(template, 1)
    trajectory = Trajectory(request, template, sample, LIMITS, list(request.prompt.messages))
    asyncio.run(play())
    added = template.encode_text(more)
    assert trajectory.token_ids == [*first, *added, *second, end]
    assert trajectory.mask == [1] * len(first) + [0] * len(added) + [1] * len([*second, end])
    assert [message["role"] for message in trajectory.messages] == ["user", "assistant"]


@pytest.mark.parametrize(
    "text", ["x" * 300, "añ€🙂" * 60, "ab cd " * 50], ids=["ascii", "characters of several tokens", "words"]
)
def test_an_edit_keeps_as_many_tokens_as_say_the_same_and_decodes_few_times(template, text, monkeypatch):
    ids = template.encode_text(text)
    (request,) = requests(template, 1)
    for kept in (0, 1, 7, len(text) // 2, len(text) - 1):
        trajectory = Trajectory(request, template, None, LIMITS, [{"role": "assistant", "content": text}])
        trajectory.token_ids, trajectory.mask = list(ids), [1] * len(ids)
        trajectory.logprobs, decoded = [-1.0] * len(ids), []
        own = trajectory._text_of_answer
        monkeypatch.setattr(
            Trajectory, "_text_of_answer", lambda self, end, own=own, decoded=decoded: decoded.append(end) or own(end)
        )
        edited = text[:kept] + "!"
        trajectory.edit(edited)
        monkeypatch.undo()
        longest = max(end for end in range(len(ids) + 1) if edited.startswith(template.decode(ids[:end])))
        assert sum(trajectory.mask) == longest
        assert template.decode(trajectory.token_ids) == edited
        assert len(decoded) < 30


class Forger(Again):
    """Changes what was said before."""

    def step(self, request, choice, turn):
        request.messages[0]["content"] = "something else"
        return {"infer_request": request}


@pytest.mark.parametrize(("on_break", "reason"), [("exclude", "environment: history_rewritten"), ("truncate", None)])
@pytest.mark.parametrize("who", ["a scheduler", "a template"])
def test_a_rewritten_history_leaves_a_sample_out_or_ends_it_before(template, source_for, who, on_break, reason):
    play = of_scheduler(Forger() if who == "a scheduler" else Again(), "again")
    source = source_for(play, Limits(3, "per_round", 2000, on_break))
    if who == "a template":
        tokenizer = type(template.tokenizer).from_pretrained(template.tokenizer.name_or_path)
        tokenizer.chat_template = (
            "{% for m in messages %}<{{ m.role }}>"
            "{{ m.content if loop.last or m.role != 'assistant' else '(cut)' }}\n{% endfor %}"
            "{% if add_generation_prompt %}<assistant>{% endif %}"
        )
        source.template = type(template)(tokenizer)
    for one in sampled(source, requests(source.template)):
        found = fault(one), one.episode.num_turns, len(one.token_ids), one.episode.metrics[REWRITTEN]
        assert found == (reason, 1, TURN, 1)


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
def test_a_sample_that_ends_only_for_its_turns_is_counted(template, source_for, play, counted):
    done = sampled(source_for(play, Limits(2, "per_round", 2000)), requests(template, 2))
    assert [one.episode.metrics[OUT_OF_TURNS] for one in done] == [counted] * 2


def test_a_scheduler_may_return_the_tokens_of_a_turn(template, source_for):
    """A tool's result behind an answer, as ms-swift's schedulers write it, and one sampled token left out."""
    result, seen = template.encode_text(" = 7"), []

    class Tool(MultiTurnScheduler):
        def check_finished(self, request, choice, turn):
            return turn == 2

        def step(self, request, choice, turn):
            seen.append((list(choice.token_ids), choice.logprobs["content"]))
            request.messages[-1]["content"] += " = 7"
            return {
                "infer_request": request,
                "response_token_ids": choice.token_ids + result,
                "response_loss_mask": [0, *[1] * (TURN - 1), *[0] * len(result)],
                "rollout_logprobs": [one["logprob"] for one in choice.logprobs["content"]],
            }

    (one,) = sampled(source_for(of_scheduler(Tool(), "tool")), requests(template, 1))
    ((ids, logprobs),) = seen
    assert one.token_ids[: TURN + len(result)] == ids + result
    assert one.mask == [0, *[1] * (TURN - 1), *[0] * len(result), *[1] * TURN]
    assert one.logprobs[1:TURN] == [row["logprob"] for row in logprobs[1:]]
    assert not any(value for value, kept in zip(one.logprobs, one.mask, strict=True) if not kept)
    assert [message["role"] for message in one.episode.messages] == ["user", "assistant"]


def test_a_turn_that_is_returned_unchanged_keeps_its_end(template, source_for):
    class Same(Again):
        def step(self, request, choice, turn):
            return {**super().step(request, choice, turn), "response_token_ids": choice.token_ids}

    same = sampled(source_for(of_scheduler(Same(), "same")), requests(template))
    plain = sampled(source_for(of_scheduler(Again(), "again")), requests(template))
    assert [(one.token_ids, one.mask) for one in same] == [(one.token_ids, one.mask) for one in plain]


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"response_token_ids": [1] * TURN}, "trains on tokens which were not sampled"),
        ({"response_token_ids": [1] * TURN, "response_loss_mask": [0]}, "response_loss_mask of 1 values for 5"),
        ({"rollout_logprobs": [-9.0] * TURN}, "rollout_logprobs that are not those of the engine"),
    ],
)
def test_tokens_that_cannot_be_trained_on_end_the_run(template, source_for, given, line):
    class Own(Again):
        def step(self, request, choice, turn):
            return {**super().step(request, choice, turn), **given}

    with pytest.raises(RewardError, match=f"--multi_turn_scheduler: own: step returned .*{line}"):
        sampled(source_for(of_scheduler(Own(), "own")), requests(template, 1))


def test_the_last_round_alone_may_be_trained_on(template, source_for):
    limits = Limits(3, "per_round", 2000, last_round=True)
    for one in sampled(source_for(of_scheduler(Again(), "again"), limits), requests(template, 2)):
        assert one.episode.num_turns == 3
        assert one.mask == [0] * (len(one.mask) - TURN) + [1] * TURN
        assert not any(one.logprobs[:-TURN])


# --- schedulers that ms-swift ships ---------------------------------------------------------------------------


def test_math_tip_trick_cuts_a_wrong_answer_and_doubts_it_once():
    scheduler = multi_turns["math_tip_trick"](max_turns=9)
    for text in ("<think>3</think><answer>3</answer>", "<think>3<answer>3</answer>"):
        request = RolloutInferRequest([{"role": "assistant", "content": text}], {"solution": "4"})
        choice = RolloutChoice(ChatMessage(text), "stop")
        assert not scheduler.check_finished(request, choice, 1)
        scheduler.step(request, choice, 1)
        assert request.messages[-1]["content"] == f"<think>3{scheduler.tips_prompt}"
        assert scheduler.check_finished(request, choice, 2)
    right = RolloutInferRequest([{"role": "assistant", "content": "<answer>4</answer>"}], {"solution": "4"})
    assert scheduler.check_finished(right, choice, 1)


def test_gym_scheduler_plays_as_gym_env_does(template, source_for):
    class Count(Once):
        async def reset(self, request):
            self.count = 0
            return f"Count from {request.data_dict['solution']}.", {}, "Be brief."

        async def step(self, messages):
            self.count += 1
            return f"{self.count} so far", self.count, self.count == 2, {"counted": self.count}

    envs["count"] = Count
    Count.closed = 0
    scheduled = sampled(source_for(find("gym_scheduler", "count", 3)), requests(template))
    played = sampled(source_for(find(None, "count", 3)), requests(template))
    for one, other in zip(scheduled, played, strict=True):
        assert (one.token_ids, one.mask, one.episode.messages) == (other.token_ids, other.mask, other.episode.messages)
        assert (one.episode.rewards, other.episode.rewards) == ([3.0], [1.0, 2.0])
        assert one.columns == {"counted": 2, "total_reward": 3.0, "step_rewards": [1.0, 2.0], "gym_done": True}
    assert Once.closed == 8


def test_an_openenv_scheduler_plays_what_its_wrapper_reaches(template, source_for):
    class Session:
        closed = 0

        def reset(self):
            return {"board": "empty"}, None

        def step(self, action):
            return {"board": action["message"]}, 0.5, action["message"] != "", None

        def close(self):
            Session.closed += 1

    class Local(multi_turns["openenv_scheduler"]):
        def _create_env(self, config):
            return Session()

        def parse_action(self, text):
            return {"message": "x"}

    (one,) = sampled(source_for(of_scheduler(Local(max_turns=3), "local")), requests(template, 1))
    assert one.episode.messages[0] == {"role": "user", "content": '{"board": "empty"}'}
    assert (one.episode.rewards, one.columns["gym_done"], Session.closed) == ([0.5], True, 1)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ('{"move": 3}', {"move": 3}),
        ('```json\n{"move": 3}\n```', {"move": 3}),
        ("left", {"message": "left"}),
        ("7", {"message": "7"}),
    ],
)
def test_an_openenv_action_is_the_json_of_an_answer(text, action):
    assert multi_turns["openenv_scheduler"]().parse_action(text) == action


def test_accuracy_works_beside_the_main_thread():
    env = envs["math_env"]({})

    async def play():
        request = RolloutInferRequest([], {"problem": "What is 1/2?", "solution": "$0.5$"})
        opened = await env.reset(request)
        return opened[0], await env.step([{"role": "assistant", "content": "<answer>$\\frac{1}{2}$</answer>"}])

    question, (_, reward, done, columns) = asyncio.run(play())
    assert (question, reward, done, columns) == ("What is 1/2?", 1.0, True, {"math_reward": 1.0})


# --- the other doors ------------------------------------------------------------------------------------------


def test_a_function_gets_rows_and_says_what_follows(template, source_for):
    rows = []

    def follow(given):
        rows.extend(given)
        for row in given:
            row["finished"] = len(row["messages"]) > 3
            row["messages"].append({"role": "user", "content": "more"})
        return given

    done = sampled(source_for(of_function(follow, "follow")), requests(template))
    assert {one.episode.num_turns for one in done} == {2}
    assert {(row["index"], row["solution"], row["finish_reason"]) for row in rows} == {
        (i, "3", "length") for i in range(4)
    }


@pytest.mark.parametrize("answer", [None, [], [{}], [{}, {}]])
def test_a_function_that_returns_other_rows_ends_the_run(template, source_for, answer):
    with pytest.raises(RewardError, match="--multi_turn_scheduler: short: must return"):
        sampled(source_for(of_function(lambda rows: answer, "short"), name="x"), requests(template))


def test_an_environment_opens_rewards_and_is_closed(policy, source_for):
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
    for one in sampled(source_for(of_envs({"game": Game}, "game")), wanted):
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
        [sample] = BATCHES.unscored_samples([group])
        assert sample.prompt_ids.tolist() == one.episode.prompt_ids
    assert Once.closed == 4


def test_a_row_may_name_its_own_environment(template, source_for):
    class Other(Once):
        async def step(self, messages):
            return "", float(self.config["worth"]), True, {}

    wanted = requests(template, 2, env_config={"name": "other", "worth": 7})
    done = sampled(source_for(of_envs({"once": Once, "other": Other}, "once")), wanted)
    assert [one.episode.rewards for one in done] == [[7.0], [7.0]]
    with pytest.raises(ConfigError, match="--gym_env: third"):
        sampled(source_for(of_envs({"once": Once}, "once")), requests(template, 1, env_config={"name": "third"}))


# --- names ----------------------------------------------------------------------------------------------------


def test_what_is_registered_is_found():
    multi_turns["again"], multi_turns["plain"], multi_turns["seven"], envs["once"] = Again, lambda rows: rows, 7, Once
    assert find(None, None, None) is None
    assert all(map(callable, (find("again", None, 2), find("plain", None, None), find(None, "once", None))))
    for wrong, line in (
        (("agian", None), "--multi_turn_scheduler: agian: .*again"),
        (("seven", None), "seven: is int"),
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
