import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swift.rl.losses import losses, sequence_weights, token_weights
from swift.rl.window import WindowCounts, count_window, nominal_batch_tokens, nominal_batches

LENGTHS = [3, 0, 2, 1]
COUNTS = count_window(LENGTHS, [0, 0, 1, 1])


def test_a_window_counts_tokens_trained_sequences_all_sequences_and_nominal_batches():
    assert COUNTS.to_list() == [6, 3, 4, 2]
    assert COUNTS.trains and not count_window([0, 0]).trains


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dapo", [1 / 6, 0, 1 / 6, 1 / 6]),
        ("cispo", [1 / 6, 0, 1 / 6, 1 / 6]),
        ("vespo", [1 / 6, 0, 1 / 6, 1 / 6]),
        ("grpo", [1 / 9, 0, 1 / 6, 1 / 3]),
        ("gspo", [1 / 9, 0, 1 / 6, 1 / 3]),
        ("sapo", [1 / 9, 0, 1 / 6, 1 / 3]),
        ("luspo", [1 / 3, 0, 1 / 3, 1 / 3]),
        ("dr_grpo", [1 / 40, 0, 1 / 40, 1 / 40]),
        ("bnpo", [1 / 6, 0, 1 / 6, 1 / 6]),
    ],
)
def test_the_weight_of_a_token_of_each_sequence(name, expected):
    weights = sequence_weights(
        losses[name],
        COUNTS,
        LENGTHS,
        nominal_tokens=nominal_batch_tokens(LENGTHS, [0, 0, 1, 1]),
        max_completion_length=10,
    )
    assert weights == pytest.approx(expected, abs=1e-15)


def test_every_loss_has_its_normaliser_tested_above():
    assert set(losses) == {"dapo", "cispo", "vespo", "grpo", "gspo", "sapo", "luspo", "dr_grpo", "bnpo"}


def test_a_masked_token_weighs_nothing():
    mask_T = torch.tensor([1, 0, 1])
    weights_T = token_weights([0.5, 0.25], mask_T, torch.tensor([0, 0, 1]))
    assert weights_T.tolist() == [0.5, 0.0, 0.25]


@pytest.mark.parametrize("name", ["dapo", "grpo", "luspo"])
def test_a_window_without_a_trained_token_has_no_weights(name):
    with pytest.raises(ValueError, match="normaliser is 0"):
        sequence_weights(losses[name], count_window([0, 0]), [0, 0])


def test_dr_grpo_without_the_longest_completion_is_refused():
    with pytest.raises(ValueError, match="dr_grpo: the normaliser is 0"):
        sequence_weights(losses["dr_grpo"], COUNTS, LENGTHS)


def test_a_nominal_batch_is_a_run_of_sequences_of_one_rank():
    assert nominal_batches(5, 2) == [0, 0, 1, 1, 2]
    assert nominal_batch_tokens([3, 1, 0, 4, 2], nominal_batches(5, 2)) == [4, 4, 4, 4, 2]


def test_wrong_counts_are_refused():
    with pytest.raises(ValueError, match="negative"):
        count_window([1, -1])
    with pytest.raises(ValueError, match="1 nominal micro-batch indices for 2 sequences"):
        count_window([1, 1], [0])
    with pytest.raises(ValueError, match="batch_size: 0"):
        nominal_batches(3, 0)


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), max_size=5), min_size=1, max_size=4), st.integers(1, 3))
def test_the_counts_of_the_ranks_add_up_to_the_window(ranks, batch_size):
    total = WindowCounts(0, 0, 0, 0)
    for lengths in ranks:
        total = total + count_window(lengths, nominal_batches(len(lengths), batch_size))
    everything = [length for lengths in ranks for length in lengths]
    assert total.num_tokens == sum(everything)
    assert total.num_sequences == len(everything)
    assert total.num_trained_sequences == len([length for length in everything if length])
    assert total.num_nominal_batches == sum(-(-len(lengths) // batch_size) for lengths in ranks)
    assert WindowCounts.from_list([float(count) for count in total.to_list()]) == total


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any), st.sampled_from(["grpo", "dapo", "bnpo"]))
def test_mean_losses_give_the_trained_tokens_a_total_weight_of_at_most_one(lengths, name):
    indices = nominal_batches(len(lengths), 2)
    weights = sequence_weights(
        losses[name],
        count_window(lengths, indices),
        lengths,
        nominal_tokens=nominal_batch_tokens(lengths, indices),
    )
    total = sum(weight * length for weight, length in zip(weights, lengths, strict=True))
    empty = sum(not any(lengths[start : start + 2]) for start in range(0, len(lengths), 2))
    expected = 1.0 if name != "bnpo" else 1.0 - empty / -(-len(lengths) // 2)
    assert total == pytest.approx(expected)
