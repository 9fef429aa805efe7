"""Starting and ending quickly: deferred packages, and an end that loses nothing."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def python(code, folder, *words):
    """Runs `code` in a process of its own that finds the packages in `folder`."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(code))
    return subprocess.run(
        [sys.executable, script, *words],
        capture_output=True, text=True, check=False, cwd=folder, timeout=300,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{folder}:{ROOT}", "PYTHONUNBUFFERED": ""},
    )  # fmt: skip


def told(code, folder):
    done = python(code, folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def folder(tmp_path):
    """A package `heavy` that says when it runs, one that cannot be imported, and a `torch` of one line."""
    (tmp_path / "heavy").mkdir()
    (tmp_path / "heavy" / "__init__.py").write_text(
        "import time\ntime.sleep(0.05)\nprint('runs')\nVALUE = 7\nclass Thing:\n    pass\n"
    )
    (tmp_path / "heavy" / "inner.py").write_text("import heavy\nNAME = heavy.VALUE\n")
    (tmp_path / "broken.py").write_text("import no_such_thing\n")
    (tmp_path / "torch.py").write_text("")
    return tmp_path


def test_a_deferred_package_runs_at_its_first_use_and_once(folder):
    lines = told(
        """
        import importlib.util, inspect, sys
        from swift.startup import defer
        defer("heavy")
        import heavy
        assert importlib.util.find_spec("heavy").name == "heavy"
        inspect.getmodule(defer)  # looks at every module's file
        print("imported")
        print(heavy.VALUE, heavy.VALUE, "Thing" in dir(heavy), "VALUE" in vars(heavy))
        """,
        folder,
    )
    assert lines == ["imported", "runs", "7 7 True True"]


@pytest.mark.parametrize(
    "use",
    [
        "from heavy import VALUE; print(VALUE)",
        "from heavy import *; print(VALUE)",
        "import heavy.inner; print(heavy.inner.NAME)",
        "from heavy.inner import NAME; print(NAME)",
        "import importlib; print(importlib.import_module('heavy').VALUE)",
        "import pickle; print(pickle.loads(b'cheavy\\nVALUE\\n.'))",
        "import heavy, pickle; print(pickle.loads(pickle.dumps(heavy)).VALUE)",
        "import os; sys.stdout.flush(); pid = os.fork(); import heavy; pid or print(heavy.VALUE, flush=True);"
        "pid or os._exit(0); os.wait()",
    ],
)
def test_every_way_of_using_it_finds_the_real_one(use, folder):
    assert told(f"import sys\nfrom swift.startup import defer\ndefer('heavy')\n{use}", folder) == ["runs", "7"]


def test_who_imported_it_before_shares_what_it_becomes(folder):
    lines = told(
        """
        from swift.startup import defer
        defer("heavy")
        import heavy as early
        from heavy import Thing
        import heavy as late
        import pickle
        early.VALUE = 8
        print(late.VALUE, early.Thing is late.Thing is Thing, isinstance(pickle.loads(pickle.dumps(Thing())), Thing))
        """,
        folder,
    )
    assert lines == ["runs", "8 True True"]


def test_threads_that_use_it_at_the_same_time_see_a_whole_module(folder):
    lines = told(
        """
        from concurrent.futures import ThreadPoolExecutor
        from swift.startup import defer
        defer("heavy")
        import heavy
        with ThreadPoolExecutor(8) as pool:
            print(sum(pool.map(lambda _: heavy.VALUE, range(8))))
        """,
        folder,
    )
    assert lines == ["runs", "56"]


def test_a_broken_package_fails_with_its_own_error_each_time(folder):
    lines = told(
        """
        from swift.startup import defer
        defer("broken")
        import broken
        for attempt in (lambda: broken.VALUE, lambda: broken.VALUE, lambda: __import__("broken")):
            try:
                attempt()
            except ModuleNotFoundError as error:
                print(error)
        """,
        folder,
    )
    assert lines == ["No module named 'no_such_thing'"] * 3


def test_what_is_missing_or_loaded_stays_as_it_is(folder):
    lines = told(
        """
        import heavy, sys
        from swift.startup import defer
        defer("heavy", "not_installed")
        print(type(sys.modules["heavy"]).__name__, "not_installed" in sys.modules)
        """,
        folder,
    )
    assert lines == ["runs", "module False"]


ENDING = """
    import atexit, sys
    from swift.startup import QuickEnd
    {before}
    end = QuickEnd()
    end.arm()
    import concurrent.futures, logging, os, threading, time, {library}
    pool = concurrent.futures.ThreadPoolExecutor(1)
    pool.submit(lambda: (time.sleep(0.2), print("pool done")))
    atexit.register(print, "handler ran")
    text, raw = open("text", "w"), open("raw", "wb")
    text.write("kept")
    raw.write(b"kept")

    class Last:
        def __del__(self, mark=os.mkdir):
            mark("torn_down")

    last = Last()
    print("said", end="")
    end.exit_code = {code}
    sys.exit({code})
    """


def ended(folder, code=0, library="torch", before="pass"):
    """How a process ends, and whether the interpreter took itself apart."""
    done = python(ENDING.format(code=code, library=library, before=before), folder)
    assert done.stdout.replace("\n", " ").split() == ["said" + "pool", "done", "handler", "ran"], done
    assert (folder / "text").read_text() == (folder / "raw").read_text() == "kept"
    return done.returncode, (folder / "torn_down").exists()


@pytest.mark.parametrize("code", [0, 3, 75])
def test_a_quick_end_keeps_the_code_the_output_and_everybodys_last_acts(folder, code):
    assert ended(folder, code) == (code, False)


@pytest.mark.parametrize(
    "case",
    [
        {"library": "json"},
        {"before": "atexit.register(int)"},
        {"code": None},
    ],
    ids=["without torch", "others were first", "without a code"],
)
def test_other_processes_end_as_usual(folder, case):
    assert ended(folder, **case) == (0, True)


def test_a_quick_end_leaves_a_reader_that_is_gone_to_the_interpreter(folder):
    code = """
        import sys, os
        from swift.startup import QuickEnd
        end = QuickEnd()
        end.arm()
        import torch
        read, write = os.pipe()
        os.dup2(write, 1)
        os.close(write)
        os.close(read)
        print("nobody hears")
        end.exit_code = 0
    """
    assert python(code, folder).returncode == 120  # as Python says when it cannot write out stdout


def test_a_quick_end_says_what_a_full_disk_has_lost(folder):
    code = """
        from swift.startup import QuickEnd
        end = QuickEnd()
        end.arm()
        import torch
        full = open("/dev/full", "w")
        full.write("the last line")
        end.exit_code = 0
    """
    ended = python(code, folder)
    assert ended.returncode == 0
    line = "/dev/full: No space left on device; what was written to it last is lost"
    assert ended.stderr.splitlines().count(line) == 1


@pytest.mark.slow
def test_a_plain_run_loads_nothing_that_it_does_not_use(nano_folders, tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{n}?"}}\n' for n in range(8)))
    (tmp_path / "plugin.py").write_text(
        "from swift.plugin import orms\n"
        "orms['length'] = lambda completions, **kwargs: [len(text) / 10 for text in completions]\n"
    )
    words = (
        f"rlhf --rlhf_type grpo --model {nano_folders['qwen2']} --dataset rows.jsonl --external_plugins plugin.py "
        "--reward_funcs length --tuner_type full --num_generations 4 --per_device_train_batch_size 8 "
        "--max_completion_length 8 --max_steps 1 --report_to none --output_dir out --save_strategy no"
    )
    code = f"""
        import sys
        from swift.cli.main import main
        sys.argv[1:] = {words.split()!r}
        assert main() == 0
        from swift.startup import DeferredModule
        print("datasets:", type(sys.modules["datasets"]) is DeferredModule)
        names = ["pandas", "pyarrow", "trl", "vllm", "modelscope", "tensorboard", "uvicorn", "fastapi", "IPython"]
        print("loaded:", [name for name in names if name in sys.modules])
        """
    done = python(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["datasets: True", "loaded: []"]
