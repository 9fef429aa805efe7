"""Failures that `swift` anticipates: one type per boundary, one line per problem, one exit code.

A `SwiftError` carries a list of problems. Each problem is a single line

    <flag or subject>: <value seen>: <what is wrong>; <nearest or all valid choices>

and the command line prints it as ``swift: error: <line>``. Anything that is not a `SwiftError`
is a defect of ours and keeps its traceback.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn


class SwiftError(Exception):
    """An anticipated failure; `exit_code` is what the process returns.

    Args:
        *problems: one line each, already in the form described in the module's docstring.
    """

    exit_code = 1

    def __init__(self, *problems: str) -> None:
        if not problems:
            raise ValueError("a SwiftError needs at least one problem")
        self.problems: list[str] = [" ".join(str(problem).split()) for problem in problems]
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[object, ...]:
        """Errors travel between processes; subclasses may have other constructors."""
        return _restore, (type(self), self.__dict__)


def _restore(cls: type[SwiftError], state: dict[str, object]) -> SwiftError:
    error = cls.__new__(cls)
    error.__dict__.update(state)
    error.args = ("\n".join(error.problems),)
    return error


class ConfigError(SwiftError):
    """A setting, file, row or plugin of the user is wrong (exit 2)."""

    exit_code = 2


class RefusedChat(ConfigError):
    """The chat template raised an error on these messages: a fault of the row, not of the template."""


class RefusedImage(RefusedChat):
    """An image of a row cannot be decoded: a fault of the row, too."""


class ResourceError(SwiftError):
    """Memory, disk, port, lock or a package is missing (exit 3)."""

    exit_code = 3


class EngineError(SwiftError):
    """An inference engine, a server or a weight transfer failed (exit 4)."""

    exit_code = 4


class PromptTooLong(EngineError):
    """A prompt leaves no room for a completion; `length` and `limit` are in tokens."""

    def __init__(self, length: int, limit: int) -> None:
        self.length, self.limit = length, limit
        super().__init__(f"prompt: {length} tokens: longer than the engine's limit of {limit} tokens")


class EngineDead(EngineError):
    """An engine's process is gone, does not answer in time, or broke inside."""


class EngineAsleep(EngineError):
    """An engine was asked to generate, or to take weights, while its memory is released."""


class SyncFailed(EngineError):
    """New weights did not arrive whole: the engine must be rebuilt before it samples again."""


class RequestRefused(EngineError):
    """An engine does not take one request, whose id is `request_id`; what else it has goes on."""

    def __init__(self, request_id: str, *problems: str) -> None:
        self.request_id = request_id
        super().__init__(*problems)


class Unsupported(EngineError):
    """An engine was asked for something that its `Capabilities` do not name."""


class RewardError(SwiftError):
    """The reward functions cannot be used (exit 5)."""

    exit_code = 5


class NumericError(SwiftError):
    """The numbers are wrong: loss stays non-finite, or sampler and trainer disagree (exit 6)."""

    exit_code = 6


class Interrupted(SwiftError):
    """A signal ended the run; a checkpoint was saved and can be resumed (exit 75)."""

    exit_code = 75


_reporters: list[Callable[[BaseException], int]] = []


def set_error_reporter(report: Callable[[BaseException], int]) -> None:
    """Set the function that prints an error and returns its exit code, for `end_process`."""
    _reporters[:] = [report]


def end_process(error: SwiftError) -> NoReturn:
    """Print `error` and end this process at once, from any thread.

    For a main thread that blocks where no exception can reach it, such as in a collective that another rank left.
    """
    code = _reporters[0](error) if _reporters else error.exit_code
    os._exit(code)


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A run whose folder exists.

    log: of this process. advice: a line with its folder and its resume command. going_on: the flags with which it goes
    on from its last checkpoint, none if it begins anew; None if it cannot go on.
    """

    log: Path
    advice: Callable[[], str]
    going_on: Callable[[], list[str] | None]


_unfinished: list[Unfinished] = []
_smaller: list[str] = []


def note_unfinished(run: Unfinished | None) -> None:
    """Set the run that is unfinished if this process ends from now on; None if there is none any more."""
    _unfinished[:] = [run] if run is not None else []
    _smaller.clear()


def unfinished() -> Unfinished | None:
    """The run that `note_unfinished` was given last."""
    return _unfinished[0] if _unfinished else None


def note_smaller(*words: str) -> None:
    """Set the flags with which the unfinished run may fit into memory when it is started again."""
    _smaller[:] = words


def smaller() -> list[str]:
    """The flags that `note_smaller` was given last."""
    return list(_smaller)


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""All but tabs and line breaks, what turns the direction of text round, and halves of pairs, which no stream takes."""

_DECODER = json.JSONDecoder()


def parse_json(text: str, decoder: json.JSONDecoder = _DECODER) -> Any:
    """The value of a JSON text; every failure is a JSONDecodeError: integers of 4,300 digits and deep nesting too."""
    try:
        return decoder.decode(text)
    except json.JSONDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        problem = "nested too deeply" if isinstance(error, RecursionError) else "an integer of too many digits"
        raise json.JSONDecodeError(problem, text, 0) from error


