"""A stand-in for NeMo Gym in one application: head server, resources server and agent, with the faults of real ones.

The reward of a text is the share of its characters with an odd code. Run as a script it serves until it is killed:
`python nemo_gym.py --port 11000 [--policy URL]`.
"""

import argparse
import asyncio
import itertools
import json
import random
import socket
import threading
import time

import httpx
import uvicorn
import yaml
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse

FAULTS = {  # fault -> why its sample is left out; None where it does not matter
    "500": "http_500",
    "422": "http_422",
    "hang": "timeout",
    "reset": "connection",
    "slow": None,
    "once_500": None,
    "once_reset": None,
    "bad_json": "bad_json",
    "no_object": "bad_json",
    "reward_missing": "reward_missing",
    "reward_null": "reward_missing",
    "reward_nan": "reward_invalid",
    "reward_text": "reward_invalid",
    "reward_huge": "reward_invalid",
    "many_components": "reward_invalid",
    "deep": "bad_json",
    "endless": "reply_too_long",
    "failure_tag": "failure_judge_failed",
    "null_fields": None,
}
RUN_FAULTS = {
    "ids_missing": "ids_missing",
    "prompt_ids_missing": "ids_missing",
    "no_output": "empty",
    "no_tokens": "empty",
    "logprobs_short": "misaligned",
    "logprob_positive": "misaligned",
    "logprob_huge": "misaligned",
    "unknown_token": "misaligned",
    "prefix_break": "history_rewritten",
}
TOOL_RESULT = "it is 7"


def odd_share(text):
    return sum(ord(c) % 2 for c in text) / max(1, len(text))


