"""From groups to a rollout batch: estimators, KL in the reward, masks, and what fills slots that teach nothing."""

import pytest

from swift.rollout.batches import BatchConfig, BatchMaker
from swift.rollout.replay import ReplayBuffer
from swift.types import Completion, GroupScores, Prompt, RolloutGroup


def group(index, values, *, excluded=(), cut=(), lengths=None):
    """A group with one row of rewards per completion."""
    completions = [
        Completion(
            f"g{index}/{i}", [7] * ((lengths or [2] * len(values))[i]), [-1.0] * ((lengths or [2] * len(values))[i]),
            "length" if i in cut else "stop", versions=[(3, 0, 2)],
        )
        for i in range(len(values))
    ]  # fmt: skip
    scores = GroupScores(
        [list(row) for row in values], ["timeout" if i in excluded else None for i in range(len(values))]
    )
    return RolloutGroup(f"g{index}", index, 0, Prompt(f"p{index}", [], [1, 2, 3]), completions, scores)


def maker(**settings):
    replay, kl_of = settings.pop("replay", None), settings.pop("kl_of", None)
    defaults = {"num_generations": 4, "generation_batches": 1, "num_global_batches": 1, "num_iterations": 1}
    made = BatchMaker(BatchConfig(**{**defaults, "reward_weights": [1.0], **settings}), replay=replay)
    made.kl_of = kl_of
    return made


def advantages(made):
    return [sample.advantage for sample in made.batch.samples]


HALF = [group(0, [[1.0], [0.0], [0.0], [0.0]]), group(1, [[1.0]] * 4)]


@pytest.mark.parametrize(
    ("settings", "first"),
    [
        ({}, [1.499700, -0.499900]),
        ({"scale_rewards": "batch"}, [1.448858, -0.482953]),
        ({"scale_rewards": "none"}, [0.75, -0.25]),
        ({"advantage_estimator": "rloo"}, [1.0, -0.333333]),
        ({"advantage_estimator": "reinforce_plus_plus"}, [2.290588, -0.763529]),
    ],
)
def test_samples_carry_the_advantages_of_the_estimator(settings, first):
    made = maker(**settings).make(HALF, 0)
    assert advantages(made) == pytest.approx([first[0], *[first[1]] * 3, 0, 0, 0, 0], abs=1e-6)
    assert made.informative == [True, False] and (made.trained, made.excluded) == (2, 0)


def test_gdpo_normalises_each_reward_on_its_own():
    groups = [group(0, [[1, 0], [0, 0], [1, 0.5], [0, 0.5]]), group(1, [[1, 1], [1, 0], [1, 0], [1, 1]])]
    made = maker(scale_rewards="gdpo", reward_weights=[1.0, 1.0]).make(groups, 0)
    expected = [0.000132, -1.527346, 1.527346, -0.000132, 0.763739, -0.763739, -0.763739, 0.763739]
    assert advantages(made) == pytest.approx(expected, abs=1e-6)


def test_generation_batches_of_a_rollout_batch_have_statistics_of_their_own():
    made = maker(scale_rewards="batch", generation_batches=2).make(HALF, 0)
    assert advantages(made) == pytest.approx([1.4997, *[-0.4999] * 3, 0, 0, 0, 0], abs=1e-4)


def test_the_kl_lowers_rewards_for_training_and_stays_out_of_the_log():
    seen = []

    def kl_of(samples):
        seen.append([sample.token_ids.tolist() for sample in samples])
        return [0.0, 1.0, 2.0, 3.0, 0.0, 0.0, 0.0, 4.0]

    made = maker(advantage_estimator="rloo", reward_kl=0.5, kl_of=kl_of).make(HALF, 0)
    rewards = [1.0, -0.5, -1.0, -1.5]
    expected = [r - (sum(rewards) - r) / 3 for r in rewards]
    assert advantages(made)[:4] == pytest.approx(expected)
    assert advantages(made)[4:] != [0.0] * 4, "completions that have drifted apart differ in what they are trained on"
    assert made.informative == [True, False], "but not in their rewards"
    assert made.plain[0].rewards_S.tolist() == [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    assert seen == [[[7, 7]] * 8]
    assert made.metrics["kl_in_reward"] == pytest.approx(10 / 8)


def test_completions_that_are_not_trained_on_do_not_thin_the_logged_kl():
    groups = [group(0, [[1.0], [0.0], [0.0], [0.0]], cut=(0, 1))]
    made = maker(overlong_filter=True, reward_kl=0.5, kl_of=lambda samples: [0.0, 0.0, 2.0, 3.0]).make(groups, 0)
    assert made.metrics["kl_in_reward"] == pytest.approx(2.5)
    assert "kl_in_reward" not in maker().make(groups, 0).metrics


def test_rewards_of_cut_completions_are_lowered_by_their_kl_like_all_others():
    """Equal rewards and a KL of 2 everywhere: no completion is better than another."""
    groups = [group(0, [[1.0], [1.0], [1.0], [0.0]], cut=(0, 1))]

    def kl_of(samples):
        return [2.0 * bool(sample.num_trained) for sample in samples]

    made = maker(overlong_filter=True, scale_rewards="none", reward_kl=0.5, kl_of=kl_of).make(groups, 0)
    assert advantages(made) == pytest.approx([0.25, 0.25, 0.25, -0.75])
    assert [sample.num_trained for sample in made.batch.samples] == [0, 0, 2, 2]


def test_cut_completions_leave_the_loss_and_stay_in_the_statistics():
    groups = [group(0, [[1.0], [0.0], [0.0], [0.0]], cut=(0,))]
    made = maker(overlong_filter=True).make(groups, 0)
    assert [sample.num_trained for sample in made.batch.samples] == [0, 2, 2, 2]
    assert advantages(made)[1] == pytest.approx(-0.4999, abs=1e-4)


def test_groups_without_a_trained_token_count_as_excluded():
    groups = [
        *HALF[:1],
        group(1, [[1.0], [0.0], [0.0], [0.0]], excluded=range(4)),
        group(2, [[1.0]] * 4, lengths=[0] * 4),
    ]
    made = maker().make(groups, 0)
    assert (made.trained, made.excluded) == (1, 2)


def test_slots_that_teach_nothing_are_filled_with_the_best_of_earlier_groups():
    replay = ReplayBuffer(1, max_age=3, seed=0)
    batches = maker(replay=replay)
    weak = group(0, [[0.1], [0.0], [0.0], [0.0]])
    strong = group(1, [[1.0], [0.0], [0.0], [0.0]])
    assert batches.make([weak, strong], 0).replayed == {}
    equal = [group(2, [[0.5]] * 4), group(3, [[0.5]] * 4)]
    made = batches.make(equal, 2)
    assert {slot: entry.group_id for slot, entry in made.replayed.items()} == {0: "g1"}
    assert advantages(made) == pytest.approx([1.4997, *[-0.4999] * 3, 0, 0, 0, 0], abs=1e-4)
    assert made.metrics == {"replay/groups": 1.0, "replay/size": 1.0, "replay/age": 2.0}
    assert (made.trained, made.excluded) == (1, 0)
    assert batches.make(equal, 4).replayed == {}, "too old"
