"""The routes of `swift rollout`, as clients of every kind use them."""

import asyncio
import json
import math
import pickle
import re
import threading
from dataclasses import replace
from http.client import HTTPConnection
from importlib.util import find_spec

import httpx
import pytest
from oracle import PROMPT, ask, difference, load, run
from processes import wait_for
from server_parts import KEY, Wakeful, client_of_service

from swift.errors import Unsupported
from swift.models.tokenizer import read_tokenizer
from swift.rollout.engines import wire
from swift.rollout.server import weights
from swift.rollout.server.access import LIMITS
from swift.rollout.server.app import make_app

XGRAMMAR = pytest.mark.skipif(find_spec("xgrammar") is None, reason="the package xgrammar is not installed")
IDS = {"prompt": PROMPT, "return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": 0}


@pytest.fixture(scope="module")
def model(server):
    return load(server.model)


def ok(reply):
    assert reply.status_code == 200, reply.text
    return reply.json()


def refused(reply, status):
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert error["code"] == status
    return error["message"]


def infer_lines(http, requests, **more):
    samples = [
        {"id": request.request_id, "prompt": index, "sampling": {"max_new_tokens": request.sampling.max_new_tokens}}
        for index, request in enumerate(requests)
    ]
    body = {"prompts": [list(request.prompt_ids) for request in requests], "requests": samples, **more}
    return http.post("/infer/", json=body)


# --- what it is ----------------------------------------------------------------------------------------------------


def test_health_needs_no_key_and_everything_else_does(server, http):
    assert httpx.get(f"{server.url}/health", trust_env=False).json() == {"status": "ok", "alive": True}
    assert {"detail", "boot_id", "counters"} <= set(http.get("/health").json())
    assert httpx.get(f"{server.url}/health/", trust_env=False).status_code == 200
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": server.key}):
        for path in ("/info", "/v1/models", "/metrics", "/infer/", "/nothing"):
            reply = httpx.request(
                "POST" if path == "/infer/" else "GET", server.url + path, headers=headers, trust_env=False
            )
            assert reply.status_code == 401
            assert server.key not in reply.text
    assert http.get("/info").status_code == 200


def test_every_route_but_health_needs_the_key(made):
    """The application's own list, so that a new route is in it."""
    service = made(Wakeful(), api_key=KEY)
    gate = make_app(service)
    routes = [(method, route.path) for route in gate.app.routes for method in sorted(route.methods)]
    assert len(routes) >= 25

    async def answered(keys=({}, {"Authorization": "Bearer wrong"})):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(gate), base_url="http://server") as client:
            replies = [(route, await client.request(*route, headers=key)) for route in routes for key in keys]
            return {route for route, reply in replies if reply.status_code != 401}

    assert asyncio.run(answered()) == {("GET", "/health"), ("GET", "/health/")}


def test_it_says_what_it_serves(server, http):
    info = ok(http.get("/info"))
    assert (info["model"], info["dtype"], info["tp"], info["dp"]) == (server.model, "float32", 1, 1)
    assert info["max_model_len"] == 512
    assert info["capabilities"]["name"] == "transformers"
    assert len(info["checksum"]) == 32
    assert ok(http.get("/v1/models"))["data"][0]["id"] == server.model


def test_an_unknown_route_and_a_wrong_method_are_json_errors(http):
    assert "/nothing" in refused(http.get("/nothing"), 404)
    assert "/infer/" in refused(http.get("/infer/"), 405)


# --- /infer/ -------------------------------------------------------------------------------------------------------


def test_infer_answers_every_request_once_in_lines_that_end_with_end(http, model):
    requests = [ask(f"g/{i}", max_new_tokens=4 + i) for i in range(6)]
    lines = [json.loads(line) for line in infer_lines(http, requests).text.splitlines()]
    assert [line["event"] for line in lines[-1:]] == ["end"]
    done = {line["completion"]["request_id"]: line["completion"] for line in lines if line["event"] == "completion"}
    assert sorted(done) == sorted(request.request_id for request in requests)
    for completion in done.values():
        assert difference(model, PROMPT, completion["token_ids"], completion["logprobs"]) < 1e-5
    last = max(index for index, line in enumerate(lines) if line["event"] == "completion")
    said = [line["counters"] for line in lines[:last] if line["event"] == "alive"]  # who has the last one knows it all
    assert said[-1]["decode_rows"] == ok(http.get("/info"))["counters"]["decode_rows"]


