import pytest

from swift.rl.global_batch import BatchCounts, count_batch, nominal_batch_tokens
from swift.rl.losses import losses, sequence_weights

LENGTHS = [3, 0, 2, 1]
COUNTS = count_batch(LENGTHS, 2)
WEIGHTS = {
    "dapo": [1 / 6, 0, 1 / 6, 1 / 6],
    "cispo": [1 / 6, 0, 1 / 6, 1 / 6],
    "vespo": [1 / 6, 0, 1 / 6, 1 / 6],
    "fipo": [1 / 6, 0, 1 / 6, 1 / 6],
    "grpo": [1 / 9, 0, 1 / 6, 1 / 3],
    "gspo": [1 / 9, 0, 1 / 6, 1 / 3],
    "sapo": [1 / 9, 0, 1 / 6, 1 / 3],
    "luspo": [1 / 3, 0, 1 / 3, 1 / 3],
    "dr_grpo": [1 / 40, 0, 1 / 40, 1 / 40],
    "bnpo": [1 / 6, 0, 1 / 6, 1 / 6],
}


def test_it_counts_tokens_trained_sequences_all_sequences_and_nominal_batches():
    assert BatchCounts(6, 3, 4, 2) == COUNTS
    assert BatchCounts(6, 3, 4, 1) == count_batch(LENGTHS)
    assert count_batch([1] * 5, 2).num_nominal_batches == 3
    assert nominal_batch_tokens([3, 1, 0, 4, 2], 2) == [4, 4, 4, 4, 2]


def test_the_weight_of_a_token_of_each_sequence():
    assert set(WEIGHTS) == set(losses)
    nominal = nominal_batch_tokens(LENGTHS, 2)
    for name, expected in WEIGHTS.items():
        found = sequence_weights(losses[name], COUNTS, LENGTHS, nominal_tokens=nominal, max_completion_length=10)
        assert found == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("name", ["dapo", "grpo", "luspo"])
def test_a_global_batch_without_a_trained_token_has_no_weights(name):
    with pytest.raises(ValueError, match="normaliser is 0"):
        sequence_weights(losses[name], count_batch([0, 0]), [0, 0])


def test_dr_grpo_without_the_longest_completion_is_refused():
    with pytest.raises(ValueError, match="dr_grpo: the normaliser is 0"):
        sequence_weights(losses["dr_grpo"], COUNTS, LENGTHS)
