"""What environments ask of a server, and what the run that owns it learns and decides about their requests."""

import asyncio
import json
import math
import re
import threading
import time
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from oracle import PROMPT, ask, difference, load, run
from server_parts import Wakeful, client_of_service

from swift.data.responses import prompt_from
from swift.models.template import Template
from swift.models.tokenizer import read_tokenizer
from swift.rollout.engines.pool import EnginePool
from swift.rollout.engines.wire import digest_of
from swift.rollout.server.chats import CallReader
from swift.rollout.server.events import GrowingText
from swift.rollout.server.metrics import Meter
from swift.rollout.server.sampled_versions import SampledVersions
from swift.rollout.weights.policy import PolicyWeights
from swift.rollout.weights.sync import TRIAL_VERSION
from swift.types import Completion, Request, SamplingParams

XGRAMMAR = pytest.mark.skipif(find_spec("xgrammar") is None, reason="the package xgrammar is not installed")
MESSAGES = [{"role": "user", "content": "Hello"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}]
NAMES = ("tokens", "token_logprobs", "top_logprobs")
TOKENS = {"return_token_ids": True, "return_tokens_as_token_ids": True}


@pytest.fixture
def client(server):
    openai = pytest.importorskip("openai", reason="the package openai is not installed")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0) as one:
        yield one


def generated(http, **fields):
    """As the vLLM client of Atropos asks, and what it reads of the answer: ids and log-probs of each output."""
    body = {"prompt": {"prompt_token_ids": PROMPT}, "logprobs": 0, "n": 2, "max_tokens": 5, "temperature": 0.8}
    said = http.post("/generate", json=body | fields).raise_for_status().json()
    outputs = []
    for entries, reason in zip(said["logprobs"], said["finish_reasons"], strict=True):
        assert reason in ("stop", "length")
        ids = [int(next(iter(entry[0]))) for entry in entries]
        outputs.append((ids, [next(iter(entry[0].values())) for entry in entries]))
    return outputs


def test_generate_answers_as_atropos_reads_it(server, http):
    outputs = generated(http, stop=None, top_p=1.0)
    assert len(outputs) == 2
    for ids, values in outputs:
        assert difference(load(server.model), PROMPT, ids, values, 0.8) < 1e-5
    text = http.post("/generate", json={"prompt": "abc", "max_tokens": 2}).json()
    assert (text["prompt"], "logprobs" in text) == ("abc", False)


def test_chats_answer_as_an_agent_reads_them_through_openais_client(server, client, http):
    reply = client.chat.completions.create(
        model=client.models.list().data[0].id, messages=MESSAGES, max_completion_tokens=6, logprobs=True,
        top_logprobs=0, parallel_tool_calls=True, extra_body=TOKENS,
    )  # fmt: skip
    choice, content = reply.choices[0], reply.choices[0].logprobs.content
    assert reply.prompt_token_ids == http.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"]
    assert [entry.token for entry in content] == [f"token_id:{one}" for one in choice.token_ids]
    values = [entry.logprob for entry in content]
    assert difference(load(server.model), reply.prompt_token_ids, choice.token_ids, values) < 1e-5
    assert reply.usage.completion_tokens == len(choice.token_ids)
    assert (choice.message.role, choice.message.tool_calls) == ("assistant", None)
    chunks = list(client.chat.completions.create(model=server.model, messages=MESSAGES, max_tokens=2, stream=True))
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant", *[None] * (len(chunks) - 1)]


