"""The rows, their work, and the settings of the command."""

import json
import typing
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer

from swift.arguments import parse
from swift.arguments.bench import Axis, RowName
from swift.bench.ms_swift import version_in
from swift.bench.rollouts import frozen
from swift.bench.scaling import AXES
from swift.bench.work import Work, prepare
from swift.bench.works import ROWS, TARGETS
from swift.errors import ConfigError

ROOT = Path(__file__).parents[2]


def test_the_command_knows_every_row_and_every_axis():
    assert set(typing.get_args(RowName)) == set(ROWS)
    assert set(typing.get_args(Axis)) == set(AXES)
    assert set(TARGETS) == {"tiny", "small", "small-prompt", "small-tail", "head", "publish", "start"}


@pytest.mark.parametrize("name", ROWS)
def test_every_row_is_whole_groups_in_whole_micro_batches(name):
    work = ROWS[name].work("x")
    assert work.num_completions == work.accumulation * work.per_device == work.num_prompts * work.num_generations
    assert Work.from_json(work.to_json()) == work


@pytest.mark.parametrize("name", ["tiny", "small", "small-prompt", "small-tail"])
def test_whole_steps_are_64_completions_in_groups_of_8_and_4_micro_batches(name):
    work = ROWS[name].work("x")
    assert (work.num_completions, work.num_generations, work.accumulation) == (64, 8, 4)


def test_long_tailed_lengths_are_half_of_the_longest_on_average_and_differ_within_each_group():
    limits = ROWS["small-tail"].work("x").limits
    assert max(limits) == 256 and min(limits) <= 2
    assert sum(limits) / 64 == pytest.approx(128, rel=0.03)
    assert 0.15 <= sum(length == 256 for length in limits) / 64 <= 0.25
    for start in range(0, 64, 8):
        assert max(limits[start : start + 8]) > 3 * min(limits[start : start + 8])


def test_forced_lengths_are_all_the_longest():
    assert Work(folder="x", num_completions=8, completion_tokens=5).limits == [5] * 8


def test_the_work_of_the_head_is_2048_tokens_of_a_large_vocabulary():
    work = ROWS["head"].work("x")
    assert sum(work.limits) == 2048 and work.vocab_size == 151_936


def test_the_packed_work_for_a_gpu_is_16k_tokens_in_one_pass():
    work = ROWS["gpu-packed"].work("x")
    in_stream = sum(limit - 1 for limit in work.limits) + work.num_prompts * work.prompt_tokens
    assert in_stream == pytest.approx(16_384, rel=0.02) and work.accumulation == 1 and work.recompute


def test_rows_that_need_a_gpu_are_left_out_without_one(monkeypatch):
    import torch

    for present in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda present=present: present)
        obstacles = {name: row.obstacle for name, row in ROWS.items() if name != "publish"}
        assert all((reason is None) == (present or not name.startswith("gpu")) for name, reason in obstacles.items())


def test_a_side_sees_a_gpu_only_where_its_work_is_there(monkeypatch):
    from swift.bench.contest import place

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert place(ROWS["tiny"].work("x"))["env"]["CUDA_VISIBLE_DEVICES"] == ""
    assert place(ROWS["gpu"].work("x"))["env"]["CUDA_VISIBLE_DEVICES"] == "2"


def test_another_interpreter_does_not_find_this_package(monkeypatch, tmp_path):
    from swift.bench.contest import place

    monkeypatch.setenv("PYTHONPATH", "here")
    work = Work(folder=str(tmp_path))
    assert place(work)["env"]["PYTHONPATH"] == "here" and "cwd" not in place(work)
    other = place(work, other_interpreter=True)
    assert "PYTHONPATH" not in other["env"] and other["cwd"] == str(tmp_path)


def test_a_row_that_is_asked_for_by_name_and_cannot_be_measured_fails_the_command(monkeypatch):
    import torch

    from swift.bench.run import measure_rows

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rows, failed = measure_rows(parse("bench", ["--work", "gpu"], {}).args, "unused")
    assert rows == [] and failed == ["gpu: there is no CUDA device"]


@pytest.mark.parametrize("axis", AXES)
def test_the_page_has_the_figures_of_the_scaling_files_that_it_links(axis):
    lines = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8").splitlines()
    (line,) = [line for line in lines if f"results/scaling-{axis}-" in line]
    file = (ROOT / "docs" / line.split("(")[-1].split(")")[0]).resolve()
    assert file.is_file()
    points = json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))["rows"]
    for side in ("swift", "trl"):
        if side in points[0]:
            assert f"{points[0][side]['median']:.3f} to {points[-1][side]['median']:.3f} |" in line


def test_frozen_rollouts_come_in_groups_and_are_the_same_every_time():
    work = Work(folder="unused", num_completions=8, num_generations=4, completion_tokens=6)
    first, second = frozen(work, lengths="mixed"), frozen(work, lengths="mixed")
    assert [one.group for one in first] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert all((a.token_ids == b.token_ids).all() for a, b in zip(first, second, strict=True))
    assert all(1 <= one.token_ids.size <= 6 for one in first)


@pytest.mark.parametrize("vocab_size", [None, 400])
def test_the_forced_models_end_token_cannot_be_sampled(tmp_path, vocab_size):
    work = Work(folder=str(tmp_path), size="nano", vocab_size=vocab_size)
    prepare(work)
    config = AutoConfig.from_pretrained(work.model)
    tokenizer = AutoTokenizer.from_pretrained(work.model)
    assert tokenizer.eos_token_id == config.eos_token_id >= config.vocab_size
    assert len(tokenizer.decode([config.vocab_size - 1])) > 0


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--peers", "ms-swift"], "--ms_swift_python: missing"),
        (["--ms_swift_python", "/x/python"], "no peer uses it"),
        (["--peers", "trl", "none"], "none excludes the others"),
        (["--record_baseline", "true"], "no file is named"),
        (["--baseline", "no/such.json"], "no such file"),
        (["--baseline", "b.json", "--record_baseline", "true", "--size", "nano"], "are of the rows as they are"),
        (["--work", "tiny", "--scaling", "group"], "measures no rows"),
        (["--work", "tyny"], "--work: tyny"),
    ],
)
def test_settings_that_do_not_fit_are_named(words, problem):
    with pytest.raises(ConfigError, match=problem.replace(".", r"\.")):
        parse("bench", words, {})


@pytest.mark.parametrize(
    ("python", "reason"), [("/no/such/python", "cannot be started"), ("/bin/false", "has no ms-swift")]
)
def test_an_interpreter_without_ms_swift_is_refused(python, reason):
    with pytest.raises(ValueError, match=reason):
        version_in(python)
