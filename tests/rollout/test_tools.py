"""Functions that the policy may call: what it is shown, how its calls are read, and what comes back."""

import asyncio
import json
import threading
import time
from pathlib import Path

import pytest
import trl

from swift.data.loading import Example
from swift.data.prompts import Tokenizer
from swift.errors import ConfigError
from swift.models.template import Template
from swift.models.templates import read_template
from swift.models.tiny import build_tokenizer
from swift.plugin import tool_parsers, tools
from swift.rollout.batches import BatchConfig, BatchMaker, round_metrics
from swift.rollout.sources.multi_turn.tools import CALLS, open_toolbox, read_calls
from swift.rollout.sources.multi_turn.trajectory import OUT_OF_TURNS, Limits, Trajectory
from swift.types import Completion, GroupScores, Prompt, Request, RolloutGroup, SamplingParams

MODELS = Path(trl.__path__[0]) / "chat_templates"


@tools.register("add")
def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


@tools.register("look_up")
async def look_up(key: str) -> dict:
    """Look something up.

    Args:
        key: what
    """
    await asyncio.sleep(0)
    return {"key": key, "found": True}


@tools.register("wait")
def wait(seconds: float) -> str:
    """Wait.

    Args:
        seconds: how long
    """
    time.sleep(seconds)
    return threading.current_thread().name


@tools.register("fail")
def fail() -> None:
    """Fail."""
    raise RuntimeError("the wire is cut\nand more")


@pytest.fixture(scope="module", autouse=True)
def registered():
    yield
    for name in ("add", "look_up", "wait", "fail"):
        del tools[name]


ASKED = [{"role": "user", "content": "How many?"}]


def template_of(name):
    tokenizer = build_tokenizer(8192)
    tokenizer.chat_template = (MODELS / f"{name}.jinja").read_text()
    return Template(tokenizer)


@pytest.fixture
def qwen():
    return template_of("qwen3")


def play(toolbox, *answers, max_turns=9, **columns):
    """A trajectory whose answers are written, not sampled; each ends with the end token."""
    template = toolbox.template
    prompt = Prompt("p", ASKED, toolbox.encode(ASKED, columns.get("tools")), columns)
    request = Request("p-0/0", prompt.token_ids, SamplingParams(5000), prompt)
    left = list(answers)

    async def sample(turn):
        ids = template.encode_text(left.pop(0) + "<|im_end|>")
        return Completion(turn.request_id, ids, [-1.0] * len(ids), "stop", versions=[(0, 0, len(ids))])

    trajectory = Trajectory(request, template, sample, Limits(max_turns, "per_round", 10**5), list(ASKED))
    asyncio.run(toolbox.play(trajectory))
    return trajectory.completion()


def hermes(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def results_of(completion):
    return [one["content"] for one in completion.episode.messages if one["role"] == "tool"]


def test_calls_and_results_stand_in_the_tokens_as_the_template_writes_them(qwen):
    toolbox = open_toolbox(["add,look_up"], None, qwen, 5)
    first = f"I ask.\n{hermes('add', a=2, b=3)}\n{hermes('look_up', key='é')}"
    done = play(toolbox, first, hermes("add", a=4), "<think>\nwell\n</think>\n\n5")
    assert results_of(done) == ["5", '{"key": "é", "found": true}', "5"]
    assert (done.episode.num_turns, done.text) == (3, "<think>\nwell\n</think>\n\n5")
    assert done.episode.metrics.items() >= {"tools/calls": 3, "tools/failed": 0}.items()
    prompt = qwen.encode_prompt(ASKED, list(toolbox.schemas.values()))
    whole = qwen.render(done.episode.messages, tools=list(toolbox.schemas.values()))
    assert qwen.decode([*prompt, *done.token_ids], skip_special_tokens=False) == whole.rstrip("\n")
    sampled = qwen.decode([t for t, kept in zip(done.token_ids, done.mask, strict=True) if kept])
    assert sampled == f"{first}{hermes('add', a=4)}<think>\nwell\n</think>\n\n5"


def test_calls_of_an_answer_run_at_once_and_block_nothing(qwen):
    toolbox = open_toolbox(["wait"], None, qwen, 5)
    began = time.monotonic()
    done = play(toolbox, "".join(hermes("wait", seconds=0.3) for _ in range(8)), "done")
    assert time.monotonic() - began < 1.5
    assert len(results_of(done)) == 8
    assert "MainThread" not in results_of(done)


@pytest.mark.parametrize(
    ("call", "result"),
    [
        (hermes("ad", a=1), "error: LookupError: there is no tool ad; nearest: add"),
        (hermes("fail"), "error: RuntimeError: the wire is cut"),
        (hermes("add", c=1), "error: TypeError: missing a required argument: 'a'"),
        (hermes("add", a="x"), "error: TypeError: "),
        (hermes("wait", seconds=1), "error: it took over 0.2 s"),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "error: TypeError: arguments are list, not an"),
        ('<tool_call>{"name": "add", "arguments": {"a": </tool_call>', "error: the tool call cannot be read: json"),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}', "error: the tool call cannot be read: json"),
        ("<tool_call>[1]</tool_call>", "error: the tool call cannot be read: it is no object"),
        ('<tool_call>{"arguments": {}}</tool_call>', "error: LookupError: there is no tool None"),
    ],
)
def test_what_goes_wrong_with_a_call_is_its_result(qwen, call, result):
    done = play(open_toolbox(["add", "fail", "wait"], None, qwen, 0.2), call, "well")
    (said,) = results_of(done)
    assert said.startswith(result)
    assert done.episode.metrics.items() >= {"tools/calls": 1, "tools/failed": 1}.items()
    assert done.episode.num_turns == 2


