"""Files behind URLs that rows name, from public addresses only.

A row may come from a stranger, and a URL in it must not reach what only this machine can reach: its own services, its
network, a cloud's metadata. Each host is resolved once, every address of it must be public, and the connection goes to
the address that was checked: a name that answers otherwise a moment later (DNS rebinding) gains nothing. A redirect is
checked like the first URL. Proxies and credentials of the environment are not used. Bytes are counted while they
arrive, and everything together has one time limit.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from swift.data.records import RowError
from swift.errors import first_line

if TYPE_CHECKING:
    import httpx

LIMIT_S = 30.0
"""Time limit of a download with its redirects, in seconds."""

MAX_REDIRECTS = 5

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Maps a host and a port to the host's addresses."""


async def addresses_of(host: str, port: int) -> list[str]:
    """The addresses of a host, as the system resolves it."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


def is_public(address: str) -> bool:
    """Whether an IPv4 or IPv6 address is one of the public internet; one that contains another is judged by that.

    >>> is_public("8.8.8.8"), is_public("10.0.0.1"), is_public("::ffff:127.0.0.1")
    (True, False, False)
    """
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address):
        if (inner := ip.ipv4_mapped or ip.sixtofour) is not None:
            return is_public(str(inner))
        if ip.teredo is not None or ip.is_site_local:
            return False
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


def download(
    url: str,
    max_bytes: int,
    *,
    limit_s: float = LIMIT_S,
    resolve: Resolve = addresses_of,
    transport: httpx.AsyncBaseTransport | None = None,
) -> bytes:
    """The bytes behind an http or https URL. Not to be called where an event loop runs.

    Args:
        url: may hold no password.
        max_bytes: of the answer.
        limit_s: in seconds, redirects included.
        resolve: of host names.
        transport: of requests to the addresses; None means httpx's own.

    Raises:
        RowError: an address is not public, a limit is passed, or there is no good answer.
    """
    import httpx

    try:
        return asyncio.run(asyncio.wait_for(_download(url, max_bytes, resolve, transport), limit_s))
    except RowError:
        raise
    except TimeoutError as error:
        raise RowError(f"not downloaded within {limit_s:g} s; store the file beside the dataset") from error
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
        raise RowError(f"cannot be downloaded ({first_line(error)}); store the file beside the dataset") from error


async def _download(url: str, max_bytes: int, resolve: Resolve, transport: httpx.AsyncBaseTransport | None) -> bytes:
    import httpx

    target = httpx.URL(url)
    transport = transport or httpx.AsyncHTTPTransport()
    async with httpx.AsyncClient(transport=transport, trust_env=False, timeout=None) as client:
        for _ in range(MAX_REDIRECTS + 1):
            response = await client.send(await _request(client, target, resolve), stream=True)
            try:
                if not response.has_redirect_location:
                    return await _body(response, max_bytes)
                target = target.join(response.headers["location"])
            finally:
                await response.aclose()
    raise RowError(f"more than {MAX_REDIRECTS} redirects; give the final URL")


async def _request(client: httpx.AsyncClient, target: httpx.URL, resolve: Resolve) -> httpx.Request:
    """A request to a checked address of the host, under the host's name in `Host` and in TLS."""
    if target.scheme not in ("http", "https") or not target.host:
        raise RowError(f"leads to {target.scheme or 'no scheme'}://{target.host}; only http and https are read")
    if target.userinfo:
        raise RowError("a URL with a user name or password is not read; store the file beside the dataset")
    host = target.raw_host.decode("ascii")
    addresses = await resolve(host, target.port or (443 if target.scheme == "https" else 80))
    if private := [address for address in addresses if not is_public(address)]:
        raise RowError(f"{host} has the address {private[0]}, which is not public; store the file beside the dataset")
    return client.build_request(
        "GET",
        target.copy_with(host=addresses[0]),
        headers={"Host": target.netloc.decode("ascii"), "Accept-Encoding": "identity"},
        extensions={"sni_hostname": host},
    )


async def _body(response: httpx.Response, max_bytes: int) -> bytes:
    """The body as it was sent: a compressed one could unfold to any size."""
    if response.status_code != 200:
        raise RowError(f"the server answers {response.status_code}; correct the URL")
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > max_bytes:
            raise RowError(f"over {max_bytes} bytes; make it smaller")
    return bytes(body)
