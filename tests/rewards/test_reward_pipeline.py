"""Groups in, scores out: None, failures, scopes, weights, metrics and the start-up call."""

from __future__ import annotations

import logging
import math

import pytest
from refusals import problems_of

from swift.arguments import parse
from swift.errors import RewardError
from swift.rewards.arguments import RewardArguments
from swift.types import GroupScores, Prompt


def test_built_ins_score_a_group_in_the_order_given(pipeline, group, progress):
    rewards = pipeline(["format", "accuracy", "cosine", "repetition", "soft_overlong"], soft_cache_length=20)
    texts = ["<think>x</think><answer>4</answer>", r"no \boxed{5}"]
    (scores,) = rewards.score([group(texts, solution="4")], progress)
    assert rewards.names == ["format", "accuracy", "cosine", "repetition", "soft_overlong"]
    assert [row[:2] for row in scores.values] == [[1.0, 1.0], [0.0, 0.0]]
    assert scores.values[0][2] > 0.99
    assert scores.excluded == [None, None]
    assert rewards.weights == [1.0] * 5


def test_every_keyword_of_the_contract_arrives(pipeline, group, progress):
    source = """
import json
EXPECTED = {"solution": ["s", "s"], "level": [3, 3], "prompt_id": ["p0"] * 2, "group_id": ["g0"] * 2,
            "request_id": ["g0-0", "g0-1"], "finish_reason": ["stop", "length"],
            "is_truncated": [False, True], "response_token_ids": [[0], [0, 1]],
            "messages": [[{"role": "user", "content": "question"}]] * 2, "rollout_infos": [{"num_turns": 1}] * 2}
def look(completions, **kwargs):
    state, trajectories = kwargs.pop("trainer_state"), kwargs.pop("trajectory_inputs")
    (second,) = trajectories["g0-1"]
    assert second["messages"] == [*EXPECTED["messages"][1], {"role": "assistant", "content": "b c"}]
    assert second["solution"] == "s" and second["is_truncated"] and list(trajectories) == ["g0-0", "g0-1"]
    good = kwargs == EXPECTED and (state.global_step, state.max_steps, state.epoch) == (3, 10, 0.5)
    return [float(good)] * 2
orms["look"] = look
"""
    asked = group(["a", "b c"], solution="s", level=3)
    asked.completions[1].finish_reason = "length"
    (scores,) = pipeline(["look"], source).score([asked], progress)
    assert scores.values == [[1.0], [1.0]]


VARIOUS = """
import math
def partial(completions, **kwargs):
    return [None if text == "skip" else math.nan if text == "nan" else math.inf if text == "inf" else 1.0
            for text in completions]
orms["partial"] = partial
class Static(ORM):
    def __call__(completions, **kwargs):
        return [3.0] * len(completions)
orms["static"] = Static
class Plain:
    def __call__(self, completions, **kwargs):
        return [4.0] * len(completions)
orms["instance"] = Plain()
"""


def test_none_does_not_apply_and_nan_or_inf_exclude(pipeline, group, progress):
    rewards = pipeline(["partial"], VARIOUS)
    (scores,) = rewards.score([group(["a", "skip", "nan", "inf"])], progress)
    assert scores.values == [[1.0], [None], [None], [None]]
    assert scores.excluded == [None, "no_reward", "not_finite: partial", "not_finite: partial"]


def test_a_sample_is_kept_when_another_function_applies(pipeline, group, progress, caplog):
    with caplog.at_level(logging.WARNING):
        rewards = pipeline(["partial", "static", "instance"], VARIOUS)
    assert caplog.text.count("called as a static method") == 1
    (scores, nothing) = rewards.score([group(["skip", "a"]), group([], group_id="g1")], progress)
    assert scores == GroupScores([[None, 3.0, 4.0], [1.0, 3.0, 4.0]], [None, None])
    assert nothing == GroupScores(values=[], excluded=[])


