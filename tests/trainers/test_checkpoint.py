"""A checkpoint is valid or does not exist, at whatever moment the process is killed."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from functools import partial

import pytest

from swift.arguments.plugins import settings_class
from swift.arguments.rlhf import RLHFArguments
from swift.errors import ConfigError, ResourceError
from swift.flags import flags_of
from swift.trainers import checkpoint as module
from swift.trainers.checkpoint import (
    MANIFEST,
    clean_staging,
    commit_checkpoint,
    latest_valid,
    list_checkpoints,
    resolve_resume,
    rotate,
    staging_folder,
    verify,
)
from swift.trainers.resume_settings import OUT_OF_TURN, processes_of_batch
from swift.trainers.resume_settings import compare_settings as compared_settings

compare_settings = partial(compared_settings, arguments=RLHFArguments)
FILES = {"model.safetensors": b"weights" * 100, "optimizer.pt": b"moments", "sub/rng.json": b"{}"}


def save(run_dir, step, files=FILES):
    staging = staging_folder(run_dir, step)
    for name, content in files.items():
        (staging / name).parent.mkdir(parents=True, exist_ok=True)
        (staging / name).write_bytes(content)
    (staging / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    final = run_dir / f"checkpoint-{step}"
    commit_checkpoint(staging, final, step=step)
    return final


def names(paths):
    return [path.name for path in paths]


def test_a_saved_checkpoint_verifies_and_leaves_no_staging(tmp_path):
    final = save(tmp_path, 5)
    manifest = verify(final)
    assert manifest.step == 5 and manifest.files.keys() == {*FILES, "trainer_state.json"}
    assert names(tmp_path.iterdir()) == ["checkpoint-5"]
    assert json.loads((final / MANIFEST).read_text())["files"]["optimizer.pt"]["size"] == 7
    (final / "notes.txt").write_text("mine")
    assert verify(final) == manifest, "files added later do not matter"


def test_verify_names_every_damaged_file(tmp_path):
    final = save(tmp_path, 5)
    (final / "model.safetensors").write_bytes(b"weights")
    (final / "optimizer.pt").write_bytes(b"MOMENTS")
    (final / "sub/rng.json").unlink()
    with pytest.raises(ConfigError) as caught:
        verify(final)
    text = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == 3
    assert "model.safetensors: incomplete, 7 of 700 bytes" in text
    assert "optimizer.pt: altered" in text
    assert "rng.json: missing" in text


@pytest.mark.parametrize("content", ["", "{", "[]", '{"step": 1}', '{"step": 1, "files": {"a": 3}}'])
def test_a_damaged_manifest_is_named(tmp_path, content):
    final = save(tmp_path, 5)
    (final / MANIFEST).write_text(content)
    with pytest.raises(ConfigError, match=r"manifest\.json: incomplete or altered manifest"):
        verify(final)


@pytest.mark.parametrize("name", [MANIFEST, "optimizer.pt", "later"])
@pytest.mark.parametrize("target", ["/dev/zero", "pipe"])
def test_pipes_and_devices_are_no_files_of_a_checkpoint(tmp_path, name, target):
    final = save(tmp_path, 5)
    os.mkfifo(tmp_path / "pipe")
    (final / name).unlink(missing_ok=True)
    (final / name).symlink_to(tmp_path / target)
    with pytest.raises(ConfigError, match=f"{name}: a pipe, device or socket"):
        resolve_resume(str(final), tmp_path)


@pytest.mark.parametrize("name", [MANIFEST, "optimizer.pt", "later"])
@pytest.mark.parametrize("target", ["itself", "nothing"])
def test_links_to_nothing_are_no_files_of_a_checkpoint(tmp_path, name, target):
    final = save(tmp_path, 5)
    (final / name).unlink(missing_ok=True)
    (final / name).symlink_to(final / name if target == "itself" else tmp_path / "nothing")
    with pytest.raises(ConfigError, match=f"{name}: a link to nothing"):
        resolve_resume(str(final), tmp_path)


def test_a_folder_without_manifest_is_no_checkpoint(tmp_path):
    (tmp_path / "checkpoint-5").mkdir()
    with pytest.raises(ConfigError, match="not a checkpoint"):
        verify(tmp_path / "checkpoint-5")


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 5)
    save(tmp_path, 5, {"optimizer.pt": b"other"})
    assert verify(tmp_path / "checkpoint-5").files.keys() == {"optimizer.pt", "trainer_state.json"}
    assert names(tmp_path.iterdir()) == ["checkpoint-5"]


def test_a_full_disk_leaves_no_checkpoint(tmp_path, monkeypatch):
    def full(path):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(module, "fsync_file", full)
    with pytest.raises(ResourceError, match="no space left"):
        save(tmp_path, 5)
    assert list_checkpoints(tmp_path) == []


def test_checkpoints_are_listed_by_step(tmp_path):
    for step in (10, 9, 100):
        save(tmp_path, step)
    (tmp_path / "checkpoint-best").mkdir()
    assert names(list_checkpoints(tmp_path)) == ["checkpoint-9", "checkpoint-10", "checkpoint-100"]


def test_the_latest_valid_passes_over_damaged_ones(tmp_path):
    save(tmp_path, 1)
    (save(tmp_path, 2) / "optimizer.pt").write_bytes(b"")
    assert latest_valid(tmp_path) == tmp_path / "checkpoint-1"
    assert latest_valid(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("limit", "keep", "left"),
    [
        (None, None, [1, 2, 3, 4]),
        (5, None, [1, 2, 3, 4]),
        (2, None, [3, 4]),
        (1, None, [4]),
        (2, "checkpoint-1", [1, 4]),
        (1, "checkpoint-1", [1, 4]),
        (3, "/somewhere/checkpoint-2", [2, 3, 4]),
        (1, "checkpoint-4", [4]),
    ],
)
def test_rotation_keeps_the_newest_and_the_best(tmp_path, limit, keep, left):
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    rotate(tmp_path, limit, keep=keep)
    assert sorted(names(tmp_path.iterdir())) == [f"checkpoint-{step}" for step in left]


def test_cleaning_removes_what_a_kill_left_and_gives_a_replaced_checkpoint_its_name_back(tmp_path):
    staging_folder(tmp_path, 3).mkdir()
    save(tmp_path, 1).rename(tmp_path / ".tmp-deleted-checkpoint-1")
    save(tmp_path, 2).rename(tmp_path / ".tmp-replaced-checkpoint-2")
    shutil.copytree(save(tmp_path, 4), tmp_path / ".tmp-replaced-checkpoint-4")
    clean_staging(tmp_path)
    assert sorted(names(tmp_path.iterdir())) == ["checkpoint-2", "checkpoint-4"]
    assert verify(tmp_path / "checkpoint-2").step == 2


SAVE_FOR_EVER = """
import os, sys
from pathlib import Path
from swift.trainers.checkpoint import commit_checkpoint, rotate, staging_folder
run_dir = Path(sys.argv[1])
step = 0
while True:
    step += 1
    staging = staging_folder(run_dir, step)
    staging.mkdir(parents=True)
    for name in ("model.safetensors", "optimizer.pt", "rng.pt"):
        (staging / name).write_bytes(os.urandom(300_000))
    commit_checkpoint(staging, run_dir / f"checkpoint-{step % 4}", step=step)
    rotate(run_dir, 2)
    print(step, flush=True)
