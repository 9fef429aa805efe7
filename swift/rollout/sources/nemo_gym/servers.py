"""Servers of NeMo Gym: their URLs from the config of the head server, and the wait until they answer."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx
import yaml

from swift.errors import ConfigError, EngineError, first_line, parse_json, suggest
from swift.rollout.engines import replies
from swift.rollout.engines.events import Lost

HEAD_TRIES = 3
HEAD_S = 30.0
"""Time limit of each try to read the config."""
CONFIG_BYTES = 8 << 20
POLL_S = 2.0
LOCAL = ("0.0.0.0", "127.0.0.1", "localhost", "")
"""Hosts that stand for the host of the head server."""


@dataclass(frozen=True, slots=True)
class Servers:
    """URLs by name. `resource_of`: name of the resources server of each agent."""

    resources: dict[str, str] = field(default_factory=dict)
    agents: dict[str, str] = field(default_factory=dict)
    resource_of: dict[str, str] = field(default_factory=dict)

    def url(self, kind: str, *names: str | None) -> str:
        """The URL of the first name that exists; without names, that of the only server.

        kind: "agents" or "resources". names: of servers of that kind; an agent's name stands for its resources server.
        Raises ConfigError: no name exists, or there is no name and not exactly one server.
        """
        urls: Mapping[str, str] = getattr(self, kind)
        named = [name for name in names if name is not None]
        for name in named:
            server = self.resource_of.get(name, name) if kind == "resources" else name
            if server in urls:
                return urls[server]
        if not named and len(set(urls.values())) == 1:
            return next(iter(urls.values()))
        problem = f"no {kind} of that name" if named else "rows name none in agent_ref"
        fix = suggest(named[0] if named else "", sorted(urls))
        raise ConfigError(f"--nemo_gym_agent: {' '.join(named) or 'none'}: {problem}; {fix}")


def head_url(head: str) -> str:
    """The URL of the head server; a number is a port of this machine."""
    return f"http://127.0.0.1:{head}" if head.isdigit() else head.rstrip("/")


def read_config(text: str, head: str) -> Servers:
    """The servers of a config: a JSON string that holds YAML. Raises ValueError: another format."""
    config = parse_json(text)
    if isinstance(config, str):
        config = yaml.safe_load(config)
    if not isinstance(config, Mapping):
        raise ValueError("its config is no map")
    servers, host = Servers(), urlsplit(head).hostname or "127.0.0.1"
    for name, entry in ((str(name), entry) for name, entry in config.items()):
        for inner, server in _entries(entry, "resources_servers"):
            servers.resources[name] = servers.resources[inner] = _url(server, host)
        for _, server in _entries(entry, "responses_api_agents"):
            servers.agents[name] = _url(server, host)
            resource = server.get("resources_server")
            if isinstance(resource, Mapping) and resource.get("name"):
                servers.resource_of[name] = str(resource["name"])
    return servers


def _entries(entry: Any, kind: str) -> list[tuple[str, Mapping[str, Any]]]:
    found = entry.get(kind) if isinstance(entry, Mapping) else None
    pairs = found.items() if isinstance(found, Mapping) else ()
    return [(str(name), server) for name, server in pairs if isinstance(server, Mapping) and server.get("port")]


def _url(server: Mapping[str, Any], host: str) -> str:
    given, port = str(server.get("host") or ""), server["port"]
    if not (str(port).isdecimal() and 0 < int(port) < 1 << 16 and re.fullmatch(r"[\w.:\[\]-]*", given)):
        raise ValueError(f"host {given!r}, port {port!r}: no address of a server")
    return f"http://{host if given in LOCAL else given}:{port}"


def find_servers(
    head: str, *, kind: str, limit_s: float, starting: bool = False, check: Callable[[], None] = lambda: None
) -> Servers:
    """Read the config, and wait until every server of a kind answers.

    Args:
        head: URL or port of the head server.
        kind: "agents" or "resources".
        limit_s: time limit in total.
        starting: whether the head server is starting, so that it is tried until the time limit.
        check: called during the wait; its exceptions end the wait.

    Raises:
        EngineError: the head server or another server does not answer.
    """
    url, deadline = head_url(head), time.monotonic() + limit_s
    with httpx.Client(headers=replies.HEADERS, trust_env=False) as http:
        tries = 0
        while True:
            check()
            tries += 1
            try:
                limit = httpx.Timeout(min(HEAD_S, limit_s))
                reply = replies.whole(http, "GET", f"{url}/global_config_dict_yaml", limit, CONFIG_BYTES)
                if reply.status_code != 200:
                    raise ValueError(f"status {reply.status_code}")
                servers = read_config(reply.content.decode("utf-8", "replace"), url)
                break
            except (Lost, ValueError, RecursionError, yaml.YAMLError) as error:
                if time.monotonic() + POLL_S > deadline or (not starting and tries == HEAD_TRIES):
                    raise EngineError(
                        f"--nemo_gym_head: {head}: no head server of NeMo Gym answers there ({first_line(error)}); "
                        "start it with ng_run, or give --nemo_gym_auto_start true"
                    ) from error
            time.sleep(POLL_S)
        found: dict[str, str] = getattr(servers, kind)
        if not found:
            raise EngineError(f"--nemo_gym_head: {head}: NeMo Gym runs no {kind} there; start it with their configs")
        for name, server_url in found.items():
            while not _answers(http, server_url):
                check()
                if time.monotonic() + POLL_S > deadline:
                    raise EngineError(
                        f"--nemo_gym_head: {head}: {name} at {server_url} does not answer within {limit_s:g} s; "
                        "see its log, or raise --nemo_gym_server_timeout"
                    )
                time.sleep(POLL_S)
    return servers


def _answers(http: httpx.Client, url: str) -> bool:
    """Whether the URL answers, with any status."""
    try:
        replies.whole(http, "GET", url, httpx.Timeout(POLL_S))
    except Lost:
        return False
    return True