@pytest.mark.parametrize("kind", ["chat", "plain"])
@pytest.mark.parametrize("stop", [None, "text"])
def test_a_stream_tells_parts_of_the_answer_while_it_is_sampled_and_its_usage_at_the_end(server, client, kind, stop):
    fields = {"model": server.model, "max_tokens": 60, "seed": 3, "extra_body": {**TOKENS, "ignore_eos": True}}
    if kind == "chat":
        make, fields = client.chat.completions.create, {**fields, "messages": MESSAGES, "logprobs": True}
    else:
        make, fields = client.completions.create, {**fields, "prompt": PROMPT, "logprobs": 0}
    whole = make(**fields)
    text = whole.choices[0].message.content if kind == "chat" else whole.choices[0].text
    if stop is not None:
        fields["stop"] = stop = text[len(text) // 2 :][:3]
        whole = make(**fields)
        text = whole.choices[0].message.content if kind == "chat" else whole.choices[0].text
    *parts, last = make(**fields, stream=True, stream_options={"include_usage": True})
    choices = [part.choices[0] for part in parts]
    texts = [(one.delta.content if kind == "chat" else one.text) or "" for one in choices]
    assert len([one for one in texts if one]) > 3
    assert "".join(texts) == text
    assert [token for one in choices for token in one.token_ids] == whole.choices[0].token_ids
    if kind == "chat":
        values = [entry.logprob for one in choices if one.logprobs for entry in one.logprobs.content]
        wanted = [entry.logprob for entry in whole.choices[0].logprobs.content]
    else:
        values = [value for one in choices for value in one.logprobs.token_logprobs]
        wanted = whole.choices[0].logprobs.token_logprobs
    assert values == pytest.approx(wanted, abs=1e-6)
    assert [one.finish_reason for one in choices] == [None] * (len(choices) - 1) + [whole.choices[0].finish_reason]
    assert last.choices == [] and last.usage == whole.usage


def likeliest(model, prompt, token_ids, most):
    """At each place the likeliest tokens and their log-probs, by the model itself."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *token_ids]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).topk(most, -1)


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_tells_the_likeliest_tokens_beside_each_sampled_one(server, client, stream):
    fields = {"messages": MESSAGES, "max_tokens": 8, "seed": 2, "logprobs": True, "top_logprobs": 5, "stream": stream}
    told = client.chat.completions.create(model=server.model, **fields, extra_body={**TOKENS, "ignore_eos": True})
    parts = list(told) if stream else [told]
    prompt = next(part.prompt_token_ids for part in parts)
    entries = [entry for part in parts for one in part.choices for entry in one.logprobs.content]
    token_ids = [int(entry.token.removeprefix("token_id:")) for entry in entries]
    values, order = likeliest(load(server.model), prompt, token_ids, 5)
    shown = [[one.token for one in entry.top_logprobs] for entry in entries]
    assert shown == [[f"token_id:{one}" for one in row] for row in order.tolist()]
    for entry, row in zip(entries, values.tolist(), strict=True):
        assert [one.logprob for one in entry.top_logprobs] == pytest.approx(row, abs=1e-5)


def test_tokens_have_bytes_where_they_are_whole_characters(server, client):
    fields = {"messages": MESSAGES, "max_tokens": 64, "seed": 2, "logprobs": True, "top_logprobs": 20}
    reply = client.chat.completions.create(model=server.model, **fields, extra_body={"ignore_eos": True})
    entries = [one for entry in reply.choices[0].logprobs.content for one in (entry, *entry.top_logprobs)]
    assert {one.bytes is None for one in entries} == {True, False}
    assert all(one.bytes is None or bytes(one.bytes).decode() == one.token for one in entries)
    assert all(one.bytes is not None or "\ufffd" in one.token for one in entries)


@XGRAMMAR
@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_tells_the_likeliest_tokens_and_where_each_token_begins(server, client, stream):
    fields = {"prompt": PROMPT, "max_tokens": 40, "seed": 2, "logprobs": 3, "stream": stream}
    more = {"structured_outputs": {"regex": "[a-z]{50}"}}
    told = client.completions.create(model=server.model, **fields, extra_body=more)
    choices = [part.choices[0] for part in (told if stream else [told])]
    text = "".join(one.text for one in choices)
    tokens = [token for one in choices for token in one.logprobs.tokens]
    offsets = [place for one in choices for place in one.logprobs.text_offset]
    assert [text[place:][: len(token)] for place, token in zip(offsets, tokens, strict=True)] == tokens
    for one in choices:
        for token, value, top in zip(*(getattr(one.logprobs, name) for name in NAMES), strict=True):
            assert top[token] == pytest.approx(value, abs=1e-5)
            assert len(top) in (3, 4) and all(letter.islower() for letter in top), "what could not be drawn is none"


def test_what_cannot_be_drawn_is_no_alternative_and_the_sampled_token_comes_first(server, http):
    body = {"prompt": {"prompt_token_ids": PROMPT}, "max_tokens": 3, "logprobs": 4, "top_k": 2, "ignore_eos": True}
    reply = http.post("/generate", json=body).raise_for_status().json()
    for token, ((entry),) in zip(reply["token_ids"][0], reply["logprobs"][0], strict=True):
        assert next(iter(entry)) == str(token) and len(entry) == 2
        assert sum(math.exp(value) for value in entry.values()) == pytest.approx(1, abs=1e-5)


def test_engines_that_report_the_sampled_token_only_say_so(made):
    service = made(Wakeful())

    async def scene():
        async with client_of_service(service) as http:
            reply = await http.post("/v1/completions", json={"prompt": PROMPT, "logprobs": 2})
            return reply.status_code, reply.json()["error"]["message"]

    assert asyncio.run(scene()) == (
        422, "logprobs: 2: the engine scripted reports the sampled token only; use 0"
    )  # fmt: skip


def test_the_first_part_comes_long_before_the_end(server, http):
    body = {"prompt": PROMPT, "max_tokens": 480, "stream": True, "ignore_eos": True, "n": 2}
    with http.stream("POST", "/v1/completions", json=body) as reply:
        lines = reply.iter_lines()
        assert next(lines).startswith("data: {")
        assert server.service.queue.load == (2, 0)
        assert sum(line.startswith("data: {") for line in lines) > 20


def test_a_character_of_several_tokens_comes_whole_and_the_rest_of_a_stop_text_never():
    parts = {1: b"a", 2: "\u20ac".encode()[:2], 3: "\u20ac".encode()[2:], 4: b" b", 5: b"\xff"}

    def decode(ids):
        return b"".join(parts[one] for one in ids).decode(errors="replace")

    def told(ids, held_back):
        text = GrowingText(decode, held_back)
        return [text.add(ids[: count + 1]) for count in range(len(ids))] + [text.rest(decode(ids))]

    assert told([1, 2, 3, 4], 0) == ["a", "", "\u20ac", " b", ""]
    assert told([1, 2, 3, 4], 2) == ["", "", "", "a\u20ac", " b"]
    assert "".join(told([1, *[5] * 40, 4], 0)) == decode([1, *[5] * 40, 4])


@XGRAMMAR
def test_answers_are_held_to_json(server, client):
    shape = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": shape, "strict": True}}
    fields = {"model": server.model, "messages": MESSAGES, "max_tokens": 200, "seed": 1}
    for one in (wanted, {"type": "text"}):
        reply = client.chat.completions.create(**fields, response_format=one)
        if one is wanted:
            assert json.loads(reply.choices[0].message.content)["a"] in (1, 2)
    reply = client.chat.completions.create(**fields, response_format={"type": "json_object"})
    assert reply.choices[0].message.content.lstrip().startswith("{")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format: json_schema: missing"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "another form"),
        ({"stream_options": {"include_usage": True}}, "stream_options: "),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "continuous_usage_stats"),
        ({"tool_choice": "required", "tools": TOOLS}, "shows no tools"),
        ({"tools": TOOLS}, "shows no tools"),
        ({"tool_choice": {"type": "custom"}}, "tool_choice"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs: 21: out of range; at least 0, at most 20"),
        ({"top_logprobs": -1, "logprobs": True}, "top_logprobs: -1"),
        ({"top_logprobs": 1}, "top_logprobs: 1: only with logprobs true"),
        ({"reasoning_effort": "high"}, "reasoning_effort: high"),
        ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens"),
    ],
)
def test_what_would_change_the_answer_and_is_not_there_is_refused(http, fields, said):
    reply = http.post("/v1/chat/completions", json={"max_tokens": 1, "messages": MESSAGES, **fields})
    assert reply.status_code == 422, reply.text
    assert said in reply.json()["error"]["message"]


def test_the_model_has_the_names_that_it_was_given_and_no_other(server, http, monkeypatch):
    monkeypatch.setattr(server.service, "settings", replace(server.service.settings, model="one", names=("two",)))
    assert [one["id"] for one in http.get("/v1/models").json()["data"]] == ["one", "two"]
    for name in ("one", "two", None):
        reply = http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1, "model": name})
        assert reply.json()["model"] == (name or "one")
    assert http.post("/v1/completions", json={"prompt": PROMPT, "model": server.model}).status_code == 404


def test_metrics_count_what_was_asked_and_answered(http):
    def numbers():
        lines = [line for line in http.get("/metrics").text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    before = numbers()
    body = {"prompt": PROMPT, "n": 3, "max_tokens": 5, "ignore_eos": True}
    assert http.post("/v1/completions", json=body).status_code == 200
    after = numbers()
    more = {name: after[name] - before[name] for name in after}
    assert (more["swift_requests_total"], more["swift_prompt_tokens_total"]) == (3, 3 * len(PROMPT))
    assert more["swift_generation_tokens_total"] == 15
    assert more["swift_request_latency_seconds_count"] == more['swift_request_latency_seconds_bucket{le="+Inf"}'] == 3
    assert (after["swift_requests_running"], after["swift_weight_version"]) == (0, 0)


def test_the_log_has_a_line_of_throughput_while_there_is_something_to_tell():
    meter = Meter()
    assert meter.line(100.0, (0, 0)) == ""
    meter.add_requests([Request("a", [1] * 10, SamplingParams(max_new_tokens=50))])
    meter.add_arrivals([Completion("a", [1] * 50, [-1.0] * 50, "length")], 2.0)
    assert meter.line(105.0, (0, 0)) == "", "too early"
    assert "prompts 1 tokens/s, completions 5 tokens/s; samples: 1 done, 2 running, 3 waiting" in meter.line(
        110.0, (2, 3)
    )
    assert meter.line(120.0, (0, 0)) == ""


def test_parts_of_texts_and_calls_with_text_arguments_are_rendered_as_what_they_mean(http, server, monkeypatch):
    shown = []
    monkeypatch.setattr(server.service.template, "render", lambda messages, **_: shown.append(messages) or "x")
    monkeypatch.setattr(server.service.template, "check_tools", lambda messages, tools: None)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    asked = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "How "}, {"type": "text", "text": "many?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    assert http.post("/tokenize", json={"messages": asked}).status_code == 200
    read = {**call, "function": {"name": "f", "arguments": {"a": 1}}}
    assert shown == [
        [
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": "How many?"},
            {"role": "assistant", "content": "", "tool_calls": [read]},
        ]
    ]


@pytest.mark.parametrize("known", [False, True], ids=["no developer", "developer"])
def test_a_row_of_nemo_gym_is_one_prompt_whoever_asks(http, server, known):
    template = server.service.template
    chat = [{"role": role, "content": f"for {role}"} for role in ("system", "developer", "developer", "user")]
    jinja = template.tokenizer.chat_template
    template.tokenizer.chat_template = jinja + "{# developer #}" if known else jinja
    try:
        asked = http.post("/tokenize", json={"messages": chat}).json()["tokens"]
        assert asked == template.encode_prompt(prompt_from({"input": chat}))
    finally:
        template.tokenizer.chat_template = jinja
    shown = ["<|im_start|>developer\nfor developer<|im_end|>"] * 2 if known else ["for developer\n\nfor developer<|"]
    assert all(part in template.decode(asked, skip_special_tokens=False) for part in shown)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages, turn 1: a part",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "turn 1",
        ),
        ({"messages": MESSAGES, "tool_choice": "required"}, "tool_choice: "),
    ],
)
def test_what_no_template_can_show_is_refused(http, fields, said):
    reply = http.post("/v1/chat/completions", json={"max_tokens": 1, **fields})
    assert reply.status_code == 422
    assert said in reply.json()["error"]["message"]


HERMES = """{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}{{ "\\n" }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'


@pytest.fixture
def hermes(server, monkeypatch):
    """The server with a template that shows tools."""
    tokenizer = read_tokenizer(server.model)
    tokenizer.chat_template = HERMES
    template = Template(tokenizer)
    monkeypatch.setattr(server.service, "template", template)
    return template


@XGRAMMAR
def test_an_agent_calls_tools_and_the_next_prompt_goes_on_where_the_answer_ended(hermes, client, server):
    said = f"I add.\n{CALL}"
    more = {**TOKENS, "structured_outputs": {"regex": re.sub("([{}.])", r"\\\1", said)}}
    asked = [{"role": "user", "content": [{"type": "text", "text": "How "}, {"type": "text", "text": "many?"}]}]
    first = client.chat.completions.create(model=server.model, messages=asked, tools=TOOLS, extra_body=more)
    (choice,) = first.choices
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 2})
    assert (choice.message.content, choice.finish_reason) == ("I add.", "tool_calls")
    chat = [*asked, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "5"}]
    second = client.chat.completions.create(
        model=server.model, messages=chat, tools=TOOLS, max_tokens=1, extra_body=TOKENS
    )
    seen = [*first.prompt_token_ids, *choice.token_ids[:-1]]  # of the end tokens the template has one
    assert second.prompt_token_ids[: len(seen)] == seen
    assert second.choices[0].message.tool_calls is None
    plain = client.chat.completions.create(
        model=server.model, messages=asked, tools=TOOLS, tool_choice="none", extra_body=more
    )
    assert (plain.choices[0].message.content, plain.choices[0].finish_reason) == (said, "stop")


