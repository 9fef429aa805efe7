"""Models of images and text with a head of scores, where transformers has no class for them.

Its classes of this kind are all made alike: the model without its language head, and a linear layer over the hidden
state of the last token (`GenericForSequenceClassification`).
"""

from __future__ import annotations

from typing import Any

from swift.models.multimodal import is_whole


def ensure_reward_class(config: Any) -> None:
    """Let `AutoModelForSequenceClassification` load the model of a config, if that sees images and it cannot yet."""
    from transformers import (
        AutoModel,
        AutoModelForImageTextToText,
        AutoModelForSequenceClassification,
        PreTrainedModel,
        conversion_mapping,
    )
    from transformers.modeling_layers import GenericForSequenceClassification

    kind = type(config)
    if not is_whole(config) or kind in AutoModelForSequenceClassification._model_mapping:
        return
    ending = PreTrainedModel.__name__
    base = next(one for one in AutoModel._model_mapping[kind].__mro__ if one.__name__.endswith(ending))
    language = AutoModelForImageTextToText._model_mapping[kind]
    name = f"{base.__name__.removesuffix(ending)}ForSequenceClassification"
    body = {"__module__": base.__module__, "base_model_prefix": language.base_model_prefix}
    made = type(name, (GenericForSequenceClassification, base), body)
    # `register` of transformers 5.16 silently leaves out a config of its own
    AutoModelForSequenceClassification._model_mapping._extra_content[kind] = made
    names = conversion_mapping.get_checkpoint_conversion_mapping(language.__name__)  # of files with older names
    if names is not None:
        conversion_mapping.register_checkpoint_conversion_mapping(name, names)
