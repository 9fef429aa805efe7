"""Each example logs what it logged before: reward, KL, mismatch, length and gradient norm stay in recorded bands."""

import json

import metric_history
import pytest

BANDS = json.loads(metric_history.BANDS.read_text())


def test_every_script_has_bands():
    assert BANDS.keys() == set(map(metric_history.name_of, metric_history.SCRIPTS))
    assert all({"loss", "grad_norm"} <= bands.keys() for bands in BANDS.values())


def test_a_band_has_two_sides():
    assert metric_history.band([1.0, 1.2, 1.1]) == [0.6944, 1.728]
    assert metric_history.band([2.0, 2.0, 2.0]) == [1.538, 2.6]
    assert metric_history.band([-1.0, 1.0, 0.5]) == [-5.0, 5.0]
    assert metric_history.band([0.0, 0.0, 0.0]) == [-1e-6, 1e-6]
    assert metric_history.band([2e-9, 1e-9, 3e-9])[0] < 0


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("script", metric_history.SCRIPTS, ids=metric_history.name_of)
def test_the_metrics_of_an_example_are_in_their_bands(script, tmp_path):
    found = metric_history.measured(script, tmp_path, seed=45)
    bands = BANDS[metric_history.name_of(script)]
    assert found.keys() == bands.keys()
    outside = {name: (value, bands[name]) for name, value in found.items() if not _inside(value, *bands[name])}
    assert not outside, "a metric is broken, or training has changed: tests/support/metric_history.py"


def _inside(value: float, low: float, high: float) -> bool:
    return low <= value <= high
