"""Images of prompts, read again from where completions.jsonl says that they lie: a file, or a row of a dataset's file.

They are read as those of a dataset are (`swift.data.images`): regular files of known formats, within its limits; no
address is asked. What is shown has the digest of what was trained on.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from swift.data.files import read_file
from swift.data.images import ImageSource, encoded, media_type, read_image
from swift.data.records import RawRow, RowError
from swift.data.spec import is_data
from swift.errors import ConfigError
from swift.types import Image

KEPT = 16
"""Images of rows that are kept, as each needs its file read up to there."""


def image_of(row: Mapping[str, Any], digest: str) -> tuple[bytes, str]:
    """The encoded image of a completion, and its media type.

    row: of completions.jsonl.

    Raises:
        ConfigError: the row names no such image, or it is not there any more.
    """
    place = next((one for one in row.get("images", ()) if one["digest"] == digest), None)
    if place is None:
        raise ConfigError(f"image {digest}: not one of this completion's")
    path = Path(place["path"] if "path" in place else place["row"].rpartition(":")[0])
    try:
        status = path.stat()
        image = read_image(str(path), ImageSource(folder=path.parent)) if "path" in place else None
    except (OSError, RowError) as error:
        raise ConfigError(f"image {digest}: {path}: not there any more, or no image ({error})") from error
    image = image or _in_row(path, place["row"], digest, status.st_mtime_ns)
    if image is None or image.digest != digest:
        raise ConfigError(f"image {digest}: {path}: has changed since the run")
    return encoded(image), media_type(image)


@functools.lru_cache(maxsize=KEPT)
def _in_row(file: Path, origin: str, digest: str, _: int) -> Image | None:
    """The image in a row of a dataset's file; None if the row has it no more."""
    records = read_file(file) if file.is_file() and is_data(file) else iter(())
    row = next((one for one in records if isinstance(one, RawRow) and one.origin == origin), None)
    for url in _data_urls(row.values if row else None):
        with contextlib.suppress(RowError):  # a column that is none of images
            image = read_image(url, ImageSource())
            if image.digest == digest:
                return image
    return None


def _data_urls(value: Any) -> Iterator[str]:
    """The data URLs in a row, however deep."""
    if isinstance(value, str) and value[:5].lower() == "data:":
        yield value
    elif isinstance(value, dict):
        if isinstance(value.get("base64"), str):
            yield f"data:;base64,{value['base64']}"
        yield from _data_urls(list(value.values()))
    elif isinstance(value, list):
        for one in value:
            yield from _data_urls(one)
