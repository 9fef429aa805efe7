"""`--async_save`: checkpoints that are written while training goes on."""

import errno
import threading

import pytest
import torch
from grpo_parts import make_trainer
from transformers import TrainerCallback

from swift.errors import ResourceError
from swift.trainers import atomic_trainer
from swift.trainers.checkpoint import commit_checkpoint, list_checkpoints, verify

SAVING = {"save_strategy": "steps", "save_steps": 2, "async_save": True}
LIMIT_S = 60


class AtStep(TrainerCallback):
    """Calls `action` when a step ends."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step:
            self.action()


@pytest.fixture
def train(nano_folders, tmp_path):
    def train(name, *, callbacks=(), resume=None, **arguments):
        trainer = make_trainer(nano_folders["qwen2"], tmp_path / name, **{"max_steps": 6, **SAVING, **arguments})
        for callback in callbacks:
            trainer.add_callback(callback)
        if resume is not None:
            trainer.load_pipeline_state(resume)
        trainer.train(resume_from_checkpoint=str(resume) if resume is not None else None)
        return trainer

    return train


def names(folder):
    return [path.name for path in list_checkpoints(folder)]


def hold(monkeypatch, go_on):
    """Let the checkpoint of step 2 wait for an event before it is sealed."""

    def slow(folder, final, *, step, **known):
        assert step != 2 or go_on.wait(LIMIT_S)
        commit_checkpoint(folder, final, step=step, **known)

    monkeypatch.setattr(atomic_trainer, "commit_checkpoint", slow)


def test_a_checkpoint_appears_a_step_later_and_holds_its_own_step(train, tmp_path, monkeypatch):
    go_on, seen = threading.Event(), []
    hold(monkeypatch, go_on)

    def look():
        seen.append(names(tmp_path / "late"))
        go_on.set()

    train("late", callbacks=[AtStep(3, look)])
    assert seen == [[]], "training went on while the checkpoint was written"
    assert names(tmp_path / "late") == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    train("at once", async_save=False)
    for step in (2, 4, 6):
        late, at_once = (tmp_path / name / f"checkpoint-{step}" for name in ("late", "at once"))
        verify(late)
        assert (late / "model.safetensors").read_bytes() == (at_once / "model.safetensors").read_bytes()
        states = [torch.load(one / "optimizer.pt", weights_only=True)["state"] for one in (late, at_once)]
        assert states[0].keys() == states[1].keys() and len(states[0]) > 0
        assert all(torch.equal(own[key], states[1][k][key]) for k, own in states[0].items() for key in own)


def test_a_run_resumed_from_it_is_the_straight_one(train, tmp_path):
    straight = train("straight")
    again = train("again", resume=tmp_path / "straight" / "checkpoint-2")
    expected = straight.model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in again.model.state_dict().items())


def test_a_full_disk_ends_the_run_and_leaves_the_checkpoint_before(train, tmp_path, monkeypatch):
    def full(folder, final, *, step, **known):
        if step == 4:
            raise OSError(errno.ENOSPC, "no space left")
        commit_checkpoint(folder, final, step=step, **known)

    monkeypatch.setattr(atomic_trainer, "commit_checkpoint", full)
    with pytest.raises(ResourceError, match="no space left"):
        train("full")
    assert names(tmp_path / "full")[0] == "checkpoint-2" and "checkpoint-4" not in names(tmp_path / "full")
    assert not list((tmp_path / "full").glob(".tmp-*"))


def test_a_run_that_fails_waits_for_the_checkpoint(train, tmp_path, monkeypatch):
    go_on = threading.Event()
    hold(monkeypatch, go_on)

    def fail():
        threading.Timer(0.5, go_on.set).start()
        raise RuntimeError("a defect")

    with pytest.raises(RuntimeError, match="a defect"):
        train("failed", callbacks=[AtStep(3, fail)])
    verify(tmp_path / "failed" / "checkpoint-2")


def test_one_save_waits_for_the_one_before(train, tmp_path, monkeypatch):
    """Two copies would not fit."""
    running = threading.Lock()

    def alone(folder, final, **known):
        assert running.acquire(blocking=False)
        commit_checkpoint(folder, final, **known)
        running.release()

    monkeypatch.setattr(atomic_trainer, "commit_checkpoint", alone)
    train("each", save_steps=1)
    assert names(tmp_path / "each") == [f"checkpoint-{step}" for step in range(1, 7)]


def test_only_so_many_stay(nano_folders, tmp_path):
    trainer = make_trainer(nano_folders["qwen2"], tmp_path / "few", **{**SAVING, "max_steps": 4, "save_steps": 1})
    trainer.save_total_limit = 2
    trainer.train()
    assert names(tmp_path / "few") == ["checkpoint-3", "checkpoint-4"]
