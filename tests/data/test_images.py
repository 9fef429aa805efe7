"""References of rows become images, or one line with the reason; nothing large is decoded, nothing outside is read."""

import base64
import io
import os
import pickle
import subprocess
import sys

import hostile_images as hostile
import pytest
from hostile_images import KINDS, encoded
from PIL import Image as Pictures

from swift.data import images
from swift.data.images import MAX_BYTES, ImageSource, digest_of, open_image, read_image
from swift.data.records import RowError
from swift.errors import ConfigError, RefusedImage
from swift.types import Image

NO_FORMAT = "no image of a format that is read (PNG, JPEG, WEBP, GIF, BMP); convert it"
TOO_MANY = "over 67108864 pixels; make it smaller"
FRAMES = "several frames; save one of them as a file of its own"
ENCODED = "no image; give a path, a data URL, or bytes"
PNG = encoded()
DATA_URL = "data:image/png;base64," + base64.b64encode(PNG).decode()


@pytest.fixture
def folder(tmp_path):
    """The folder of a dataset's file, and what lies beside it."""
    folder = tmp_path / "data"
    (folder / "images").mkdir(parents=True)
    (folder / "images" / "a.png").write_bytes(PNG)
    (folder / "b c.png").write_bytes(PNG)
    (tmp_path / "secret.png").write_bytes(PNG)
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "inner.png").symlink_to(folder / "images" / "a.png")
    (folder / "out").symlink_to(tmp_path)
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "zero").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe")
    with (folder / "large.png").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    return folder


HOSTILE_BYTES = {
    "nothing": (b"", NO_FORMAT),
    "text": (b"hello", NO_FORMAT),
    "HTML": (b"<!DOCTYPE html><img src=x>", NO_FORMAT),
    "SVG": (b'<svg xmlns="http://www.w3.org/2000/svg"><script/></svg>', NO_FORMAT),
    "EPS": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", NO_FORMAT),
    "PDF": (b"%PDF-1.7\n", NO_FORMAT),
    "ICO": (encoded(kind="ICO"), NO_FORMAT),
    "PPM": (b"P6 99999 99999 255\n", NO_FORMAT),
    "only a signature": (PNG[:8], NO_FORMAT),
    "PNG bomb": (lambda: hostile.png(13000, 13000), f"13000 x 13000: {TOO_MANY}"),
    "PNG of 10 gigapixels": (lambda: hostile.png(100_000, 100_000, pixels=b""), TOO_MANY),
    "long PNG": (lambda: hostile.png(2**31 - 1, 1, pixels=b""), TOO_MANY),
    "PNG of no width": (lambda: hostile.png(0, 5, pixels=b""), NO_FORMAT),
    "text bomb": (hostile.text_bomb, "a damaged image"),
    "profile bomb": (hostile.profile_bomb, "a damaged image"),
    "many texts": (hostile.many_texts, "a damaged image"),
    "WebP bomb": (hostile.huge_webp, TOO_MANY),
    "GIF bomb": (hostile.huge_gif, TOO_MANY),
    "GIF frame beyond its screen": (hostile.gif_frame_beyond_its_screen, TOO_MANY),
    "BMP bomb": (hostile.huge_bmp, f"100000 x 1000: {TOO_MANY}"),
    "JPEG bomb": (hostile.huge_jpeg, TOO_MANY),
    "TIFF": (encoded(kind="TIFF"), NO_FORMAT),
    "TIFF whose tiles take 540 MiB": (hostile.huge_tiles, NO_FORMAT),
    "scans without end": (hostile.scans_without_end, "a JPEG of more than 50 scans; write it again"),
    "animated GIF": (lambda: hostile.frames("GIF"), FRAMES),
    "animated WebP": (lambda: hostile.frames("WEBP"), FRAMES),
    "animated PNG": (lambda: hostile.frames("PNG"), FRAMES),
    "too many bytes": (lambda: bytes(MAX_BYTES + 1), "over 33554432 bytes; make it smaller"),
}  # fmt: skip


def made(content):
    return content() if callable(content) else content


@pytest.mark.parametrize("name", HOSTILE_BYTES)
def test_hostile_bytes_are_refused_by_their_header(name):
    content, expected = HOSTILE_BYTES[name]
    content = made(content)
    with pytest.raises(RowError) as caught:
        read_image(content, ImageSource())
    line = str(caught.value)
    assert line.startswith(f"image of {len(content)} bytes: {expected}") and "\n" not in line
    assert len(line) < 300


