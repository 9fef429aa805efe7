"""Plugins: how they register, what may be wrong with them, and how entries are built and called."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from array import array
from collections import Counter, deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from refusals import problems_of

from swift.plugin import REGISTRIES, load_external_plugins, loader, losses, orms
from swift.rewards import contract
from swift.rewards.trl_convention import Logged


def test_a_plugin_registers_by_assignment(plugin):
    load_external_plugins([plugin("orms['dummy'] = lambda completions, **kwargs: [0.0] * len(completions)\n")])
    assert orms["dummy"](["a", "b"]) == [0.0, 0.0]
    assert orms.plugins() == ["dummy"]


def test_two_files_of_one_name_are_two_modules(plugin, tmp_path):
    (tmp_path / "other").mkdir()
    first = plugin("orms['one'] = len\n")
    second = plugin("orms['two'] = len\n", name="other/plugin.py")
    modules = load_external_plugins([first, second])
    assert len({module.__name__ for module in modules}) == 2
    assert {"one", "two"} <= set(orms)


def test_one_file_given_twice_is_loaded_once_with_a_note(plugin, caplog):
    path = plugin("orms['one'] = len\n")
    with caplog.at_level(logging.WARNING):
        assert len(load_external_plugins([path, path])) == 1
    assert "given twice" in caplog.text


def test_a_plugin_may_import_its_neighbour(plugin, tmp_path):
    (tmp_path / "neighbour_of_the_plugin.py").write_text("VALUE = 3.0\n")
    load_external_plugins([plugin("import neighbour_of_the_plugin\norms['n'] = neighbour_of_the_plugin.VALUE\n")])
    assert orms["n"] == 3.0


def test_a_slow_import_is_told_with_its_line_and_a_hanging_one_ends_the_process(plugin, monkeypatch, capfd):
    monkeypatch.setattr(loader, "SLOW_S", 0.1)
    monkeypatch.setattr(loader, "LIMIT_S", 0.3)
    ended = []
    monkeypatch.setattr(loader, "end_process", ended.append)
    path = plugin("import time\ntime.sleep(0.6)\n")
    load_external_plugins([path])
    assert f"--external_plugins: {path}:3: still being imported" in capfd.readouterr().err
    (error,) = ended
    assert error.problems[0].startswith(f"--external_plugins: {path}:3: not imported after")


def test_a_child_of_a_plugin_may_leave(plugin):
    source = "import os\npid = os.fork()\npid or os._exit(7)\nSTATUS = os.waitpid(pid, 0)[1]\n"
    (module,) = load_external_plugins([plugin(source)])
    assert os.waitstatus_to_exitcode(module.STATUS) == 7


def test_a_child_of_a_plugin_does_not_go_on_as_a_second_run(plugin):
    source = "import os\npid = os.fork()\nSTATUS = pid and os.waitpid(pid, 0)[1]\n"
    (module,) = load_external_plugins([plugin(source)])
    assert os.waitstatus_to_exitcode(module.STATUS) == 0


TORCH = "torch.set_grad_enabled(False); torch.set_default_dtype(torch.float64); torch.set_default_device('meta')"
CHANGES = {
    f"import torch; {TORCH}": "torch's gradients, default type or device",
    "import sys; sys.modules.clear()": "sys.modules",
    "import sys; sys.modules.clear(); import collections\nfrom swift.plugin import orms": "sys.modules",
    "import sys; sys.modules = {}": "sys.modules",
    "import sys; sys.stdout.close()": "sys.stdout",
    "import sys; sys.stderr = None": "sys.stderr",
    "import sys; sys.stderr.close()\n1/0": "sys.stderr",
    "import os; os.close(2)": "sys.stderr",
    "import os; os.chdir('/')": "the working folder",
    "import os; os.umask(0)": "the umask",
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)": "signal handlers",
    "import time; time.time = time.monotonic = lambda: 0.0": "the clock",
    "import time; time.sleep = print": "the clock",
}
PROBE = """
import collections, os, signal, sys, time
from swift.errors import SwiftError
from swift.plugin import load_external_plugins

def state():
    os.umask(mask := os.umask(0o77))
    torch = sys.modules.get("torch")
    return (os.getcwd(), mask, signal.getsignal(signal.SIGTERM), time.time, time.monotonic, time.sleep,
            sorted({"os", "signal", "swift.errors"} & sys.modules.keys()), sys.modules["collections"] is collections,
            torch and (torch.is_grad_enabled(), torch.zeros(1).dtype, torch.zeros(1).device))

if "torch" in sys.argv:
    import torch
before = state()
try:
    load_external_plugins(["plugin.py"])
except SwiftError as error:
    print(error)
if before[-1] is None and "torch" in sys.modules:
    import torch
    before = (*before[:-1], (True, torch.float32, torch.device("cpu")))
