"""Calls to a `swift rollout` server: bounded in time, and errors of the server raised here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import httpx

from swift.errors import EngineDead, SyncFailed
from swift.rollout.engines import wire
from swift.rollout.engines.remote_replies import first_line, problem_of
from swift.rollout.engines.transport import Lost, Timeouts


class HttpCalls:
    """See the module's docstring; a part of `HttpTransport`."""

    name: str
    run_id: str
    timeouts: Timeouts
    _http: httpx.Client
    _ending: threading.Event

    def _check_open(self) -> None:
        if self._ending.is_set():
            raise EngineDead(f"{self.name}: it is closed; make a new one")

    def _request(self, method: str, path: str, timeout_s: float, **options: Any) -> httpx.Response:
        """One request.

        Raises:
            Lost: no answer.
        """
        try:
            return self._http.request(method, path, timeout=bounds(timeout_s, self.timeouts), **options)
        except httpx.TimeoutException as error:
            problem = f"no answer to {path.partition('?')[0]} within {timeout_s:g} s"
            raise Lost(problem + (self._in_the_way() if timeout_s > self.timeouts.reply_s else "")) from error
        except (httpx.HTTPError, RuntimeError) as error:
            self._check_open()
            raise Lost(first_line(error)) from error

    def _in_the_way(self) -> str:
        """What a call that is carried out at rest waits for, if that are requests of others."""
        try:
            reply = self._http.get("/info", timeout=bounds(min(5.0, self.timeouts.reply_s), self.timeouts))
            running = dict(reply.json()["running_of"])
        except (httpx.HTTPError, RuntimeError, ValueError, KeyError, TypeError):
            return ""
        running.pop(f"run {self.run_id}", None)
        said = ", ".join(f"{count} of {owner}" for owner, count in sorted(running.items()))
        return f"; it waits for requests of others: {said}" if said else ""

    def _get(self, method: str, path: str, timeout_s: float, **options: Any) -> dict[str, Any]:
        """One request and its answer.

        Raises:
            Lost.
            SwiftError: what the server raised, or that it refuses us.
        """
        return self._answer(self._request(method, path, timeout_s, **options))

    def _answer(self, reply: httpx.Response) -> dict[str, Any]:
        if reply.status_code == 200:
            answer: dict[str, Any] = reply.json()
            return answer
        raise problem_of(self.name, reply)

    def _upload(self, path: str, params: dict[str, Any], data: bytes) -> dict[str, Any]:
        headers = {"Content-Type": wire.SAFETENSORS}
        return self._get("POST", path, self.timeouts.sync_s, params=params, content=data, headers=headers)

    def _aside(self, work: Callable[[], Any], timeout_s: float) -> Callable[[], Any]:
        """Begin `work` on a thread; the result waits for it and raises what came of it."""
        outcome: list[Any] = []

        def run() -> None:
            try:
                outcome.append(work())
            except Exception as error:  # raised in the thread that waits
                outcome.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()

        def wait() -> Any:
            thread.join(timeout_s + self.timeouts.connect_s)
            if not outcome:
                raise SyncFailed(f"weights: {self.name}: no answer within {timeout_s:g} s")
            if isinstance(outcome[0], Exception):
                raise outcome[0]
            return outcome[0]

        return wait


def bounds(timeout_s: float, timeouts: Timeouts) -> httpx.Timeout:
    """A call's time limit."""
    return httpx.Timeout(timeout_s, connect=min(timeouts.connect_s, timeout_s))
