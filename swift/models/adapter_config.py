"""Limits on the config and tensors of an adapter, which is untrusted; checked before PEFT loads it.

A rank allocates matrices, an initialisation computes decompositions, and matching a regular expression can take
unbounded time. Values that no adapter needs are refused, with their name in adapter_config.json.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from swift.errors import ConfigError, first_line

LARGEST_ALPHA = 1e6
MOST_ROUNDS = 100
"""Iterations of a decomposition at the start (PiSSA, LoftQ); their papers use up to 16."""
MATCHING_S = 10
"""Seconds in which all expressions of a config have been matched with all modules of the base."""
UNSUPPORTED = ("layer_replication", "megatron_config")
"""Settings that make another model, or import modules by name."""
BOUNDED = ("r", "lora_alpha", "init_lora_weights")
"""Settings whose values have checks of their own; PEFT's type annotations are narrower than what it accepts."""

_MATCH = """
import json, re, sys
patterns, names = json.load(sys.stdin)
for one in map(re.compile, patterns):
    for name in names:
        one.fullmatch(name), one.match(name)
"""


def check_config(folder: Path, config: Mapping[str, Any], files: Sequence[Path]) -> None:
    """Raises ConfigError: a value that no adapter needs.

    Args:
        folder: of the adapter.
        config: its adapter_config.json.
        files: weights of the base.
    """
    where = f"--adapters: {folder}: adapter_config.json"
    for field, value, problem in _faults(config, _largest_dimension(folder)):
        raise ConfigError(f"{where}: {field}: {str(value)[:60]}: {problem}")
    patterns = dict(_patterns(config))
    for pattern, field in patterns.items():
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ConfigError(f"{where}: {field}: no regular expression ({first_line(error)})") from error
    if patterns and _take_too_long(tuple(patterns), tuple(files)):
        raise ConfigError(
            f"{where}: {next(iter(patterns.values()))}: to match it with the names of the modules takes more than "
            f"{MATCHING_S} s; name the modules in a list"
        )


def _faults(config: Mapping[str, Any], largest: int) -> Iterator[tuple[str, Any, str]]:
    """Field, value and problem of each value out of bounds."""
    for field in UNSUPPORTED:
        if config.get(field):
            yield field, config[field], "is not supported; leave it out"
    yield from _type_faults(config)
    ranks = {"r": config.get("r"), **_named("rank_pattern", config)}
    for field, rank in ranks.items():
        if rank is not None and not (type(rank) is int and 1 <= rank <= largest):
            yield (
                field,
                rank,
                f"1 to {largest} was expected, the largest dimension of the adapter's tensors",
            )
    for field, alpha in {"lora_alpha": config.get("lora_alpha"), **_named("alpha_pattern", config)}.items():
        if alpha is not None and not (type(alpha) in (int, float) and abs(alpha) <= LARGEST_ALPHA):
            yield field, alpha, f"a number of at most {LARGEST_ALPHA:.0e} was expected; correct it"
    start = config.get("init_lora_weights")
    rounds = re.fullmatch(r"pissa_niter_(\d+)", start) if isinstance(start, str) else None
    if rounds and (len(rounds[1]) > 9 or int(rounds[1]) > MOST_ROUNDS):
        yield "init_lora_weights", start, f"at most {MOST_ROUNDS} iterations were expected; correct it"
    loftq = (config.get("loftq_config") or {}).get("loftq_iter", 1)
    if not (type(loftq) is int and loftq <= MOST_ROUNDS):
        yield "loftq_config: loftq_iter", loftq, f"at most {MOST_ROUNDS} iterations were expected; correct it"


def _type_faults(config: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Those of another type than PEFT declares for this kind of adapter."""
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    known: Mapping[Any, Any] = PEFT_TYPE_TO_CONFIG_MAPPING
    if (kind := config.get("peft_type")) not in list(known):  # a list has no hash
        yield "peft_type", kind, "no kind of adapter that PEFT knows; correct it"
    for field, type_ in get_type_hints(known[kind]).items():
        if field not in BOUNDED and config.get(field) is not None:
            try:
                TypeAdapter(type_).validate_python(config[field])
            except ValidationError as error:
                yield field, config[field], error.errors()[0]["msg"].replace("Input", "it", 1)


def _named(field: str, config: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{field}: {name[:60]}": value for name, value in (config.get(field) or {}).items()}


def _patterns(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Every regular expression of a config as PEFT matches it, with its label in errors; plain names are omitted."""
    layers = config.get("layers_pattern") or []
    found = [(field, config.get(field), "{}") for field in ("target_modules", "exclude_modules")]
    found += [
        ("layers_pattern", pattern, r".*\.{}\.(\d+)\.") for pattern in ([layers] if isinstance(layers, str) else layers)
    ]
    for field in ("rank_pattern", "alpha_pattern"):
        found += [(field, pattern, r"(.*\.)?({})$") for pattern in config.get(field) or {}]
    for field, pattern, shape in found:
        if isinstance(pattern, str) and re.search(r"[^\w.\-]", pattern):
            yield shape.replace("{}", pattern), f"{field}: {pattern[:60]}"


@functools.cache
def _take_too_long(patterns: tuple[str, ...], files: tuple[Path, ...]) -> bool:
    """Whether matching takes more than the limit, in a process of its own, which can be ended."""
    command = [sys.executable, "-I", "-S", "-c", _MATCH]
    names = json.dumps([patterns, _module_names(files)])
    try:
        subprocess.run(command, input=names, text=True, timeout=MATCHING_S, check=True)
    except subprocess.TimeoutExpired:
        return True
    return False


def _module_names(files: Sequence[Path]) -> list[str]:
    """Names of the modules that hold the tensors of a model's files, and of those around them."""
    from safetensors import safe_open

    names: set[str] = set()
    for file in files:
        with safe_open(file, framework="numpy") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - not a dict
                while "." in key:
                    key = key.rpartition(".")[0]
                    names.add(key)
    return sorted(names)


def _largest_dimension(folder: Path) -> int:
    """Of an adapter's tensors: no rank is above it."""
    from safetensors import SafetensorError, safe_open

    file = folder / "adapter_model.safetensors"
    try:
        with safe_open(file, framework="numpy") as tensors:
            shapes = [tensors.get_slice(key).get_shape() for key in tensors.keys()]  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"--adapters: {file}: cannot be read ({first_line(error)}); is it complete?") from error
    return max((size for shape in shapes for size in shape), default=0)


def check_finite(folder: Path) -> None:
    """Raises ConfigError: an adapter's file holds values that are not finite."""
    from safetensors import safe_open

    with safe_open(folder / "adapter_model.safetensors", framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - not a dict
            if not bool(tensors.get_tensor(name).isfinite().all()):
                raise ConfigError(
                    f"--adapters: {folder}: {name}: holds values that are not finite; give an earlier checkpoint"
                )
