"""Settings that change nothing beside others are noted, where the user wrote them."""

from __future__ import annotations

import pytest
from command_lines import rlhf


def notes(*words):
    return [note for note in rlhf(*words).notes if "no effect" in note]


@pytest.mark.parametrize(
    ("setting", "beside", "why"),
    [
        ("--epsilon 0.1", "--loss_type sapo", "with --loss_type sapo, which does not read it"),
        ("--epsilon 0.1", "--loss_type vespo", "with --loss_type vespo"),
        ("--epsilon_high 0.3", "--loss_type sapo", "with --loss_type sapo"),
        ("--epsilon 0.1", "--loss_type cispo --epsilon_high 5", "with --loss_type cispo"),
        ("--importance_sampling_level token", "--loss_type vespo", "with --loss_type vespo"),
        ("--kl_in_reward true", "--beta 0", "without --beta"),
        ("--ref_model other", "--beta 0", "without --beta"),
        (
            "--rollout_importance_sampling_threshold 3",
            "--rollout_importance_sampling_mode none",
            "without --rollout_importance_sampling_mode token_truncate or",
        ),
        ("--rollout_importance_sampling_lower 0.5", "", "without --rollout_importance_sampling_mode"),
        (
            "--rollout_importance_sampling_ratio sum",
            "--rollout_importance_sampling_mode token_mask",
            "without --rollout_importance_sampling_mode sequence_truncate or sequence_mask",
        ),
        ("--reroll_max_groups 2", "", "without --reroll_start_fraction below 1"),
        ("--reroll_fail_reward 0.5", "--reroll_start_fraction 1.0", "without --reroll_start_fraction below 1"),
    ],
)
def test_what_changes_nothing_is_noted_under_its_name(setting, beside, why):
    (note,) = notes(*setting.split(), *beside.split())
    name, value = setting.split()
    assert note.startswith(f"{name}: {value}: no effect {why}")
    assert not notes(*beside.split()), "what the user did not write earns no note"


@pytest.mark.parametrize(
    "words",
    [
        "--epsilon 0.1 --epsilon_high 0.3",
        "--loss_type cispo --epsilon_high 5",
        "--loss_type gspo --importance_sampling_level sequence_token",
        "--kl_in_reward true --beta 0.1",
        "--cosine_max_len 9",
        "--rollout_importance_sampling_mode sequence_mask --rollout_importance_sampling_threshold 3 "
        "--rollout_importance_sampling_lower 0.5 --rollout_importance_sampling_ratio sum",
        "--reroll_start_fraction 0.5 --reroll_max_groups 2 --reroll_fail_reward 0.5",
        "--loss_type sapo --epsilon 0.2",
    ],
)
def test_what_has_an_effect_or_is_the_default_is_not_noted(words):
    assert not notes(*words.split())


@pytest.mark.parametrize("preset", ["grpo", "dapo", "gspo", "cispo", "sapo", "vespo", "rloo", "reinforce_plus_plus"])
def test_the_values_of_a_preset_are_not_the_users(preset):
    assert not notes("--preset", preset, "--beta", "0")
