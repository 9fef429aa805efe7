"""What is measured of memory, and how the line of the log reads."""

import mmap

import torch

from swift import devices
from swift.observability.memory import MemoryFigures, freed_between, measure, memory_line, too_little

MIB = 1 << 20
GPU = MemoryFigures("cuda:0", 100 * MIB, 160 * MIB, 7000 * MIB, 900 * MIB)


def test_the_line_names_every_holder_in_mib():
    held = {"trainer": 10 * MIB, "optim": 20 * MIB, "engine_w": 30 * MIB, "engine_kv": 40 * MIB}
    assert memory_line(3, "generate", GPU, held, 5 * MIB + MIB // 2 + 1) == (
        "mem step=3 phase=generate dev=cuda:0 alloc=100 reserved=160 free=7000 rss=900 trainer=10 optim=20 "
        "engine_w=30 engine_kv=40 freed=6"
    )


def test_what_is_not_known_is_a_dash_and_not_a_zero():
    figures = MemoryFigures("cpu", None, None, 5 * MIB, 7 * MIB)
    line = memory_line(0, "before", figures, {"trainer": 1, "optim": 0, "engine_w": None, "engine_kv": None}, 0)
    assert "alloc=- reserved=- free=5 rss=7 trainer=0 optim=0 engine_w=- engine_kv=- freed=0" in line


def test_figures_of_a_cpu_are_those_of_the_system():
    import psutil

    before = measure(torch.device("cpu"))
    held = mmap.mmap(-1, 64 * MIB)  # not by malloc, which may hold freed memory that it gives out again
    for _ in range(64):
        held.write(bytes([1]) * MIB)
    after = measure(torch.device("cpu"))
    assert before.alloc is None and before.device == "cpu"
    assert 60 * MIB < after.rss - before.rss < 80 * MIB
    assert 0 < after.free <= psutil.virtual_memory().total
    assert freed_between(before, after) == 0
    held.close()
    assert freed_between(after, measure(torch.device("cpu"))) > 50 * MIB


def test_the_limit_of_a_control_group_counts_unless_it_has_none(monkeypatch, tmp_path):
    monkeypatch.setattr(devices, "CGROUP", tmp_path)
    unlimited = measure(torch.device("cpu")).free
    (tmp_path / "memory.max").write_text("2097152\n")
    (tmp_path / "memory.current").write_text("1048576\n")
    assert measure(torch.device("cpu")).free == MIB
    (tmp_path / "memory.max").write_text("max\n")
    assert unlimited > MIB < measure(torch.device("cpu")).free


def test_a_device_is_judged_by_what_anybody_could_have():
    later = MemoryFigures("cuda:0", 50 * MIB, 160 * MIB, 7010 * MIB, 100 * MIB)
    assert freed_between(GPU, later) == 10 * MIB, "what torch keeps is not free"
    assert freed_between(later, GPU) == 0


def test_less_than_half_of_what_was_expected_is_too_little():
    assert too_little(49 * MIB, 100 * MIB)
    assert not too_little(50 * MIB, 100 * MIB)
    assert not too_little(0, 63 * MIB), "allocators round by as much"
    assert not too_little(0, 0)
