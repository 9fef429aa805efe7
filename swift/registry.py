"""Dictionaries of named parts that remember who registered what.

A registry is a dictionary: `orms["name"] = entry`. It additionally remembers the origin of each entry
(built-in, or the plugin file being loaded), so that a replaced built-in is announced and the loader can
refuse two plugin files that claim the same name instead of one silently winning.

An entry may have an attribute `parameters`: a dataclass of fields made with `swift.flags.flag`. These are flags of the
command line and act where the entry is chosen; `parameters_of` reads them back.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

logger = logging.getLogger("swift.plugin")

BUILT_IN = "built-in"
SESSION = "this program"


class Registry(dict[str, Any]):
    """A dictionary of named parts that knows who registered what.

    Args:
        kind: what the entries are, for messages: "reward function".
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.origins: dict[str, str] = {}
        self._loading = SESSION
        self._assigned: dict[str, Any] = {}

    @contextmanager
    def registering(self, origin: str) -> Iterator[dict[str, Any]]:
        """Entries assigned inside the block come from `origin` (a plugin's path, or `BUILT_IN`).

        Yields:
            The entries assigned so far inside the block, by name.
        """
        before = self._loading, self._assigned
        self._loading, self._assigned = origin, {}
        try:
            yield self._assigned
        finally:
            self._loading, self._assigned = before

    def __setitem__(self, name: str, entry: Any) -> None:
        if self.origins.get(name) == BUILT_IN and self._loading != BUILT_IN:
            what = getattr(entry, "__name__", type(entry).__name__)
            logger.warning("note: %s of %s replaces the built-in %s %r", what, self._loading, self.kind, name)
        super().__setitem__(name, entry)
        self.origins[name] = self._loading
        self._assigned[name] = entry

    def update(self, *others: Any, **entries: Any) -> None:
        """As `dict.update`, remembering origins like an assignment."""
        for name, entry in dict(*others, **entries).items():
            self[name] = entry

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self.origins.pop(name, None)

    def find(self, name: str, flag: str) -> Any:
        """The entry of that name.

        Raises:
            ValueError: there is none; the message begins with `flag`.
        """
        if name not in self:
            raise ValueError(f"{flag}: {name}: unknown; valid: {', '.join(self)}")
        return self[name]

    def load(self, package: ModuleType) -> None:
        """Import every file of a package; what they register is built in."""
        with self.registering(BUILT_IN):
            for module in pkgutil.iter_modules(package.__path__):
                importlib.import_module(f"{package.__name__}.{module.name}")

    def built_ins(self) -> list[str]:
        """Names whose present entry ships with `swift`, sorted."""
        return sorted(name for name, origin in self.origins.items() if origin == BUILT_IN)

    def plugins(self) -> list[str]:
        """Names registered by plugins or by the running program, sorted."""
        return sorted(name for name, origin in self.origins.items() if origin != BUILT_IN)


def parameters_of(entry: Any, settings: Any) -> Any:
    """An entry's own parameters out of the flat settings of a run; None when it declares none."""
    if entry.parameters is None:
        return None
    names = [field.name for field in dataclasses.fields(entry.parameters)]
    return entry.parameters(**{name: getattr(settings, name) for name in names})
