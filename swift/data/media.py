"""The images of a row, whichever way it is written, in one normal form.

A turn with images has a list of parts as its content, `{"type": "text", "text": ...}` and `{"type": "image", "image":
<digest>}`; every other turn keeps its text. The forms that are read:

* ms-swift: `<image>` in texts, and a column `images` (or `image`);
* TRL: parts `{"type": "image"}`, and such a column;
* OpenAI: parts `{"type": "image_url", "image_url": {"url": ...}}`;
* Axolotl and transformers: parts `{"type": "image"}` with `image`, `url`, `path` or `base64`.

Tags and empty parts are places, which the images of the column fill in their order; there must be as many of both.
If the messages have neither place nor image, the images of the column come before the text of the first user turn, as
in ms-swift and TRL. ms-swift also adds tags where some are lacking, and leaves those that are too many in the text:
here both are errors, as the row may have lost an image. Turns of every role but `assistant` may have images, and a
document (`swift.data.texts`), which is a single turn. Without such a column `<image>` is text.

Video and audio are refused in all these places.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swift.data.images import ImageSource, read_image
from swift.data.messages import MEDIA, Message, parsed
from swift.data.records import RowError
from swift.errors import counted
from swift.types import Image

COLUMNS = ("images", "image")
TAG = "<image>"
REFERENCES = ("image", "image_url", "url", "path", "base64")
"""Keys of an image part that refer to its image."""

TAG_IS_TEXT = f"note: {TAG} in rows without a column images: it is text there"
_NO_OTHERS = "video and audio are not supported; use text and images"


@dataclass(frozen=True, slots=True)
class RowMedia:
    """A row's messages in normal form, their images in the order of the parts, and notes for the report.

    The i-th part of type `image` shows `images[i]`: an image that two parts show is there twice.
    """

    messages: list[Message]
    images: tuple[Image, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class _Slot:
    """An image between the texts of a turn. reference: None until one of the column is put in. index: its number."""

    reference: Any = None
    index: int | None = None


def read_media(
    row: Mapping[str, Any], messages: str | Sequence[Message], source: ImageSource, *, document: bool = False
) -> RowMedia:
    """The messages of a row in normal form, and its images.

    Args:
        row: the columns, under the names that `--columns` gives.
        messages: turns of `role` and `content`, a text or a list of parts; or a text, which becomes a user turn. They
            are not changed.
        source: where images may come from.
        document: the messages are one, in which images may stand anywhere.

    Raises:
        RowError: video or audio, an image that `read_image` refuses, places without images or images without places.
    """
    turns: Sequence[Message] = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    _refuse_other_media(row, turns)
    column, given = _column_images(row)
    contents = [_pieces(turn, f"turn {number}", tags=column is not None) for number, turn in enumerate(turns, start=1)]
    if not document:
        _refuse_answers(turns, contents)
    if given and not list(_slots(contents)):
        contents[0 if document else _first_user(turns)][:0] = [_Slot() for _ in given]
    _fill([slot for slot in _slots(contents) if slot.reference is None], given, column)
    images = tuple(_image(slot, number, source) for number, slot in enumerate(_slots(contents), start=1))
    digests = iter([image.digest for image in images])
    read = [_turn(turn, pieces, digests) for turn, pieces in zip(turns, contents, strict=True)]
    has_tag = any(TAG in piece for pieces in contents for piece in pieces if isinstance(piece, str))
    return RowMedia(read, images, (TAG_IS_TEXT,) if has_tag else ())


def _refuse_other_media(row: Mapping[str, Any], turns: Sequence[Message]) -> None:
    """Raises RowError: a column of video or audio has values, or a tag for one is beside such a column."""
    for column, tag in MEDIA.items():
        if column in COLUMNS:
            continue
        if row.get(column):
            raise RowError(f"column {column}: {_NO_OTHERS}, or rename it with --columns")
        if column in row and any(f"<{tag}>" in str(turn.get("content")) for turn in turns):
            raise RowError(f"<{tag}> beside the column {column}: {_NO_OTHERS}")
    if row.get("rejected_images"):
        raise RowError("column rejected_images: rejected answers have the images of the prompt; leave the column out")


def _column_images(row: Mapping[str, Any]) -> tuple[str | None, list[Any]]:
    """The column of images, None if there is none, and the references in it."""
    here = [name for name in COLUMNS if name in row]
    filled = [name for name in here if row[name]]
    if len(filled) > 1:
        raise RowError(f"columns {' and '.join(filled)}: both hold images; keep one of them")
    if not filled:
        return next(iter(here), None), []
    value = parsed(row[filled[0]], filled[0])  # in a csv file a list is JSON text
    return filled[0], value if isinstance(value, list) else [value]


def _pieces(turn: Message, where: str, *, tags: bool) -> list[str | _Slot]:
    """Texts and images of a turn. tags: whether `<image>` in a text is a place."""
    content = turn.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    parts = content if isinstance(content, list) else []  # null beside tool calls
    return [piece for part in parts for piece in _pieces_of(part, where, tags=tags)]


def _pieces_of(part: Any, where: str, *, tags: bool) -> Iterator[str | _Slot]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        first, *others = part["text"].split(TAG) if tags else [part["text"]]
        yield first
        for text in others:
            yield _Slot()
            yield text
    elif kind in ("image", "image_url"):
        yield _slot(part, where)
    elif str(kind).removeprefix("input_").removesuffix("_url") in ("video", "audio"):
        raise RowError(f"{where}: a part of type {kind}: {_NO_OTHERS}")
    else:
        raise RowError(f"{where}: a part of type {kind}; valid: text with a text, image, image_url")


def _slot(part: Mapping[str, Any], where: str) -> _Slot:
    """The slot of an image part; a null is like a missing key, as tables of parquet files have all keys."""
    named = [key for key in REFERENCES if part.get(key) is not None]
    if len(named) > 1:
        raise RowError(f"{where}: an image with {' and '.join(named)}; keep one of them")
    if not named:
        return _Slot(index=part.get("index"))
    value = part[named[0]]
    if named[0] == "image_url" and isinstance(value, Mapping):
        value = value.get("url")
        if value is None:
            raise RowError(f"{where}: an image_url without url; add it")
    if named[0] == "base64" and isinstance(value, str) and not value.startswith("data:"):
        value = f"data:;base64,{value}"
    return _Slot(value)


def _slots(contents: Sequence[Sequence[str | _Slot]]) -> Iterator[_Slot]:
    return (piece for pieces in contents for piece in pieces if isinstance(piece, _Slot))


def _refuse_answers(turns: Sequence[Message], contents: Sequence[Sequence[str | _Slot]]) -> None:
    """Raises RowError: an image in an assistant turn."""
    for number, (turn, pieces) in enumerate(zip(turns, contents, strict=True), start=1):
        if turn.get("role") == "assistant" and any(isinstance(piece, _Slot) for piece in pieces):
            raise RowError(f"turn {number}: an image in an assistant turn; answers are texts: move it to a user turn")


def _first_user(turns: Sequence[Message]) -> int:
    for number, turn in enumerate(turns):
        if turn.get("role") == "user":
            return number
    raise RowError("no user turn that the images could belong to")


def _fill(places: Sequence[_Slot], given: Sequence[Any], column: str | None) -> None:
    """Puts the images of the column into the places."""
    if len(places) != len(given):
        where = f"column {column}" if column else "no column images"
        raise RowError(
            f"{where}: {counted(len(given), 'image')} for {counted(len(places), 'place')} "
            f"({TAG}, or parts without an image); give one for each"
        )
    for number, (place, reference) in enumerate(zip(places, given, strict=True)):
        if place.index not in (None, number):
            raise RowError(f"an image part with index {place.index} in place {number}; put the images into this order")
        place.reference = reference


def _image(slot: _Slot, number: int, source: ImageSource) -> Image:
    try:
        return read_image(slot.reference, source)
    except RowError as error:
        raise RowError(f"image {number}: {error}") from error


def _turn(turn: Message, pieces: Sequence[str | _Slot], digests: Iterator[str]) -> Message:
    """A turn in normal form: neighbouring texts are joined, empty ones left out."""
    if isinstance(turn.get("content"), list) or any(isinstance(piece, _Slot) for piece in pieces):
        return {**turn, "content": _content(pieces, digests)}
    return turn


def _content(pieces: Sequence[str | _Slot], digests: Iterator[str]) -> str | list[dict[str, str]]:
    parts: list[dict[str, str]] = []
    for piece in pieces:
        if isinstance(piece, _Slot):
            parts.append({"type": "image", "image": next(digests)})
        elif parts and parts[-1]["type"] == "text":
            parts[-1]["text"] += piece
        elif piece:
            parts.append({"type": "text", "text": piece})
    if any(part["type"] == "image" for part in parts):
        return parts
    return "".join(part["text"] for part in parts)
