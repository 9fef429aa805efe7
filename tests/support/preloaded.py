"""Python programs in forks of a process that has imported the libraries: they start in a second instead of four.

Each is a process with a session, an environment and a folder of its own, as if a shell had started it.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext
from pathlib import Path

LIBRARIES = [
    "matplotlib.pyplot",
    "peft",
    "torch._inductor.compile_fx",  # FlexAttention on the simulated GPU asks for it
    "torch.utils.tensorboard",
    "transformers.trainer",
    "transformers.models.qwen2.modeling_qwen2",
    "swift.arguments",
    "swift.cli.main",
    "swift.rewards.workers",
    "swift.rollout.engines.transformers",
    "swift.trainers.grpo.attempt",
    "swift.trainers.grpo.prepare",
    "swift.trainers.grpo.run",
    "swift.trainers.grpo.trainer",
    "swift.trainers.trl.run",
]


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LIBRARIES)
    return context


def make_ready() -> None:
    """Start the process that programs are forked from; it is none of theirs."""
    _context()
    forkserver.ensure_running()


class Program:
    """`python <words>`, with what the tests use of `subprocess.Popen`.

    words: `-m <module> ...` or `<script> ...`. output: file of stdout, and of stderr unless `errors` names another.
    """

    def __init__(
        self,
        words: list[str],
        *,
        output: Path,
        errors: Path | None = None,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.args = [str(word) for word in words]
        self._files = output, errors
        output.touch()
        (errors or output).touch()
        place = dict(os.environ if env is None else env), str(cwd or Path.cwd())
        self._process = _context().Process(target=_run, args=(self.args, *place, str(output), str(errors or output)))
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
        """Wait; what it wrote to stdout and to stderr."""
        self.wait(timeout)
        output, errors = self._files
        return output.read_text(), errors.read_text() if errors else ""

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(words: list[str], env: dict[str, str], cwd: str, output: str, errors: str) -> None:
    """In the fork: become the program."""
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for number, path in ((1, output), (2, errors)):
        access = os.O_RDWR if Path(path).is_char_device() else os.O_WRONLY  # else a terminal would not be ours
        descriptor = os.open(path, access | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, number)
        os.close(descriptor)
    multiprocessing.set_start_method("spawn", force=True)
    tracker = resource_tracker._resource_tracker
    os.close(tracker._fd)
    tracker._fd = None  # the program has a tracker of its own, which cleans up when it has ended
    sys.path[:0] = [folder for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.exit(_as_main(words))


def _as_main(words: list[str]) -> int:
    """The program's exit code."""
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path.insert(0, str(Path(words[0]).parent))
            runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # as at the end of every program: first threads, then exit handlers
    atexit._run_exitfuncs()
    return code


def run_ranks(
    words: list[str],
    folder: Path,
    *,
    count: int = 2,
    limit_s: float = 300,
    cwd: Path | None = None,
    **variables: object,
) -> list[str]:
    """Run `python <words>` once per rank of a group of processes; what each wrote. Fails where one failed.

    They find each other by the variables of torchrun; `{rank}` in a word becomes the rank.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"OMP_NUM_THREADS": 1, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables}
    shared |= {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    programs = []
    for rank in range(count):
        place = {**shared, "RANK": rank, "LOCAL_RANK": rank}
        env = {**os.environ, **{name: str(value) for name, value in place.items()}}
        own = [str(word).replace("{rank}", str(rank)) for word in words]
        programs.append(Program(own, env=env, cwd=cwd, output=folder / f"rank-{rank}.log"))
    try:
        codes = [program.wait(limit_s) for program in programs]
    finally:
        for program in programs:
            program.kill()
    texts = [program.communicate()[0] for program in programs]
    assert not any(codes), "\n".join(text[-3000:] for text in texts)
    return texts
