"""`swift doctor` without a run: a table about the machine."""

import json
import os
import time
from types import SimpleNamespace

import httpx
import pytest
from packaging.requirements import Requirement

from swift.observability import doctor, leftovers, machine, packages
from swift.observability.machine import Check

NO_RUN = {"run": None}


def asked(**args):
    return doctor.run(SimpleNamespace(args=SimpleNamespace(**NO_RUN, **args)))


@pytest.fixture
def no_network(monkeypatch):
    def refused(url, timeout):
        raise httpx.ConnectError("no route")

    monkeypatch.setattr(httpx, "head", refused)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


def test_this_machine_can_train_and_is_examined_in_seconds(capsys, no_network):
    began = time.process_time()
    assert asked(json=True) == 0
    assert time.process_time() - began < 10
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert {"python", "torch", "threads", "accelerator", "transformers", "vllm", "/dev/shm", "clock", "ports"} <= {
        check["name"] for check in checks
    }
    assert all(bool(check["fix"]) == (check["status"] != "ok") for check in checks)
    (hub,) = [check for check in checks if check["name"] == "Hugging Face"]
    assert hub["status"] == "warning" and "no route" in hub["found"]


def test_an_error_is_exit_code_3_and_shown_with_its_fix(capsys, monkeypatch):
    monkeypatch.setattr(
        doctor, "examine", lambda: [Check("disk", "error", "0 GiB\x1b[2J", "free it"), Check("a", "ok", "1")]
    )
    assert asked(json=False) == 3
    assert capsys.readouterr().out.splitlines() == [
        "error    disk  0 GiB\\x1b[2J",
        "               fix: free it",
        "ok       a     1",
        "1 error, 0 warnings",
    ]


@pytest.mark.parametrize(
    ("version", "status"), [("1.16.2", "ok"), ("1.17.0", "warning"), ("1.15", "warning"), ("1.16.3rc1", "ok")]
)
def test_a_library_outside_of_its_tested_range_is_a_warning(version, status):
    check = packages.ranged("trl", version, Requirement("trl>=1.16,<1.17"), "requirements/base.txt")
    assert check.status == status
    assert check.fix == ("" if status == "ok" else "pip install 'trl<1.17,>=1.16' (requirements/base.txt)")


def test_a_missing_library_says_what_it_costs(monkeypatch):
    monkeypatch.setattr(packages, "installed", lambda name: None)
    found = {check.name: check for check in packages.packages()}
    assert found["transformers"].status == "error" and "pip install" in found["transformers"].fix
    assert found["ray"].status == "ok" and "--vllm_mode dedicated" in found["ray"].found


def test_a_hub_tells_that_the_clock_is_wrong(monkeypatch):
    monkeypatch.setattr(
        httpx, "head", lambda url, timeout: httpx.Response(200, headers={"date": "Sun, 29 Nov 2026 12:00:00 GMT"})
    )
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    right, wrong = 1795953600.0, 1795953600.0 - 7200
    assert [check.status for check in machine.hubs(lambda: right)] == ["ok", "ok", "ok"]
    clock = next(machine.hubs(lambda: wrong))
    assert clock.status == "warning" and "7200 s behind" in clock.found
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert [check.name for check in machine.hubs(lambda: right)] == ["clock", "hubs"]


def test_leftovers_are_told_with_the_command_that_removes_them(monkeypatch, tmp_path):
    monkeypatch.setattr(leftovers, "SHARED", tmp_path)
    monkeypatch.setattr(leftovers.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(leftovers, "_orphans", lambda: iter([17]))
    for name in ("psm_unused", "psm_open", "others"):
        (tmp_path / name).write_text("1")
    (tmp_path / "swift-ray-x").mkdir()
    with (tmp_path / "psm_open").open():
        found = {check.name: check for check in leftovers.leftovers()}
    assert found["shared memory"].fix == f"rm -r {tmp_path / 'psm_unused'}"
    assert found["temporary folders"].fix == f"rm -r {tmp_path / 'swift-ray-x'}"
    assert found["processes"].fix.endswith("kill 17")


def test_ports_that_are_in_use_are_named(monkeypatch):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(machine, "PORTS", {server.getsockname()[1]: "a server"})
        (check,) = machine.ports()
    assert check.status == "warning" and "a server" in check.found


def test_own_process_is_no_orphan():
    assert os.getpid() not in list(leftovers._orphans())
