"""What every training mode does around its trainer."""

import gc
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from swift import elastic
from swift.arguments import parse
from swift.errors import ConfigError, Interrupted, ResourceError
from swift.observability.files import writing
from swift.signals import STOP, kept_from_children
from swift.startup import collector_resting
from swift.trainers import session
from swift.trainers.distributed import Collectives
from swift.trainers.session import (
    SignalTrap,
    Start,
    accumulation_of,
    continue_elastic,
    equip,
    require_shared,
    resume_command,
)


@pytest.mark.parametrize(
    "given",
    [
        [],
        ["--resume_from_checkpoint", "last"],
        ["--resume-from-checkpoint", "last"],
        ["--resume_from_checkpoint=last"],
    ],
)
def test_the_resume_command_is_the_command_with_the_checkpoint(monkeypatch, given):
    monkeypatch.setattr(sys, "argv", ["swift", "rlhf", "--model", "a b", *given, "--seed", "1"])
    monkeypatch.delenv("NPROC_PER_NODE", raising=False)
    command = "swift rlhf --model 'a b' --seed 1 --resume_from_checkpoint /x/checkpoint-3"
    assert resume_command("rlhf", Path("/x/checkpoint-3")) == command
    monkeypatch.setenv("NPROC_PER_NODE", "2")
    assert resume_command("rlhf", Path("/x/checkpoint-3")) == f"NPROC_PER_NODE=2 {command}"


def test_without_a_checkpoint_the_command_is_repeated(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["swift", "rlhf", "--seed", "1"])
    trap = SignalTrap()
    trap.check("rlhf", Collectives(), Start({}))
    trap.caught = "SIGTERM"
    with pytest.raises(Interrupted, match=r"there is no checkpoint yet; start again: .*swift rlhf --seed 1$"):
        trap.check("rlhf", Collectives(), Start({}))


def test_what_trackers_record_of_the_command_has_no_secret(monkeypatch, tmp_path):
    """wandb and SwanLab send `sys.argv` away."""
    words = ["--rlhf_type", "dpo", "--model", "m", "--dataset", "d", "--output_dir", str(tmp_path), "--hub_token", "x7"]
    monkeypatch.setattr(sys, "argv", ["swift", "rlhf", *words])
    resolved = parse("rlhf", words, {})
    with session.open_run(resolved, Collectives(), Start(resolved.to_json())):
        assert sys.argv == ["swift", "rlhf", *words[:-1], "***"]
        assert " '***' # set SWIFT_API_KEY" in resume_command("rlhf", None)


@pytest.mark.parametrize("words", [["--seed", "1"], ["--seed", "1", "--resume_from_checkpoint", "out"]])
def test_a_checkpoint_of_weights_only_is_not_resumed(monkeypatch, tmp_path, words):
    monkeypatch.setattr(sys, "argv", ["swift", "rlhf", *words])
    checkpoint = tmp_path / "checkpoint-3"
    checkpoint.mkdir()
    (checkpoint / "model.safetensors").touch()
    trap = SignalTrap()
    said = str(trap.interruption("rlhf", tmp_path, 3))
    assert "it holds the weights only (--save_only_model true), start again: " in said
    assert said.endswith(f"swift rlhf {' '.join(words)}")
    (checkpoint / "optimizer.pt").touch()
    said = str(trap.interruption("rlhf", tmp_path, 3))
    assert said.endswith(f"resume: swift rlhf --seed 1 --resume_from_checkpoint {checkpoint}")


@pytest.mark.parametrize("number", STOP)
def test_every_signal_that_asks_to_stop_is_noted_and_forks_die_of_it(number):
    before = signal.getsignal(number)
    with SignalTrap() as trap:
        signal.raise_signal(number)
        child = os.fork()
        if not child:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.raise_signal(number)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -number
    assert trap.caught == number.name
    assert signal.getsignal(number) is before


def test_nohup_stays_in_force():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with SignalTrap() as trap:
            signal.raise_signal(signal.SIGHUP)
        assert trap.caught is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_closing_terminal_does_not_reach_the_processes_that_a_run_needs():
    with kept_from_children():
        kept = subprocess.Popen(["sleep", "60"])
    free = subprocess.Popen(["sleep", "60"])
    for process in (kept, free):
        process.send_signal(signal.SIGHUP)
    assert free.wait(10) == -signal.SIGHUP
    assert kept.poll() is None
    kept.terminate()
    assert kept.wait(10) == -signal.SIGTERM


def test_each_run_of_a_process_has_its_own_tensorboard_folder(tmp_path):
    boards = []
    trainer = SimpleNamespace(remove_callback=lambda _: None, add_callback=boards.append)
    for name, tracker in (("a", "tensorboard"), ("b", "tensorboard"), ("c", "none")):
        equip(trainer, SimpleNamespace(optim="adamw_torch", report_to=[tracker], profile_steps=None), tmp_path / name)
    assert [board.logging_dir for board in boards] == [str(tmp_path / name / "runs") for name in "ab"]


def test_a_failed_write_of_torch_is_a_full_disk_only_when_the_disk_is_full(tmp_path, monkeypatch):
    def fail():
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534")

    with pytest.raises(ResourceError, match=r"cannot be written .*inline_container"), writing(tmp_path):
        fail()
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=4096))
    with pytest.raises(ResourceError, match="no space left"), writing(tmp_path):
        fail()
    with pytest.raises(RuntimeError, match="a defect"), writing(tmp_path):
        raise RuntimeError("a defect")


def test_a_failure_in_one_process_is_raised_as_it_is():
    with pytest.raises(KeyError, match="own"), Collectives().together():
        raise KeyError("own")