def outside(folder):
    return f"leads out of {folder}, the folder of the dataset's file; store it below"


HOSTILE_REFERENCES = {
    "parent": ("../secret.png", outside),
    "parent on the way": ("images/../../secret.png", outside),
    "absolute": ("/etc/passwd", outside),
    "processes": ("/proc/self/environ", outside),
    "device": ("/dev/zero", outside),
    "link to a file": ("link.png", outside),
    "link to a folder": ("out/secret.png", outside),
    "link to a device": ("zero", outside),
    "file URL": ("file:///etc/passwd", outside),
    "quoted parent": ("file:///proc/%2e%2e/etc/passwd", outside),
    "another host's file": ("file://host/a.png", "a file on the host host is not read; store it beside the dataset"),
    "folder itself": ("images", "no regular file; give the path of an image"),
    "no name": ("", "no regular file; give the path of an image"),
    "pipe": ("pipe", "no regular file; give the path of an image"),
    "missing": ("c.png", "c.png cannot be read (No such file or directory); correct the path"),
    "file as a folder": ("b c.png/d", "cannot be read (Not a directory); correct the path"),
    "zero byte": ("a\0.png", "no usable path (embedded null byte); correct it"),
    "surrogate": ("\ud800.png", "no usable path ("),
    "long name": ("a" * 300, "(File name too long); correct"),
    "circle": ("loop", "no usable path ("),
    "large file": ("large.png", "over 33554432 bytes; make it smaller"),
    "URL": ("https://example.org/a.png", "URLs are not read; store the file beside the dataset, or set --allow_media"),
    "URL in capitals": ("HTTP://127.0.0.1/", "URLs are not read; store the file beside the dataset, or set --allow_me"),
    "bucket": ("s3://bucket/a.png", "s3:// is not read; store the file beside the dataset"),
    "FTP": ("ftp://host/a.png", "ftp:// is not read; store the file beside the dataset"),
    "plain data URL": ("data:image/svg+xml,<svg/>", "a data URL without base64; write data:image/png;base64,<bytes>"),
    "no comma": ("data:image/png;base64", "no image of a format that is read ("),
    "broken base64": ("data:image/png;base64,@@@@", "broken base64"),
    "other letters": ("data:image/png;base64,ä", "broken base64"),
    "large data URL": ("data:;base64," + "A" * (MAX_BYTES // 3 * 4 + 8), "over 33554432 bytes; make it smaller"),
    "null": (None, ENCODED),
    "number": (7, ENCODED),
    "list": ([DATA_URL], ENCODED),
    "empty struct": ({"bytes": None, "path": None}, "an object with bytes, path: no image; give it bytes or a path"),
    "other struct": ({"url": "a.png"}, "an object with url: no image; give it bytes or a path"),
    "path in a struct": ({"bytes": None, "path": "../secret.png"}, outside),
    "text as bytes": ({"bytes": 5, "path": "images/a.png"}, ENCODED),
}


@pytest.mark.parametrize("name", HOSTILE_REFERENCES)
def test_hostile_references_are_refused(name, folder):
    reference, expected = HOSTILE_REFERENCES[name]
    with pytest.raises(RowError) as caught:
        read_image(reference, ImageSource(folder=folder))
    line = str(caught.value)
    assert (expected(folder) if callable(expected) else expected) in line
    assert len(line) < 500


def test_a_dataset_without_a_folder_has_no_files():
    with pytest.raises(RowError, match=r"a\.png: no files are read here; give the bytes of the image"):
        read_image("a.png", ImageSource())


def test_messages_hold_no_password_and_little_of_what_is_long():
    def line(reference):
        with pytest.raises(RowError) as caught:
            read_image(reference, ImageSource())
        return str(caught.value)

    assert line("https://me:hunter2@host/a.png?key=abc").startswith("https://host/a.png: URLs are not read")
    assert line("x" * 5000).startswith("..." + "x" * 80 + ": ")
    assert line("data:image/png;base64," + "@" * 5000).startswith("data:image/png;base64,...: ")


DAMAGED = {
    "half a PNG": lambda: PNG[: len(PNG) // 2],
    "half a JPEG": lambda: encoded(kind="JPEG")[:-200],
    "half a WebP": lambda: encoded(kind="WEBP", lossless=True)[:-40],
    "half a GIF": lambda: encoded(kind="GIF")[:-200],
    "half a BMP": lambda: encoded(kind="BMP")[:-200],
    "PNG without rows": lambda: hostile.png(8, 8, pixels=b""),
    "PNG of other bytes": lambda: hostile.png(8, 8, pixels=b"not compressed"),
    "PNG with a wrong checksum": lambda: PNG[:29] + b"\0\0\0\0" + PNG[33:],
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_images_are_refused_at_the_latest_when_they_are_decoded(name):
    content = DAMAGED[name]()
    with pytest.raises((RowError, RefusedImage)) as caught:
        open_image(read_image(content, ImageSource()))
    line = str(caught.value)
    assert NO_FORMAT in line or "a damaged image (" in line
    assert "\n" not in line and len(line) < 300


MEMORY = """
import pickle, sys
from swift.data.images import ImageSource, read_image
from swift.data.records import RowError

def peak_kb():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

read_image(pickle.load(open(sys.argv[1] + ".good", "rb")), ImageSource())
contents = pickle.load(open(sys.argv[1], "rb"))
before = peak_kb()
for content in contents:
    try:
        read_image(content, ImageSource())
    except RowError:
        continue
    sys.exit("read")
print(peak_kb() - before)
"""


def test_refusing_them_takes_little_memory(tmp_path):
    contents = [made(content) for name, (content, _) in HOSTILE_BYTES.items() if name != "too many bytes"]
    (tmp_path / "images").write_bytes(pickle.dumps(contents))
    (tmp_path / "images.good").write_bytes(pickle.dumps(encoded(kind="WEBP")))
    words = [sys.executable, "-c", MEMORY, str(tmp_path / "images")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 24 * 2**10  # the PNG bomb alone would be 483 MiB
    assert done.stderr == ""  # Pillow would warn of some


def test_a_picture_without_pixels():
    with pytest.raises(RowError, match="no pixels; write the image again"):
        read_image(Pictures.new("RGB", (0, 4)), ImageSource())


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_is_read_and_decoded(kind):
    content = encoded(kind=kind)
    image = read_image(content, ImageSource())
    assert image == Image(digest_of(content)) and image.content == content and image.path is None
    picture = open_image(image)
    assert (picture.mode, picture.size, type(picture)) == ("RGB", (64, 48), Pictures.Image)


def test_the_digest_is_of_the_encoded_bytes():
    import hashlib

    assert read_image(PNG, ImageSource()).digest == hashlib.sha256(PNG).hexdigest()[:32]
    assert "content" not in repr(read_image(PNG, ImageSource()))


@pytest.mark.parametrize(
    "reference",
    [PNG, DATA_URL, DATA_URL.replace("data:image/png", "DATA:"), "images/a.png", "b c.png", "inner.png",
     "images/../images/a.png", {"bytes": PNG, "path": "../elsewhere.png"}, {"bytes": None, "path": "images/a.png"}],
    ids=["bytes", "data URL", "bare data URL", "path", "space", "link inside", "dots", "struct", "struct with path"],
)  # fmt: skip
def test_all_ways_to_name_an_image_give_the_same_one(reference, folder):
    assert read_image(reference, ImageSource(folder=folder)) == Image(digest_of(PNG))


def test_files_are_named_by_absolute_paths_and_file_urls_too(folder):
    source, path = ImageSource(folder=folder), folder / "b c.png"
    for reference in (str(path), path.as_uri(), f"file://localhost{path}".replace(" ", "%20")):
        image = read_image(reference, source)
        assert (image.path, image.content) == (str(path), None)
    assert open_image(image).size == (64, 48)


def test_a_relative_folder_is_that_of_the_working_directory(folder, monkeypatch):
    from pathlib import Path

    monkeypatch.chdir(folder)
    image = read_image("images/a.png", ImageSource(folder=Path()))
    monkeypatch.chdir("/")
    assert open_image(image).size == (64, 48)


def test_base64_may_be_broken_into_lines():
    lines = base64.encodebytes(PNG).decode()
    assert read_image(f"data:;base64,{lines}", ImageSource()).content == PNG


def test_a_decoded_picture_becomes_a_png_of_the_same_pixels():
    picture = Pictures.open(io.BytesIO(encoded(kind="JPEG")))
    image = read_image(picture, ImageSource())
    assert open_image(image).tobytes() == picture.convert("RGB").tobytes()


def test_a_picture_that_is_not_decoded_yet_is_no_way_round_the_limits():
    with pytest.raises(RowError, match=f"13000 x 13000: {TOO_MANY}"):
        read_image(Pictures.open(io.BytesIO(hostile.png(13000, 13000))), ImageSource())


def test_a_url_is_downloaded_where_they_are_allowed():
    asked = []

    def download(url, max_bytes):
        asked.append((url, max_bytes))
        return PNG

    image = read_image("https://host/a.png", ImageSource(allow_urls=True, download=download))
    assert asked == [("https://host/a.png", MAX_BYTES)] and (image.path, image.content) == (None, PNG)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_are_turned_as_their_exif_data_say(orientation, kind):
    corners = Pictures.new("RGB", (32, 16), "black")
    corners.paste("white", (0, 0, 16, 8))  # the white quarter is at the top left of the stored pixels
    exif = Pictures.Exif()
    exif[0x0112] = orientation
    picture = open_image(read_image(encoded(corners, kind, exif=exif), ImageSource()))
    assert picture.size == ((32, 16) if orientation < 5 else (16, 32))
    width, height = picture.size
    places = {"top left": (3, 3), "top right": (width - 4, 3), "bottom left": (3, height - 4)}
    places["bottom right"] = (width - 4, height - 4)
    white = [name for name, place in places.items() if picture.getpixel(place)[0] > 128]
    assert white == [(["top left", "top right", "bottom right", "bottom left"] * 2)[orientation - 1]]


def test_sixteen_bits_of_grey_become_eight():
    ramp = Pictures.frombytes("I;16", (4, 1), b"".join(v.to_bytes(2, "little") for v in (0, 255, 32768, 65535)))
    picture = open_image(read_image(encoded(ramp), ImageSource()))
    assert [picture.getpixel((x, 0)) for x in range(4)] == [(0, 0, 0), (0, 0, 0), (128, 128, 128), (255, 255, 255)]


@pytest.mark.parametrize("mode", ["I", "F"])
def test_more_bits_have_no_known_range(mode):
    with pytest.raises(RowError, match="32 bits per pixel and colour; convert it to 8 bits"):
        read_image(Pictures.new(mode, (8, 8)), ImageSource())


@pytest.mark.parametrize(
    ("mode", "kind"), [("1", "PNG"), ("L", "PNG"), ("LA", "PNG"), ("P", "PNG"), ("RGBA", "PNG"), ("CMYK", "JPEG"),
                       ("YCbCr", "JPEG"), ("RGBA", "WEBP"), ("P", "GIF")]
)  # fmt: skip
def test_every_mode_becomes_rgb(mode, kind):
    picture = open_image(read_image(encoded(Pictures.new(mode, (8, 8)), kind), ImageSource()))
    assert (picture.mode, picture.size) == ("RGB", (8, 8))


def test_an_alpha_channel_is_dropped():
    clear = Pictures.new("RGBA", (2, 2), (10, 20, 30, 0))
    assert open_image(read_image(encoded(clear), ImageSource())).getpixel((0, 0)) == (10, 20, 30)
    palette = Pictures.new("P", (2, 2))
    palette.putpalette([40, 50, 60])
    content = encoded(palette, transparency=0)
    assert open_image(read_image(content, ImageSource())).getpixel((0, 0)) == (40, 50, 60)


def test_a_photo_with_a_preview_is_one_image():
    first, second = Pictures.new("RGB", (32, 16)), Pictures.new("RGB", (8, 4))
    content = encoded(first, "MPO", save_all=True, append_images=[second])
    assert open_image(read_image(content, ImageSource())).size == (32, 16)


def test_a_file_that_changes_or_goes_away_during_a_run_ends_it(folder):
    path = folder / "images" / "a.png"
    image = read_image("images/a.png", ImageSource(folder=folder))
    path.write_bytes(encoded(Pictures.new("RGB", (8, 8))))
    with pytest.raises(ConfigError, match=f"image {path}: changed since the dataset was loaded; leave its files as"):
        open_image(image)
    path.unlink()
    with pytest.raises(ConfigError, match=f"image {path}: .*No such file or directory"):
        open_image(image)
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="no regular file"):
        open_image(image)


def test_a_fault_of_the_row_is_no_end_of_the_run():
    content = DAMAGED["half a JPEG"]()
    with pytest.raises(RefusedImage, match=f"image {digest_of(content)}: a damaged image"):
        open_image(read_image(content, ImageSource()))


def test_memory_that_runs_out_is_not_the_image_s_fault(monkeypatch):
    def fail(*args, **settings):
        raise MemoryError

    monkeypatch.setattr(images.PIL.Image, "open", fail)
    with pytest.raises(MemoryError):
        read_image(PNG, ImageSource())
