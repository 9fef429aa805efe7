"""Multimodal checkpoints: some have a class that loads their text part without the towers; others are refused.

A tower encodes images, video or audio. The text part works without it, but saving that part loses the tower.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swift.errors import ConfigError

TOWERS = ("vision_config", "audio_config", "thinker_config")
"""Keys of config.json for the towers of a multimodal checkpoint."""


def is_part(config_class: type, loader: str = "AutoModelForCausalLM") -> bool:
    """Whether the class of transformers that loads it holds the text part of a multimodal checkpoint only."""
    import transformers

    kind = getattr(transformers, loader)._model_mapping.get(config_class, None)
    return kind is not None and config_class is not kind.config_class


def refuse_part(config: Any, folder: Path, loader: str = "AutoModelForCausalLM") -> None:
    """Refuses a multimodal checkpoint of which training would save a part, or whose adapters have other names.

    Raises:
        ConfigError: see there.
    """
    if is_part(type(config), loader):
        raise ConfigError(
            f"--model: {folder}: a multimodal checkpoint, whose vision or audio tower would be lost; save "
            "its text part with AutoModelForCausalLM.from_pretrained(...).save_pretrained(...) of transformers; use it"
        )


def refuse_towers(written: Mapping[str, Any], name: str, flag: str = "--model") -> None:
    """Refuses, by its config.json, a multimodal checkpoint whose text part no class of transformers loads alone.

    Raises:
        ConfigError: see there.
    """
    from transformers import CONFIG_MAPPING

    found, model_type = [tower for tower in TOWERS if written.get(tower) is not None], written.get("model_type")
    if found and not (model_type in CONFIG_MAPPING and is_part(CONFIG_MAPPING[model_type])):
        raise ConfigError(
            f"{flag}: {name}: a multimodal checkpoint ({model_type} with {found[0]}): images, video and audio are not "
            "supported, and its text part is no model of its own; use a text model"
        )
