"""What `--atropos_env` starts: the server's settings, and that all of it ends in time."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from swift.arguments import parse
from swift.errors import EngineError
from swift.rollout.sources.atropos import processes as processes_module
from swift.rollout.sources.atropos.launch import AtroposProcesses
from swift.rollout.sources.atropos.processes import Processes

STUBBORN = ["sh", "-c", "trap '' INT; echo ready; while :; do sleep 1; done"]


def test_commands_that_do_not_end_share_their_time_and_folders_go(monkeypatch):
    monkeypatch.setattr(processes_module, "GRACE_S", 0.5)
    made = Processes()
    folder = made.new_folder("swift-test-")
    for name in ("a", "b", "c"):
        made.start(name, STUBBORN)
        child = made._children[name]
        made.wait_until(lambda child=child: "ready" in child.last_lines, name, 10.0)
    start = time.monotonic()
    made.close()
    assert time.monotonic() - start < 1.4
    assert not folder.exists()


@pytest.mark.parametrize(
    ("command", "limit_s", "said"),
    [
        (["false"], 10.0, "api: exited with status 1; install it; its last lines: nothing"),
        (["sleep", "60"], 0.0, "api: not ready within 0 s; raise --x; its last lines: nothing"),
    ],
)
def test_what_died_or_takes_too_long_comes_with_advice(command, limit_s, said):
    made = Processes()
    made.start("api", command, advice="install it")
    with pytest.raises(EngineError, match=said):
        made.wait_until(lambda: False, "api", limit_s, "raise --x; ")
    made.close()


def test_with_adapters_alone_the_server_and_environments_are_told_their_base(tmp_path, monkeypatch):
    (base := tmp_path / "base").mkdir()
    (base / "config.json").write_text("{}")
    (base / "model.safetensors").touch()
    config = {"peft_type": "LORA", "base_model_name_or_path": str(base)}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    save_file({"lora_A": torch.zeros(1, 2)}, tmp_path / "adapter_model.safetensors")
    monkeypatch.setattr("swift.rollout.sources.atropos.processes.library", lambda: Path("atropos"))
    flags = f"--rlhf_type grpo --adapters {tmp_path} --rollout_source atropos --max_steps 5 --atropos_env 'true $X'"
    sources = AtroposProcesses(parse("rlhf", shlex.split(flags), {"CUDA_VISIBLE_DEVICES": ""}).args)
    told, variables = [], []
    monkeypatch.setattr(Processes, "wait_until", lambda *more: None)

    def start(self, name, command, given=None, **more):
        told.extend(json.loads(Path(word).read_text()) for word in command if word.endswith(".json"))
        variables.append(given)

    monkeypatch.setattr(Processes, "start", start)
    sources.start_server(64)
    sources.start_environments()
    sources.close()
    assert told[0]["model"] == variables[-1]["SWIFT_MODEL"] == str(base)
