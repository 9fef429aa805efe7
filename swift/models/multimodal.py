"""Multimodal checkpoints: a mode that takes images loads them whole; others load the text part, or refuse them.

A tower encodes images, video or audio. Some checkpoints have a class that loads their text part without it; saving that
part loses the tower.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from swift.errors import ConfigError

if TYPE_CHECKING:
    from swift.models.arguments import CheckpointArguments, TunerArguments

Part = Literal["vit", "aligner", "llm", "head"]
"""Parts of a whole model; the head of a reward model is none that can be frozen."""

TOWERS = ("vision_config", "audio_config", "thinker_config")
"""Keys of config.json for the towers of a multimodal checkpoint."""

THINKER = "qwen2_5_omni"
"""The `model_type` of checkpoints with a part that sees, whose class is in `swift.models.thinker`."""
NOT_LOADED = ("talker", "token2wav", "thinker.audio_tower")
"""Other modules of such a checkpoint: training leaves them as they are."""

OF_TOWERS: dict[str, Any] = {
    "freeze_vit": True, "freeze_aligner": True, "freeze_llm": False, "vit_lr": None, "aligner_lr": None,
    "full_towers": False, "vit_gradient_checkpointing": None, "max_pixels": None,
}  # fmt: skip
"""Settings of models with a vision tower, and their defaults."""

ALIGNERS = re.compile(r"(^|\.)(\w*merger\w*|\w*projector|connector|embed_vision|modality_projection|aligner)(\.|$)")
"""Names of the modules between a tower and the language model."""


def loads_whole(config: Any, args: CheckpointArguments) -> bool:
    """Whether a checkpoint with this config is loaded with its vision tower."""
    return args.SEES and is_whole(config)


def is_whole(config: Any) -> bool:
    """Whether a config is that of a model of images and text."""
    return _is_known(type(config)) and getattr(seeing(config), "vision_config", None) is not None


def seeing(config: Any) -> Any:
    """The part of a config that has the tower and the placeholders: its own, or that of a thinker."""
    return getattr(config, "thinker_config", config)


def parts_of(model: Any) -> dict[str, Part]:
    """The part of each module of a whole model by its name; of modules that hold the language model, none."""
    decoder = model.get_decoder()
    inside = next(name for name, module in model.named_modules() if module is decoder)
    parts: dict[str, Part] = {}
    for name, _ in model.named_modules():
        if name == inside or name.startswith((f"{inside}.", "lm_head", "thinker.lm_head")):
            parts[name] = "llm"
        elif name.startswith("score"):
            parts[name] = "head"
        elif name and not inside.startswith(f"{name}."):
            parts[name] = "aligner" if ALIGNERS.search(name) else "vit"
    return parts


def frozen_modules(model: Any, args: TunerArguments) -> list[str]:
    """Names of the largest modules that settings keep as they are; [] for a language model."""
    return _modules_of(model, frozen_parts(model, args))


def full_modules(model: Any, args: TunerArguments) -> list[str]:
    """Names of the largest modules that are trained in full beside an adapter (`--full_towers`)."""
    towers: set[Part] = {"vit", "aligner"}
    return _modules_of(model, towers - frozen_parts(model, args)) if args.full_towers else []


def _modules_of(model: Any, chosen: Collection[Part]) -> list[str]:
    """Names of the largest modules of these parts alone."""
    parts = parts_of(model) if chosen else {}
    mixed = set()  # modules that hold one of another part
    for name, part in parts.items():
        while part not in chosen and (name := name.rpartition(".")[0]):
            mixed.add(name)
    known = {name for name, part in parts.items() if part in chosen} - mixed
    return [name for name in parts if name in known and name.rpartition(".")[0] not in known]


def frozen_parameters(model: Any, args: TunerArguments) -> set[str]:
    """Names of the parameters that settings keep as they are; none of a language model."""
    frozen = frozen_parts(model, args)
    return {name for name, part in parts_of_parameters(model).items() if part in frozen} if frozen else set()


def parts_of_parameters(model: Any) -> dict[str, Part]:
    """The part of each parameter of a whole model by its name; one beside all modules counts to the aligner."""
    parts = parts_of(model)
    return {name: parts.get(name.rpartition(".")[0], "aligner") for name, _ in model.named_parameters()}


def frozen_parts(model: Any, args: TunerArguments) -> set[Part]:
    """The parts of a model that settings keep as they are; none of a language model.

    Raises:
        ConfigError: a language model, and a setting for towers that asks for something.
    """
    settings: dict[Part, bool] = {"vit": args.freeze_vit, "aligner": args.freeze_aligner, "llm": args.freeze_llm}
    if loads_whole(model.config, args):
        return {part for part, frozen in settings.items() if frozen}
    for name, usual in OF_TOWERS.items():
        if (value := getattr(args, name)) not in (usual, False):
            raise no_tower(name, value)
    return set()


def no_tower(name: str, value: Any) -> ConfigError:
    """The error of a setting for towers where there is none."""
    of_variable = name == "max_pixels" and str(value) == os.environ.get("MAX_PIXELS")
    leave = "unset MAX_PIXELS" if of_variable else "leave it out"
    return ConfigError(f"--{name}: {str(value).lower()}: the model has no vision tower here; {leave}")


def check_reached(model: Any, adapted: Collection[str], args: TunerArguments) -> None:
    """Refuses an adapter, on the modules of these names, that reaches no layer of a part that settings unfreeze."""
    if not loads_whole(model.config, args) or args.full_towers:
        return
    parts = parts_of(model)
    reached = {parts.get(name) for name in adapted}
    for part, frozen in (("vit", args.freeze_vit), ("aligner", args.freeze_aligner)):
        if not frozen and part not in reached:
            raise ConfigError(
                f"--freeze_{part}: false: the adapter reaches no layer there; leave it out, change --target_modules, "
                "or use --tuner_type full"
            )


def is_part(config_class: type, loader: str = "AutoModelForCausalLM") -> bool:
    """Whether the class of transformers that loads it holds the text part of a multimodal checkpoint only."""
    import transformers

    kind = getattr(transformers, loader)._model_mapping.get(config_class, None)
    return kind is not None and config_class is not kind.config_class


def refuse_part(config: Any, folder: Path, args: CheckpointArguments, loader: str = "AutoModelForCausalLM") -> None:
    """Refuses a multimodal checkpoint of which training would save a part, or whose adapters have other names.

    Raises:
        ConfigError: see there.
    """
    if is_part(type(config), loader) and not loads_whole(config, args):
        raise ConfigError(
            f"--model: {folder}: a multimodal checkpoint, whose vision or audio tower would be lost; save "
            "its text part with AutoModelForCausalLM.from_pretrained(...).save_pretrained(...) of transformers; use it"
        )


def refuse_towers(written: Mapping[str, Any], name: str, flag: str = "--model", *, sees: bool) -> None:
    """Refuses, by its config.json, a multimodal checkpoint whose text part no class of transformers loads alone.

    sees: whether it may be loaded whole.

    Raises:
        ConfigError: see there.
    """
    from transformers import CONFIG_MAPPING

    found, model_type = [tower for tower in TOWERS if written.get(tower) is not None], written.get("model_type")
    if sees and found in (["vision_config"], ["thinker_config"]) and _is_known_whole(model_type):
        return
    if found and not (model_type in CONFIG_MAPPING and is_part(CONFIG_MAPPING[model_type])):
        strange = [tower for tower in found if tower != "vision_config" or not sees] or found
        media = "video" if sees and "vision_config" not in strange else "images, video"
        raise ConfigError(
            f"{flag}: {name}: a multimodal checkpoint ({model_type} with {strange[0]}): {media} and audio are not "
            "supported, and its text part is no model of its own; use a text model"
        )


def _is_known_whole(model_type: Any) -> bool:
    """Whether transformers has a model of images and text for the type in a config.json."""
    from transformers import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING and _is_known(CONFIG_MAPPING[model_type])


def _is_known(kind: Any) -> bool:
    """Whether there is a model of images and text for a class of configs."""
    from transformers import AutoModelForImageTextToText

    if getattr(kind, "model_type", None) == THINKER:
        import_module("swift.models.thinker")
    return kind in AutoModelForImageTextToText._model_mapping
