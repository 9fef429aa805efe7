"""Chat templates are programs of whoever made the model: what one rendering may compute is bounded.

A rendering has a deadline and a budget of items: characters, list entries and turns of loops that it makes. Templates
are compiled for that by an environment of our own: loops and `~` are rewritten to count, operators, filters and calls
are intercepted by jinja2's sandbox, and what makes much at once (`*`, `center`, `join`, ...) is estimated first.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    """A template that computes beyond what a chat takes."""


class _Budget(threading.local):
    """What is left of this thread's rendering; also bounds the folding of constants when a template is compiled."""

    items, until = 0, 0.0

    def begin(self) -> None:
        self.items, self.until = RENDER_ITEMS, time.monotonic() + RENDER_S

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
    _budget.begin()
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
        extensions=[type(one) for one in theirs.extensions.values()],
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
        text = sum(len(one.data) for one in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        node.iter = _filtered("counted_turns", node.iter, nodes.Const(text + 1))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        return _filtered("counted_text", nodes.List(node.nodes, lineno=node.lineno))


def _filtered(name: str, node: Any, *arguments: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(arguments), [], None, None, lineno=node.lineno)


class _Turns:
    """An iterable whose turns cost something; it has a length if that has one."""

    def __init__(self, items: Iterable[Any], cost: int) -> None:
        self._items, self._cost = items, cost

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            _budget.spend(self._cost)
            yield item


def _turns(items: Any, cost: int) -> Any:
    return _Turns(items, cost) if isinstance(items, Iterable) else items


def _text(parts: list[Any]) -> str:
    return str(_counted("".join(map(str, parts))))


def _counted(value: Any) -> Any:
    _budget.spend(_length(value))
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
    texts = [one for one in values if isinstance(one, str)]
    if name == "replace" and len(texts) == 3:
        values = [texts[0].count(texts[1]), texts[2]]
    if name.startswith("format") and any(isinstance(one, str) and _WIDTH.search(one) for one in values[:1]):
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
        return sum(_size(one, depth - 1) for one in value) + 1
    return 1


def _length(value: Any) -> int:
    """Items of a text or collection."""
    return len(value) if isinstance(value, str | list | tuple | dict) else 1
