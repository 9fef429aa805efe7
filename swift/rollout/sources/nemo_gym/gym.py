"""Plays trajectories with NeMo Gym: the engine answers and a server verifies, or an agent does all of it.

A call that fails leaves its sample out, with the reason: connection, timeout, http_<status>, bad_json, reward_missing,
reward_invalid, reply_too_long, failure_<class>, and those of `assembly`. Connection errors and answers of 500 and above
get one more try within the same time limit. A row that names no known server ends the run.
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
"""Most calls at a time: to one host, and in all."""
RETRY_S = 0.25
"""Pause before the second try."""
MOST_COMPONENTS = 64
"""Of a reward; each is a metric."""
FAILURE = "_ng_failure_class"
"""Key of an answer that says that its reward is none."""


@dataclass(eq=False)
class NemoGym:
    """How trajectories are played; a `Play`.

    mode: "verify" or "run". agent: of rows that name none. limit_s: of a call. model: the name of the policy.
    reward_names: of the reward functions, which no component of a reward may share. servers, vocab_size, versions_of:
    known once the engine is there. child: what serves NeMo Gym, if the run has started it.
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
    _http: httpx.AsyncClient | None = None  # of the loop that plays
    _all: asyncio.Semaphore = field(init=False)
    _hosts: dict[str, asyncio.Semaphore] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._all = asyncio.Semaphore(CALLS[self.mode][1])

    def attach(self, engine: InferenceEngine, vocab_size: int) -> None:
        """What samples for the agents, once it is there."""
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
        most = min(sampling.max_new_tokens, row[COLUMN].get("max_output_tokens", sampling.max_new_tokens))
        params = {"max_output_tokens": most, "temperature": sampling.temperature, "top_p": sampling.top_p}
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
        """Of the agent or resources server of a row, and of those that name none that runs."""
        return (row.get("agent_ref") or {}).get("name"), self.agent

    def _response(self, params: Mapping[str, Any], text: str) -> dict[str, Any]:
        """A completion as the answer of a Responses API."""
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
        """Take the reward of an answer, and its components for the log. Raises Excluded: it has none."""
        if (failure := reply.get(FAILURE)) is not None:
            raise Excluded("failure_" + (re.sub(r"\W+", "_", str(failure))[:40] or "unknown"))
        reward = reply.get("reward")
        if reward is None:
            raise Excluded("reward_missing")
        components = reply.get("reward_components")
        components = without_nulls(components) if isinstance(components, Mapping) else {}
        if len(components) > MOST_COMPONENTS or not all(map(is_reward, (reward, *components.values()))):
            raise Excluded("reward_invalid")
        if shared := sorted(set(components) & set(self.reward_names)):
            raise ConfigError(
                f"--reward_funcs: {shared[0]}: NeMo Gym gives a reward component of that name; leave the function out"
            )
        trajectory.reward(float(reward))
        trajectory.metrics |= {f"rewards/{name}/mean": float(value) for name, value in components.items()}

    async def _post(self, trajectory: Trajectory, url: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The answer to a call; only its own limit bounds it, and waiting until it may be made takes nothing from that.

        Raises Excluded: it failed. Raises EngineError: what serves NeMo Gym has ended.
        """
        host = self._hosts.setdefault(urlsplit(url).netloc, asyncio.Semaphore(CALLS[self.mode][0]))
        with trajectory.untimed():
            async with host, self._all:  # in this order: who waits for a host keeps no other one waiting
                began = time.monotonic()
                try:
                    async with asyncio.timeout(self.limit_s):
                        reply = await self._tried(url, body)
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

    async def _tried(self, url: str, body: Mapping[str, Any]) -> replies.Reply:
        """An answer, of the second try if the first one failed."""
        if self._http is None:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=CALLS[self.mode][0])
            self._http = httpx.AsyncClient(timeout=None, limits=limits, headers=replies.HEADERS, trust_env=False)
        try:
            reply = await _whole(self._http, url, body)
            if reply.status_code < 500:
                return reply
        except httpx.TransportError:
            pass
        await asyncio.sleep(RETRY_S)
        return await _whole(self._http, url, body)


async def _whole(http: httpx.AsyncClient, url: str, body: Mapping[str, Any]) -> replies.Reply:
    """An answer as it came. Raises Excluded: it is too long."""
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