class Own(BaseException):
    """Of a plugin."""


def endless():
    cycle = []
    cycle.append(cycle)
    return cycle


def raised(error):
    raise error


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("make", "result"),
    [
        (lambda: b"caf\xc3\xa9 \xff", "caf\u00e9 \ufffd"),
        (lambda: "a\ud800b", "a?b"),
        (lambda: "\x1b[31m\0", "\x1b[31m\0"),
        (lambda: object, "\"<class 'object'>\""),
        (lambda: None, "null"),
        (endless, "error: ValueError: Circular reference detected"),
        (lambda: raised(KeyboardInterrupt()), "error: KeyboardInterrupt: KeyboardInterrupt"),
        (lambda: raised(Own("mine")), "error: Own: mine"),
        (lambda: "\ue000the answer of the policy\ue000", "\ue000the answer of the policy\ue000"),
    ],
)
def test_whatever_a_tool_returns_or_raises_is_a_text_of_bounded_length(qwen, make, result, is_async):
    async def given_async():
        """Give."""
        return make()

    def given():
        """Give."""
        return make()

    tools["given"] = given_async if is_async else given
    try:
        done = play(open_toolbox(["given"], None, qwen, 5.0), hermes("given"), "Done.")
    finally:
        del tools["given"]
    assert results_of(done) == [result]
    text = qwen.decode([token for token, own in zip(done.token_ids, done.mask, strict=True) if not own])
    assert result.replace("\0", "")[:1000] in text.replace("\0", "")
    assert done.text == "Done."


CUT = "x" * 100 + "\n[cut: 100 of 100000000 characters]"


@pytest.mark.parametrize(("count", "text"), [(100, "x" * 100), (10**8, CUT)], ids=["short", "long"])
def test_a_long_result_is_cut_with_a_note(qwen, count, text):
    def long():
        """Give."""
        return "x" * count

    tools["long"] = long
    try:
        toolbox = open_toolbox(["long"], None, qwen, 5.0)
    finally:
        del tools["long"]
    message, failed = asyncio.run(toolbox._result({"name": "long", "arguments": {}}, {"long"}, 100))
    assert (message["content"], failed) == (text, False)


def test_an_answer_that_is_the_last_allowed_calls_nothing(qwen):
    done = play(open_toolbox(["all"], None, qwen, 5), hermes("add", a=1), hermes("add", a=1), max_turns=2)
    assert results_of(done) == ["2"]


@pytest.mark.parametrize(("last", "counted"), [(hermes("add", a=1), 1), ("<tool_call>\n{oops", 1), ("2", 0)])
def test_an_answer_that_calls_where_it_may_not_is_counted(qwen, last, counted):
    done = play(open_toolbox(["all"], None, qwen, 5), hermes("add", a=1), last, max_turns=2)
    assert (done.episode.metrics[OUT_OF_TURNS], done.episode.metrics[CALLS]) == (counted, 1)


def test_calls_per_completion_are_logged(qwen):
    toolbox = open_toolbox(["all"], None, qwen, 5)
    both = [play(toolbox, hermes("add", a=1) + hermes("fail"), "x"), play(toolbox, "y")]
    group = RolloutGroup("p-0", 0, 0, Prompt("p", [], []), both, GroupScores([[0.0], [0.0]], [None, None]))
    maker = BatchMaker(BatchConfig(num_generations=2, generation_batches=1, num_global_batches=1, num_iterations=1))
    metrics = round_metrics([group], maker.advantages([group]))
    assert (metrics["tools/calls"], metrics["tools/failed"]) == (1.0, 0.5)