assert state() == before
print("to stdout")
print("to stderr", file=sys.stderr)
"""


@pytest.mark.parametrize(("change", "words"), [*((change, []) for change in CHANGES), (next(iter(CHANGES)), ["torch"])])
def test_what_a_run_depends_on_is_put_back_after_an_import(tmp_path, change, words):
    (tmp_path / "plugin.py").write_text(change)
    (tmp_path / "probe.py").write_text(PROBE)
    ended = subprocess.run(
        [sys.executable, "probe.py", *words], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    note = f"note: --external_plugins: plugin.py: changed {CHANGES[change]} while it was imported"
    assert (ended.returncode, note in ended.stderr) == (0, True), ended.stderr
    assert ended.stdout.endswith("to stdout\n") and ended.stderr.endswith("to stderr\n")
    assert ("ZeroDivisionError" in ended.stdout) == ("1/0" in change)


def test_a_key_that_is_pressed_ends_an_import(plugin):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore the key
    try:
        with pytest.raises(KeyboardInterrupt):
            load_external_plugins([plugin("import signal\nsignal.raise_signal(signal.SIGINT)\n")])
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_import_that_only_loads_torch_is_no_change(plugin, caplog):
    load_external_plugins([plugin("import torch, random; random.seed(0); torch.set_num_threads(1)\n")])
    assert "put back" not in caplog.text


def test_a_missing_plugin_names_the_nearest_file(plugin, tmp_path):
    plugin("", name="plugin.py")
    (line,) = problems_of(load_external_plugins, [str(tmp_path / "plugni.py")])
    assert "plugni.py: no such file" in line
    assert "plugin.py" in line.split(";")[1]


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("raise KeyError('no key')", "KeyError: 'no key'"),
        ("import no_such_module_here", "ModuleNotFoundError"),
        ("exit(3)", "SystemExit: 3"),
        ("raise KeyboardInterrupt", "raised while it was imported: KeyboardInterrupt"),
        ("raise type('Own', (BaseException,), {})('of mine')", "Own: of mine"),
        ("def broken(:", "SyntaxError"),
    ],
)
def test_an_error_at_import_shows_path_line_and_last_line(plugin, statement, said):
    path = plugin(f"x = 1\n{statement}\n")
    (line,) = problems_of(load_external_plugins, [path])
    assert f"{path}:3" in line
    assert said in line


def test_bytes_that_are_no_program_are_an_error_of_the_file(tmp_path):
    (tmp_path / "plugin.py").write_bytes(b"x = 1\0")
    (line,) = problems_of(load_external_plugins, [tmp_path / "plugin.py"])
    assert line.startswith(f"--external_plugins: {tmp_path / 'plugin.py'}") and "null bytes" in line


def test_all_broken_plugins_are_reported_together(plugin, tmp_path):
    found = problems_of(load_external_plugins, [plugin("1/0\n"), str(tmp_path / "a.txt"), str(tmp_path)])
    assert len(found) == 3


def test_replacing_a_built_in_prints_a_notice(plugin, caplog):
    with caplog.at_level(logging.WARNING):
        load_external_plugins([plugin("def mine(completions, **k):\n    pass\norms['accuracy'] = mine\n")])
    assert "replaces the built-in reward function 'accuracy'" in caplog.text
    assert "accuracy" not in orms.built_ins()


@pytest.mark.parametrize("key", REGISTRIES)
def test_two_plugins_may_not_register_one_name(plugin, key):
    head = f"from swift.plugin import {key}\n{key}"
    files = [plugin(f"{head}['same'] = len\n", name="a.py"), plugin(f"{head}.register('same')(max)\n", name="b.py")]
    (line,) = problems_of(load_external_plugins, files)
    assert f"b.py: registers the {REGISTRIES[key].kind} 'same', which" in line
    assert "a.py" in line


def test_an_entry_declares_its_own_settings(plugin):
    source = """
from dataclasses import dataclass
from swift.flags import flag
from swift.plugin import losses
@dataclass
class Margin:
    margin: float = flag(0.5, above=0)
@losses.register("hinge", parameters=Margin)
class Hinge:
    pass
class Other:
    parameters = Margin
