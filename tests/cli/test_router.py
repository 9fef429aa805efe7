"""Modes, help and version of the console script, and how fast they answer."""

import json
import resource
import subprocess
import sys

import pytest

import swift
from swift.cli import mode
from swift.cli.main import MODES, main, wanted
from swift.plugin import orms


def swift_command(*words):
    return subprocess.run([sys.executable, "-m", "swift", *words], capture_output=True, text=True, check=False)


def seconds_of_a_core(*words):
    """What a command takes, however busy the machine is."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    swift_command(*words)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help_lists_every_mode(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in MODES)


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"swift {swift.__version__}\n"


@pytest.mark.parametrize("words", [("--help",), ("--version",)])
def test_help_and_version_answer_within_three_tenths_of_a_second(words):
    assert seconds_of_a_core(*words) < 0.3


def test_the_help_of_a_mode_answers_within_three_seconds():
    assert seconds_of_a_core("rlhf", "--help") < 3.0


def test_the_module_runs_like_the_script():
    done = swift_command("nonsense")
    assert done.returncode == 2
    assert done.stderr.startswith("swift: error: mode: nonsense: unknown; valid: ")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "mode: none given; start with swift sft or swift rlhf --rlhf_type grpo"),
        (["train"], "mode: train: not a mode of swift; use swift sft, or swift rlhf --rlhf_type grpo"),
        (["grpo"], "mode: grpo: not a mode of swift; use swift rlhf --rlhf_type grpo"),
        (["dpo"], "mode: dpo: not a mode of swift; use swift rlhf --rlhf_type dpo"),
        (["deploy"], "mode: deploy: not a mode of swift; use swift rollout"),
        (["eval"], "mode: eval: not a mode of swift; use swift infer"),
        (["web_ui"], "mode: web_ui: not a mode of swift; use swift infer"),
    ],
)
def test_a_mode_of_others_is_answered_with_the_nearest_of_ours(words, line, capsys):
    assert main(words) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"swift: error: {line}")


@pytest.mark.parametrize("name", ["rlhf", "sft", "infer", "export", "reward-test", "reward_test", "merge-lora"])
def test_every_mode_has_help(name, capsys):
    assert main([name, "--help"]) == 0
    assert "--model" in capsys.readouterr().out or name.startswith("reward")


def test_all_flags_are_more_than_the_everyday_ones(capsys):
    main(["rlhf", "--help"])
    everyday = capsys.readouterr().out
    main(["rlhf", "--help-all"])
    assert len(capsys.readouterr().out) > len(everyday)


def test_the_help_of_rewards_names_the_built_in_ones(capsys):
    main(["rlhf", "--help", "reward_funcs"])
    said = " ".join(capsys.readouterr().out.split())
    assert f"Built in: {', '.join(orms.built_ins())}." in said and "soft_overlong" in orms.built_ins()


@pytest.mark.parametrize(
    ("words", "is_wanted"),
    [
        (["rlhf", "--debug", "true"], True),
        (["rlhf", "--debug"], True),
        (["rlhf", "--debug=1"], True),
        (["rlhf", "--debug", "--beta", "0"], True),
        (["rlhf", "--debug", "false"], False),
        (["rlhf"], False),
    ],
)
def test_debug_is_seen_before_anything_is_parsed(words, is_wanted, monkeypatch):
    monkeypatch.delenv("SWIFT_DEBUG", raising=False)
    assert wanted(words, "debug") is is_wanted


def test_with_json_errors_are_json_too(capsys):
    assert main(["rlhf", "--model", "m", "--beta", "x", "--num_generation", "8", "--dry_run", "true", "--json"]) == 2
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert told["exit_code"] == 2
    assert {error.partition(":")[0] for error in told["errors"]} >= {"--beta", "--num_generation"}
    assert err.splitlines() == [f"swift: error: {error}" for error in told["errors"]]


def test_debug_keeps_the_traceback(capsys, monkeypatch):
    monkeypatch.setenv("SWIFT_DEBUG", "1")
    assert main(["rlfh"]) == 2
    text = capsys.readouterr().err
    assert text.startswith("Traceback")
    assert text.endswith("swift: error: mode: rlfh: unknown; nearest: rlhf\n")


def test_a_wrong_setting_starts_no_process(capsys, monkeypatch):
    monkeypatch.setenv("NPROC_PER_NODE", "2")
    monkeypatch.setattr(mode.launcher, "launch", None)
    assert main(["rlhf", "--rlhf_type", "grpo", "--model", "m", "--top_p", "7"]) == 2
    assert "--top_p: 7" in capsys.readouterr().err


def test_a_mode_of_one_process_says_that_it_starts_no_others(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("NPROC_PER_NODE", "2")
    assert main(["merge-lora", "--adapters", str(tmp_path / "gone")]) == 2
    assert "swift: NPROC_PER_NODE, NNODES: 2 processes: merge-lora runs in one\n" in capsys.readouterr().err
