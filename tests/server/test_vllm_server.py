"""What clients of OpenAI's API ask of `swift rollout --infer_backend vllm`: one process, all the requests in it."""

import json
import re

import pytest
from server_parts import Server

from swift.models.tiny import build_tiny

pytest.importorskip("vllm")
pytest.importorskip("xgrammar")
pytestmark = [pytest.mark.slow, pytest.mark.long]

MESSAGES = [{"role": "user", "content": "Hello"}]
TEMPLATE = """{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}{{ "\\n" }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
UNIT = {"type": "object", "properties": {"unit": {"$ref": "#/$defs/U"}}, "required": ["unit"]}
PARAMETERS = {**UNIT, "additionalProperties": False, "$defs": {"U": {"enum": ["C"]}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]


@pytest.fixture(scope="module")
def http(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm")
    model = build_tiny(folder / "model", size="tiny")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        server = Server(
            model, folder, "--infer_backend", "vllm", "--vllm_enforce_eager", "true", "--vllm_max_model_len", "1024",
            "--served_model_name", "one", "two",
        )  # fmt: skip
    with server.client() as client:
        yield client
    assert server.stop() == 0
    assert server.left() == []


def post(http, route, status=200, **body):
    reply = http.post(f"/v1/{route}", json=body)
    assert reply.status_code == status, reply.text
    return reply.json() if status == 200 else reply.json()["error"]["message"]


def streamed(http, route, **body):
    """The events of a stream."""
    events = http.post(f"/v1/{route}", json={**body, "stream": True}).raise_for_status().text.split("\n\n")
    told = [event.removeprefix("data: ") for event in events if event.startswith("data: ")]
    assert told.pop() == "[DONE]"
    return [json.loads(event) for event in told]


def test_the_model_has_its_names(http):
    assert [one["id"] for one in http.get("/v1/models").json()["data"]] == ["one", "two"]
    assert post(http, "completions", prompt="a", max_tokens=1, model="two")["model"] == "two"
    assert "served: one, two" in post(http, "completions", 404, prompt="a", model="three")


def test_a_stream_tells_what_the_whole_answer_has_and_its_usage(http):
    body = {"messages": MESSAGES, "max_tokens": 30, "seed": 3, "ignore_eos": True, "logprobs": True, "top_logprobs": 4}
    whole = post(http, "chat/completions", **body)
    *parts, last = streamed(http, "chat/completions", **body, stream_options={"include_usage": True})
    assert len(parts) > 3 and last["choices"] == [] and last["usage"] == whole["usage"]
    choices = [part["choices"][0] for part in parts]
    assert "".join(one["delta"]["content"] for one in choices) == whole["choices"][0]["message"]["content"]
    entries = [entry for one in choices for entry in one["logprobs"]["content"]]
    wanted = whole["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in entries] == [4] * 30
    for mine, theirs in zip(entries, wanted, strict=True):
        assert mine["token"] == theirs["token"]
        assert mine["logprob"] == pytest.approx(theirs["logprob"], abs=1e-4)
    assert {one["finish_reason"] for one in choices} == {None, "length"}


def test_samples_of_one_prompt_differ_and_the_greedy_ones_do_not(http):
    body = {"prompt": "abc", "max_tokens": 16, "n": 3, "ignore_eos": True}
    for temperature, number in ((1.0, 3), (0.0, 1)):
        reply = post(http, "completions", **body, temperature=temperature)
        assert len({one["text"] for one in reply["choices"]}) == number
        assert reply["usage"] == {"prompt_tokens": 3, "completion_tokens": 48, "total_tokens": 51}


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_ends_before_its_stop(http, stream):
    body = {"prompt": "abc", "max_tokens": 40, "structured_outputs": {"regex": "abcabc[x-z]{20}"}, "stop": ["ca", "cx"]}
    choices = streamed(http, "completions", **body) if stream else [post(http, "completions", **body)]
    choices = [one["choices"][0] for one in choices]
    assert "".join(one["text"] for one in choices) == "ab"
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", "ca")


def test_completions_tell_the_likeliest_of_what_could_be_drawn(http):
    reply = post(http, "completions", prompt="abc", max_tokens=8, logprobs=5, top_k=2, ignore_eos=True)
    told = reply["choices"][0]["logprobs"]
    assert len(told["text_offset"]) == len(told["top_logprobs"]) == 8
    assert all(len(top) <= 2 for top in told["top_logprobs"])
    assert all(top[token] <= 0 for token, top in zip(told["tokens"], told["top_logprobs"], strict=True))


def test_answers_are_held_to_json(http):
    body = {"messages": MESSAGES, "max_tokens": 400, "seed": 1, "temperature": 2}
    reply = post(http, "chat/completions", **body, response_format={"type": "json_object"})
    assert reply["choices"][0]["message"]["content"].startswith("{")
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    reply = post(http, "chat/completions", **body, response_format=form)
    assert json.loads(reply["choices"][0]["message"]["content"])["a"] in (1, 2)


@pytest.mark.parametrize(
    "wanted", [{"json": {"type": "unheard of"}}, {"regex": "(a"}, {"json": {"properties": {"a": {"$ref": "#/no"}}}}]
)
def test_what_cannot_be_compiled_is_the_clients_fault(http, wanted):
    assert "vLLM refuses it" in post(http, "completions", 422, prompt="a", max_tokens=1, structured_outputs=wanted)
    assert http.get("/health").json()["status"] == "ok"


def test_tools_are_shown_and_their_calls_read(http):
    said = 'I look.\n<tool_call>\n{"name": "weather", "arguments": {"unit": "C"}}\n</tool_call>'
    body = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 200}
    shown = post(http, "chat/completions", **body, structured_outputs={"regex": re.sub("([{}.])", r"\\\1", said)})
    assert shown["usage"]["prompt_tokens"] > 200
    (choice,) = shown["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("I look.", "tool_calls")
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"unit": "C"}'}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wanted", ["required", {"type": "function", "function": {"name": "weather"}}], ids=str)
def test_a_call_that_is_required_comes(http, wanted, stream):
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": wanted, "seed": 4, "temperature": 2}
    told = streamed(http, "chat/completions", **body) if stream else [post(http, "chat/completions", **body)]
    (choice,) = told[0]["choices"]
    (call,) = choice["delta" if stream else "message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"unit": "C"}
    assert choice["finish_reason"] == "tool_calls"


def test_metrics_count_what_was_sampled(http):
    def numbers():
        lines = [line for line in http.get("/metrics").text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    before = numbers()
    post(http, "completions", prompt="abc", n=2, max_tokens=5, ignore_eos=True)
    more = {name: value - before[name] for name, value in numbers().items()}
    assert (more["swift_requests_total"], more["swift_prompt_tokens_total"]) == (2, 6)
    assert (more["swift_generation_tokens_total"], more["swift_request_latency_seconds_count"]) == (10, 2)