def first_line(error: BaseException) -> str:
    """The first line of an error's text, with the next where it ends in a colon, cut to 200 characters; or its type."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    return shortened(" ".join(lines[: 2 if lines[0].endswith(":") else 1]).replace("\t", ""), 200)


def format_seconds(seconds: float) -> str:
    """A duration for people: 42s, 3m05s, 2h07m, 3d04h.

    >>> format_seconds(185)
    '3m05s'
    """
    whole = max(0, round(seconds))
    for unit, smaller, size, part in (("d", "h", 86400, 3600), ("h", "m", 3600, 60), ("m", "s", 60, 1)):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // part:02d}{smaller}"
    return f"{whole}s"


def shortened(text: str, limit: int) -> str:
    """`text` cut to at most `limit` characters after a whole word: half of a URL may be a password that no mask finds.

    >>> shortened("cannot reach https://me:hunter2@host", 31)
    'cannot reach ...'
    """
    return text if len(text) <= limit else f"{text[: limit - 3].rpartition(' ')[0]} ...".lstrip()


OUT_OF_MEMORY = (
    "out of memory", "not enough memory", "allocate memory", "alloc_cpu", "defaultcpuallocator", "alloc_failed",
    "failed to map segment", "std::bad_alloc",
)  # fmt: skip
"""Parts of the messages of CUDA, cuBLAS, NCCL, vLLM and the C library, in lower case."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error means that memory of the system or of an accelerator ran out, whatever its type."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    if any(cls.__name__ == "OutOfMemoryError" for cls in type(error).__mro__):
        return True
    text = str(error).lower()
    return any(words in text for words in OUT_OF_MEMORY)


@contextlib.contextmanager
def unusable(problem: str, fix: str = "") -> Iterator[None]:
    """A block in which libraries read files of the user: an exception means that the files are wrong.

    Libraries raise any type, a bare Exception too. Errors about missing packages and memory are raised unchanged.

    Raises:
        ConfigError: `problem` with the first line of the failure, and `fix`.
    """
    try:
        yield
    except (SwiftError, ImportError):
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        if "trust_remote_code" in str(error):
            fix = "; it needs Python code from its repository: read that code, then set --trust_remote_code true"
        raise ConfigError(f"{problem} ({first_line(error)}){fix}") from error


@contextlib.contextmanager
def packages_for(problem: str) -> Iterator[None]:
    """A block in which libraries import packages that not every machine has.

    Raises:
        ConfigError: one is missing; `problem`, and its name.
    """
    try:
        yield
    except ImportError as error:
        first: BaseException = error
        while first.__cause__ is not None:
            first = first.__cause__
        fix = f"; pip install {name}" if (name := getattr(first, "name", None)) else ""
        raise ConfigError(f"{problem} ({first_line(first)}){fix}") from error


@contextlib.contextmanager
def attributed_to(flag: str, instead: str = "--model") -> Iterator[None]:
    """Attribute problems that the block raises about the flag `instead` to `flag`, which gave the value."""
    try:
        yield
    except SwiftError as error:
        problems = [re.sub(rf"^{instead}(?=:)", flag, problem) for problem in error.problems]
        error.problems, error.args = problems, ("\n".join(problems),)
        raise


def printable(text: str) -> str:
    r"""Text for a terminal: control characters, such as those that begin escape sequences, are written out.

    >>> printable("\x1b[31mred")
    '\\x1b[31mred'
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def counted(number: float, noun: str) -> str:
    """A number with its noun.

    >>> counted(1, "row"), counted(2, "process")
    ('1 row', '2 processes')
    """
    ending = "" if number == 1 else "es" if noun.endswith(("s", "x", "ch")) else "s"
    return f"{number:.0f} {noun}{ending}"


def nearest(name: str, choices: Iterable[str], count: int = 3, *, likeness: float = 0.5) -> list[str]:
    """Up to `count` of `choices` closest to `name` by edit distance, best first; those less alike are left out."""
    return difflib.get_close_matches(str(name), [str(choice) for choice in choices], n=count, cutoff=likeness)


def likeness(first: str, second: str) -> float:
    """From 0 to 1, as `nearest` measures it."""
    return difflib.SequenceMatcher(None, first, second).ratio()


_MOST_LISTED = 30


def suggest(name: str, choices: Sequence[str]) -> str:
    """The end of an error line: the nearest valid choices, or all of them when none is near and they are not many."""
    near = nearest(name, choices, likeness=0.5 if len(choices) <= _MOST_LISTED else 0.0)
    return f"nearest: {', '.join(near)}" if near else f"valid: {', '.join(str(choice) for choice in choices)}"


def join_problems(problems: Sequence[str], error: type[SwiftError] = ConfigError) -> None:
    """Raise `error` with all `problems` when there is any; configuration problems are listed together."""
    if problems:
        raise error(*problems)
