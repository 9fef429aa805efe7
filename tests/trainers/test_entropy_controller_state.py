"""The entropy controller in a checkpoint, and bounds that change at a resume."""

import math

import pytest

from swift.rl.entropy import AdaptiveEntropy
from swift.trainers.grpo.entropy import controller_state, restored_controller


def test_a_controller_comes_back_with_the_settings_of_now():
    saved = controller_state(AdaptiveEntropy(coefficient=0.03, target=1.0, last_entropy=0.7))
    assert restored_controller(AdaptiveEntropy(target=2.0), saved) == AdaptiveEntropy(
        coefficient=0.03, target=2.0, last_entropy=0.7
    )
    fresh = controller_state(AdaptiveEntropy(coefficient=0.03))
    assert restored_controller(AdaptiveEntropy(), fresh).last_entropy == math.inf


@pytest.mark.parametrize(("bounds", "expected"), [((0.0, 0.01), 0.01), ((0.2, 0.5), 0.2), ((0.0, 0.05), 0.05)])
def test_bounds_that_have_changed_hold_from_the_first_step_on(bounds, expected):
    saved = controller_state(AdaptiveEntropy(coefficient=0.05, target=1.0, last_entropy=0.5))
    minimum, maximum = bounds
    controller = restored_controller(
        AdaptiveEntropy(coefficient=minimum, target=1.0, minimum=minimum, maximum=maximum), saved
    )
    assert controller.applied == expected
    assert minimum <= controller.updated(2.0).coefficient <= maximum


def test_a_run_that_turns_the_controller_on_or_off_begins_anew():
    start = AdaptiveEntropy(coefficient=0.1)
    assert restored_controller(start, None) is start
    assert restored_controller(None, controller_state(start)) is None
