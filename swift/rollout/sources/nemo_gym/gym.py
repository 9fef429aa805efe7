"""Trajectories with NeMo Gym: the engine samples and a server verifies, or an agent samples and scores.

A failed call excludes its sample, with the reason: connection, timeout, http_<status>, bad_json, reward_missing,
reward_invalid, reply_too_long, failure_<class>, and those of `assembly`. Connection errors and statuses from 500 are
retried once within the same time limit. A row without a known server ends the run.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from swift.data.responses import COLUMN, without_nulls
from swift.errors import ConfigError, parse_json
from swift.plugin.numbers import is_finite
from swift.rollout.child import Child
from swift.rollout.engines import replies
from swift.rollout.engines.base import InferenceEngine
from swift.rollout.engines.wire import Spans, Versions
from swift.rollout.sources.multi_turn.trajectory import Excluded, Trajectory
from swift.rollout.sources.nemo_gym.assembly import assemble, calls_of
from swift.rollout.sources.nemo_gym.servers import Servers

CALLS = {"verify": (64, 256), "run": (256, 512)}
"""Maximum concurrent calls: per host, and in total."""
RETRY_S = 0.25
"""Pause before the second try."""
MAX_COMPONENTS = 64
"""Maximum number of components of a reward; each is a metric."""
FAILURE = "_ng_failure_class"
"""Key of an answer without a valid reward; its value is the class of the failure."""


@dataclass(eq=False)
class NemoGym:
    """Plays trajectories; a `Play`.

    mode: "verify" or "run". agent: default agent or resources server. limit_s: time limit of a call. model: name of the
    policy. reward_names: names of the reward functions, which a reward component may not have. servers, vocab_size,
    versions_of: set after the engine is created. child: the process that serves NeMo Gym, if this run started it.
    """

    mode: str
    agent: str | None
    limit_s: float
    model: str
    reward_names: Collection[str]
    servers: Servers = field(default_factory=Servers)
    vocab_size: int = 0
    versions_of: Versions | None = None
    child: Child | None = None
    _http: httpx.AsyncClient | None = None  # used by one event loop
    _total: asyncio.Semaphore = field(init=False)
    _hosts: dict[str, asyncio.Semaphore] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._total = asyncio.Semaphore(CALLS[self.mode][1])

    def attach(self, engine: InferenceEngine, vocab_size: int) -> None:
        """Set the engine that samples for the agents."""
        self.vocab_size, self.versions_of = vocab_size, getattr(engine, "versions_of", None)

    async def __call__(self, trajectory: Trajectory) -> None:
        """Play one trajectory."""
        assert trajectory.request.prompt is not None
        row = without_nulls({k: v for k, v in trajectory.request.prompt.columns.items() if k != "tools"})
        if not isinstance(row.get(COLUMN), Mapping):
            raise ConfigError(f"--dataset: a row has no {COLUMN}, which NeMo Gym needs; use rows of NeMo Gym")
        await (self._verify if self.mode == "verify" else self._run)(trajectory, row)

    async def _verify(self, trajectory: Trajectory, row: dict[str, Any]) -> None:
        url = self.servers.url("resources", *self._names(row))
        answer = await trajectory.answer()
        body = {**row, "response": self._response(row[COLUMN], answer["content"])}
        self._score(trajectory, await self._post(trajectory, f"{url}/verify", body))

    async def _run(self, trajectory: Trajectory, row: dict[str, Any]) -> None:
        url, sampling = self.servers.url("agents", *self._names(row)), trajectory.request.sampling
        max_tokens = min(sampling.max_new_tokens, row[COLUMN].get("max_output_tokens", sampling.max_new_tokens))
        params = {"max_output_tokens": max_tokens, "temperature": sampling.temperature, "top_p": sampling.top_p}
        reply = await self._post(trajectory, f"{url}/run", {**row, COLUMN: {**row[COLUMN], **params}})
        self._score(trajectory, reply)
        response = reply.get("response")
        output = response.get("output") if isinstance(response, Mapping) else None
        if not isinstance(output, list) or not all(isinstance(item, Mapping) for item in output):
            raise Excluded("empty")
        calls = calls_of(output, self.vocab_size)
        versions: Sequence[Spans | None] = [None] * len(calls)
        if self.versions_of is not None:
            versions = await asyncio.to_thread(self.versions_of, [call.key for call in calls])
        assemble(trajectory, output, calls, versions, trajectory.template.stop_token_ids)

    def _names(self, row: Mapping[str, Any]) -> tuple[str | None, str | None]:
        """Name of the agent or resources server of a row, and the default name."""
        return (row.get("agent_ref") or {}).get("name"), self.agent

    def _response(self, params: Mapping[str, Any], text: str) -> dict[str, Any]:
        """A completion as a response of the Responses API."""
        part = {"type": "output_text", "text": text, "annotations": []}
        item = {"id": "msg", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
        return {
            "id": "resp",
            "created_at": int(time.time()),
            "model": self.model,
            "object": "response",
            "output": [item],
            "parallel_tool_calls": params.get("parallel_tool_calls", True),
            "tool_choice": params.get("tool_choice", "auto"),
            "tools": params.get("tools", []),
        }

    def _score(self, trajectory: Trajectory, reply: Mapping[str, Any]) -> None:
        """Record the reward of an answer, and its components as metrics. Raises Excluded: no valid reward."""
        if (failure := reply.get(FAILURE)) is not None:
            raise Excluded("failure_" + (re.sub(r"\W+", "_", str(failure))[:40] or "unknown"))
        reward = reply.get("reward")
        if reward is None:
            raise Excluded("reward_missing")
        components = reply.get("reward_components")
        components = without_nulls(components) if isinstance(components, Mapping) else {}
        if len(components) > MAX_COMPONENTS or not all(map(is_reward, (reward, *components.values()))):
            raise Excluded("reward_invalid")
        if shared := sorted(set(components) & set(self.reward_names)):
            raise ConfigError(
                f"--reward_funcs: {shared[0]}: NeMo Gym gives a reward component of that name; leave the function out"
            )
        trajectory.reward(float(reward))
        trajectory.metrics |= {f"rewards/{name}/mean": float(value) for name, value in components.items()}

    async def _post(self, trajectory: Trajectory, url: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The answer to a call. `limit_s` starts with the call, after the wait for the semaphores.

        Raises Excluded: the call failed. Raises EngineError: the process that serves NeMo Gym has ended.
        """
        host = self._hosts.setdefault(urlsplit(url).netloc, asyncio.Semaphore(CALLS[self.mode][0]))
        with trajectory.untimed():
            async with host, self._total:  # in this order: a wait for one host does not block calls to others
                began = time.monotonic()
                try:
                    async with asyncio.timeout(self.limit_s):
                        reply = await self._post_with_retry(url, body)
                except TimeoutError:
                    raise Excluded("timeout") from None
                except httpx.TransportError:
                    if self.child is not None:
                        self.child.check()
                    raise Excluded("connection") from None
                trajectory.metrics[f"nemo_gym/{self.mode}_s"] = time.monotonic() - began
        if reply.status_code != 200:
            raise Excluded(f"http_{reply.status_code}")
        try:
            answer = parse_json(reply.content.decode("utf-8", "replace"))
        except ValueError:
            answer = None
        if not isinstance(answer, Mapping):
            raise Excluded("bad_json")
        return answer

    async def _post_with_retry(self, url: str, body: Mapping[str, Any]) -> replies.Reply:
        """The reply to a POST; after a failure, that of a second try."""
        if self._http is None:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=CALLS[self.mode][0])
            self._http = httpx.AsyncClient(timeout=None, limits=limits, headers=replies.HEADERS, trust_env=False)
        try:
            reply = await _post_once(self._http, url, body)
            if reply.status_code < 500:
                return reply
        except httpx.TransportError:
            pass
        await asyncio.sleep(RETRY_S)
        return await _post_once(self._http, url, body)


async def _post_once(http: httpx.AsyncClient, url: str, body: Mapping[str, Any]) -> replies.Reply:
    """The raw reply to one POST. Raises Excluded: it is too long."""
    content = bytearray()
    async with http.stream("POST", url, json=body) as reply:
        async for part in reply.aiter_raw():
            content += part
            if len(content) > replies.REPLY_BYTES:
                raise Excluded("reply_too_long")
    return replies.Reply(reply.status_code, bytes(content))


def is_reward(value: Any) -> bool:
    """Whether a value is a number that a 32-bit float holds; rewards are compared as such."""
    return isinstance(value, int | float) and is_finite(value)
