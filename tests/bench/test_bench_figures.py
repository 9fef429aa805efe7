"""What is made of measurements: ratios, floors, phases, tables, and the comparison with recorded ratios."""

import json
import platform

import pytest

from swift.bench import measure, record, regression, table
from swift.bench.profile import PHASES, Phases
from swift.bench.ratios import ratio_of_means, ratio_of_medians, spread
from swift.bench.scaling import AXES, at
from swift.bench.work import Work


def turns(*took, **more):
    return [{"seconds": s, "processor_s": 2 * s, "peak_mib": 100.0, **more} for s in took]


def test_equal_measurements_have_ratio_one_and_a_certain_interval():
    ratio = ratio_of_medians([2.0] * 5, [2.0] * 5)
    assert (ratio.value, ratio.low, ratio.high) == (1.0, 1.0, 1.0)


def test_load_that_hits_both_sides_of_a_pair_cancels_in_the_ratio():
    load = [1.0, 9.0, 2.0, 5.0, 3.0]
    ratio = ratio_of_medians([3.0 * x for x in load], load)
    assert ratio.low == pytest.approx(3.0) and ratio.high == pytest.approx(3.0)


def test_the_ratio_of_means_sees_what_the_median_does_not():
    above, below = [1.0] * 6 + [9.0] * 4, [2.0] * 6 + [8.0] * 4
    assert ratio_of_medians(above, below).value == pytest.approx(0.5)
    ratio = ratio_of_means(above, below)
    assert ratio.value == pytest.approx(42 / 44)
    assert ratio.low < 0.9 and ratio.high > 1.0


@pytest.mark.parametrize("ratio", [ratio_of_medians, ratio_of_means])
def test_unpaired_measurements_are_refused(ratio):
    with pytest.raises(ValueError, match="not pairs"):
        ratio([1.0, 2.0], [1.0])


def test_spread_is_median_and_extremes():
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}


def test_a_ratio_is_above_one_where_swift_is_better():
    reports = {"swift": turns(1.0, 2.0, 1.5), "trl": turns(3.0, 6.0, 4.5)}
    ratios = measure.compared(reports, per_token=False)["ratios"]["trl"]
    assert ratios["seconds"]["value"] == pytest.approx(3.0)
    assert ratios["processor_s"]["value"] == pytest.approx(3.0)
    assert ratios["peak_mib"]["value"] == pytest.approx(1.0)


def test_sides_that_sampled_different_lengths_are_compared_per_token():
    reports = {"swift": turns(1.0, tokens=10), "trl": turns(3.0, tokens=60)}
    ratios = measure.compared(reports, per_token=True)["ratios"]["trl"]
    assert ratios["seconds"]["value"] == pytest.approx(0.5)
    assert ratios["peak_mib"]["value"] == pytest.approx(1.0)


def test_a_side_without_a_figure_has_no_ratio_of_it():
    without = [{"seconds": 2.0, "processor_s": 2.0}]
    assert "peak_mib" not in measure.compared({"swift": turns(1.0), "trl": without}, per_token=False)["ratios"]["trl"]


def test_the_floor_is_what_the_machines_own_rate_makes_of_the_operations():
    machine = [{"flops_per_s": rate, "flops_per_processor_s": 50.0, "threads": 2} for rate in (90.0, 100.0, 110.0)]
    found = measure.floor(200, machine, turns(8.0, 8.0))
    assert found["floor_s"] == pytest.approx(2.0)
    assert found["floor_share"] == pytest.approx(0.25)
    assert found["floor_share_processor"] == pytest.approx(0.25)  # 4 s of 16


def test_gradients_must_have_one_direction_and_one_length():
    equal = {"cosine": 0.99995, "required": 0.9999, "norm_ratio": 0.995}
    assert measure.agrees(equal)
    assert not measure.agrees({**equal, "cosine": 0.9998})
    assert not measure.agrees({**equal, "norm_ratio": 1.11})  # another temperature changes nothing but this


def test_a_ratio_may_fall_by_less_than_15_percent():
    recorded = {"small": 2.0, "tiny": 3.0}
    assert regression.regressions(recorded, {"small": 1.71, "tiny": 2.56}) == []
    (problem,) = regression.regressions(recorded, {"small": 1.69, "tiny": 9.0})
    assert problem.startswith("small: 1.69, recorded 2.00: 16% below")