def test_a_row_may_show_some_of_the_tools(qwen):
    toolbox = open_toolbox(["add", "look_up"], None, qwen, 5)
    row = [toolbox.schemas["add"]]
    done = play(toolbox, hermes("look_up", key="k"), "well", tools=row)
    assert results_of(done) == ["error: LookupError: there is no tool look_up; valid: add"]
    examples = [Example(ASKED, columns, "f:1") for columns in ({}, {"tools": row})]
    shown = [qwen.decode(Tokenizer(toolbox.encode).ids(one)) for one in examples]
    assert ["look_up" in text for text in shown] == [True, False]
    other = {"type": "function", "function": {"name": "subtract"}}
    with pytest.raises(ConfigError, match="f:1: tools: subtract: not among --rollout_tools; valid: add, look_up"):
        Tokenizer(toolbox.encode).ids(Example(ASKED, {"tools": [other]}, "f:1"))


FORMATS = {
    "qwen2_5": "hermes", "qwen3": "hermes", "qwen3_instruct_2507": "hermes", "qwen3_5_think": "qwen3_coder",
    "nemotron_3_nano": "qwen3_coder", "glm4moe": "glm4_moe", "llama3_1": "llama3_json", "llama3_2": "llama3_json",
}  # fmt: skip


@pytest.mark.parametrize(("name", "format"), FORMATS.items())
def test_the_format_of_a_template_is_found_and_reads_typed_calls(name, format):
    template = template_of(name)
    toolbox = open_toolbox(["add", "look_up"], None, template, 5)
    assert toolbox.format == tool_parsers[format]
    calls = [{"name": "add", "arguments": {"a": 2, "b": 3}}, {"name": "look_up", "arguments": {"key": "75"}}]
    calls = calls[: 1 if format == "llama3_json" else 2]  # its template writes one call in an answer
    made = [{"type": "function", "function": dict(call)} for call in calls]
    text = template.render([*ASKED, {"role": "assistant", "content": "", "tool_calls": made}])
    text = text[len(template.render(ASKED)) :]
    assert read_calls(text, toolbox.format, list(toolbox.schemas.values())) == calls
    assert read_calls("<think>\n<tool_call>{</think> none", toolbox.format) == []


def test_a_plugin_may_bring_a_format(qwen):
    tool_parsers["bang"] = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "tool_calls": {
                "open_pattern": r"!(?P<name>\w+) ",
                "close_pattern": "$",
                "content": "json",
                "repeats": True,
                "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
            }
        },
    }
    assert read_calls('so !add {"a": 1}', tool_parsers["bang"]) == [{"name": "add", "arguments": {"a": 1}}]
    assert open_toolbox(["all"], "bang", qwen, 5).format == tool_parsers["bang"]
    del tool_parsers["bang"]


def without_schema(x):
    return x


CHATML = "chatml"


@pytest.mark.parametrize(
    ("names", "template", "parser", "line"),
    [
        (["ad"], "qwen3", None, r"--rollout_tools: ad: no plugin has registered it; nearest: add"),
        (["bare"], "qwen3", None, r"--rollout_tools: bare: .*no docstring.*; register a function with annotations"),
        (["number"], "qwen3", None, r"--rollout_tools: number: "),
        (
            ["add"],
            CHATML,
            None,
            r"--rollout_tools: the chat template writes tool calls in none of the formats .*hermes",
        ),
        (["add"], CHATML, "hermes", r"--rollout_tools: messages: the chat template shows no tools"),
        (["add"], "qwen3", "wrong", r"--tool_parser: wrong: .*; correct the plugin"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_is_loaded(names, template, parser, line):
    tools["bare"], tools["number"], tool_parsers["wrong"] = without_schema, 3, {"start_anchor": "x", "fields": {"a": 1}}
    tokenizer = build_tokenizer()
    tokenizer.chat_template = read_template(template)
    try:
        with pytest.raises(ConfigError, match=line):
            open_toolbox(names, parser, Template(tokenizer), 5)
    finally:
        del tools["bare"], tools["number"], tool_parsers["wrong"]


def test_a_template_that_changes_answers_before_results_is_refused(qwen):
    qwen.kwargs["enable_thinking"] = False
    with pytest.raises(ConfigError, match="--rollout_tools: the chat template changes an answer once a tool's result"):
        open_toolbox(["add"], None, qwen, 5)


def test_without_any_registered_tool_all_is_refused(qwen, monkeypatch):
    monkeypatch.setattr(tools, "_registered", {})
    with pytest.raises(ConfigError, match="--rollout_tools: all: none is registered; give --external_plugins"):
        open_toolbox(["all"], None, qwen, 5)
