"""Where the processes of a run meet: a store that, on one node, other machines cannot reach.

torch's own rendezvous (`env://`) listens on all addresses, and whoever reaches the store can read and write it. Nor
does it say which node has not come.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psutil

from swift.errors import ConfigError, EngineError, ResourceError, first_line

LOOPBACK = ("127.0.0.1", "localhost")
ANYWHERE = "192.0.2.1"
"""An address of other networks (RFC 5737), to which nothing is sent."""
LOOK_S = 0.2
PATIENT_S = 10.0
"""After so long rank 0 says whom it waits for."""
MET = "swift/met"
"""Key of what rank 0 says when all have come, "", or when it gives up."""


def process_group_place(timeout_s: float) -> dict[str, Any]:
    """Arguments of `init_process_group` that say where the ranks meet, once all are there; {} leaves it to torch.

    They meet at a store of rank 0 at MASTER_ADDR:MASTER_PORT. On one node it listens on 127.0.0.1 only, and so does
    gloo, whose messages between ranks are pickles; on several, gloo has the interface of the way to MASTER_ADDR. Where
    a torchrun agent holds a store, torch knows better.

    An EngineError: node 0 cannot be reached, or a node does not come, within `timeout_s`.
    """
    import torch.distributed as dist

    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if host and host not in LOOPBACK:
        lead_gloo(host)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or not host or not port:
        return {}
    if host in LOOPBACK:
        keep_gloo_here()
    rank, world_size, limit = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timedelta(seconds=timeout_s)
    if rank == 0:
        listener = _listener(int(port), everywhere=host not in LOOPBACK)
        store = dist.TCPStore(
            host,
            int(port),
            world_size,
            is_master=True,
            timeout=limit,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        _await_all(store, f"{host}:{port}", world_size, timeout_s)
    else:
        try:
            store = dist.TCPStore(host, int(port), world_size, is_master=False, timeout=limit)
            _report(store, rank, limit)
        except dist.DistError as error:
            raise EngineError(
                f"node 0: cannot be reached at {host}:{port} within {timeout_s:g} s; is it started, and are "
                "MASTER_ADDR and MASTER_PORT its own?"
            ) from error
    return {"store": store, "rank": rank, "world_size": world_size}


def connect(limit_s: float) -> Any:
    """Another connection to the store, which waits for at most `limit_s`."""
    import torch.distributed as dist

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=limit_s))


@contextlib.contextmanager
def reachable() -> Iterator[None]:
    """Torch's errors of a store that is gone or slow, all RuntimeErrors, as an EngineError: rank 0 is gone with it."""
    try:
        yield
    except RuntimeError as error:
        raise EngineError(f"rank 0: its store cannot be reached ({first_line(error)}); look at its log") from error


def keep_gloo_here() -> None:
    """Process groups of gloo listen on this machine only, not at the address of its name."""
    here = (name for name, all_of in psutil.net_if_addrs().items() if LOOPBACK[0] in [one.address for one in all_of])
    if (name := next(here, None)) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def lead_gloo(host: str) -> None:
    """Process groups of gloo use the network interface of the way to `host`, unless GLOO_SOCKET_IFNAME names one.

    By itself gloo takes the address of this machine's own name, which Debian's /etc/hosts has at 127.0.1.1: other nodes
    cannot reach it, and all would wait without end. Where `host` is such a name, the way out of this machine counts.
    """
    own = _source_address(host)
    if own is None or ipaddress.ip_address(own.partition("%")[0]).is_loopback:
        own = _source_address(ANYWHERE)
    names = (name for name, all_of in psutil.net_if_addrs().items() if own in [one.address for one in all_of])
    if (name := next(names, None)) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _source_address(host: str) -> str | None:
    """The address that packets to `host` come from; nothing is sent. None: there is no way."""
    with contextlib.suppress(OSError):
        family, kind, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    return None


def _report(store: Any, rank: int, limit: timedelta) -> None:
    """Says that this rank is there, and waits for the others."""
    store.set(_here(rank), "")
    store.wait([MET], limit + timedelta(seconds=PATIENT_S))  # rank 0 is the one to give up
    if problem := store.get(MET).decode():
        raise EngineError(problem)


def _await_all(store: Any, place: str, world_size: int, timeout_s: float) -> None:
    """Waits for the other ranks; names the nodes that do not come."""
    began, told = time.monotonic(), False
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    while missing := [rank for rank in range(1, world_size) if not store.check([_here(rank)])]:
        away = sorted({rank // per_node for rank in missing})
        nodes = ", ".join(f"node {node}" for node in away)
        if away[0] == 0:  # this one: not all of its processes have come
            nodes = ", ".join(f"rank {rank}" for rank in missing)
        waited = time.monotonic() - began
        if waited > timeout_s:
            problem = (
                f"{nodes}: has not come to {place} within {timeout_s:g} s (--ddp_timeout); start the same command "
                "there with its NODE_RANK, and see that the port can be reached"
            )
            store.set(MET, problem)
            time.sleep(2 * LOOK_S)  # those that did come read it
            raise EngineError(problem)
        if waited > PATIENT_S and not told:
            told = True
            print(
                f"swift: waiting for {nodes} at {place} ({PATIENT_S:g} s of at most {timeout_s:g} s)",
                file=sys.stderr,
                flush=True,
            )
        time.sleep(LOOK_S)
    store.set(MET, "")


def _here(rank: int) -> str:
    return f"swift/here/{rank}"


def _listener(port: int, *, everywhere: bool) -> socket.socket:
    both = everywhere and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        place = ("" if everywhere else LOOPBACK[0], port)
        return socket.create_server(place, family=family, dualstack_ipv6=both, backlog=1024)
    except OSError as error:
        raise ResourceError(f"MASTER_PORT: {port}: cannot be used ({error.strerror}); choose another port") from error


def bind(host: str, port: int) -> socket.socket:
    """A socket of a server, bound and not listening yet; port 0 takes a free one.

    Raises ResourceError: another process has the port. Raises ConfigError: this host does not have the address.
    """
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:  # UnicodeError: a label of the name is empty or too long
        raise _no_address(host, error) from error
    listener = socket.socket(family, kind, number)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        exists = error.errno != errno.EADDRNOTAVAIL
        raise (port_taken(host, port, error) if exists else _no_address(host, error)) from error
    return listener


def _no_address(host: str, error: Exception) -> ConfigError:
    reason = getattr(error, "strerror", None) or first_line(error)
    return ConfigError(f"--host: {host}: no such address here ({reason}); use 127.0.0.1 or 0.0.0.0")


def port_taken(host: str, port: int, error: OSError) -> ResourceError:
    """The error about a port that another process has."""
    return ResourceError(
        f"--port: {port}: cannot be used on {host} ({error.strerror}); use another port, or 0 for a free one"
    )