FLAKY = """
def flaky(completions, **kwargs):
    if "bad" in completions:
        raise ValueError("no bad ones")
    return [1.0] * len(completions)
orms["flaky"] = flaky
class Ranked(ORM):
    scope = "group"
    def __call__(self, completions, **kwargs):
        if "bad" in completions:
            raise ValueError("whole group")
        return [float(len(completions))] * len(completions)
orms["ranked"] = Ranked
class Batch(ORM):
    scope = "batch"
    def __call__(self, completions, group_id, **kwargs):
        return [float(len(completions))] * len(completions)
orms["batch"] = Batch
def short(completions, **kwargs):
    return [1.0] * (len(completions) - 1)
orms["short"] = short
def dead(completions, **kwargs):
    raise RuntimeError("always")
orms["dead"] = dead
def same(completions, **kwargs):
    return [0.5] * len(completions)
orms["same"] = same
"""


def test_one_bad_sample_of_eight_is_explained_once(pipeline, group, progress, caplog):
    rewards = pipeline(["flaky"], FLAKY)
    with caplog.at_level(logging.WARNING):
        for number in range(2):
            texts = ["ok"] * 7 + ["bad"]
            (scores,) = rewards.score([group(texts, group_id=f"g{number}")], progress)
            assert scores.excluded == [None] * 7 + ["exception: flaky"]
    assert caplog.text.count("no bad ones") == 1
    assert "excluded 1 of 8" in caplog.text
    assert "prompt_id p0" in caplog.text
    metrics = rewards.drain_metrics()
    assert metrics["health/reward_failed/flaky"] == 2
    assert metrics["health/reward_timeout/flaky"] == 0
    assert metrics["rewards/flaky/mean"] == 1.0


def test_a_group_function_never_sees_less_than_a_group_and_excludes_it_whole(pipeline, group, progress):
    rewards = pipeline(["ranked"], FLAKY)
    scores = rewards.score([group(["a", "b", "bad"]), group(["c", "d"], group_id="g1")], progress)
    assert scores[0].excluded == ["exception: ranked"] * 3
    assert scores[1].values == [[2.0], [2.0]]


def test_a_batch_function_gets_the_whole_generation_batch(pipeline, group, progress):
    rewards = pipeline(["batch", "same"], FLAKY)
    assert rewards.needs_whole_batch
    scores = rewards.score([group(["a", "b", "c"]), group(["c", "d"], group_id="g1")], progress)
    assert [item.values for item in scores] == [[[5.0, 0.5]] * 3, [[5.0, 0.5]] * 2]


def test_a_wrong_length_counts_as_a_failed_call(pipeline, group, progress, caplog):
    rewards = pipeline(["short"], FLAKY)
    with caplog.at_level(logging.WARNING):
        (scores,) = rewards.score([group(["a", "b"])], progress)
    assert scores.excluded == ["contract: short"] * 2
    assert "plugin.py" in caplog.text
    assert "0 values for 1 completion" in caplog.text


def test_three_dead_batches_in_a_row_end_the_run(pipeline, group, progress):
    rewards = pipeline(["flaky", "same"], FLAKY)
    for number, text in enumerate(["bad", "bad", "ok", "bad", "bad"]):
        rewards.score([group([text], group_id=f"g{number}")], progress)
        rewards.end_batch()
        rewards.drain_metrics()
    with pytest.raises(RewardError, match=r"flaky.*3 generation"):
        groups = [group(["bad", "bad"], group_id="g9")]
        rewards.score(groups, progress)
        rewards.end_batch(groups)


HANGS = """
import time
def hangs(completions, **kwargs):
    time.sleep(99 * ("bad" in completions))
    return [0.0] * len(completions)
orms["hangs"] = hangs
"""