"""


def test_sigkill_at_any_moment_leaves_valid_checkpoints_only(tmp_path):
    rng = random.Random(0)
    for _ in range(12):
        process = subprocess.Popen(
            [sys.executable, "-c", SAVE_FOR_EVER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        process.stdout.readline()  # at least one checkpoint was saved
        time.sleep(rng.uniform(0.0, 0.2))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        clean_staging(tmp_path)
        checkpoints = list_checkpoints(tmp_path)
        assert checkpoints
        for checkpoint in checkpoints:
            verify(checkpoint)
        assert sorted(names(tmp_path.iterdir())) == sorted(names(checkpoints))


# --- resuming -----------------------------------------------------------------------------------------------------


def test_a_checkpoint_a_run_and_the_newest_run_can_be_resumed(tmp_path):
    save(tmp_path / "v2-20260101-000000", 50)
    newest = save(tmp_path / "v10-20260101-000000", 5)
    (tmp_path / "v11-20260101-000000").mkdir()
    assert resolve_resume("last", tmp_path) == (newest.parent, newest)
    assert resolve_resume(str(newest), "elsewhere") == (newest.parent, newest)
    assert resolve_resume(str(newest.parent), "elsewhere") == (newest.parent, newest)
    without_versions = save(tmp_path, 7)
    assert resolve_resume("last", tmp_path) == (tmp_path, without_versions)


def test_nothing_to_resume_says_where_it_looked(tmp_path):
    with pytest.raises(ConfigError, match=f"last: no valid checkpoint in {tmp_path}"):
        resolve_resume("last", tmp_path)
    with pytest.raises(ConfigError, match="no such folder"):
        resolve_resume(str(tmp_path / "checkpoint-9"), tmp_path)
    with pytest.raises(ConfigError, match="no such folder"):
        resolve_resume(str(tmp_path / "typo"), tmp_path)


def test_a_damaged_checkpoint_that_was_asked_for_is_not_replaced_by_another(tmp_path):
    save(tmp_path, 1)
    (save(tmp_path, 2) / "optimizer.pt").unlink()
    with pytest.raises(ConfigError, match=r"optimizer\.pt: missing"):
        resolve_resume(str(tmp_path / "checkpoint-2"), tmp_path)


def test_weights_alone_cannot_be_resumed(tmp_path):
    save(tmp_path, 1, {"model.safetensors": b"w"})
    with pytest.raises(ConfigError, match="weights only"):
        resolve_resume("last", tmp_path)


@pytest.mark.parametrize(
    "content",
    ['{"global_step": 2}', '{"global_step": "4"}', '{"global_step": NaN}', '{"global_step": 1e999}', "[]", "null", "{"]
    + [f'{{"global_step": 4, {more}}}' for more in ('"log_history": 5', '"stateful_callbacks": []', '"epoch": "x"')],
)
def test_a_wrong_trainer_state_is_named(tmp_path, content):
    staging = staging_folder(tmp_path, 4)
    save(tmp_path, 4).rename(staging)
    (staging / "trainer_state.json").write_text(content)
    (staging / "manifest.json").unlink()
    commit_checkpoint(staging, tmp_path / "checkpoint-4", step=4)
    with pytest.raises(ConfigError, match=r"checkpoint-4/trainer_state\.json:"):
        resolve_resume(str(tmp_path / "checkpoint-4"), tmp_path)


def test_settings_are_fixed_free_or_noted(tmp_path):
    saved = {"num_generations": 8, "learning_rate": 1e-5, "save_steps": 10, "seed": 1, "_provenance": {}, "old": 1}
    current = {"num_generations": 4, "learning_rate": 1e-6, "save_steps": 20, "seed": 1, "_provenance": {"a": 1}}
    change = compare_settings(saved, current | {"new": 3})
    assert change.changed == {"num_generations": (8, 4), "learning_rate": (1e-5, 1e-6), "save_steps": (10, 20)}
    (problem,) = change.problems
    assert problem.startswith("--num_generations: 4: the checkpoint was made with 8")
    assert change.notes == ["resume: learning_rate changes from 1e-05 to 1e-06 at this step"]


FOUR = {"num_generations": 8, "world_size": 4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}


@pytest.mark.parametrize(
    ("more", "now", "fix"),
    [
        ({}, {"world_size": 2, "gradient_accumulation_steps": 2}, None),
        ({}, {"world_size": 1, "per_device_train_batch_size": 8}, None),
        ({}, {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}, None),
        ({"generation_batch_size": 16}, {"world_size": 2, "gradient_accumulation_steps": 2}, None),
        ({"steps_per_generation": 2}, {"world_size": 8, "per_device_train_batch_size": 1}, None),
        ({}, {"world_size": 2}, "with 8 rows a step; use --gradient_accumulation_steps 2, start 4 processes"),
        ({"steps_per_generation": 2}, {"world_size": 2, "gradient_accumulation_steps": 2},
            "use --gradient_accumulation_steps 2 --steps_per_generation 4, start"),
        ({}, {"world_size": 3}, "with 8 rows a step; start 4 processes, or"),
        ({"deepspeed": "zero2", "optim": "adamw_torch"}, {"world_size": 2, "gradient_accumulation_steps": 2}, None),
        ({"deepspeed": "zero2", "optim": "sgd"}, {"world_size": 2, "gradient_accumulation_steps": 2},
            "ZeRO's state of --optim sgd is cut for"),
        ({"num_generations": None, "group_by_length": True}, {"world_size": 2, "gradient_accumulation_steps": 2},
            "--group_by_length; start"),
        ({"dataloader_drop_last": True}, {"world_size": 8, "per_device_train_batch_size": 1}, None),
        ({"num_generations": None, "dataloader_drop_last": True}, {"world_size": 2, "gradient_accumulation_steps": 2},
            "--dataloader_drop_last; start"),
        ({"num_generations": None}, {"world_size": 2, "gradient_accumulation_steps": 2}, None),
        ({"num_generations": None}, {"world_size": 8, "per_device_train_batch_size": 1},
            "means over a micro-batch: keep --per_device_train_batch_size 2; start"),
        ({"loss_type": "bnpo"}, {"world_size": 8, "per_device_train_batch_size": 1}, "means over a micro-batch"),
        ({"num_generations": None, "rlhf_type": "kto", "loss_type": "kto"},
            {"world_size": 2, "gradient_accumulation_steps": 2}, "the KL of --rlhf_type kto"),
        ({"num_generations": None, "rlhf_type": "kto", "loss_type": "apo_zero_unpaired"},
            {"world_size": 2, "gradient_accumulation_steps": 2}, None),
    ],
)  # fmt: skip
def test_processes_may_share_equal_batches_in_another_way(more, now, fix):
    saved = {name: value for name, value in {**FOUR, **more}.items() if value is not None}
    change = compare_settings(saved, {**saved, **now})
    problems = [line for line in change.problems if line.startswith("NPROC_PER_NODE")]
    if fix is None:
        assert change.problems == []
        assert len(change.notes) == ("world_size" in now)
        assert all(note.endswith("from this step, 4 before; equal batches") for note in change.notes)
    else:
        assert len(problems) == 1 and fix in problems[0]


def test_a_batch_of_another_size_is_refused_with_equal_processes_too():
    (problem,) = compare_settings(FOUR, {**FOUR, "gradient_accumulation_steps": 2}).problems
    assert problem.startswith("--gradient_accumulation_steps: 2: the checkpoint was made with 1")


@pytest.mark.parametrize(
    ("then", "now", "processes", "problem"),
    [
        ({}, {"world_size": 3}, 4, None),
        ({}, {"world_size": 5}, 4, None),
        ({"world_size": 3, "batch_processes": 4}, {"world_size": 2}, 4, None),
        ({"world_size": 3, "batch_processes": 4}, {"world_size": 4}, 4, None),
        ({}, {"world_size": 3, "gradient_accumulation_steps": 2}, 2, None),
        ({}, {"world_size": 3, "per_device_train_batch_size": 3}, 2,
            "with 8 rows a step; use --per_device_train_batch_size 2 --gradient_accumulation_steps 1"),
        ({}, {"world_size": 3, "deepspeed": "zero2", "optim": "adamw_torch"}, 4, None),
        ({}, {"world_size": 3, "deepspeed": "zero2", "optim": "sgd"}, 4, "ZeRO's state of --optim sgd is cut"),
    ],
)  # fmt: skip
def test_an_elastic_run_keeps_its_batch_on_any_number_of_processes(then, now, processes, problem):
    saved = {**FOUR, **then}
    current = {**FOUR, "elastic": True, **now}
    current["batch_processes"] = processes_of_batch(saved, current)
    assert current["batch_processes"] == processes
    problems = compare_settings(saved, current).problems
    if problem is None:
        assert problems == []
    else:
        assert problem in problems[0]


@pytest.mark.parametrize(("divides", "problems"), [(True, 0), (False, 2)])
def test_micro_batches_have_other_rows_if_the_loss_does_not_depend_on_them(divides, problems):
    saved = {"world_size": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    now = {**saved, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    change = compared_settings(saved, now, settings_class("dpo"), divides=divides)
    assert len(change.problems) == problems and change.notes == []


def test_fsdp_may_cut_in_another_way_but_not_begin():
    saved = {"fsdp": "full_shard", "fsdp_replicas": 1}
    assert compare_settings(saved, {"fsdp": "shard_grad_op", "fsdp_replicas": 2}).problems == []
    assert compare_settings({"fsdp": None}, {"fsdp": "full_shard"}).problems
    assert compare_settings(saved, {"fsdp": None}).problems
    adam = {"optim": "adamw_torch", "torch_dtype": "bfloat16"}
    change = compare_settings({**saved, "deepspeed": None}, {**adam, "fsdp": None, "deepspeed": "zero3"})
    assert not change.problems and len(change.notes) == 2
    for obstacle in ({"load_best_model_at_end": True}, {"torch_dtype": "float16"}, {"optim": "sgd"}):
        assert compare_settings(saved, {**adam, "fsdp": None, **obstacle}).problems


@pytest.mark.parametrize("then, now", [(1, 4), (4, 1), (4, 4)])
def test_what_publishes_weights_out_of_turn_is_free_only_with_a_publication_per_update(then, now):
    saved = {"eval_steps": 10, "save_steps": 10, "sleep_level": 1, "logging_steps": 1}
    current = {"eval_steps": 20, "save_steps": 20, "sleep_level": 2, "logging_steps": 5}
    assert compare_settings(saved | {"vllm_sync_interval": 1}, current | {"vllm_sync_interval": 1}).notes == []
    change = compare_settings(saved | {"vllm_sync_interval": then}, current | {"vllm_sync_interval": now})
    noted = [note.split()[1] for note in change.notes if "--vllm_sync_interval 4 it also decides" in note]
    assert noted == ["eval_steps", "save_steps", "sleep_level"]
    assert change.problems == []
    assert {flags_of(RLHFArguments)[name].details.resume for name in OUT_OF_TURN} == {"free"}


def test_a_system_prompt_and_the_file_that_it_came_from_are_one_setting(tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("Be brief.\n")
    assert compare_settings({"system": str(file)}, {"system": "Be brief."}).changed == {}
    assert compare_settings({"system": str(file)}, {"system": "Be long."}).problems
    assert compare_settings({"system": str(tmp_path / "gone.txt")}, {"system": "Be brief."}).problems
    assert compare_settings({"system": None}, {"system": "Be brief."}).problems


def test_two_spellings_of_one_path_are_the_same_setting(tmp_path, monkeypatch):
    (tmp_path / "data.jsonl").write_text("")
    monkeypatch.chdir(tmp_path)
    saved = {"dataset": [str(tmp_path / "data.jsonl")], "api_key": "***"}
    change = compare_settings(saved, {"dataset": ["data.jsonl"], "api_key": "abc"})
    assert change.changed == {}
    assert compare_settings(saved, {"dataset": ["other.jsonl"]}).problems
