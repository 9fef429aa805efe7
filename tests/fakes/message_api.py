"""The Atropos message API in this process, with its traps; and the real one, where atroposlib is installed.

api = StandIn()                 app.state of the real one in a few fields
api.client()                    an httpx.Client that talks to it
api.post(group(), env=0)        what an environment does
"""

from __future__ import annotations

import itertools
import json
import sys

import httpx

from swift.rollout.sources.atropos.processes import library

FOLDER = library()
"""Where atroposlib is."""
REAL = FOLDER is not None


class StandIn:
    """What atroposlib 0.4.0 does, as far as a trainer can see it. `calls` is what it was asked; `fails` come first."""

    def __init__(self):
        self.calls, self.fails = [], []
        self.state = {}

    def client(self):
        return httpx.Client(transport=httpx.MockTransport(self.answer), base_url="http://api")

    def answer(self, request):
        path = request.url.path
        self.calls.append(path)
        if self.fails:
            return self.fails.pop(0)
        body = json.loads(request.content) if request.content else None
        said = getattr(self, path.strip("/").replace("-", "_"))(*([body] if body is not None else []))
        return said if isinstance(said, httpx.Response) else httpx.Response(200, json=said)

    def restart(self):
        self.state = {}

    def info(self):
        if "batch_size" not in self.state:
            return {"batch_size": -1, "max_token_len": -1}
        return {name: self.state[name] for name in ("batch_size", "max_token_len")}

    def register(self, wanted):
        if "queue" not in self.state:  # else only another uuid
            self.state = {**wanted, "step": wanted["starting_step"], "queue": [], "ready": [], "envs": [], "buffer": {}}
        return {"uuid": 2**127 + 1}

    def reset_data(self):
        self.state.pop("queue", None)
        self.state |= {"batch_size": -1, "step": 0, "ready": [], "envs": [], "buffer": {}}
        return httpx.Response(200, text="Reset successful")

    def status(self):
        return {"current_step": self.state.get("step", 0), "queue_size": len(self.state.get("queue", ()))}

    def batch(self):
        if "ready" not in self.state:
            return {"status": "error", "message": "Trainer not registered. Call /register first.", "batch": []}
        if "queue" not in self.state:
            return httpx.Response(500)
        if not self.state["ready"]:
            while (batch := self._form()) is not None:
                self.state["ready"].append(batch)
                self.state["step"] += 1
        return {"batch": self.state["ready"].pop() if self.state["ready"] else None}

    def _form(self):
        """Packs of the largest size queued, of one size each; never a part of a group."""
        queue, wanted = self.state["queue"], self.state["batch_size"]
        if any(least and not any(g["env_id"] == i for g in queue) for i, (_, least) in enumerate(self.state["envs"])):
            return None
        sizes = [len(one["tokens"]) for one in queue]
        packs, usable = {}, []
        for one, size in zip(queue, sizes, strict=True):
            packs.setdefault(size, []).append(one)
            if len(packs[size]) * size == max(sizes):
                usable += packs.pop(size)
        taken, count = [], 0
        for one in usable:
            taken.append(one)
            count += len(one["tokens"])
            if count >= wanted:
                break
        if count != wanted:
            return None
        self.state["queue"] = [one for one in queue if one not in taken]
        return taken

    # --- the environments' side -------------------------------------------------------------------------------------

    def add_env(self, group_size, least=None):
        self.state["envs"].append((group_size, least))

    def post(self, group):
        envs, number = self.state.get("envs", []), group["env_id"]
        if number is not None and number < len(envs) and envs[number][0] != len(group["tokens"]):
            self.state["buffer"].setdefault(number, []).append(group)
        else:
            self.state.setdefault("queue", []).append(group)


class Real:
    """The application of atroposlib itself."""

    def __init__(self):
        from starlette.testclient import TestClient

        sys.path.append(str(FOLDER))  # for this import only: other tests look for packages that are there, too
        try:
            from atroposlib.api.server import app
        finally:
            sys.path.remove(str(FOLDER))

        self.app, self.calls = app, []
        self.restart()
        self._http = TestClient(app, base_url="http://api", raise_server_exceptions=False)

    def client(self):
        from starlette.testclient import TestClient

        client = TestClient(self.app, base_url="http://api", raise_server_exceptions=False)
        client.event_hooks = {"request": [lambda request: self.calls.append(request.url.path)]}
        return client

    def restart(self):
        self.app.state._state.clear()

    def add_env(self, group_size, least=None):
        body = {"max_token_length": 64, "desired_name": "e", "weight": 1.0, "group_size": group_size}
        assert self._http.post("/register-env", json={**body, "min_batch_allocation": least}).json()["status"] == (
            "success"
        )

    def post(self, group):
        assert self._http.post("/scored_data", json=group).status_code == 200


KINDS = [StandIn, *([Real] if REAL else [])]

_numbers = itertools.count()


def group(size=2, *, env=0, prompt=3, answer=2, **more):
    """A group as environments send them; its first token tells it from others."""
    number = next(_numbers) % 50
    rows = [[number, *range(1, prompt), *range(10 + row, 10 + row + answer)] for row in range(size)]
    masks = [[-100] * prompt + one[prompt:] for one in rows]
    logprobs = [[1.0] * prompt + [-0.5] * answer for _ in rows]
    scores = [float(row) for row in range(size)]
    return {
        "tokens": rows, "masks": masks, "scores": scores, "inference_logprobs": logprobs, "env_id": env, **more
    }  # fmt: skip