losses["other"] = Other
losses["plain"] = len
"""
    (module,) = load_external_plugins([plugin(source)])
    assert losses["hinge"] is module.Hinge
    assert losses.parameters_of("hinge") is module.Margin
    assert losses.parameters_of("plain") is None
    assert losses.parameters_of("other") is module.Margin


def test_the_built_in_entries_are_there_whatever_is_imported_first(tmp_path):
    (tmp_path / "plugin.py").write_text(
        "from swift.rewards.functions.format import Format\nfrom swift.plugin import orms\norms['mine'] = Format\n"
    )
    code = (
        "from swift.plugin import load_external_plugins, orms\n"
        f"load_external_plugins([{str(tmp_path / 'plugin.py')!r}])\n"
        "print(orms.plugins(), orms.origin('format'), len(orms))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["['mine']", "built-in", "13"]


def test_a_second_load_in_one_process_registers_the_same_entries_again(plugin):
    first = plugin("def mine(completions):\n    pass\norms['same'] = mine\n", name="a.py")
    second = plugin("orms['same'] = max\n", name="b.py")
    load_external_plugins([first])
    mine = orms["same"]
    load_external_plugins([second])
    assert orms["same"] is max
    load_external_plugins([first])
    assert orms["same"] is mine


class Old:
    def __init__(self, beta, cosine_max_len=3, *args, **kwargs):
        self.seen = (beta, cosine_max_len, args, kwargs)

    def __call__(self, completions, **kwargs):
        return [0.0]


class New:
    def __init__(self, args, tokenizer=None, unknown_with_default=5):
        self.seen = (args.beta, args.old_beta, tokenizer, unknown_with_default)

    def __call__(self, completions, **kwargs):
        return [0.0]


class Static:
    def __call__(completions, **kwargs):  # noqa: N805  the style of the 3.x guide
        return [float(len(text)) for text in completions]


def build(entry, flags):
    flags = {**flags, "old_beta": flags["beta"]}
    available = {**flags, "args": SimpleNamespace(**flags), "tokenizer": "tok"}
    return entry(**contract.constructor_arguments("name", entry, available))


def test_classes_are_built_from_flags_by_parameter_name_or_take_all_arguments_and_the_tokenizer():
    assert build(Old, {"beta": 0.1, "cosine_max_len": 9}).seen == (0.1, 9, (), {})
    assert build(New, {"beta": 0.1}).seen == (0.1, 0.1, "tok", 5)


def test_signatures_of_functions_instances_and_async_entries():
    async def judge(completions, solution, *, prompt_id=None):
        return [0.0]

    signature = contract.signature_of("judge", judge)
    assert (signature.is_async, signature.required, signature.open) == (True, ("solution",), False)
    assert signature.accepted == {"solution", "prompt_id"}
    assert contract.signature_of("old", Old(1)).scope == "sample"
    static = contract.signature_of("static", Static)
    assert (static.without_self, static.open) == (True, True)


@pytest.mark.parametrize("entry", [7, "text", lambda: [0.0], SimpleNamespace()])
def test_entries_that_cannot_be_called_are_refused(entry):
    assert problems_of(contract.signature_of, "bad", entry)


def test_an_unknown_scope_is_refused():
    entry = type("Scoped", (Old,), {"scope": "epoch"})
    assert "epoch" in problems_of(contract.signature_of, "scoped", entry)[0]


def test_a_function_gets_what_its_signature_accepts():
    available = {"solution": [1], "prompt_id": ["p"], "prompt_opens_think": [True]}
    open_one = contract.signature_of("open", lambda completions, **kwargs: None)
    closed = contract.signature_of("closed", lambda completions, prompt_opens_think: None)
    assert set(contract.keywords_for(open_one, available)) == {"solution", "prompt_id"}
    assert set(contract.keywords_for(closed, available)) == {"prompt_opens_think"}


@pytest.mark.parametrize(
    ("columns", "fix"),
    [
        (["answer", "level"], '{"answer":"solution"}'),
        (["solutions"], '{"solutions":"solution"}'),
        (["ground_truth"], '{"ground_truth":"solution"}'),
        ([], '{"<your column>":"solution"}'),
    ],
)
def test_a_missing_column_shows_the_columns_seen_and_a_fix(columns, fix):
    signature = contract.signature_of("accuracy", orms["accuracy"])
    (line,) = contract.missing_columns(signature, columns)
    assert "accuracy" in line
    assert f"--columns '{fix}'" in line
    for column in columns:
        assert column in line


def test_results_may_be_numbers_bools_scalars_arrays_and_none():
    assert contract.read_values([1, 0.5, True, None, torch.tensor(1.5), np.float32(2)], 6) == [1, 0.5, 1, None, 1.5, 2]
    assert contract.read_values((0, 0), 2) == [0.0, 0.0]
    assert contract.read_values(np.array([1.0, 2.0]), 2) == [1.0, 2.0]
    assert contract.read_values(deque([1.0, 2.0]), 2) == contract.read_values(array("d", [1.0, 2.0]), 2) == [1.0, 2.0]


UNORDERED = [{0.0, 1.0}, frozenset({0.0, 1.0}), {0.0: 1, 1.0: 2}, {0: 0.0, 1: 1.0}.values(), {0: 1}.items(),
             Counter("a"), (one for one in [0.0, 1.0]), b"ab", bytearray(b"ab")]  # fmt: skip


@pytest.mark.parametrize("result", [None, 1.0, "ab", [1.0], [1.0, "x"], [1.0, [1.0]], [1, 1j], *UNORDERED])
def test_other_results_break_the_contract(result):
    with pytest.raises(contract.ContractBroken):
        contract.read_values(result, 2)


@pytest.mark.parametrize("values", UNORDERED, ids=lambda one: type(one).__name__)
def test_unordered_values_are_not_logged_as_a_column(values):
    with pytest.raises(TypeError, match=r"log_extra\('seen'\) got .*, not a list with one value per completion"):
        Logged().log_extra("seen", values)
