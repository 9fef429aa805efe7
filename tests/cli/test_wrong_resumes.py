"""Checkpoints that cannot be resumed, or not like this: one line, code 2, and nothing is touched."""

import json
import shutil
from pathlib import Path

import pytest
from desk import ROWS, contents, cut_in_half, refused
from trap import set_trap

from swift.cli.main import main


@pytest.fixture(scope="session")
def finished_run(tiny_model, tmp_path_factory):
    """A run of one step, its data set beside it."""
    home = tmp_path_factory.mktemp("finished")
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        assert main(resume(tiny_model)) == 0
    return home


def resume(model, *words):
    """The command of the finished run, given in its folder, with more words."""
    command = f"rlhf --rlhf_type grpo --model {model} --dataset rows.jsonl --reward_funcs accuracy --max_steps 1"
    command += " --per_device_train_batch_size 8 --max_completion_length 8 --output_dir run --add_version false"
    return [*command.split(), "--report_to", "none", *map(str, words)]


def damaged_checkpoint(home, name, damage):
    damage(home / "run" / "checkpoint-1" / name)
    return home / "run" / "checkpoint-1"


def lock(home):
    holder = {"pid": 4242, "host": "elsewhere", "time": "2026-01-01T00:00:00+00:00", "started": 0.0}
    (home / "run" / "lock").write_text(json.dumps(holder) + "\n")
    return "last"


RESUMED = {
    "changed G": (lambda h: ["last", "--num_generations", "4"], "--num_generations: 4 | made with 8"),
    "changed tuner": (lambda h: ["last", "--tuner_type", "full"], "--tuner_type: full | made with lora"),
    "changed rewards": (lambda h: ["last", "--reward_funcs", "format"], "--reward_funcs | made with"),
    "run folder instead of weights": (lambda h: [h / "run" / "logs"], "--resume_from_checkpoint"),
    "torn adapter": (
        lambda h: [damaged_checkpoint(h, "adapter_model.safetensors", cut_in_half)],
        "--resume_from_checkpoint | adapter_model.safetensors",
    ),
    "torn pipeline state": (
        lambda h: [damaged_checkpoint(h, "pipeline_state.msgpack", cut_in_half)],
        "--resume_from_checkpoint | pipeline_state.msgpack",
    ),
    "lost optimizer": (
        lambda h: [damaged_checkpoint(h, "optimizer.pt", Path.unlink)],
        "--resume_from_checkpoint | optimizer.pt",
    ),
    "run in use elsewhere": (lambda h: [lock(h)], "in use by process 4242 on elsewhere"),
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_wrong_resume_is_told_in_lines_and_touches_nothing(
    name, finished_run, tiny_model, tmp_path, desk, monkeypatch, capfd
):
    flags, fragments = RESUMED[name]
    home = Path(shutil.copytree(finished_run, tmp_path / "home"))
    monkeypatch.chdir(home)
    words = resume(tiny_model, "--resume_from_checkpoint", *flags(home))
    before = contents(home / "run")
    capfd.readouterr()
    refused(words, fragments, capfd, 3 if "in use" in fragments else 2)
    assert contents(home / "run") == before


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_a_checkpoint_that_holds_a_pickle_runs_nothing(name, finished_run, tiny_model, tmp_path, monkeypatch, capfd):
    home = Path(shutil.copytree(finished_run, tmp_path / "home"))
    monkeypatch.chdir(home)
    checkpoint = set_trap(home / "run" / "checkpoint-1", name, home / "owned")
    words = resume(tiny_model, "--resume_from_checkpoint", checkpoint, "--max_steps", 2)
    refused(words, "--resume_from_checkpoint: | objects that could run code", capfd)
    assert not (home / "owned").exists()


@pytest.mark.parametrize("name", ["optimizer.pt", "reference.pt"])
def test_a_checkpoint_of_dpo_that_holds_a_pickle_runs_nothing(name, desk, capfd):
    pairs = desk.rows([{"prompt": f"{n}?", "chosen": "yes", "rejected": "no"} for n in range(8)])
    flags = {"--rlhf_type": "dpo", "--tuner_type": "full", "--sync_ref_model": "true", "--add_version": "false"}
    words = desk.train("rlhf", flags, ["--dataset", pairs], ())
    assert main(words) == 0
    checkpoint = set_trap(desk.output / "checkpoint-1", name, desk.folder / "owned")
    words[words.index("--max_steps") + 1] = "2"
    refused([*words, "--resume_from_checkpoint", checkpoint], "objects that could run code", capfd)
    assert not (desk.folder / "owned").exists()