SHAPE = {
    "type": "object",
    "properties": {"unit": {"$ref": "#/$defs/U"}},
    "required": ["unit"],
    "$defs": {"U": {"enum": ["C"]}},
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {**SHAPE, "additionalProperties": False}}}
NOTHING = {"type": "function", "function": {"name": "stop"}}


@XGRAMMAR
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wanted", ["required", "weather", "stop"])
def test_a_call_that_is_required_comes_and_fits_the_functions_schema(hermes, client, server, wanted, stream):
    choice = "required" if wanted == "required" else {"type": "function", "function": {"name": wanted}}
    fields = {"messages": MESSAGES, "tools": [NOTHING, WEATHER], "tool_choice": choice, "temperature": 1e6}
    told = client.chat.completions.create(model=server.model, **fields, max_tokens=400, seed=5, stream=stream)
    (one,) = [part.choices[0] for part in told] if stream else told.choices
    message = one.delta if stream else one.message
    (call,) = message.tool_calls
    assert call.function.name in ([wanted] if wanted != "required" else ["stop", "weather"])
    assert json.loads(call.function.arguments) == ({"unit": "C"} if call.function.name == "weather" else {})
    assert (message.content, one.finish_reason) == (None, "tool_calls")


@XGRAMMAR
def test_a_required_call_that_is_cut_off_is_a_text(hermes, client, server):
    fields = {"messages": MESSAGES, "tools": [WEATHER], "tool_choice": "required", "max_tokens": 3}
    (one,) = client.chat.completions.create(model=server.model, **fields).choices
    assert (one.message.tool_calls, one.finish_reason, one.message.content[:1]) == (None, "length", "{")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tool_choice": "required"}, "tool_choice: required: there is no such tool; give it in tools"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "sub"}}, "tools": TOOLS},
            "tool_choice: sub: there is",
        ),
        ({"tool_choice": "required", "tools": [{"type": "function"}]}, "tool_choice: each entry of tools"),
        (
            {"tool_choice": "required", "tools": TOOLS, "structured_outputs": {"regex": "a"}},
            "structured_outputs asks for",
        ),
        (
            {"tool_choice": "required", "tools": TOOLS, "response_format": {"type": "json_object"}},
            "response_format asks",
        ),
    ],
)
def test_a_required_call_that_cannot_be_had_is_refused(hermes, http, fields, said):
    reply = http.post("/v1/chat/completions", json={"max_tokens": 1, "messages": MESSAGES, **fields})
    assert reply.status_code == 422, reply.text
    assert said in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    "said", ["<tool_call>{", '<tool_call>{"arguments": {}}</tool_call>', "<tool_call>[1]</tool_call>", "5"]
)
def test_an_answer_without_a_call_that_can_be_read_is_a_text(hermes, said):
    assert CallReader(hermes).message(said, said, TOOLS) == {"role": "assistant", "content": said}