def test_equal_lora_runs_write_equal_configs(nano_folders):
    from swift.models.arguments import ModelArguments
    from swift.models.policy import load_policy

    policy = load_policy(ModelArguments(model=str(nano_folders["qwen2"]), tuner_type="lora", lora_dropout=0.0))
    targets = policy.peft_config["default"].target_modules
    assert targets == sorted(targets)


def test_the_garbage_collector_rests_while_a_run_loads_and_works_again_afterwards():
    try:
        before = gc.get_freeze_count()
        with collector_resting():
            loaded = [[i] for i in range(100)]
            assert not gc.isenabled()
        assert gc.isenabled() and gc.get_freeze_count() >= before + len(loaded), "later rounds look at what was loaded"
        with pytest.raises(ValueError, match="no model"), collector_resting():
            raise ValueError("no model")
        assert gc.isenabled()
        gc.disable()
        with collector_resting():
            pass
        assert not gc.isenabled(), "one that was off stays off"
    finally:
        gc.enable()
        gc.unfreeze()


def test_a_missing_package_is_named_with_the_way_out(monkeypatch):
    monkeypatch.setattr(session.importlib.util, "find_spec", lambda name: None)
    args = SimpleNamespace(
        deepspeed=None,
        fsdp=None,
        load_best_model_at_end=False,
        report_to=["wandb"],
        optim="adamw_8bit",
        attn_impl="sdpa",
        quant_method="bnb",
    )
    with pytest.raises(ResourceError) as caught:
        session.require_packages(args)
    assert caught.value.problems == [
        "--report_to: wandb: needs the package wandb, which is not installed; install it, or leave the name out",
        "--optim: adamw_8bit: needs the package bitsandbytes, which is not installed; install it, or use --optim adamw",
        "--quant_method: bnb: needs the package bitsandbytes, which is not installed; install it, or leave it out",
    ]


@pytest.mark.parametrize("flags", [{"fsdp": "full_shard"}, {"deepspeed": "zero2"}], ids=str)
def test_shards_need_a_folder_that_every_process_sees(flags, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "SHARED_LIMIT_S", 0)
    args = SimpleNamespace(**{"fsdp": None, "deepspeed": None, "save_only_model": False, **flags})
    require_shared(args, tmp_path, Collectives())
    with pytest.raises(ResourceError, match="not there for process 0, whose node has another disk"):
        require_shared(args, tmp_path / "elsewhere", Collectives())
    args.save_only_model = True
    require_shared(args, tmp_path / "elsewhere", Collectives())
    require_shared(SimpleNamespace(fsdp=None, deepspeed=None), tmp_path / "elsewhere", Collectives())


@pytest.mark.parametrize(("accumulation", "of_batch", "processes", "each"), [(1, 4, 2, 2), (3, 4, 3, 4), (2, 3, 6, 1)])
def test_micro_batches_are_dealt_to_other_processes(accumulation, of_batch, processes, each):
    args, start = SimpleNamespace(gradient_accumulation_steps=accumulation), Start({"batch_processes": of_batch})
    assert accumulation_of(args, start, processes) == each


@pytest.mark.parametrize("processes", [3, 8])
def test_processes_that_cannot_have_equal_shares_are_refused(processes):
    args, start = SimpleNamespace(gradient_accumulation_steps=1), Start({"batch_processes": 4})
    with pytest.raises(ConfigError, match=f"{processes} training processes: cannot share the 4 .*; valid: 1, 2, 4"):
        accumulation_of(args, start, processes)


def test_the_launcher_reads_how_far_a_start_has_come(tmp_path, monkeypatch):
    file = tmp_path / "progress"
    monkeypatch.setenv(elastic.PROGRESS_FILE, str(file))
    assert elastic.read_progress(file).checkpoint is None
    elastic.note_start(None, 4)
    assert elastic.read_progress(file) == ("", 0, False, 4)
    first, last = tmp_path / "checkpoint-2", tmp_path / "checkpoint-4"
    elastic.note_checkpoint(first)
    assert elastic.read_progress(file) == ("", 0, False, 4), "it does not exist yet"
    first.mkdir()
    elastic.note_checkpoint(last, ends=True)
    assert elastic.read_progress(file) == (str(first), 1, True, 4)
    last.mkdir()
    first.rmdir()  # as the oldest one
    with file.open("a") as progress:
        progress.write("/run/check")
    assert elastic.read_progress(file) == (str(last), 2, True, 4)
    elastic.note_end()
    assert file.exists(), "swift's launcher removes it"


def test_torchrun_starts_a_run_again_where_it_was(tmp_path, monkeypatch):
    args = SimpleNamespace(elastic=True, output_dir=str(tmp_path / "out"), resume_from_checkpoint=None)
    for name in (elastic.PROGRESS_FILE, elastic.BATCH_PROCESSES):
        monkeypatch.setenv(name, "")  # taken back at the end
    monkeypatch.setenv(elastic.RUN_ID, "none")
    with pytest.raises(ConfigError, match="give torchrun --rdzv_id"):
        continue_elastic(args, Collectives())
    monkeypatch.setenv(elastic.RUN_ID, "run-7")
    continue_elastic(args, Collectives())
    assert args.resume_from_checkpoint is None and elastic.batch_processes(os.environ, 6) == 6
    elastic.note_start(None, 6)
    elastic.note_checkpoint(tmp_path)
    continue_elastic(args, Collectives())
    assert args.resume_from_checkpoint == str(tmp_path) and elastic.batch_processes(os.environ, 4) == 6
    elastic.note_end()
    args.resume_from_checkpoint = None
    continue_elastic(args, Collectives())
    assert args.resume_from_checkpoint is None