def test_infer_refuses_weights_that_the_caller_does_not_count_on(http):
    assert "the request expects version 7" in refused(infer_lines(http, [ask("a")], version=7), 412)


def one_sample(prompt=0, prompts=((1,),), limit_s=None, **sampling):
    entry = {"id": "a", "prompt": prompt, "sampling": {"max_new_tokens": 1, **sampling}, "limit_s": limit_s}
    return {"prompts": [list(one) for one in prompts], "requests": [entry]}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (one_sample(prompt=1), "prompt 1 of 1"),
        ({"prompts": [], "requests": []}, "prompts: 0"),
        (one_sample(prompts=((),)), "no tokens"),
        (one_sample(prompts=((1,) * 600,)), "600 tokens"),
        (one_sample(max_new_tokens=0), "max_new_tokens"),
        (one_sample(top_p=0), "top_p"),
        (one_sample(temperature="hot"), "temperature"),
        (one_sample(limit_s=0), "limit_s"),
        ({"prompts": [[1]], "requests": [{"id": "a", "prompt": 0}]}, "sampling"),
        ({"prompts": [["x"]], "requests": []}, "prompts[0][0]"),
        ({"prompts": [[1]], "requests": [], "code": "import os"}, "code"),
    ],
)
def test_infer_refuses_what_makes_no_sense_before_anything_is_sampled(http, body, said):
    reply = http.post("/infer/", json=body)
    assert said in refused(reply, 422)


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/completions", {"prompt": [5, 10**6], "max_tokens": 1}),
        ("/infer/", one_sample(prompts=((5, 10**6),))),
        ("/generate", {"prompt": {"prompt_token_ids": [5, 10**6]}, "max_tokens": 1}),
    ],
)
def test_ids_outside_of_the_vocabulary_are_the_fault_of_the_caller(http, route, body):
    assert "outside of 0.." in refused(http.post(route, json=body), 422)
    assert ok(http.get("/health"))["alive"]


# --- OpenAI --------------------------------------------------------------------------------------------------------


def test_completions_carry_ids_and_logprobs_of_the_sampled_tokens(http, model):
    reply = ok(http.post("/v1/completions", json={**IDS, "n": 3, "seed": 5, "max_tokens": 8, "temperature": 0.7}))
    assert reply["usage"]["prompt_tokens"] == len(PROMPT)
    texts = set()
    for choice in reply["choices"]:
        ids = choice["token_ids"]
        assert choice["prompt_token_ids"] == PROMPT
        assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in ids]
        assert difference(model, PROMPT, ids, choice["logprobs"]["token_logprobs"], 0.7) < 1e-5
        texts.add(tuple(ids))
    assert len(texts) == 3
    again = ok(http.post("/v1/completions", json={**IDS, "n": 3, "seed": 5, "max_tokens": 8, "temperature": 0.7}))
    assert [c["token_ids"] for c in again["choices"]] == [c["token_ids"] for c in reply["choices"]]
    other = ok(http.post("/v1/completions", json={**IDS, "n": 3, "max_tokens": 8}))
    assert {tuple(c["token_ids"]) for c in other["choices"]} != texts


def test_completions_take_texts_ids_and_lists_of_both(http):
    tokens = ok(http.post("/tokenize", json={"prompt": "The quick"}))["tokens"]
    for prompt, count in (("The quick", 1), (["The quick", "The"], 2), (tokens, 1), ([tokens, tokens[:2]], 2)):
        body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "return_token_ids": True}
        choices = ok(http.post("/v1/completions", json=body))["choices"]
        assert len(choices) == count
        assert choices[0]["prompt_token_ids"] == tokens


