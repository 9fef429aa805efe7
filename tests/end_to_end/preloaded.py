"""`swift` commands in forks of a process that has imported the libraries: they start in a second instead of four.

Each is a process with a session, an environment and a folder of its own, as if a shell had started it.
"""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import os
import subprocess
import sys
from multiprocessing.context import ForkServerContext
from pathlib import Path

LIBRARIES = [
    "matplotlib.pyplot",
    "peft",
    "torch.utils.tensorboard",
    "transformers.trainer",
    "transformers.models.qwen2.modeling_qwen2",
    "swift.cli.main",
    "swift.rollout.engines.transformers",
    "swift.trainers.grpo.run",
    "swift.trainers.grpo.trainer",
]


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LIBRARIES)
    return context


class Command:
    """A command that runs or has run, with the part of `subprocess.Popen` that the tests use."""

    def __init__(self, words: list[str], *, env: dict[str, str], cwd: Path, output: Path) -> None:
        output.mkdir(parents=True)
        self.args = words
        self._files = output / "stdout", output / "stderr"
        self._process = _context().Process(target=_run, args=(words, env, cwd, self._files))
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        out, err = (path.read_text() for path in self._files)
        return out, err

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def _run(words: list[str], env: dict[str, str], cwd: Path, files: tuple[Path, Path]) -> None:
    """In the fork: become the command."""
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for number, path in enumerate(files, start=1):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
    multiprocessing.set_start_method("spawn", force=True)
    sys.argv = ["swift", *words]
    main = importlib.import_module("swift.__main__")
    sys.modules["__main__"] = main  # what processes that this one spawns import
    code = main.main()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)