@pytest.mark.parametrize("worked", [True, False])
def test_a_function_that_only_hangs_ends_soon_and_one_that_worked_has_its_three_batches(
    pipeline, group, progress, worked
):
    rewards = pipeline(["hangs"], HANGS, reward_timeout=0.2, num_workers=4)
    groups = [group(["bad"] * 8, group_id=name) for name in ("g1", "g2")]
    if worked:
        rewards.score([group(["good"])], progress)
        assert [scores.excluded for scores in rewards.score(groups, progress)] == [["timeout: hangs"] * 8] * 2
    else:
        with pytest.raises(RewardError, match=r"hangs: 16 calls in a row.* 0.2 s; .*plugin.py:"):
            rewards.score(groups, progress)


def test_the_diagnosis_says_why_rewards_are_equal(pipeline, group, progress):
    rewards = pipeline(["same", "accuracy"], FLAKY)
    for number in range(20):
        rewards.score([group(["a", "b"], group_id=f"g{number}", solution="Paris")], progress)
        rewards.end_batch()
        rewards.drain_metrics()
    assert "same: constant 0.5, None on 0% of 40 samples" in rewards.diagnosis()
    assert "gold_unparsed 40" in rewards.diagnosis()


def test_metrics_are_exact_and_belong_to_the_groups_asked_for(pipeline, group, progress):
    rewards = pipeline(["accuracy"])
    first = group([r"\boxed{1}", "", ""], solution="1", group_id="g0")
    ahead = group([r"\boxed{1}"], solution="1", group_id="g1")
    rewards.score([first, ahead], progress)
    metrics = rewards.drain_metrics([first])
    assert metrics["rewards/accuracy/mean"] == pytest.approx(1 / 3)
    assert metrics["rewards/accuracy/std"] == pytest.approx(math.sqrt(1 / 3))
    assert metrics["time/reward/accuracy"] > 0
    assert rewards.drain_metrics([ahead])["rewards/accuracy/mean"] == 1.0
    assert "rewards/accuracy/mean" not in rewards.drain_metrics()


def test_gold_counters_are_counted_once_with_accuracy_and_cosine_listed(pipeline, group, progress, caplog):
    rewards = pipeline(["accuracy", "cosine"])
    with caplog.at_level(logging.WARNING):
        rewards.score([group(["a", "b"], solution="Paris"), group(["c"], group_id="g1", solution="")], progress)
    metrics = rewards.drain_metrics()
    assert (metrics["health/gold_unparsed"], metrics["health/gold_missing"]) == (2.0, 1.0)
    assert caplog.text.count("ground truth unparsed: prompt_id p0: solution 'Paris'") == 1


def test_answers_that_a_function_has_read_are_a_column_of_the_completion(pipeline, group, progress):
    source = """
class First(ORM):
    def __call__(self, completions, **kwargs):
        self.extracted = [text[:1] or None for text in completions]
        return [0.0] * len(completions)
orms["first"] = First
"""
    groups = [group([r"\\boxed{5}", ""], solution="4"), group(["c"], group_id="g1", solution="4")]
    pipeline(["accuracy", "first"], source).score(groups, progress)
    columns = [completion.logged for group in groups for completion in group.completions]
    read = [(row["accuracy_extracted"], row["first_extracted"]) for row in columns]
    assert read == [("5", "\\"), (None, None), (None, "c")]


def test_a_think_tag_opened_by_the_prompt_counts_for_format(pipeline, group, progress):
    texts = ["x</think><answer>1</answer>"]
    for opening, value in (("...<think>\n", 1.0), ("...", 0.0)):
        rewards = pipeline(["format"], decode=lambda ids, text=opening: text)
        assert rewards.score([group(texts)], progress)[0].values == [[value]]


def test_columns_that_only_some_groups_have_are_none_for_the_others(pipeline, group, progress):
    source = """
class Batch(ORM):
    scope = "batch"
    def __call__(self, completions, level, **kwargs):
        return level
orms["level"] = Batch
"""
    scores = pipeline(["level"], source).score([group(["a"], level=4), group(["b"], group_id="g1")], progress)
    assert [item.values for item in scores] == [[[4.0]], [[None]]]


