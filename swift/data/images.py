"""Images of rows: references are read into `Image`s, and an `Image` is decoded into pixels.

Rows may come from strangers. A reference is followed to bytes in the row itself, to regular files below the folder of
the dataset's file, links resolved, and with `--allow_media_urls` to public addresses (`swift.data.downloads`). Before
anything is decoded the header must name one of `FORMATS`, and bytes and pixels must be within limits: a PNG of 20 kB
can unfold to 483 MiB.

Pixels are decoded by `open_image` where they are needed. A fault that the header does not show, such as a missing end,
appears only there.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import re
import stat
import urllib.parse
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import PIL.Image
import PIL.ImageOps

from swift.data.downloads import download
from swift.data.records import RowError
from swift.errors import ConfigError, RefusedImage, first_line, is_out_of_memory
from swift.types import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats that are decoded, by Pillow's names. Not TIFF: its tiles may be far larger than the image, and a file of 136
bytes whose header says 64 x 64 takes 540 MiB."""

MAX_BYTES = 32 * 2**20
"""Maximum size of an encoded image."""

MAX_PIXELS = 64 * 2**20
"""Maximum number of pixels of an image; each takes 8 bytes while it is decoded, up to 18 in a WebP."""

MAX_SCANS = 50
"""Maximum number of passes over the pixels of a JPEG; a usual one has ten at most."""

warnings.filterwarnings("ignore", category=PIL.Image.DecompressionBombWarning)  # begins above `MAX_PIXELS`

_SHOWN = 80
_URL = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSource:
    """Where the images of a dataset may come from.

    folder: of the dataset's file; below it lie the files that rows may name, and relative paths begin there. None:
    rows may name no files. allow_urls: `--allow_media_urls`. download: maps a URL and a number of bytes that are too
    many to a file's bytes, or raises RowError.
    """

    folder: Path | None = None
    allow_urls: bool = False
    download: Callable[[str, int], bytes] = download


def read_image(reference: Any, source: ImageSource) -> Image:
    """The image that a value of a row refers to; its header is checked, its pixels are not decoded.

    Args:
        reference: encoded bytes; `{"bytes", "path"}`, of which bytes have precedence, as in `datasets`; a data URL; a
            path or `file://` URL; an http or https URL; or a PIL image, which is encoded as PNG.
        source: what may be read.

    Raises:
        RowError: `<reference>: <what is wrong>; <what to do>`.
    """
    if isinstance(reference, Mapping):
        reference = _in_struct(reference)
    try:
        path, content = _encoded(reference, source)
        _header(content)
    except RowError as error:
        raise RowError(f"{_shown(reference)}: {error}") from error
    return Image(digest_of(content), path, None if path else content)


def open_image(image: Image) -> PIL.Image.Image:
    """The pixels of an image: RGB, turned as its EXIF orientation says.

    An alpha channel is dropped and colours are not managed, as `convert("RGB")` does; 16 bits of grey become 8.

    Raises:
        RefusedImage: the bytes cannot be decoded, which is a fault of the row.
        ConfigError: the file at `path` is gone or has changed since it was read.
    """
    content = encoded(image)
    try:
        return _decoded(content)
    except RowError as error:
        raise RefusedImage(f"image {image.path or image.digest}: {error}") from error


def pixels_of(image: Image) -> int:
    """Number of pixels, as its header says."""
    header = _header(encoded(image))
    return header.width * header.height


def media_type(image: Image) -> str:
    """What an image is to a browser, as its header says: `image/png`. Raises ConfigError: see `encoded`."""
    kind = str(_header(encoded(image)).format)
    return "image/jpeg" if kind == "MPO" else PIL.Image.MIME[kind]


def encoded(image: Image) -> bytes:
    """The bytes of an image. Raises ConfigError: the file at `path` is gone or has changed since it was read."""
    return image.content if image.content is not None else _read_again(image, f"image {image.path}")


def digest_of(content: bytes) -> str:
    """The first 32 hex digits of the SHA-256 of an encoded image."""
    return hashlib.sha256(content).hexdigest()[:32]


def _in_struct(struct: Mapping[str, Any]) -> Any:
    """The reference in a struct of parquet files and of `datasets`."""
    for key in ("bytes", "path"):
        if struct.get(key):
            return struct[key]
    raise RowError(f"an object with {', '.join(map(str, struct)) or 'nothing'}: no image; give it bytes or a path")


def _encoded(reference: Any, source: ImageSource) -> tuple[str | None, bytes]:
    """The path of a reference to a file, else None, and the encoded bytes."""
    if isinstance(reference, bytes):
        return None, _within_limit(reference)
    if isinstance(reference, PIL.Image.Image):
        return None, _as_png(reference)
    if not isinstance(reference, str):
        raise RowError("no image; give a path, a data URL, or bytes")
    if reference[:5].lower() == "data:":
        return None, _in_data_url(reference)
    scheme = url[1].lower() if (url := _URL.match(reference)) else None
    if scheme in ("http", "https"):
        if not source.allow_urls:
            raise RowError("URLs are not read; store the file beside the dataset, or set --allow_media_urls true")
        return None, source.download(reference, MAX_BYTES)
    if scheme not in (None, "file"):
        raise RowError(f"{scheme}:// is not read; store the file beside the dataset")
    path = _path_of(reference if scheme is None else _path_in_url(reference), source.folder)
    return str(path), _file_content(path)


