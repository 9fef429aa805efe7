"""A longer context than the model's own: `--rope_scaling` and `--max_model_len` change its config before it is made.

Checkpoints of all weights have the changed config. Those of an adapter have the settings in args.json, from which they
come back wherever the adapter is loaded on its base. A `--max_model_len` within the own context changes no config, from
which longrope and others take their frequencies; it limits the rows only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swift.errors import ConfigError, parse_json, unusable
from swift.models.source import read_json

NAMES = ("rope_scaling", "max_model_len")
OF_THE_MODEL = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
"""Parameters that scaling leaves alone."""
OF_A_BATCH = ("dynamic", "longrope")
"""Types whose frequencies depend on the longest row of a batch: packed, padded and sampled tokens would differ."""


def parameters_of(text: str) -> dict[str, Any]:
    """`--rope_scaling` as parameters of transformers: a type alone, or JSON.

    Raises ConfigError: it is neither.
    """
    found: Any = {"rope_type": text}
    if text.lstrip().startswith("{"):
        try:
            found = parse_json(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"--rope_scaling: {text}: not JSON: {error.msg}") from error
    found["rope_type"] = kind = found.pop("type", None) or found.get("rope_type")
    if kind in OF_A_BATCH:
        raise ConfigError(f"--rope_scaling: {text}: {kind} depends on the longest row of a batch; use yarn")
    if kind not in ("linear", "yarn", "llama3"):
        raise ConfigError(f"--rope_scaling: {text}: not a choice; valid: linear, yarn, JSON with rope_type and factor")
    return found  # type: ignore[no-any-return]


def recorded(adapters: Sequence[str | Path]) -> tuple[str | None, int | None]:
    """The two settings that adapters were trained with, by the last that has another RoPE than its base."""
    for folder in reversed(adapters):
        file = Path(folder) / "args.json"
        found = read_json(file) if file.is_file() else {}
        if found.get("rope_scaling"):
            return found["rope_scaling"], found.get("max_model_len")
    return None, None


def lengthen(config: Any, args: Any) -> None:
    """Change a config by the settings of a run, or by those that its adapters were trained with.

    Raises:
        ConfigError: settings that do not fit the model, each other, or the adapters.
    """
    folders = [*args.adapters, *([args.model] if args.model else [])]
    scaling, length = then = recorded([one for one in folders if (Path(one) / "adapter_config.json").is_file()])
    if hasattr(args, "rope_scaling"):
        scaling, length = given = args.rope_scaling, args.max_model_len
        if then not in ((None, None), given):
            flags = " ".join(f"--{name} {value}" for name, value in zip(NAMES, then, strict=True) if value)
            raise ConfigError(f"--rope_scaling: {scaling}: the adapter was trained with {flags}; give the same")
    text = config.get_text_config()
    own = getattr(text, "max_position_embeddings", None)
    if scaling is not None:
        _scale(text, parameters_of(scaling), length)
    elif length is not None and own is not None and length > own:
        raise ConfigError(f"--max_model_len: {length}: the model's context is {own}; give --rope_scaling yarn, too")


def context_of(config: Any, args: Any) -> int | None:
    """The longest sequence in tokens: `--max_model_len`, else that of the config; None: neither has a limit."""
    own: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return getattr(args, "max_model_len", None) or own


def _scale(text: Any, wanted: dict[str, Any], length: int | None) -> None:
    base = getattr(text, "rope_parameters", None) or {}
    if "rope_theta" not in base:  # none, or several, by type of layer
        raise ConfigError(f"--rope_scaling: {wanted['rope_type']}: {text.model_type} has no single RoPE; leave it out")
    place = "original_max_position_embeddings"
    own = wanted.pop(place, None) or base.get(place) or text.max_position_embeddings
    if "factor" not in wanted and length is None:
        raise ConfigError(f"--rope_scaling: {wanted['rope_type']}: by which factor? give --max_model_len N")
    factor = wanted.setdefault("factor", max(1.0, float(math.ceil((length or own) / own))))
    if (length or 0) > own * factor:
        raise ConfigError(f"--max_model_len: {length}: above {own} x the factor {factor:g} of --rope_scaling")
    if wanted["rope_type"] != "linear":
        wanted[place] = own
    with unusable(f"--rope_scaling: {json.dumps(wanted)}: cannot be used"):
        text.rope_parameters = {**{name: base[name] for name in OF_THE_MODEL if name in base}, **wanted}
        text.max_position_embeddings = length or int(own * factor)
        text.validate_rope()