def test_thinking_is_no_call_and_stays_in_the_text(hermes):
    said = f"<think>\n{CALL}</think>\n\nSo: {CALL}{CALL}"
    message = CallReader(hermes).message(said, said, TOOLS)
    assert message["content"] == f"<think>\n{CALL}</think>\n\nSo:"
    assert len(message["tool_calls"]) == 2


def test_a_template_without_tools_gives_texts(server):
    assert "tool_calls" not in CallReader(server.service.template).message(CALL, CALL, TOOLS)


def test_the_run_learns_which_weights_sampled_what_others_were_given(server, http, engine):
    assert engine.capabilities.lora  # connected
    old = generated(http)
    engine.load_weights(PolicyWeights(load(server.model)), 3)
    body = {"max_tokens": 3, "return_token_ids": True, "seed": 1}
    chat = http.post("/v1/chat/completions", json={"messages": MESSAGES, **body}).json()
    events = http.post("/v1/completions", json={"prompt": PROMPT, "stream": True, **body, "seed": 9}).text
    parts = [json.loads(line.removeprefix("data: ")) for line in events.splitlines() if line.startswith("data: {")]
    streamed = [token for part in parts for token in part["choices"][0]["token_ids"]]
    chatted = chat["choices"][0]["token_ids"]
    said = engine.versions_of(
        [
            *((PROMPT, *both) for both in old),
            (chat["prompt_token_ids"], chatted, []),
            ([*PROMPT, streamed[0]], streamed[1:], []),  # where the prompt ends does not matter
            (PROMPT, [*streamed, 1], []),
        ]
    )
    assert said == [*([(0, 0, len(ids))] for ids, _ in old), [(3, 0, len(chatted))], [(3, 0, len(streamed))], None]
    engine.close()
    another = server.engine()
    assert another.versions_of([(PROMPT, streamed, [])]) == [None]
    another.close()