def _in_data_url(url: str) -> bytes:
    head, _, text = url.partition(",")
    if not head.lower().endswith(";base64"):
        raise RowError("a data URL without base64; write data:image/png;base64,<bytes>")
    text = "".join(text.split())
    if len(text) // 4 * 3 > MAX_BYTES + 3:
        raise _too_large()
    try:
        content = base64.b64decode(text, validate=True)
    except ValueError as error:  # binascii.Error is one, too
        raise RowError(f"broken base64 ({first_line(error)}); encode the image again") from error
    return _within_limit(content)


def _path_in_url(url: str) -> str:
    """The path of a file:// URL."""
    host, _, path = url[len("file://") :].partition("/")
    if host not in ("", "localhost"):
        raise RowError(f"a file on the host {host} is not read; store it beside the dataset")
    return "/" + urllib.parse.unquote(path)


def _path_of(text: str, folder: Path | None) -> Path:
    """The path without links; it lies below the folder."""
    if folder is None:
        raise RowError("no files are read here; give the bytes of the image, as in a data URL")
    try:
        folder = folder.resolve()
        path = (folder / text).resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a zero byte is a ValueError, a circle of links the last
        raise RowError(f"no usable path ({first_line(error)}); correct it") from error
    if not path.is_relative_to(folder):
        raise RowError(f"leads out of {folder}, the folder of the dataset's file; store it below")
    return path


def _file_content(path: Path) -> bytes:
    """The bytes of a regular file: a pipe or a device may never end."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise RowError("no regular file; give the path of an image")
        with path.open("rb") as file:
            return _within_limit(file.read(MAX_BYTES + 1))
    except OSError as error:
        raise RowError(f"{_shown(str(path))} cannot be read ({error.strerror}); correct the path") from error


def _read_again(image: Image, subject: str) -> bytes:
    assert image.path is not None, "an image has content or a path"
    try:
        content = _file_content(Path(image.path))
    except RowError as error:
        raise ConfigError(f"{subject}: {error}") from error
    if digest_of(content) != image.digest:
        raise ConfigError(f"{subject}: changed since the dataset was loaded; leave its files as they are during a run")
    return content


def _within_limit(content: bytes) -> bytes:
    if len(content) > MAX_BYTES:
        raise _too_large()
    return content


def _too_large() -> RowError:
    return RowError(f"over {MAX_BYTES} bytes; make it smaller")


def _as_png(image: PIL.Image.Image) -> bytes:
    """A PIL image, which may not be decoded yet, as PNG: the bytes that it came from are not known any more."""
    _check_pixels(image)
    content = io.BytesIO()
    with _decoding():
        _as_rgb(PIL.ImageOps.exif_transpose(image)).save(content, "PNG")
    return content.getvalue()


def _header(content: bytes) -> PIL.Image.Image:
    """The image of which only the header is read. Raises RowError: another format, or too many pixels."""
    with _decoding():
        image = PIL.Image.open(io.BytesIO(content), formats=FORMATS)
        _check_pixels(image)
        is_still = image.format == "MPO" or not getattr(image, "is_animated", False)  # MPO: a photo, and its preview
    if not is_still:
        raise RowError("several frames; save one of them as a file of its own")
    if image.format in ("JPEG", "MPO") and content.count(b"\xff\xda") > MAX_SCANS:  # both bytes only begin a scan
        raise RowError(f"a JPEG of more than {MAX_SCANS} scans; write it again")
    return image


def _check_pixels(image: PIL.Image.Image) -> None:
    """Raises RowError: too many pixels, none, or such that have no 8 bits."""
    if not image.width * image.height:
        raise RowError("no pixels; write the image again")
    if image.width * image.height > MAX_PIXELS:
        raise RowError(f"{image.width} x {image.height}: over {MAX_PIXELS} pixels; make it smaller")
    if image.mode in ("I", "F"):
        raise RowError("32 bits per pixel and colour; convert it to 8 bits")


def _decoded(content: bytes) -> PIL.Image.Image:
    image = _header(content)
    with _decoding():
        PIL.ImageOps.exif_transpose(image, in_place=True)  # decodes; one copy fewer
        return _as_rgb(image)


def _as_rgb(image: PIL.Image.Image) -> PIL.Image.Image:
    """The pixels with three colours of 8 bits."""
    if image.mode.startswith("I;16"):  # convert("RGB") would make all above 255 white
        image = image.convert("I").point(lambda value: value / 256).convert("L")
    return image.convert("RGB")


@contextlib.contextmanager
def _decoding() -> Iterator[None]:
    """A block in which Pillow reads an image, for whose faults it raises errors of any type. Raises RowError."""
    try:
        yield
    except RowError:
        raise
    except PIL.UnidentifiedImageError as error:
        raise RowError(f"no image of a format that is read ({', '.join(FORMATS)}); convert it") from error
    except PIL.Image.DecompressionBombError as error:
        raise RowError(f"over {MAX_PIXELS} pixels; make it smaller") from error
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise RowError(f"a damaged image ({first_line(error)}); write it again") from error


def _shown(reference: Any) -> str:
    """A reference for messages: no bytes, no password or key of a URL."""
    if isinstance(reference, bytes):
        return f"image of {len(reference)} bytes"
    if not isinstance(reference, str):
        return type(reference).__name__
    if reference[:5].lower() == "data:":
        return f"{reference.partition(',')[0][:_SHOWN]},..."
    if _URL.match(reference):
        reference = re.sub(r"//[^/?#]*@", "//", reference.partition("?")[0])
    return reference if len(reference) <= _SHOWN else f"...{reference[-_SHOWN:]}"