def test_what_is_missing_on_either_side_is_not_compared():
    assert regression.regressions({"small": 2.0}, {"tiny": 0.1}) == []
    assert regression.unrecorded({"small": 2.0}, {"tiny": 0.1, "small": 2.0}) == ["tiny"]


def test_recording_keeps_the_rows_that_were_not_measured(tmp_path):
    path = tmp_path / "folder" / "baseline.json"
    regression.record(path, {"small": 2.0, "tiny": 3.0}, "x86")
    regression.record(path, {"tiny": 3.33333}, "x86")
    regression.record(path, {"tiny": 2.5, "head": 4.0}, "arm")
    assert regression.read(path) == {"x86": {"small": 2.0, "tiny": 3.333}, "arm": {"tiny": 2.5, "head": 4.0}}


def test_a_processor_is_compared_with_its_own_family_or_with_the_lowest():
    baseline = {"x86": {"small": 2.0, "tiny": 3.0}, "arm": {"tiny": 2.5, "head": 4.0}}
    assert regression.expected(baseline, "x86") == {"small": 2.0, "tiny": 3.0}
    assert regression.expected(baseline, "riscv") == {"head": 4.0, "small": 2.0, "tiny": 2.5}
    assert regression.expected({}, "x86") == {}


def test_a_family_is_that_of_the_first_processor(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel\t\t: 2\n\nprocessor\t: 1\n")
    assert regression.processor_family(path) == "AuthenticAMD family 26"
    path.write_text("processor\t: 0\nBogoMIPS\t: 50.00\n")
    assert regression.processor_family(path) == platform.machine()
    assert regression.processor_family(tmp_path / "missing") == platform.machine()
    assert regression.processor_family()


@pytest.mark.parametrize(
    "content",
    ["[]", "{}", '{"ratios": {"a": 2}}', '{"ratios": {"x86": {"a": "2"}}}', '{"ratios": {"x86": {"a": 0}}}', "{"],
)
def test_a_file_that_is_no_baseline_is_refused(tmp_path, content):
    path = tmp_path / "baseline.json"
    path.write_text(content)
    with pytest.raises(ValueError):
        regression.read(path)


def row(name="tiny", *, figure="seconds", void=False, peers=("trl",)):
    result = measure.compared({"swift": turns(1.0), **{p: turns(2.0) for p in peers}}, per_token=False)
    agreement = {"cosine": 0.5 if void else 1.0, "required": 0.9999}
    constant = {"kind": "step", "at_least": 2, "aim": 3, "not_measured": {}, "agreement": agreement}
    return {"row": name, "figure": figure, "void": void, **constant, **result}


def test_recorded_is_the_figure_of_each_row_and_void_rows_have_none():
    rows = [row("tiny"), row("head", figure="peak_mib"), row("small", void=True), row("alone", peers=())]
    assert measure.ratios_of(rows) == {"tiny": 2.0, "head, peak_mib": 1.0}


def test_tables_have_a_cell_for_each_column_and_mark_void_rows():
    for peers in ((), ("trl",), ("trl", "ms-swift")):
        assert len(table.cells(row(), peers)) == len(table.header(peers))
    assert "VOID" in table.plain([row(void=True)], ["trl"])
    assert table.markdown([row()], ["trl"]).splitlines()[2].startswith("| tiny | 1.000 | 2.000 | 2.00 [2.00, 2.00] |")


def test_phases_are_exclusive_and_add_up():
    now = iter([0.0, 1.0, 3.0, 7.0, 8.0, 10.0])
    phases = Phases(clock=lambda: next(now))
    with phases.inside("forward"), phases.inside("backward"):  # from 1, and from 3 to 7
        pass
    found = phases.seconds()
    assert {name: s for name, s in found.items() if s} == {"other": 3.0, "forward": 3.0, "backward": 4.0}
    assert sum(found.values()) == 10.0 and tuple(found) == PHASES


def test_an_axis_changes_one_property_and_keeps_four_micro_batches():
    base = Work(folder="x")
    for field, _, values in AXES.values():
        for value in values if field != "workers" else ():
            work = at(base, field, value)
            assert getattr(work, field) == value and work.accumulation == 4
            assert work.num_completions % work.num_generations == 0


def test_a_second_record_of_a_day_does_not_overwrite_the_first(tmp_path):
    first, second = record.write("x", [{"a": 1}], tmp_path), record.write("x", [{"a": 2}], tmp_path)
    assert first != second and json.loads(first.read_text())["rows"] == [{"a": 1}]
