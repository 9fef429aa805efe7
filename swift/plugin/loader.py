"""Imports users' plugin files.

Every file becomes a module of its own, under a name made from its path, so two files called `plugin.py`
can be loaded together. Its folder is appended to `sys.path`, so a plugin can import its neighbours. An error
inside a plugin is reported with the file, the line and the last line of the exception.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import NoReturn

from swift.errors import ConfigError, end_process, join_problems, nearest
from swift.plugin.kept import process_kept
from swift.plugin.registry import REGISTRIES, Recorded, register_again, registering

logger = logging.getLogger("swift.plugin")

SLOW_S = 10.0
LIMIT_S = 120.0
"""Seconds after which an unfinished import is reported, and after which it ends the process."""

_loaded: dict[str, Recorded] = {}  # module name -> what the plugin registered


def load_external_plugins(paths: Sequence[str | Path]) -> list[ModuleType]:
    """Imports the plugin files in order and registers what they define; one module per distinct file.

    A file that this process has imported before is not run again; its entries are registered anew.

    Raises:
        ConfigError: with one problem per file that is missing, is no Python file, has a syntax error,
            raises while it is imported or registers a name of another plugin.
    """
    modules: dict[Path, ModuleType] = {}
    owners: dict[tuple[str, str], str] = {}
    problems: list[str] = []
    for given in paths:
        path = Path(given).expanduser().resolve()
        if path in modules:
            logger.warning("note: --external_plugins: %s: given twice, loaded once", given)
            continue
        if not path.is_file() or path.suffix != ".py":
            problems.append(_file_problem(path, str(given)))
            continue
        try:
            modules[path] = _load(path, str(given))
        except ConfigError as error:
            problems += error.problems
            continue
        for place in _loaded[modules[path].__name__]:
            if owners.setdefault(place, str(given)) != str(given):
                key, name = place
                problems.append(
                    f"--external_plugins: {given}: registers the {REGISTRIES[key].kind} {name!r}, which "
                    f"{owners[place]} registers too; rename one of them"
                )
    join_problems(problems)
    return list(modules.values())


def _file_problem(path: Path, given: str) -> str:
    if path.is_file():
        return f"--external_plugins: {given}: not a .py file"
    if path.is_dir():
        return f"--external_plugins: {given}: a folder; name the .py file in it"
    neighbours = [item.name for item in path.parent.glob("*.py")] if path.parent.is_dir() else []
    near = nearest(path.name, neighbours)
    if near:
        where = f"nearest: {', '.join(str(Path(given).parent / name) for name in near)}"
    elif path.parent.is_dir():
        where = f"looked in {path.parent}"
    else:
        where = f"the folder {path.parent} does not exist either"
    return f"--external_plugins: {given}: no such file; {where}"


def _load(path: Path, given: str) -> ModuleType:
    """The module of the plugin at an absolute path; the name of a module is readable and unique."""
    stem = "".join(char if char.isalnum() else "_" for char in path.stem)
    name = f"swift_plugin_{stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        register_again(_loaded[name], given)
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--external_plugins: {given}: Python cannot import this file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        with registering(given) as entries, watched(f"--external_plugins: {given}", path) as sigint:
            spec.loader.exec_module(module)
        _loaded[name] = entries
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, ConfigError) or sigint.interrupted(error):
            raise
        raise ConfigError(_import_problem(error, path, given)) from error
    return module


@dataclass(slots=True)
class SigintRecord:
    """Whether Ctrl-C was pressed. A KeyboardInterrupt does not show that: the plugin may raise one itself."""

    pressed: bool = False

    def interrupted(self, error: BaseException) -> bool:
        """Whether the user ended the import."""
        return self.pressed and isinstance(error, KeyboardInterrupt)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Records SIGINT inside the block, then calls its handler."""
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler) or threading.current_thread() is not threading.main_thread():
            yield
            return

        def record(number: int, frame: FrameType | None) -> None:
            self.pressed = True
            handler(number, frame)

        signal.signal(signal.SIGINT, record)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, handler)


@contextlib.contextmanager
def watched(subject: str, path: Path | None = None) -> Iterator[SigintRecord]:
    """Reports an import that takes long, ends the process if it hangs, and turns `os._exit` into a SystemExit.

    Restores the process settings of `swift.plugin.kept`. A child process that the import forks ends with the block.

    subject: the start of messages. path: the file, whose current line they name.
    """
    pid, thread, leave = os.getpid(), threading.get_ident(), os._exit

    def place() -> str:
        frames = traceback.extract_stack(sys._current_frames()[thread])
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        return subject + (f":{lines[-1]}" if lines else "")

    def report() -> None:
        print(f"swift: {place()}: still being imported after {SLOW_S:g} s", file=sys.stderr, flush=True)

    def end() -> None:
        end_process(ConfigError(f"{place()}: not imported after {LIMIT_S:g} s; move slow work into the functions"))

    def leave_by_error(status: int) -> NoReturn:
        if (os.getpid(), threading.get_ident()) != (pid, thread):  # a child, or the end of the process
            leave(status)
        raise SystemExit(f"os._exit({status})")

    timers = [threading.Timer(SLOW_S, report), threading.Timer(LIMIT_S, end)]
    for timer in timers:
        timer.daemon = True
        timer.start()
    os._exit = leave_by_error
    sigint = SigintRecord()
    try:
        with sigint.recording(), process_kept(subject):
            yield sigint
    finally:
        if os.getpid() != pid:
            leave(0)
        os._exit = leave
        for timer in timers:
            timer.cancel()


def _import_problem(error: BaseException, path: Path, given: str) -> str:
    last_line = traceback.format_exception_only(error)[-1].strip()
    if isinstance(error, SyntaxError):
        return f"--external_plugins: {error.filename or given}:{error.lineno}: {last_line}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    line = f":{lines[-1]}" if lines else ""
    return f"--external_plugins: {given}{line}: raised while it was imported: {last_line}"
