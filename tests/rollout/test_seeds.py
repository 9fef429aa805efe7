"""A seed is a pure function of run, prompt, launch and sample: values worked out once, on another implementation."""

import itertools

import numpy as np
import pytest

from swift.rollout.seeds import sample_seed, sample_uniforms


@pytest.mark.parametrize(
    ("launch", "sample", "seed"),
    [(0, 0, 3416702877527238213), (0, 1, 4986332419357495469), (1, 0, 8312791869297408811)],
)
def test_seeds_are_those_that_were_worked_out(launch, sample, seed):
    assert sample_seed(42, "p0", launch, sample) == seed


def test_no_two_samples_share_a_seed_and_each_fits_into_63_bits():
    keys = itertools.product((0, 1), ("p0", "p1", "p01"), range(12), range(12))
    seeds = [sample_seed(*key) for key in keys]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_first_uniforms_do_not_depend_on_how_many_are_drawn():
    few, many = sample_uniforms(7, 5), sample_uniforms(7, 500)
    assert np.array_equal(few, many[:5])
    assert many.min() >= 0.0 and many.max() < 1.0
