"""An engine whose log-probs are at temperature 1 while it samples at another: nothing is left out without a word."""

from __future__ import annotations

import pytest

from swift.arguments import parse
from swift.errors import ConfigError
from swift.trainers.grpo.arguments import trainer_settings, uncorrected_lines

BASE = ["--rlhf_type", "grpo", "--model", "m", "--dataset", "d", "--reward_funcs", "accuracy", "--temperature", "0.7"]


def settings(*words, support="raw"):
    resolved = parse("rlhf", [*BASE, *words], {})
    return trainer_settings(resolved.args, logprob_support=support, given=resolved.given)


def test_a_derived_correction_is_off_and_a_line_says_so():
    made = settings("--dynamic_sample", "true")
    assert not made.correctable_sampling and not made.comparable_sampling
    (line,) = uncorrected_lines(made)
    assert line.startswith("--rollout_importance_sampling_mode: token_truncate (derived): off, because this engine")
    assert "not at --temperature 0.7" in line


def test_there_is_nothing_to_say_where_it_acts_or_is_not_wanted():
    assert not uncorrected_lines(settings("--dynamic_sample", "true", support="truncated"))
    assert not uncorrected_lines(settings("--dynamic_sample", "true", "--temperature", "1"))
    assert not uncorrected_lines(settings())


@pytest.mark.parametrize(
    ("words", "begins"),
    [
        (("--rollout_importance_sampling_mode", "token_mask"), "--rollout_importance_sampling_mode: token_mask: this"),
        (("--old_logprobs", "sampler"), "--old_logprobs: sampler: this engine"),
        (("--kl_in_reward", "true"), "--kl_in_reward: true: this engine"),
        (
            ("--replay_buffer_size", "4", "--replay_recompute_logps", "false"),
            "--replay_recompute_logps: false: this engine",
        ),
    ],
)
def test_what_was_asked_for_and_cannot_be_is_refused(words, begins):
    with pytest.raises(ConfigError) as raised:
        settings(*words)
    (line,) = raised.value.problems
    assert line.startswith(begins) and line.endswith("or --temperature 1")
    settings(*words, support="truncated")


def test_a_mode_of_none_may_be_given():
    assert not uncorrected_lines(settings("--rollout_importance_sampling_mode", "none"))
