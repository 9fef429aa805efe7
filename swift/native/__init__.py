"""The compiled part of swift: parts of a decoder on a CPU (`kernels.c`).

Composed of PyTorch's operations, a norm, a gate or a rotary position is several passes over the same numbers, and
attention of a decode step over a shared prompt and own tokens is a dozen operations per layer, each over in
microseconds; a product of few rows is over sooner than a library has chosen how to compute it. Here each is one call.
`swift.rollout.engines.native_step`, `swift.models.cpu_panels` and `swift.models.cpu_rows` call them.

`setup.py` compiles it with the machine's C compiler, in seconds and without headers of PyTorch; where there is no
compiler, the package is installed without it and `kernels` is None: the same results, up to rounding, by operations of
PyTorch. The instruction set is chosen when it is loaded, so a built package can be moved between machines.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch

from swift.errors import ConfigError

logger = logging.getLogger(__name__)

LANES = 16
"""Widths are multiples of this many floats."""

PANEL = 32
"""Columns of a matrix that `Kernels.product` multiplies at once."""

FEW_FLOATS = 16_384
"""Up to these, one thread is through before a second has begun."""

VARIABLE = "SWIFT_NATIVE"
"""Environment variable: 0 for PyTorch's operations only; avx512, avx2 or plain for that instruction set."""


class Layer(ctypes.Structure):
    """`swift_layer` of kernels.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("prompt_keys", "prompt_values", "own_keys", "own_values")),
        *((name, ctypes.c_void_p) for name in ("query_norm", "key_norm")),
        *((name, ctypes.c_int64) for name in ("heads", "groups", "depth", "width", "size", "room")),
        *((name, ctypes.c_float) for name in ("epsilon", "scale")),
    ]


class Step(ctypes.Structure):
    """`swift_step` of kernels.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("slots", "own", "prompts", "positions", "cosines", "sines")),
        *((name, ctypes.c_void_p) for name in ("states", "output", "workspace")),
        *((name, ctypes.c_int64) for name in ("share", "rows", "threads")),
    ]


class Kernels:
    """The functions of kernels.c; pointers are `Tensor.data_ptr()`, of contiguous float32 or int64 on the CPU.

    Args:
        library: as loaded.
        instructions: the instruction set to use; None: the best of this processor.

    Raises:
        ConfigError: this processor or this build does not have the instruction set.
    """

    def __init__(self, library: ctypes.CDLL, instructions: str | None = None) -> None:
        library.swift_choose.restype = ctypes.c_char_p
        chosen = library.swift_choose(instructions.encode() if instructions else None)
        if chosen is None:
            raise ConfigError(
                f"{VARIABLE}: {instructions!r} is nothing that this processor or this build of swift has; "
                "unset it, or set it to 0 (PyTorch's operations), plain, avx2 or avx512"
            )
        self.instructions: str = chosen.decode()
        pointer, number, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
        self.attend: Any = _declared(library.swift_attend, ctypes.POINTER(Layer), ctypes.POINTER(Step))
        add_norm = [pointer, pointer, pointer, real, pointer, number, number, number]
        self.add_norm: Any = _declared(library.swift_add_norm, *add_norm)
        self.gate: Any = _declared(library.swift_gate, *[pointer] * 3, *[number] * 4)
        self.gate_back: Any = _declared(library.swift_gate_back, *[pointer] * 6, *[number] * 3)
        self.norm: Any = _declared(library.swift_norm, pointer, pointer, real, *[pointer] * 3, *[number] * 3)
        self.norm_back: Any = _declared(library.swift_norm_back, *[pointer] * 6, *[number] * 3)
        self.turn: Any = _declared(library.swift_turn, *[pointer] * 4, *[number] * 8)
        self.product: Any = _declared(library.swift_product, *[pointer] * 4, *[number] * 4)
        self.pack: Any = _declared(library.swift_pack, *[pointer] * 2, *[number] * 3)
        self.threaded = _use_threads(library)


def _declared(function: Any, *types: Any) -> Any:
    function.argtypes, function.restype = types, None
    return function


def _use_threads(library: ctypes.CDLL) -> bool:
    """Hand over the OpenMP runtime whose threads PyTorch uses: another one's would fight with them for the cores."""
    paths = sorted((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"))
    for path in (None, *map(str, paths)):  # None: what was loaded before everything else, as by LD_PRELOAD
        try:
            entry = ctypes.CDLL(path).GOMP_parallel  # looked up in what PyTorch is linked against, too
        except (OSError, AttributeError):
            continue
        library.swift_use_threads(ctypes.cast(entry, ctypes.c_void_p))
        return True
    return False


def sources_digest() -> str | None:
    """Of the C files beside this one, as `setup.py` has it compiled in; None where only the library is installed."""
    files = [Path(__file__).parent / name for name in ("kernels.c", "kernels.h")]
    if not all(file.is_file() for file in files):
        return None
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _is_of_these_sources(library: ctypes.CDLL) -> bool:
    wanted = sources_digest()
    if wanted is None:
        return True
    try:
        library.swift_sources.restype = ctypes.c_char_p
        found: bytes = library.swift_sources()
    except AttributeError:
        return False
    return found.decode() == wanted


def threads_for(count: int) -> int:
    """Threads for `count` floats: one, or those of PyTorch."""
    return torch.get_num_threads() if count > FEW_FLOATS else 1


def library_path() -> Path | None:
    """The compiled library; None where the package was installed without it."""
    folder = Path(__file__).parent
    return next((path for suffix in EXTENSION_SUFFIXES if (path := folder / f"_kernels{suffix}").is_file()), None)


@functools.cache
def kernels() -> Kernels | None:
    """The compiled functions; None where there are none, or `VARIABLE` says that they are not wanted."""
    wanted = os.environ.get(VARIABLE, "").strip().lower()
    if wanted in ("0", "no", "off", "false"):
        return None
    path = library_path()
    if path is None:
        logger.info(
            "swift was installed without its compiled part (no C compiler?): a CPU takes longer to sample and to train"
        )
        return None
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        logger.warning("%s cannot be loaded: %s; install swift again", path, error)
        return None
    if not _is_of_these_sources(library):
        logger.warning("%s was not compiled from the sources beside it and is not used; install swift again", path)
        return None
    found = Kernels(library, None if wanted in ("", "1", "yes", "on", "true") else wanted)
    if not found.threaded:
        logger.info("the threads of this PyTorch cannot be used by swift's compiled part, which is left out")
        return None
    return found
