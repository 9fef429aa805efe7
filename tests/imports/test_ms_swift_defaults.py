"""A script of ms-swift trains here what it trains there, imported or pasted: setting by setting."""

from __future__ import annotations

import shlex

import pytest

from swift.arguments import parse
from swift.arguments.imports.command import import_file
from tests.imports import ms_swift_facts as facts

OURS = {"lora_dropout": 0.0}
"""What a pasted GRPO command has otherwise: with dropout the trained policy is not the one that samples."""


def expected(script):
    """Setting -> value in ms-swift."""
    rows = [settings for scripts, settings in facts.TRAINED if script in scripts]
    return {name: others.get(script, usual) for row in rows for name, (usual, others) in row.items()}


def resolved(script, way, folder):
    """The settings of a script that is pasted as a command, or imported."""
    variables, mode, flags = facts.SCRIPTS[script]
    environ = dict(one.split("=") for one in variables.split())
    if way == "pasted":
        return parse(mode, shlex.split(flags), environ)
    theirs, ours = folder / "train.sh", folder / "ours.yaml"
    theirs.write_text(f"{variables} \\\nswift {mode} {flags}\n", encoding="utf-8")
    imported = import_file(str(theirs))
    assert not [line for line in imported.draft.lines if line[1] == "no counterpart"]
    ours.write_text(imported.to_yaml(str(theirs), str(ours)), encoding="utf-8")
    return parse(imported.command, [str(ours)], {})


@pytest.mark.parametrize("way", ["pasted", "imported"])
@pytest.mark.parametrize("script", facts.SCRIPTS)
def test_a_script_trains_what_it_trains_in_ms_swift(script, way, tmp_path):
    run = resolved(script, way, tmp_path)
    wanted = expected(script)
    assert len(wanted) > 20
    differs = {name: getattr(run.args, name) for name, value in wanted.items() if getattr(run.args, name) != value}
    if way == "pasted" and run.mode == "rlhf" and run.args.tuner_type == "lora":
        assert differs == OURS
        assert any(note.startswith("--lora_dropout: 0.0") for note in run.notes)
    else:
        assert differs == {}


def test_what_follows_from_other_settings_says_its_rule():
    words = "--rlhf_type dpo --model m --dataset d --per_device_train_batch_size 3"
    origin = parse("rlhf", words.split(), {"NPROC_PER_NODE": "2"}).provenance["gradient_accumulation_steps"]
    assert origin["source"] == "default" and origin["rule"].startswith("else max(1, ceil(16 / ")


@pytest.mark.parametrize("switch", ["async_generate", "dynamic_sample"])
def test_an_import_writes_the_correction_that_ms_swift_does_not_make(switch, tmp_path):
    theirs = tmp_path / "train.sh"
    theirs.write_text(f"swift rlhf --rlhf_type grpo --model m --dataset d --tuner_type full --{switch} true\n")
    lines = import_file(str(theirs)).draft.lines
    added = [why for key, fate, why in lines if (key, fate) == ("rollout_importance_sampling_mode", "added")]
    assert added == ["rollout_importance_sampling_mode: none, as ms-swift has it by default"]
    words = f"--rlhf_type grpo --model m --dataset d --reward_funcs format --tuner_type full --{switch} true"
    notes = parse("rlhf", words.split(), {}).notes
    assert any(note.startswith("--rollout_importance_sampling_mode: token_truncate") for note in notes)