def test_the_default_length_is_openais(http):
    body = {"prompt": PROMPT, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    choice = ok(http.post("/v1/completions", json=body))["choices"][0]
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (16, "length")


def test_a_text_ends_before_its_stop_and_ids_and_logprobs_after_it(http, model):
    body = {**IDS, "max_tokens": 32, "temperature": 0, "ignore_eos": True, "skip_special_tokens": False}
    whole = ok(http.post("/v1/completions", json=body))["choices"][0]
    stop = next(char for char in whole["text"][1:] if char != "\ufffd")
    place = whole["text"].index(stop)
    cut = ok(http.post("/v1/completions", json={**body, "stop": [stop, "never said"]}))["choices"][0]
    assert (cut["text"], cut["finish_reason"], cut["stop_reason"]) == (whole["text"][:place], "stop", stop)
    count = len(cut["token_ids"])
    assert 0 < count <= len(whole["token_ids"])
    assert cut["token_ids"] == whole["token_ids"][:count]
    assert len(cut["logprobs"]["token_logprobs"]) == count
    assert difference(model, PROMPT, cut["token_ids"], cut["logprobs"]["token_logprobs"], 1.0) < 1e-5
    kept = ok(http.post("/v1/completions", json={**body, "stop": stop, "include_stop_str_in_output": True}))
    assert kept["choices"][0]["text"].startswith(whole["text"][: place + 1])
    plain = ok(http.post("/generate", json={**body, "prompt": {"prompt_token_ids": PROMPT}, "stop": stop,
                                            "return_token_ids": None, "return_tokens_as_token_ids": None}))  # fmt: skip
    assert plain["text"] == [whole["text"][:place]]
    events = http.post("/v1/completions", json={**body, "stop": stop, "stream": True}).text.splitlines()
    parts = [json.loads(one.removeprefix("data: ")) for one in events if one.startswith("data: {")]
    assert "".join(part["choices"][0]["text"] for part in parts) == whole["text"][:place]


def test_a_stop_text_before_the_least_length_is_text_streamed_or_not(http):
    body = {**IDS, "max_tokens": 64, "temperature": 0, "ignore_eos": True, "skip_special_tokens": False}
    whole = ok(http.post("/v1/completions", json=body))["choices"][0]
    text, least = whole["text"], 20
    stop = text[least]
    assert len(text) == len(whole["token_ids"]) and stop in text[:least], "a letter for each token"
    body |= {"stop": stop, "min_tokens": least}
    cut = ok(http.post("/v1/completions", json=body))["choices"][0]
    assert (cut["text"], cut["stop_reason"]) == (text[:least], stop)
    events = http.post("/v1/completions", json={**body, "stream": True}).text.splitlines()
    parts = [json.loads(one.removeprefix("data: ")) for one in events if one.startswith("data: {")]
    assert "".join(part["choices"][0]["text"] for part in parts) == cut["text"]


def test_a_stop_token_is_no_part_of_the_text(http):
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
            "skip_special_tokens": False}  # fmt: skip
    whole = ok(http.post("/v1/completions", json=body))["choices"][0]["token_ids"]
    stopped = ok(http.post("/v1/completions", json={**body, "stop_token_ids": [whole[0]]}))["choices"][0]
    assert (stopped["token_ids"], stopped["text"], stopped["finish_reason"]) == (whole[:1], "", "stop")


def test_a_stream_has_all_tokens_of_each_completion_and_an_end(http):
    body = {"prompt": PROMPT, "n": 2, "max_tokens": 4, "stream": True, "return_token_ids": True, "ignore_eos": True}
    events = [line.removeprefix("data: ") for line in http.post("/v1/completions", json=body).text.splitlines() if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event)["choices"][0] for event in events[:-1]]
    for index in (0, 1):
        own = [chunk for chunk in chunks if chunk["index"] == index]
        assert sum(len(chunk["token_ids"]) for chunk in own) == 4
        assert [chunk["finish_reason"] for chunk in own] == [None] * (len(own) - 1) + ["length"]


def test_texts_become_tokens(http):
    reply = ok(http.post("/tokenize", json={"prompt": "héllo", "return_token_strs": True}))
    assert reply["count"] == len(reply["tokens"]) == len(reply["token_strs"])


