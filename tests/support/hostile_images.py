"""Images that rows may hold to break whatever reads them, each made of a few bytes."""

import io
import struct
import zlib

from PIL import Image

KINDS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def encoded(image=None, kind="PNG", **settings):
    content = io.BytesIO()
    (image or Image.linear_gradient("L").convert("RGB").resize((64, 48))).save(content, kind, **settings)
    return content.getvalue()


def chunk(name, data, crc=None):
    check = zlib.crc32(name + data) if crc is None else crc
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", check)


def png(width, height, *, before=b"", pixels=None):
    """A PNG of one bit per pixel, all black; `pixels` replaces its compressed rows."""
    if pixels is None:
        packer, row = zlib.compressobj(9), bytes(1 + (width + 7) // 8)
        pixels = b"".join([*(packer.compress(row) for _ in range(height)), packer.flush()])
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + before + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def text_bomb():
    return png(8, 8, before=chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(100 << 20), 1)))


def profile_bomb():
    return png(8, 8, before=chunk(b"iCCP", b"icc\0\0" + zlib.compress(bytes(100 << 20), 1)))


def many_texts():
    """A hundred texts that are each below Pillow's limit."""
    return png(8, 8, before=chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(1 << 20), 9)) * 100)


def huge_webp():
    content = bytearray(encoded(Image.new("RGB", (16, 16)), "WEBP", lossless=True))
    place = content.index(b"VP8L") + 9  # after the signature: 14 bits of width - 1, 14 of height - 1
    content[place : place + 4] = struct.pack("<I", 16382 | 16382 << 14)
    return bytes(content)


def huge_gif():
    content = bytearray(encoded(Image.new("P", (8, 8)), "GIF"))
    content[6:10] = struct.pack("<HH", 65535, 65535)
    return bytes(content)


def gif_frame_beyond_its_screen():
    content = bytearray(encoded(Image.new("P", (8, 8)), "GIF"))
    place = content.index(b",\0\0\0\0\x08\0\x08\0")
    content[place + 5 : place + 9] = struct.pack("<HH", 65535, 65535)
    return bytes(content)


def huge_bmp():
    content = bytearray(encoded(Image.new("1", (8, 8)), "BMP"))
    content[18:26] = struct.pack("<ii", 100_000, 1000)
    return bytes(content)


def huge_jpeg():
    content = bytearray(encoded(kind="JPEG"))
    place = content.index(b"\xff\xc0") + 5
    content[place : place + 4] = struct.pack(">HH", 65500, 65500)
    return bytes(content)


def huge_tiles():
    """A TIFF of 64 x 64 pixels in one tile of 65,520 x 65,520."""
    tags = {256: 64, 257: 64, 258: 1, 259: 5, 262: 1, 277: 1, 322: 65520, 323: 65520, 324: 8, 325: 1}
    table = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<IxxH", 10, len(tags)) + table + bytes(4)


def scans_without_end():
    """A progressive JPEG whose last pass is there a thousand times."""
    content = encoded(kind="JPEG", progressive=True)
    last = content.rindex(b"\xff\xda")
    return content[:last] + content[last:-2] * 1000 + content[-2:]


def frames(kind):
    first, second = Image.new("RGB", (8, 8), "red"), Image.new("RGB", (8, 8), "blue")
    return encoded(first, kind, save_all=True, append_images=[second])
