"""Entries of a registry by import path: `package.module.attribute`, or `module.attribute` in the working folder.

The working folder comes first on `sys.path` while a module is imported and last afterwards, so its files do not
shadow libraries that are loaded later. An error is one line with the flag, the path and the reason.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swift.errors import ConfigError, nearest
from swift.plugin.loader import watched
from swift.plugin.registry import IMPORTED, Registration, Registry


def is_import_path(name: str) -> bool:
    """Whether a name may be an import path: identifiers with dots between them."""
    return "." in name and all(part.isidentifier() for part in name.split("."))


def register_import_path(registry: Registry, name: str, *, flag: str, path: str | None = None) -> None:
    """Registers the object at an import path under `name`.

    Args:
        registry: the registry.
        name: as typed.
        flag: the setting, for messages: "--reward_funcs".
        path: the import path, if it differs from the name.

    Raises:
        ConfigError: no such module or attribute, it cannot be called, or the import raises.
    """
    module_name, _, attribute = (path or name).rpartition(".")
    module = _import(module_name, f"{flag}: {name}")
    found = getattr(module, attribute, None)
    where = getattr(module, "__file__", None) or module_name
    if found is None:
        near = nearest(attribute, [name for name, value in vars(module).items() if callable(value)])
        fix = f"nearest: {', '.join(near)}" if near else "check the name"
        raise ConfigError(f"{flag}: {name}: {where} has no {attribute!r}; {fix}")
    if not callable(found):
        raise ConfigError(
            f"{flag}: {name}: is {type(found).__name__} in {where}, which cannot be called; name a function, or a "
            "class with __call__"
        )
    registry.add(name, Registration(found, IMPORTED, None))


def _import(module: str, subject: str) -> Any:
    try:
        with _working_folder_first(), watched(subject) as sigint:
            importlib.invalidate_caches()  # a file may be younger than the last look into its folder
            return importlib.import_module(module)
    except BaseException as error:
        if isinstance(error, ConfigError) or sigint.interrupted(error):
            raise
        missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module}.".startswith(f"{missing}."):
            near = nearest(missing, [path.stem for path in Path.cwd().iterdir() if path.suffix == ".py"])
            fix = f"nearest: {', '.join(near)}" if near else "install it, or start in the folder that has it"
            raise ConfigError(
                f"{subject}: no module {missing!r} in {Path.cwd()} or among installed packages; {fix}"
            ) from error
        stack = traceback.extract_tb(error.__traceback__)
        frames = [frame for frame in stack if not frame.filename.startswith("<frozen")]
        wrong: Any = error if isinstance(error, SyntaxError) else frames[-1]
        last_line = traceback.format_exception_only(error)[-1].strip()
        raise ConfigError(
            f"{subject}: {wrong.filename}:{wrong.lineno}: raised while it was imported: {last_line}"
        ) from error


@contextmanager
def _working_folder_first() -> Iterator[None]:
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
        if folder not in sys.path:
            sys.path.append(folder)