@pytest.mark.parametrize(
    ("field", "value"),
    [("frequency_penalty", 3), ("logit_bias", {"1": 5}), ("best_of", 4), ("echo", True),
     ("logprobs", 21), ("guided_regex", "a"), ("chat_template", "{{ 1 }}"), ("min_tokens", -1)],
)  # fmt: skip
def test_what_the_server_does_not_have_is_refused_by_name(http, field, value):
    said = refused(http.post("/v1/completions", json={"prompt": PROMPT, field: value}), 422)
    assert said.startswith(f"{field}: ")


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("temperature", 5e-324, "temperature"), ("temperature", 1e-30, "temperature"), ("temperature", 1e300, ""),
        ("temperature", -0.1, ""), ("top_p", 0, ""), ("top_p", 5e-324, ""), ("top_p", 1.1, ""), ("min_p", 1.5, ""),
        ("min_p", -1e-9, ""), ("top_k", -2, ""), ("top_k", 2**40, ""), ("repetition_penalty", 5e-324, ""),
        ("repetition_penalty", 1e308, ""), ("n", 0, ""), ("n", -1, ""), ("n", 2**70, ""), ("max_tokens", 0, "max_"),
        ("max_tokens", -5, "max_"), ("max_tokens", 2**70, "max_"), ("seed", 2**70, ""), ("seed", -1, ""),
        ("logit_bias", {"1": 1e308}, ""), ("stop", ["x"] * 10**6, ""), ("stop", "x" * 10**6, ""),
        ("stop_token_ids", list(range(10**6)), ""), ("structured_outputs", {"regex": "a" * 10**6}, "regex"),
    ],
)  # fmt: skip
def test_numbers_that_no_distribution_has_are_refused_in_one_line(http, field, value, named):
    said = refused(http.post("/v1/completions", json={"prompt": PROMPT, field: value}, timeout=20), 422)
    assert said.startswith(named or field) and len(said) < 300


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.01}, {"temperature": 1e6}, {"top_p": 1e-6}, {"min_p": 1.0}, {"min_p": 5e-324},
        {"repetition_penalty": 1e-3}, {"repetition_penalty": 1e3}, {"max_tokens": 2**31 - 1, "stop_token_ids": [0, 1]},
        {"seed": 2**63 - 1}, {"top_k": 2**31 - 1}, {"min_tokens": 2**31 - 1}, {"temperature": 0.01, "top_p": 1e-6},
    ],
)  # fmt: skip
def test_the_last_numbers_that_are_taken_give_logprobs_of_the_distribution(http, sampling):
    reply = ok(http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 4, "logprobs": 0, **sampling}))
    values = reply["choices"][0]["logprobs"]["token_logprobs"]
    assert values and all(-1e4 < value <= 0 for value in values)


def test_neutral_values_of_such_fields_change_nothing(http):
    body = {"prompt": PROMPT, "max_tokens": 1, "frequency_penalty": 0, "best_of": 1, "echo": False, "user": "me"}
    assert len(ok(http.post("/v1/completions", json=body))["choices"]) == 1


def test_chats_without_a_system_prompt_get_that_of_the_server(server, http, monkeypatch):
    asked = [{"role": "user", "content": "a"}]
    own = [{"role": "system", "content": "mine"}, *asked]
    plain, others = (ok(http.post("/tokenize", json={"messages": one}))["tokens"] for one in (asked, own))
    monkeypatch.setattr(server.service, "settings", replace(server.service.settings, system="mine"))
    assert ok(http.post("/tokenize", json={"messages": asked}))["tokens"] == others != plain
    own[0]["role"] = "developer"
    assert ok(http.post("/tokenize", json={"messages": own}))["tokens"] == others


@XGRAMMAR
def test_completions_are_held_to_an_expression(http):
    body = {"max_tokens": 12, "seed": 3, "skip_special_tokens": False, "structured_outputs": {"regex": "(a|b){3}"}}
    text = ok(http.post("/generate", json={**body, "prompt": {"prompt_token_ids": PROMPT}}))["text"][0]
    assert re.fullmatch("(a|b){3}(<.*>)?", text)
    text = ok(http.post("/v1/completions", json={**body, "prompt": PROMPT}))["choices"][0]["text"]
    assert re.fullmatch("(a|b){3}(<.*>)?", text)


@XGRAMMAR
@pytest.mark.parametrize(
    ("wanted", "status", "said"),
    [
        ({"regex": "(a"}, 422, "parenthesis"),
        ({"choice": ["a"]}, 422, "the transformers engine takes one of regex and json"),
        ({"json": {"type": "unheard of"}}, 422, "structured_outputs: json"),
    ],
)
def test_guidance_that_cannot_be_given_is_refused(http, wanted, status, said):
    reply = http.post("/v1/completions", json={"prompt": PROMPT, "structured_outputs": wanted})
    assert said in refused(reply, status)


def test_counting_penalties_and_least_lengths_are_taken(http):
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0.2, "seed": 1, "return_token_ids": True, "n": 4}
    plain = ok(http.post("/v1/completions", json=body))["choices"]
    more = {"presence_penalty": 2, "frequency_penalty": 2, "min_tokens": 24}
    varied = ok(http.post("/v1/completions", json=body | more))["choices"]
    assert sum(len(set(one["token_ids"])) for one in varied) > sum(len(set(one["token_ids"])) for one in plain)
    assert {len(one["token_ids"]) for one in varied} == {24}


