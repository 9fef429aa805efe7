"""Rendering of chat templates, which are untrusted programs, within limits on time and output.

A rendering has a deadline and a budget of items: characters, list entries and loop iterations that it makes. Templates
are compiled by an environment that enforces both: loops and `~` are rewritten to count, jinja2's sandbox intercepts
operators, filters and calls, and results that can be large (`*`, `center`, `join`, ...) are estimated before they are
made.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jinja2 import Template, nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

RENDER_S = 5.0
"""Longest rendering of a chat, in seconds."""
RENDER_ITEMS = 1 << 27
"""Most items that a rendering makes on its way: about ten times what a chat of a million tokens takes."""
_INTEGER_BITS = 4096
_GROWING = frozenset(
    {
        "center", "ljust", "rjust", "zfill", "expandtabs", "join", "replace", "format", "format_map", "translate",
        "indent", "wordwrap", "batch", "slice", "tojson", "urlize", "xmlattr", "range",
    }
)  # fmt: skip
"""Methods and filters whose result can be as large as the product of two arguments."""
_WIDTH = re.compile(r"\d{6}")


class RenderLimit(Exception):
    """A rendering exceeds its budget of items or its deadline."""


class _Budget(threading.local):
    """What this thread's rendering may still make; also bounds constant folding when a template is compiled."""

    items, until = 0, 0.0

    def spend(self, items: int) -> None:
        self.items -= items
        if self.items < 0:
            raise RenderLimit(f"it makes over {RENDER_ITEMS >> 20} million characters and list items")
        if time.monotonic() > self.until:
            raise RenderLimit(f"it takes over {RENDER_S:g} s")


_budget = _Budget()


def render(jinja: str, variables: Mapping[str, Any], *, marks: bool) -> tuple[str, list[tuple[int, int]]]:
    """The text of a template with these variables, and with `marks` where its `{% generation %}` blocks stand in it.

    Raises:
        RenderLimit: beyond the limits.
        Exception: whatever a template raises.
    """
    _budget.items, _budget.until = RENDER_ITEMS, time.monotonic() + RENDER_S
    template = compiled(jinja)
    if not marks:
        return template.render(**variables), []
    blocks: list[str] = []
    spans: list[tuple[int, int]] = []
    with template.environment.activate_tracker(blocks, spans):  # type: ignore[attr-defined]
        for block in template.generate(**variables):
            blocks.append(block)
    return "".join(blocks), spans


@functools.lru_cache
def compiled(jinja: str) -> Template:
    """A template in the dialect of transformers, compiled so that its renderings are bounded."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    theirs = _compile_jinja_template("").environment
    environment = BoundedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[type(extension) for extension in theirs.extensions.values()],
        finalize=_counted,
    )
    bounded = {name: _bounded(name, function) for name, function in theirs.filters.items()}
    environment.filters = {**bounded, "counted_turns": _turns, "counted_text": _text}
    environment.globals = {name: value for name, value in theirs.globals.items() if name != "lipsum"}
    return environment.from_string(jinja)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Counts what a template makes."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def _generate(self, source: nodes.Template, *arguments: Any, **named: Any) -> str:
        return super()._generate(_Counting().visit(source), *arguments, **named)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """jinja2's, for small results."""
        if operator == "*" and (isinstance(left, str | list | tuple) or isinstance(right, str | list | tuple)):
            _budget.spend(_size(left) * _size(right))
        elif operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * (right if operator == "**" else 1) + right.bit_length() > _INTEGER_BITS:
                raise RenderLimit("it computes with integers of thousands of digits")
        elif operator == "%" and isinstance(left, str):
            _estimate("format", (left, right))
        return _counted(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """jinja2's, for small results."""
        if (name := getattr(__obj, "__name__", "")) in _GROWING:
            args = tuple(map(_listed, args))
            own = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", "")
            _estimate(name, (own, *args, *kwargs.values()))
        return _counted(super().call(__context, __obj, *args, **kwargs))


class _Counting(NodeTransformer):
    """Rewrites what jinja2 cannot intercept: loops and `~`."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        text = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        cost: list[nodes.Expr] = [nodes.Const(text + 1)]
        node.iter = nodes.Filter(node.iter, "counted_turns", cost, [], None, None, lineno=node.iter.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, "counted_text", [], [], None, None, lineno=node.lineno)


@dataclass(eq=False, repr=False, slots=True)
class _Turns:
    """An iterable that spends `cost` items of the budget per iteration; it has a length if `items` has one."""

    items: Iterable[Any]
    cost: int

    def __len__(self) -> int:
        return len(self.items)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        for item in self.items:
            _budget.spend(self.cost)
            yield item


def _turns(items: Any, cost: int) -> Any:
    return _Turns(items, cost) if isinstance(items, Iterable) else items


def _text(parts: list[Any]) -> str:
    return str(_counted("".join(map(str, parts))))


def _counted(value: Any) -> Any:
    """`value`, after its characters or entries are spent."""
    _budget.spend(len(value) if isinstance(value, str | list | tuple | dict) else 1)
    return value


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that counts."""

    @functools.wraps(function)
    def bounded(*arguments: Any, **named: Any) -> Any:
        if name in _GROWING:
            arguments = tuple(map(_listed, arguments))
            _estimate(name, (*arguments, *named.values()))
        return _counted(function(*arguments, **named))

    return bounded


def _listed(value: Any) -> Any:
    return list(_Turns(value, 1)) if isinstance(value, Iterator) else value


def _estimate(name: str, values: Iterable[Any]) -> None:
    """Refuses arguments of a method, filter or operator from which it could make more than is left."""
    values = list(values)
    texts = [value for value in values if isinstance(value, str)]
    if name == "replace" and len(texts) == 3:
        values = [texts[0].count(texts[1]), texts[2]]
    if name.startswith("format") and any(isinstance(value, str) and _WIDTH.search(value) for value in values[:1]):
        raise RenderLimit("it pads a text to over 100000 characters")
    largest = sorted(map(_size, values))[-2:]
    if len(largest) == 2 and largest[0] * largest[1] > _budget.items:
        raise RenderLimit(f"it makes over {RENDER_ITEMS >> 20} million characters and list items at once")


def _size(value: Any, depth: int = 3) -> int:
    """How much a value could add to a text, at least 1: its characters, or itself if it is a number."""
    if isinstance(value, str):
        return len(value) + 1
    if isinstance(value, int | float):
        return int(min(abs(value), RENDER_ITEMS)) + 1 if value == value else 1
    if isinstance(value, range):
        return len(value) + 1
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    if depth and isinstance(value, list | tuple):
        return sum(_size(entry, depth - 1) for entry in value) + 1
    return 1