class NemoGym:
    """policy: URL of a policy server; canned: (prompt ids, token ids, log-probs) of both calls without one.

    fault_of: body of a call -> its fault, or None. Calls are kept in `calls` as (path, body).
    """

    def __init__(self, *, port=0, policy=None, canned=None, fault_of=lambda body: None, components=None):
        self.policy, self.canned, self.fault_of, self.components = policy, canned, fault_of, components
        self.calls, self.most_at_once, self._at_once = [], 0, 0
        self._listener = socket.create_server(("127.0.0.1", port), backlog=2048)
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._http = httpx.AsyncClient(timeout=60, trust_env=False)
        self._server = uvicorn.Server(
            uvicorn.Config(self._app(), log_level="error", lifespan="off", timeout_graceful_shutdown=1)
        )

    def config(self):
        here = {"entrypoint": "app.py", "host": "0.0.0.0", "port": self.port}
        agent = {**here, "resources_server": {"type": "resources_servers", "name": "odd"}}
        return {
            "head_server": {"host": "0.0.0.0", "port": self.port},
            "odd": {"resources_servers": {"odd": here}},
            "odd_agent": {"responses_api_agents": {"simple_agent": agent}},
            "policy_model": {"responses_api_models": {"vllm_model": {"entrypoint": "app.py"}}},
            "names": ["a list"],
        }

    def serve(self):
        self._server.run([self._listener])

    def __enter__(self):
        threading.Thread(target=self.serve, daemon=True).start()
        while not self._server.started:
            time.sleep(0.005)
        return self

    def __exit__(self, *_):
        self._server.should_exit = self._server.force_exit = True

    def _app(self):
        app = FastAPI()

        @app.get("/")
        async def alive():
            return {}

        @app.get("/global_config_dict_yaml")
        async def config() -> str:
            return yaml.safe_dump(self.config())

        @app.post("/seed_session")
        async def seed_session():
            return {}

        @app.post("/verify")
        async def verify(request: Request):
            return await self._answer("/verify", await request.json(), self._verified)

        @app.post("/run")
        async def run(request: Request):
            return await self._answer("/run", await request.json(), self._ran)

        return app

    async def _answer(self, path, body, make):
        again = any(one == (path, body) for one in self.calls)
        self.calls.append((path, body))
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            return await self._with_fault(self.fault_of(body), again, body, make)
        finally:
            self._at_once -= 1

    async def _with_fault(self, fault, again, body, make):
        if "responses_create_params" not in body or fault == "422":
            return Response(status_code=422)
        if fault == "500" or (fault == "once_500" and not again):
            return Response(status_code=500)
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault == "slow":
            await asyncio.sleep(0.3)
        if fault == "reset" or (fault == "once_reset" and not again):
            return StreamingResponse(_cut_off(), headers={"content-length": "100"})
        if fault in (texts := {"bad_json": "{", "no_object": "[]", "deep": '{"a":' * 100_000}):
            return Response(texts[fault], media_type="application/json")
        if fault == "endless":
            return StreamingResponse(itertools.repeat(b" " * (1 << 20)))
        reply = await make(body, fault)
        if reply is None:
            return Response(status_code=422)
        if self.components is not None:
            reply["reward_components"] = self.components
        if fault == "reward_missing":
            del reply["reward"]
        changes = {
            "reward_null": {"reward": None},
            "reward_nan": {"reward": float("nan")},
            "reward_text": {"reward": "1.0"},
            "reward_huge": {"reward": 10**400},
            "many_components": {"reward_components": dict.fromkeys(map(str, range(1000)), 0.0)},
            "failure_tag": {"reward": 0.0, "_ng_failure_class": "judge_failed"},
            "null_fields": {"reward_components": None, "judge": None},
        }
        return Response(json.dumps({**reply, **changes.get(fault, {})}), media_type="application/json")

    async def _verified(self, body, _):
        try:
            [item] = body["response"]["output"]
            [part] = item["content"]
            assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
            assert {"id", "created_at", "model", "object", "parallel_tool_calls", "tool_choice", "tools"} <= {
                *body["response"]
            }
            text = part["text"]
        except (KeyError, ValueError, AssertionError):
            return None
        return {**body, "reward": odd_share(text)}

    async def _ran(self, body, fault):
        first, second = self.canned if self.policy is None else await self._sampled(body["responses_create_params"])
        calls = [dict(zip(("prompt_token_ids", "generation_token_ids", "generation_log_probs"), one, strict=True))
                 for one in (first[:3], second[:3])]  # fmt: skip
        last = calls[1]
        if fault == "logprobs_short":
            last["generation_log_probs"] = last["generation_log_probs"][:-1]
        elif fault == "logprob_positive":
            last["generation_log_probs"] = [1.0, *last["generation_log_probs"][1:]]
        elif fault == "logprob_huge":
            last["generation_log_probs"] = [-(10**400), *last["generation_log_probs"][1:]]
        elif fault == "unknown_token":
            last["generation_token_ids"] = [10**6, *last["generation_token_ids"][1:]]
        elif fault == "prefix_break":
            last["prompt_token_ids"] = [1 - last["prompt_token_ids"][0], *last["prompt_token_ids"][1:]]
        elif fault == "prompt_ids_missing":
            del last["prompt_token_ids"]
        elif fault == "ids_missing":
            calls = [{}, {}]
        elif fault == "no_tokens":
            calls = [{**one, "generation_token_ids": [], "generation_log_probs": []} for one in calls]
        text = second[3] if self.policy is not None else "canned"
        output = [
            {"type": "reasoning", "summary": []},
            {"type": "function_call", "name": "look", "arguments": "{}", "call_id": "c1", **calls[0]},
            {"type": "function_call_output", "call_id": "c1", "output": TOOL_RESULT},
            {"type": "message", "role": "assistant", "status": "completed", **calls[1],
             "content": [{"type": "output_text", "text": text, "annotations": []}]},
        ]  # fmt: skip
        return {"response": {"output": [] if fault == "no_output" else output}, "reward": odd_share(text)}

    async def _sampled(self, params):
        """Two answers of the policy around the result of a tool."""
        told = {"max_tokens": params["max_output_tokens"], "temperature": params["temperature"]}
        told |= {"top_p": params["top_p"], "return_token_ids": True, "return_tokens_as_token_ids": True}
        given = params["input"]
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
        chat = await self._call("/v1/chat/completions", messages=messages, logprobs=True, top_logprobs=0, **told)
        first = (
            chat["prompt_token_ids"],
            chat["choices"][0]["token_ids"],
            [one["logprob"] for one in chat["choices"][0]["logprobs"]["content"]],
        )
        result = (await self._call("/tokenize", prompt=TOOL_RESULT))["tokens"]
        prompt = [*first[0], *first[1], *result]
        again = await self._call("/v1/completions", prompt=prompt, logprobs=0, **told)
        choice = again["choices"][0]
        return first, (prompt, choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["text"])

    async def _call(self, path, **body):
        reply = await self._http.post(f"{self.policy}{path}", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()


async def _cut_off():
    yield b"{"
    raise asyncio.CancelledError


def at_random(rate, faults):
    """Faults of a share of the calls, the same for equal calls."""

    def fault_of(body):
        random_of_call = random.Random(json.dumps(body.get("response", body).get("output", body), sort_keys=True))
        return random_of_call.choice(list(faults)) if random_of_call.random() < rate else None

    return fault_of


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--policy")
    told = parser.parse_args()
    print("serving", flush=True)
    NemoGym(port=told.port, policy=told.policy).serve()