def test_equal_tokens_of_other_weights_are_told_apart_by_their_logprobs(server, http, engine):
    assert engine.capabilities.lora  # connected
    old, model = generated(http, seed=1), load(server.model)
    with torch.no_grad():
        model.model.norm.weight.mul_(1.001)
    engine.load_weights(PolicyWeights(model), 3)
    new = generated(http, seed=1)
    assert [ids for ids, _ in new] == [ids for ids, _ in old]
    told = [(PROMPT, *both) for both in [*old, *new]]
    assert [spans[0][0] for spans in engine.versions_of(told)] == [0, 0, 3, 3]
    assert [spans[0][0] for spans in engine.versions_of([(*one[:2], []) for one in told])] == [3, 3, 3, 3]


def test_the_versions_used_least_recently_are_removed():
    versions = SampledVersions(limit=2)
    for token in range(2):
        versions.add([7], Completion("a", [token], [], "stop", versions=[(token, 0, 1)]))
    assert versions.find(digest_of([7], [0])) == [(0, 0, 1)]
    versions.add((7,), Completion("a", [2], [], "stop", versions=[(2, 0, 1)]))
    assert [versions.find(digest_of([7], [token])) for token in range(3)] == [[(0, 0, 1)], None, [(2, 0, 1)]]


def test_only_the_run_that_owns_the_server_asks_for_versions_and_holds_back(http, engine):
    assert engine.capabilities.lora
    assert http.post("/versions", json={"digests": []}).status_code == 409
    assert http.post("/hold", json={"held": True}).status_code == 409


