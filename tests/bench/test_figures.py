"""Arithmetic of the benchmarks by hand, and the pages that show their results."""

import json

import pytest


def result(row, value, *, void=False, peer="trl", compared="step"):
    return {"row": row, "compared": compared, "void": void, "ratios": {peer: {compared: {"value": value}}}}


def test_a_ratio_is_that_of_the_medians_and_its_interval_spans_the_pairs():
    from harness import record

    exact = record.ratio([4.0, 4.0, 4.0], [2.0, 2.0, 2.0])
    assert exact == {"value": 2.0, "low": 2.0, "high": 2.0}
    same = record.ratio([4.0, 40.0, 8.0], [2.0, 20.0, 4.0])
    assert same["value"] == 2.0 and same["low"] <= 2.0 <= same["high"]
    with pytest.raises(ValueError, match="not pairs"):
        record.ratio([1.0], [1.0, 2.0])


def test_a_ratio_below_85_percent_of_the_recorded_one_fails():
    from harness import record

    recorded = {"tiny": 2.0, "small": 1.0, "unmeasured": 9.0}
    assert record.regressions(recorded, {"tiny": 1.71, "small": 0.85}) == []
    assert record.regressions(recorded, {"tiny": 1.69, "small": 0.9}) == ["tiny: 1.69, recorded 2.00: 84%"]


def test_void_rows_have_no_ratio_and_a_row_without_trl_has_that_of_its_other_side():
    from harness import record

    rows = [result("tiny", 2.0), result("small", 3.0, void=True), result("ahead", 1.5, peer="in turns")]
    assert record.ratios_of([*rows, {"row": "vllm", "ratios": {}, "void": False}]) == {"tiny": 2.0, "ahead": 1.5}


def test_another_family_is_compared_with_the_lowest_ratios(tmp_path):
    from harness import record

    for family, value in (("a", 2.0), ("b", 3.0)):
        path = record.results_file("run", family, tmp_path)
        path.write_text(json.dumps({"rows": [result("tiny", value)]}))
    assert record.recorded_ratios(tmp_path, "b") == {"tiny": 3.0}
    assert record.recorded_ratios(tmp_path, "c") == {"tiny": 2.0}


def test_recording_replaces_the_rows_that_were_measured_and_keeps_the_others(tmp_path):
    from harness import record

    path = tmp_path / "run-x.json"
    record.merge(path, [result("tiny", 2.0), result("small", 1.0)])
    record.merge(path, [result("small", 4.0)])
    content = json.loads(path.read_text())
    assert record.ratios_of(content["rows"]) == {"tiny": 2.0, "small": 4.0}
    assert all(row["utc"] and "commit" in row for row in content["rows"])
    assert {"processor", "family", "instructions", "cores"} <= content["machine"].keys()


def test_the_family_of_a_processor_names_its_instruction_set(tmp_path, monkeypatch):
    from harness import record

    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("vendor_id\t: AuthenticAMD\ncpu family\t: 25\nflags\t: sse avx avx2\n\nvendor_id\t: other\n")
    assert record.family(record.cpu_fields(cpuinfo)) == "AuthenticAMD family 25 avx2"
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    assert record.family(record.cpu_fields(cpuinfo)) == "AuthenticAMD family 25 limited-to-avx2"


def test_runs_of_unequal_lengths_are_compared_per_token():
    from harness.turns import Run, figures

    runs = [
        Run(9.0, [2.0, 4.0], [1.0, 1.0], [10.0, 30.0], 100.0, 20.0),
        Run(8.0, [3.0, 3.0], [1.0, 1.0], [20.0, 40.0], 90.0, 20.0),
    ]
    assert figures(runs, per_token=True)["seconds"] == [6 / 40, 6 / 60]
    assert figures(runs, per_token=False)["seconds"] == [3.0, 3.0]


def test_a_flag_of_a_variant_replaces_that_of_its_row(tmp_path):
    from harness.sides import command
    from harness.works import ROWS, Work

    work = Work(ROWS["ahead"], tmp_path, tmp_path, tmp_path, tmp_path)
    for side, wanted in (("swift", "true"), ("in turns", "false")):
        words = command(side, work, tmp_path, 3, 0).words
        assert words.count("--async_generate") == 1 and words[words.index("--async_generate") + 1] == wanted


def test_whole_batches_are_added_up_until_enough_groups_teach():
    import dynamic_sampling

    rows = [
        {"time/generate": 2.0, "time/reward": 1.0, "frac_reward_zero_std": share} for share in (0.5, 0.5, 0.0, 0.75)
    ]
    assert list(dynamic_sampling.whole_batches(rows, 4)) == [(6.0, 2), (3.0, 1)]


def test_lengths_that_are_cut_have_the_wanted_mean():
    from harness.models import end_rate

    rate = end_rate(128, 256)
    assert sum((1 - rate) ** k for k in range(256)) == pytest.approx(128)


def test_every_option_is_a_command_that_swift_accepts(tmp_path, monkeypatch):
    import algorithms
    from harness.works import ROOT

    from swift.arguments import parse

    monkeypatch.chdir(ROOT)
    data = tmp_path / "train.jsonl", tmp_path / "held_out.jsonl"
    for file in data:
        file.write_text('{"query": "1+1=", "solution": "2", "carries": 0}\n')
    for option in algorithms.OPTIONS:
        words = algorithms.command(option, tmp_path, data, tmp_path / "out", 40, 0)
        assert words[1] == "rlhf" and len({w for w in words if w.startswith("--")}) == sum(
            w.startswith("--") for w in words
        )
        parse("rlhf", words[2:], {})


def test_a_metric_that_is_missing_fails_its_row(tmp_path):
    import algorithms

    (tmp_path / "logging.jsonl").write_text('{"step": 1, "reward": 1.0}\n')
    (tmp_path / "completions.jsonl").write_text("")
    with pytest.raises(RuntimeError, match=r"sapo: its log has no ratio/max"):
        algorithms.read(algorithms.Option("sapo", "", "ratio/max"), tmp_path)


def test_the_pages_show_the_recorded_results():
    import page
    from harness import tables

    for name, text in page.contents().items():
        assert tables.inside(page.PAGES[name], name) == text, "run benchmarks/page.py"