def test_functions_do_not_see_each_others_changes_to_their_arguments(pipeline, group, progress):
    source = """
def greedy(completions, solution, **kwargs):
    result = [float(len(solution))] * len(completions)
    solution.clear()
    completions.clear()
    return result
orms["greedy"] = greedy
orms["again"] = greedy
"""
    rewards = pipeline(["greedy", "again"], source, num_workers=1)
    assert rewards.score([group(["a", "b"], solution="1")], progress)[0].values == [[2.0, 2.0]] * 2


def test_an_unknown_name_shows_the_nearest_and_all_names(pipeline):
    (line,) = problems_of(pipeline, ["acuracy"], FLAKY)
    assert "acuracy" in line
    assert "nearest: accuracy" in line
    for name in ("format", "soft_overlong", "flaky"):
        assert name in line


def parsed(*words):
    return parse("rlhf", ["--rlhf_type", "grpo", "--model", "m", "--dataset", "d", *words], {}).args


def test_reward_functions_declare_flags_of_their_own(plugin):
    source = '''
from dataclasses import dataclass
from swift.flags import flag
@dataclass(kw_only=True)
class Own:
    margin: float = flag(0.5, above=0)
    """Margin."""
@orms.register("mine", parameters=Own)
class Mine(ORM):
    pass
orms["cosine"] = Mine
'''
    assert parsed("--reward_funcs", "cosine", "--cosine_max_len", "7").cosine_max_len == 7
    own = ["--reward_funcs", "cosine", "mine", "--margin", "2", "--external_plugins", plugin(source)]
    args = parsed(*own, "--cosine_max_len", "7")  # who replaces a built-in keeps its flags
    assert (args.reward_funcs, args.margin, args.cosine_max_len) == (["cosine", "mine"], 2.0, 7)


def rows(count=3, **columns):
    return [Prompt(f"p{index}", [{"role": "user", "content": "q"}], [], dict(columns)) for index in range(count)]


def test_self_check_refuses_a_data_set_without_any_gold(pipeline):
    rewards = pipeline(["cosine"])
    (line,) = problems_of(rewards.self_check, rows(64, solution=""))
    assert "first 64 rows" in line
    rewards.self_check([*rows(3, solution=None), *rows(1, solution="1")])


def test_self_check_refuses_a_function_that_fails_on_every_ground_truth(pipeline, caplog):
    rewards = pipeline(["dead", "same"], FLAKY)
    with caplog.at_level(logging.WARNING):
        rewards.self_check(rows())
    assert "dead failed on all 3 start-up calls" in caplog.text
    assert "rewards/same/mean" not in rewards.drain_metrics()
    with pytest.raises(RewardError, match=r"dead: fails on every ground truth .* RuntimeError: always"):
        rewards.self_check(rows(solution="4"))


def test_self_check_accepts_a_function_that_fails_on_empty_texts_only(pipeline, caplog):
    source = """
def strict(completions, **kwargs):
    return [float(text[0] == "4") for text in completions]
orms["strict"] = strict
"""
    with caplog.at_level(logging.WARNING):
        pipeline(["strict"], source).self_check(rows(solution="4"))
    assert "strict failed on all 3 start-up calls: exception: IndexError" in caplog.text


def test_plugins_read_the_resolved_arguments_by_canonical_name_and_alias(plugin, group, progress):
    from swift.rewards.pipeline import RewardPipeline

    source = """
class Reads(ORM):
    def __call__(self, completions, **kwargs):
        return [self.args.reward_timeout + self.args.reward_num_workers] * len(completions)
orms["reads"] = Reads
"""
    args = RewardArguments(
        reward_funcs=["reads"], external_plugins=[plugin(source)], reward_timeout=9.0, reward_workers=1
    )
    with RewardPipeline(args, seed=1, max_completion_length=10) as rewards:
        assert rewards.score([group(["a"])], progress)[0].values == [[10.0]]
