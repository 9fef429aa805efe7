"""Where the processes of a run meet: a store that, on one node, other machines cannot reach.

torch's own rendezvous (`env://`) listens on all addresses, and whoever reaches the store can read and write it.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

from swift.errors import ResourceError

LOOPBACK = ("127.0.0.1", "localhost")


def process_group_place(timeout_s: float) -> dict[str, Any]:
    """Arguments of `init_process_group` that say where the ranks meet; {} leaves it to torch.

    The ranks of one node that `swift` started (MASTER_ADDR is loopback, and no torchrun agent holds a store) meet at a
    store of rank 0 that listens on 127.0.0.1:MASTER_PORT.

    Raises:
        ResourceError: the port is taken.
    """
    import torch.distributed as dist

    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if has_agent or host not in LOOPBACK or not port:
        return {}
    rank, world_size, limit = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timedelta(seconds=timeout_s)
    if rank != 0:
        store = dist.TCPStore(LOOPBACK[0], int(port), world_size, is_master=False, timeout=limit)
    else:
        listener = _listener(int(port))
        store = dist.TCPStore(
            LOOPBACK[0], int(port), world_size, is_master=True, timeout=limit, master_listen_fd=listener.detach()
        )
    return {"store": store, "rank": rank, "world_size": world_size}


def _listener(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((LOOPBACK[0], port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise ResourceError(f"MASTER_PORT: {port}: cannot be used ({error.strerror}); choose another port") from error
    return listener