@XGRAMMAR
def test_a_trainer_samples_with_them_over_http(engine, server):
    tokenizer = read_tokenizer(server.model)
    assert engine.capabilities.guided
    fields = (
        "frequency_penalty", "presence_penalty", "min_tokens", "top_logprobs", "prompt_logprobs", "structured_outputs",
    )  # fmt: skip
    assert engine.capabilities.sampling_fields == fields
    for one in run(engine, [ask(n, seed=n, regex="(a|b){4}") for n in range(3)]):
        assert re.fullmatch("(a|b){4}", tokenizer.decode(one.token_ids[:-1]))
    with pytest.raises(Unsupported, match="--generation_kwargs: bad_words"):
        run(engine, [ask("x", extra={"bad_words": ["a"]})])


def test_what_the_server_was_told_about_sampling_beats_the_apis_defaults():
    from swift.arguments import parse
    from swift.rollout.server.run import _sampling_defaults

    words = ["--model", "m", "--generation_kwargs", '{"temperature": 0.5, "min_tokens": 3, "stop_token_ids": [7]}']
    told = parse("rollout", [*words, "--top_p", "0.9", "--vllm_guided_decoding_regex", "a+"], {})
    assert _sampling_defaults(told.args, told.given) == {
        "temperature": 0.5, "top_p": 0.9, "min_tokens": 3, "stop_token_ids": (7,), "regex": "a+"
    }  # fmt: skip


def test_a_model_that_is_not_served_is_named(server, http):
    said = refused(http.post("/v1/completions", json={"prompt": PROMPT, "model": "gpt"}), 404)
    assert "gpt" in said
    assert server.model in said


# --- limits --------------------------------------------------------------------------------------------------------


def test_a_body_over_the_limit_is_refused_whether_it_says_so_or_not(server, http):
    limit = 64 << 20
    connection = HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Authorization", f"Bearer {server.key}")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", str(limit + 1))
    connection.endheaders()
    answer = connection.getresponse()
    assert answer.status == 413
    assert str(limit) in json.loads(answer.read())["error"]["message"]
    connection.close()

    def chunks():
        for _ in range(66):
            yield b" " * (1 << 20)

    reply = http.post("/v1/completions", content=chunks(), headers={"Content-Type": "application/json"})
    assert str(limit) in refused(reply, 413)


def test_prompts_samples_and_the_queue_have_limits_that_are_named(http):
    assert "4096" in refused(http.post("/v1/completions", json={"prompt": [[1]] * 4097, "max_tokens": 1}), 422)
    assert "1024" in refused(http.post("/v1/completions", json={"prompt": [1], "n": 1025, "max_tokens": 1}), 422)
    full = {"prompt": [[1]] * 40, "n": 512, "max_tokens": 1}
    reply = http.post("/v1/completions", json=full)
    assert "20000" in refused(reply, 429)
    assert reply.headers["retry-after"] == "1"


def test_many_messages_and_schemas_have_limits_that_are_named(http):
    chat = {"messages": [{"role": "user", "content": ""}] * 10_000, "max_tokens": 1}
    assert "too long for the context of 512 tokens" in refused(http.post("/v1/chat/completions", json=chat), 422)
    schema = {"enum": ["a" * 100] * 700}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    for body in ({"structured_outputs": {"json": schema}}, {"response_format": form}):
        reply = http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1, **body})
        assert "65536 characters" in refused(reply, 422)


def test_an_adapter_over_the_limit_is_refused(http, monkeypatch):
    monkeypatch.setattr(weights, "LIMITS", replace(LIMITS, adapter_bytes=1000))
    ok(http.post("/reset", json={"run_id": "mine"}))
    headers = {"Content-Type": "application/x-safetensors", "X-Swift-Run": "mine"}
    upload = {"url": "/v1/load_lora_adapter?version=1", "headers": headers}
    chunks = iter([bytes(600)] * 2)
    for content in (bytes(1001), chunks):
        assert "longer than the limit of 1000 bytes" in refused(http.post(**upload, content=content), 413)
    assert "no safetensors file" in refused(http.post(**upload, content=bytes(1000)), 409)
    ok(http.post("/release", json={"run_id": "mine"}))


