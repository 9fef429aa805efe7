"""Loading happens without the garbage collector, and only loading."""

from __future__ import annotations

import gc

import pytest

from swift.startup import collector_resting


@pytest.fixture(autouse=True)
def collector_as_before():
    """The collector of the test process, whatever a test does to it."""
    yield
    gc.enable()
    gc.unfreeze()


def test_the_collector_rests_inside_and_works_again_afterwards():
    with collector_resting():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_the_collector_works_again_after_a_failed_start():
    with pytest.raises(ValueError, match="no model"), collector_resting():
        raise ValueError("no model")
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    with collector_resting():
        pass
    assert not gc.isenabled()


def test_what_was_loaded_is_left_out_of_later_rounds():
    before = gc.get_freeze_count()
    with collector_resting():
        loaded = [[i] for i in range(100)]
    assert gc.get_freeze_count() >= before + len(loaded)
