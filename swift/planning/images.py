"""Images of a run that is planned: drawn ones, which the model's own processor makes ready."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swift.errors import ConfigError, counted

if TYPE_CHECKING:
    from swift.models.vision import Vision

PIXELS = 1024 * 1024
"""Of an image, if nothing says."""


@dataclass(frozen=True, slots=True)
class DrawnImages:
    """The images of each prompt, all of one size.

    vision: of the model. ids: token ids of a prompt with nothing but the images; [] without any. title: for people.
    """

    vision: Vision
    ids: list[int]
    title: str


def draw_images(args: Any, asked: Any, config: Any) -> DrawnImages | None:
    """The images that a plan is asked for; None where prompts have none, and no process computes its tower for others.

    Args:
        args: of the run.
        asked: of the plan.
        config: of the model.

    Raises:
        ConfigError: the model has no tower, or its folder no processor.
    """
    from swift.models.multimodal import loads_whole, no_tower

    if not loads_whole(config, args):
        for name in ("images_per_prompt", "image_pixels"):
            if value := getattr(asked, name):
                raise no_tower(name, value)
        return None
    number = 1 if asked.images_per_prompt is None else asked.images_per_prompt
    if not number and not args.sharded_by:
        return None
    return _drawn(args, number, asked.image_pixels or args.max_pixels or PIXELS)


def _drawn(args: Any, number: int, pixels: int) -> DrawnImages:
    from swift.models.tokenizer import load_chat

    try:
        vision = load_chat(args, weights=False).vision
    except ConfigError as error:
        raise ConfigError(f"{error}; plan without images with --images_per_prompt 0, and without --fsdp") from error
    assert vision is not None
    if not number:
        return DrawnImages(vision, [], "no images")
    side = math.isqrt(pixels)
    ids = vision.example(number=number, size=(side, side), text="")
    title = f"{counted(number, 'image')} of {side:,} x {side:,} pixels in each prompt, {len(ids):,} tokens"
    return DrawnImages(vision, ids, title)


def prompt_of(images: DrawnImages | None, given: int | None, text: int) -> int:
    """Tokens of a prompt: as many as are given, or of a text and the images.

    Raises ConfigError: the images have more.
    """
    least = len(images.ids) if images else 0
    if given is not None and given < least:
        raise ConfigError(
            f"--prompt_tokens: {given}: its images have {least}; give more, or smaller ones (--image_pixels)"
        )
    return least + text if given is None else given
