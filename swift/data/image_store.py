"""The images of this process: messages name each by its digest, and token ids name all of a prompt at once.

A placeholder in the token ids of a prompt is a negative number made of the digests of the prompt's images. So two
prompts that differ in nothing but an image differ in their ids, wherever ids are compared, stored or sent, and ids
alone say which pixels belong to them (`swift.models.vision`).

Every process that reads rows fills its own store. The pixels under a name never change, as it is made of them; where
an image was read from twice, the later place counts. Images of requests from other processes are there only while they
are used (`brought`).
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from swift.data.images import encoded
from swift.types import Image, ShownImage

NAME_TOKENS, NAME_BITS = 4, 31
"""Placeholders that name the images of a prompt, and bits of each; further ones repeat them."""


@dataclass(slots=True)
class _Store:
    """images: by their digests. prompts, shown: those of a prompt by the numbers that name them."""

    images: dict[str, Image] = field(default_factory=dict)
    prompts: dict[tuple[int, ...], tuple[Image, ...]] = field(default_factory=dict)
    shown: dict[tuple[int, ...], tuple[ShownImage, ...]] = field(default_factory=dict)


_store: ContextVar[_Store] = ContextVar("images", default=_Store())  # noqa: B039 - that of the process


@contextlib.contextmanager
def brought(prompts: Sequence[Sequence[Image]]) -> Iterator[None]:
    """A block of this thread in which the images of these prompts are known, and none else.

    Without any image the store of the process remains.
    """
    if not any(prompts):
        yield
        return
    token = _store.set(_Store())
    try:
        for images in prompts:
            remember(images)
        yield
    finally:
        _store.reset(token)


def remember(images: Sequence[Image]) -> None:
    """Keep the images of a prompt."""
    store = _store.get()
    store.images.update({image.digest: image for image in images})
    if images:
        store.prompts[name_of(images)] = tuple(images)


def remember_shown(shown: Sequence[ShownImage]) -> None:
    """Keep how prompts show these images, for engines that write their tokens themselves (`images_shown`).

    An image may be shown in another way among others.
    """
    _store.get().shown[name_of([one.image for one in shown])] = tuple(shown)


def images_in(messages: Sequence[Mapping[str, Any]]) -> tuple[Image, ...]:
    """The images of a chat in their order; one that is there twice is named twice."""
    known = _store.get().images
    return tuple(
        known[part["image"]]
        for turn in messages
        if isinstance(turn.get("content"), list)
        for part in turn["content"]
        if part["type"] == "image"
    )


def with_files(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A chat for people: each image has its digest, and its path if it was read from one."""
    return _with_images(
        messages, lambda image: {**({"path": image.path} if image.path else {}), "digest": image.digest}
    )


def with_contents(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A chat as a row of a dataset that lies anywhere: each image is a data URL.

    Raises ConfigError: see `swift.data.images.encoded`.
    """

    def shown(image: Image) -> dict[str, Any]:
        return {"image": f"data:application/octet-stream;base64,{base64.b64encode(encoded(image)).decode()}"}

    return _with_images(messages, shown)


def _with_images(
    messages: Sequence[Mapping[str, Any]], shown: Callable[[Image], dict[str, Any]]
) -> list[dict[str, Any]]:
    known = _store.get().images
    return [
        {
            **turn,
            "content": [
                {"type": "image", **shown(known[part["image"]])} if part["type"] == "image" else dict(part)
                for part in turn["content"]
            ],
        }
        if isinstance(turn.get("content"), list)
        else dict(turn)
        for turn in messages
    ]


def name_of(images: Sequence[Image]) -> tuple[int, ...]:
    """The `NAME_TOKENS` negative numbers, of int32, that name images in their order."""
    joint = hashlib.sha256("".join(image.digest for image in images).encode()).digest()
    parts = (int.from_bytes(joint[4 * i : 4 * i + 4]) for i in range(NAME_TOKENS))
    return tuple(-1 - (part & ((1 << NAME_BITS) - 1)) for part in parts)


def images_named(ids: Iterable[int]) -> tuple[Image, ...]:
    """The images that the token ids of a prompt name; () for a text."""
    name = tuple(itertools.islice((token for token in ids if token < 0), NAME_TOKENS))
    if not name:
        return ()
    known = _store.get().prompts
    if len(name) < NAME_TOKENS:  # fewer placeholders than that
        name = next(whole for whole in known if whole[: len(name)] == name)
    return known[name]


def names(ids: Iterable[int], images: Sequence[Image]) -> bool:
    """Whether the token ids of a prompt name these images; ids without placeholders name none."""
    named = [token for token in ids if token < 0]
    return named == list(itertools.islice(itertools.cycle(name_of(images)), len(named))) and bool(named) == bool(images)


def images_shown(ids: Iterable[int]) -> tuple[ShownImage, ...]:
    """The images that the token ids of a prompt name, as `Vision.encode` has shown them."""
    images = images_named(ids)
    return _store.get().shown.get(name_of(images)) or tuple(ShownImage(image, -1, ()) for image in images)


def images_sent(ids: Iterable[int]) -> tuple[ShownImage, ...]:
    """The same with their bytes, for another process.

    Raises ConfigError: see `swift.data.images.encoded`.
    """
    return tuple(
        replace(shown, image=replace(shown.image, path=None, content=encoded(shown.image)))
        for shown in images_shown(ids)
    )