def send_trial(engine, wanted):
    engine.load_weights(PolicyWeights(load(engine.engines[0].spec.model)), TRIAL_VERSION if wanted else 1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hold", [EnginePool.hold_back, send_trial])
def test_others_wait_while_the_run_holds_them_back_and_samples_itself(server, engine, hold, stream):
    hold(engine, True)
    answers = []
    body = {"prompt": PROMPT, "max_tokens": 2, "stream": stream}
    with server.client() as other:
        thread = threading.Thread(target=lambda: answers.append(other.post("/v1/completions", json=body)))
        thread.start()
        assert len(run(engine, [ask("own", max_new_tokens=2)])) == 1
        thread.join(0.5)
        assert answers == []
        hold(engine, False)
        thread.join(30)
    assert answers[0].status_code == 200


def test_what_a_run_held_back_goes_on_when_it_falls_silent_or_leaves(made):
    service = made(Wakeful(), lifetime_s=0.2)

    async def scene():
        async with client_of_service(service) as http:
            watching = asyncio.create_task(service.watch())
            for leaves in (True, False):
                await service.reset("a", "host", rebuild=False)
                assert (await http.post("/hold", json={"held": True}, headers={"X-Swift-Run": "a"})).is_success
                began = time.monotonic()
                asked = asyncio.create_task(http.post("/generate", json={"prompt": "x", "max_tokens": 1}))
                if leaves:
                    await asyncio.sleep(0.1)
                    assert await service.release("a")
                assert (await asyncio.wait_for(asked, 20)).is_success
                assert time.monotonic() - began > 0.1
            watching.cancel()

    asyncio.run(scene())
