"""Stands before a server and damages its replies while a file says how: `python soak_proxy.py PORT SERVER_PORT FILE`.

The words of the file: `silence` (held back), `garbage` and `status` (another reply), `cut` (the connection ends in the
middle), `bytes` (some are others). It passes bytes on, so streams stay streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from pathlib import Path

OTHER = {
    "garbage": b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 6\r\n\r\n[1, 2]",
    "status": b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\n\r\n",
}


def kind_of(file: Path) -> str:
    """How replies are damaged now; "" if they are not."""
    with contextlib.suppress(FileNotFoundError):
        return file.read_text()
    return ""


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, file: Path | None) -> None:
    """One direction of a connection; with a file, that of the replies."""
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            kind = kind_of(file) if file else ""
            while file and kind == "silence":
                await asyncio.sleep(0.05)
                kind = kind_of(file)
            if kind == "bytes":
                changed = bytearray(data)
                for place in random.sample(range(len(changed)), min(3, len(changed))):
                    changed[place] ^= random.randrange(1, 256)
                data = bytes(changed)
            writer.write(OTHER.get(kind, data[: len(data) // 2] if kind == "cut" else data))
            await writer.drain()
            if kind in ("cut", *OTHER):
                break
    writer.close()


async def serve(port: int, server_port: int, file: Path) -> None:
    """Until the process is ended."""

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            answers, asks = await asyncio.open_connection("127.0.0.1", server_port)
        except ConnectionError:
            writer.close()
            return
        await asyncio.gather(pass_on(reader, asks, None), pass_on(answers, writer, file))

    async with await asyncio.start_server(connect, "0.0.0.0", port) as proxy:
        await proxy.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])))