def test_samples_of_all_clients_together_count_for_the_queue(made):
    service = made(Wakeful(step_s=0.1))
    service.queue.limit = 3

    async def scene():
        async with client_of_service(service) as one:
            body = {"prompt": PROMPT, "n": 2, "max_tokens": 500}
            running = asyncio.create_task(one.post("/v1/completions", json=body))
            while sum(service.queue.load) < 2:
                await asyncio.sleep(0.01)
            replies = [await one.post("/v1/completions", json={**body, "n": n, "max_tokens": 1}) for n in (2, 1)]
            service.queue.abort()
            return [reply.status_code for reply in (*replies, await running)]

    assert asyncio.run(scene()) == [429, 200, 200]


@pytest.mark.parametrize(("own", "servers"), [(0.2, math.inf), (math.inf, 0.2), (60.0, 0.2)])
def test_a_request_takes_no_longer_than_its_caller_and_the_server_allow(made, own, servers):
    class Endless(Wakeful):
        def submit(self, request):
            super().submit(request)
            if "endless" in request.request_id:
                self._outstanding[request.request_id].length = 1 << 30

    service = made(Endless(step_s=0.01), request_s=servers)
    body = wire.encode(wire.InferRequest.of([replace(ask("endless", [1]), limit_s=own), ask("quick", [1])], None))

    async def scene():
        async with client_of_service(service) as http:
            return await http.post("/infer/", content=body, headers={"Content-Type": "application/json"})

    said = [json.loads(line) for line in asyncio.run(scene()).text.splitlines()]
    done = {line["completion"]["request_id"]: line["completion"] for line in said if line["event"] == "completion"}
    assert {name: one["finish_reason"] for name, one in done.items()} == {"endless": "error", "quick": "stop"}
    assert service.engine.counters.late == 2


def test_a_weight_update_may_be_silent_while_another_server_of_the_run_drains(made):
    service = made(Wakeful(), drain_s=100.0)
    assert service.queue.updates.silence_s == 100.0 + service.settings.specs[0].limit_s


def test_only_json_and_safetensors_are_read(http):
    class Bomb:
        def __reduce__(self):
            return exec, ("raise SystemExit('ran')",)

    evil = pickle.dumps(Bomb())
    reply = http.post("/v1/completions", content=evil, headers={"Content-Type": "application/json"})
    assert refused(reply, 422).startswith("body: ")
    assert refused(http.post("/v1/completions", content=b"{", headers={"Content-Type": "application/json"}), 422)
    headers = {"Content-Type": "application/x-safetensors"}
    upload = {"url": "/v1/load_lora_adapter?version=1", "content": evil, "headers": headers}
    assert "only the run that holds this server" in refused(http.post(**upload), 409)
    ok(http.post("/reset", json={"run_id": "mine"}))
    headers["X-Swift-Run"] = "mine"
    assert "no safetensors file" in refused(http.post(**upload), 409)
    ok(http.post("/release", json={"run_id": "mine"}))
    assert ok(http.get("/health"))["status"] == "ok"


# --- control -------------------------------------------------------------------------------------------------------


def test_a_paused_server_answers_after_it_is_resumed(server, http):
    ok(http.post("/pause"))
    assert ok(http.get("/info"))["paused"] is True
    answers = []
    with server.client() as other:
        body = {"prompt": PROMPT, "max_tokens": 2}
        thread = threading.Thread(target=lambda: answers.append(other.post("/v1/completions", json=body)))
        thread.start()
        thread.join(0.3)
        assert answers == []
        ok(http.post("/resume"))
        thread.join(30)
    assert answers[0].status_code == 200


def test_sleeping_engines_refuse_work_and_wake_up(http):
    assert ok(http.post("/sleep?level=1"))["asleep"]
    assert "asleep" in refused(http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1}), 409)
    assert "kv-cache" in refused(http.post("/wake_up?tags=weights&tags=kv-cache"), 501)
    assert ok(http.post("/wake_up"))["fully_awake"] is True
    assert ok(http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1}))["choices"]


def test_abort_delivers_what_there_is(server, http):
    answers = []
    with server.client() as other:
        body = {"prompt": PROMPT, "max_tokens": 480, "n": 32, "ignore_eos": True, "return_token_ids": True}
        thread = threading.Thread(target=lambda: answers.append(other.post("/v1/completions", json=body)))
        thread.start()
        assert wait_for(lambda: ok(http.get("/info"))["running"] == 32)
        assert ok(http.post("/abort_requests", json={}))["aborted"] == 32
        thread.join(30)
    choices = ok(answers[0])["choices"]
    assert {choice["finish_reason"] for choice in choices} == {"abort"}
