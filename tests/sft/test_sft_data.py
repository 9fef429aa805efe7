from pathlib import Path

import pytest

from swift.arguments import parse
from swift.data.loading import Example
from swift.data.messages import read_messages
from swift.data.transforms import alpaca
from swift.errors import ConfigError, ResourceError
from swift.models.template import Template
from swift.models.templates import TEMPLATES, read_template
from swift.models.tiny import build_tokenizer
from swift.models.tokenizer import load_chat, read_tokenizer
from swift.trainers.rows import IGNORED, TOO_LONG, encode_table
from swift.trainers.sft import check_tool_format, loss_of, training_template
from swift.trainers.sft_data import NO_ANSWER, ChatEncoder
from swift.trainers.sft_packing import Packing


def chat(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def as_rows(chats):
    return [Example(messages, {}, f"d.jsonl:{line}") for line, messages in enumerate(chats, start=1)]


@pytest.fixture(scope="module")
def template() -> Template:
    return Template(build_tokenizer())


def test_labels_are_the_answer_and_its_end_token(template):
    row = ChatEncoder(template, None)(chat("2+3?", "5"))
    trained = [label for label in row["labels"] if label != IGNORED]
    assert template.decode(trained, skip_special_tokens=False) == "5<|im_end|>"
    assert template.decode(row["input_ids"], skip_special_tokens=False) == template.render(chat("2+3?", "5"))
    assert all(label in (IGNORED, token) for token, label in zip(row["input_ids"], row["labels"], strict=True))


def test_a_row_over_max_length_is_left_out_and_one_at_it_is_kept(template):
    length = len(template.encode_chat(chat("q", "a"))[0])
    rows = [chat("q", "a"), chat("q", "aa")]
    table, report = encode_table(as_rows(rows), ChatEncoder(template, length))
    assert [len(ids) for ids in table["input_ids"]] == [length]
    assert report.num_kept == 1
    assert report.dropped == {TOO_LONG: 1}
    assert report.lines("train") == [
        f"train: 1 row, {length} tokens, 2 of them trained on",
        "train: left out 1 row: 1 (longer than max_length; the first: d.jsonl:2)",
    ]


@pytest.mark.parametrize(("cut", "part"), [("left", slice(2, None)), ("right", slice(-2))])
def test_a_row_over_max_length_is_cut_on_request(template, cut, part):
    ids, mask = template.encode_chat(chat("q", "aaaa"))
    encoder = ChatEncoder(template, len(ids[part]), cut=cut)
    row = encoder(chat("q", "aaaa"))
    assert row["input_ids"] == ids[part] and [label != IGNORED for label in row["labels"]] == list(
        map(bool, mask[part])
    )
    assert (
        ChatEncoder(template, 2, cut="right")(chat("q", "a"))["problem"] == "no token to learn from within max_length"
    )


def test_a_document_is_split_on_request(template):
    document = [{"role": "assistant", "content": "abcdefg"}]
    whole = ChatEncoder(template, None, "all")(document)["input_ids"]
    table, report = encode_table(as_rows([document]), ChatEncoder(template, 3, "all", "split"))
    assert [len(ids) for ids in table["input_ids"]] == [3, 3, 2]
    assert [token for ids in table["input_ids"] for token in ids] == whole
    assert table["labels"] == table["input_ids"] and report.num_trained_tokens == 8


def test_a_row_under_min_length_is_left_out(template):
    rows = [chat("q", "a"), chat("q", "aa")]
    length = len(template.encode_chat(rows[1])[0])
    _, report = encode_table(as_rows(rows), ChatEncoder(template, None, least=length))
    assert report.num_kept == 1 and report.dropped == {"shorter than min_length": 1}


@pytest.mark.parametrize("begins", [True, False])
def test_an_instruction_is_framed_as_alpaca_frames_it(tmp_path, begins):
    """Prompt and answer are tokenised apart, with the tokenizer's bos token, if any, and an eos token."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = build_tokenizer()
    tokenizer.bos_token = "<|endoftext|>"
    if begins:
        bos = ("<|endoftext|>", tokenizer.bos_token_id)
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(f"{bos[0]} $A", special_tokens=[bos])
    tokenizer.save_pretrained(tmp_path)
    template = Template(read_tokenizer(tmp_path, template="alpaca"))
    (row,) = alpaca({"instruction": "Add.", "input": "2 3", "output": "5"})
    encoded = ChatEncoder(template, None)(row["messages"])
    prompt = (
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n### Input:\n2 3\n\n"
        "### Response:\n"
    )
    before, answer = tokenizer(prompt)["input_ids"], [*tokenizer.encode("5", add_special_tokens=False)]
    assert (before[0] == tokenizer.bos_token_id) is begins
    assert encoded["input_ids"] == [*before, *answer, tokenizer.eos_token_id]
    assert encoded["labels"] == [IGNORED] * len(before) + [*answer, tokenizer.eos_token_id]


def test_tokens_at_the_end_of_a_turn_are_trained_on_if_they_are_named(nano_folders, tmp_path):
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}{% generation %}{{ m.content }}"
        "{{ '<|im_end|>' if loop.last else '<|im_start|> ' }}{% endgeneration %}{% endif %}{% endfor %}"
    )
    messages = [*chat("q", "a"), *chat("q", "b")]

    def trained(*flags):
        words = f"--model {nano_folders['qwen2']} --dataset d --template {tmp_path}/t.jinja".split()
        template = load_chat(parse("sft", [*words, *flags], {}).args)
        labels = ChatEncoder(template, None)(messages)["labels"]
        return template.decode([label for label in labels if label != IGNORED], skip_special_tokens=False)

    assert trained() == "a<|im_start|> b<|im_end|>"
    assert trained("--eot_tokens", "<|im_start|>") == "a<|im_start|>b<|im_end|>"
    with pytest.raises(ConfigError, match="--eot_tokens: <x>: no token of"):
        trained("--eot_tokens", "<x>")


@pytest.mark.parametrize("name", ["hermes", "react_en"])
def test_a_format_of_tools_is_that_of_the_chat_template_or_refused(name):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{# tools #}<tools></tools>{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        '<tool_call>\n{"name": "{{ c.function.name }}"}{% endfor %}{% endfor %}'
    )
    own = Template(tokenizer)
    if name == "hermes":
        check_tool_format(name, own)
    with pytest.raises(ConfigError, match=f"--agent_template: {name}: .* another format, or not at all"):
        check_tool_format(name, Template(build_tokenizer()) if name == "hermes" else own)


def test_rows_without_an_answer_and_rows_the_template_refuses_are_counted_by_reason():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0].content == 'bad' %}{{ raise_exception('no bad words') }}{% endif %}" + TEMPLATES["chatml"]
    )
    rows = [chat("bad", "a"), [{"role": "user", "content": "q"}], chat("good", "a")]
    table, report = encode_table(as_rows(rows), ChatEncoder(Template(tokenizer), None))
    assert len(table) == 1
    assert report.dropped[NO_ANSWER] == 1
    assert any("no bad words" in reason for reason in report.dropped)
    assert list(report.firsts.values()) == ["d.jsonl:1", "d.jsonl:2"]
    with pytest.raises(ConfigError, match=r"d.jsonl:1: .*no bad words\n?.*d.jsonl:2: no assistant turn"):
        encode_table(as_rows(rows), ChatEncoder(Template(tokenizer), None), strict=True)


def test_no_usable_row_names_the_reason_and_the_limit(template):
    with pytest.raises(ConfigError, match=r"--dataset: no usable row .*longer than max_length \(--max_length 3\)"):
        encode_table(as_rows([chat("q", "a")]), ChatEncoder(template, 3))
    with pytest.raises(ConfigError, match=r"--val_dataset: .*no assistant turn"):
        encode_table(as_rows([chat("q", "a")[:1]]), ChatEncoder(template, None), split="val")


def test_a_template_that_cannot_be_trained_on_stops_the_run():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role if loop.last else 'x' }}{{ m.content }}<|im_end|>{% endfor %}"
    )
    with pytest.raises(ConfigError, match="rewrites earlier turns"):
        encode_table(as_rows([chat("q", "a")]), ChatEncoder(Template(tokenizer), None))


def test_worker_processes_give_the_same_table(template):
    rows = [chat(f"{n}+1?", str(n + 1)) for n in range(20)]
    alone, _ = encode_table(as_rows(rows), ChatEncoder(template, None))
    together, _ = encode_table(as_rows(rows), ChatEncoder(template, None), num_proc=2)
    assert alone.to_list() == together.to_list()


def qwen3() -> Template:
    """Qwen3's own template, as `swift sft` uses it: thoughts of earlier turns disappear from a prompt."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = read_template("qwen3")
    template = Template(tokenizer)
    template.training_template = training_template(template)
    return template


def trained_text(template: Template, row: dict) -> str:
    assert not row["problem"]
    return template.decode([label for label in row["labels"] if label != IGNORED], skip_special_tokens=False)


def test_two_exchanges_are_trained_on_with_the_template_of_qwen3():
    template = qwen3()
    thought = {"role": "assistant", "content": "<think>\n2 and 3\n</think>\n\n5"}
    row = ChatEncoder(template, None)([*chat("2+3?", "")[:1], thought, *chat("4+4?", "8")])
    first, second = "<think>\n2 and 3\n</think>\n\n5<|im_end|>", "<think>\n\n</think>\n\n8<|im_end|>"
    assert trained_text(template, row) == first + second
    assert template.decode(row["input_ids"], skip_special_tokens=False).count("<think>") == 2


@pytest.mark.parametrize("mark", [{"loss": False}, {"weight": 0}, {"weight": 0.0}])
def test_a_turn_without_loss_is_read_and_not_learnt_from(template, mark):
    silent = read_messages([{**turn, **mark} if turn["role"] == "assistant" else turn for turn in chat("2+3?", "5")])
    encoder = ChatEncoder(template, None)
    row = encoder([*silent, *chat("4+4?", "8")])
    assert trained_text(template, row) == "8<|im_end|>"
    assert encoder(silent)["problem"] == NO_ANSWER


TWO = [*chat("2+3?", "5"), *chat("4+4?", "8")]


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        ("default", "<think>\n\n</think>\n\n5<|im_end|><think>\n\n</think>\n\n8<|im_end|>"),
        ("last_round", "<think>\n\n</think>\n\n8<|im_end|>"),
        ("ignore_empty_think", "5<|im_end|>8<|im_end|>"),
        ("last_round+ignore_empty_think", "8<|im_end|>"),
        ("all", None),
    ],
)
def test_the_loss_counts_what_loss_scale_says_and_token_ids_stay_the_same(loss, said):
    template = qwen3()
    row, plain = ChatEncoder(template, None, loss)(TWO), ChatEncoder(template, None)(TWO)
    whole = template.decode(plain["input_ids"], skip_special_tokens=False)
    if loss == "all":
        whole = said = template.render(TWO)
    assert trained_text(template, row) == said
    assert template.decode(row["input_ids"], skip_special_tokens=False) == whole


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", "ignore_empty_think"),
        ("--loss_scale last_round", "last_round+ignore_empty_think"),
        ("--loss_scale all", "all"),
        ("--disable_ignore_empty_think true", "default"),
        ("--assistant_only_loss true", "default"),
    ],
)
def test_empty_thoughts_do_not_count_where_a_template_can_switch_thinking_off(flags, expected):
    args = parse("sft", f"--model m --dataset d {flags}".split(), {}).args
    loss, lines = loss_of(args, qwen3())
    assert loss == expected and bool(lines) == ("+" in loss or loss == "ignore_empty_think")
    assert loss_of(args, Template(build_tokenizer())) == (args.loss_tokens, [])


def test_loss_of_a_message_has_precedence():
    silent = {"role": "assistant", "content": "5", "loss": False}
    spoken = {"role": "assistant", "content": "5", "loss": True}
    template, after = Template(build_tokenizer()), chat("4+4?", "8")
    question = chat("2+3?", "")[:1]
    assert "5" not in trained_text(template, ChatEncoder(template, None, "all")([*question, silent, *after]))
    assert "5<" in trained_text(template, ChatEncoder(template, None, "last_round")([*question, spoken, *after]))


def test_a_document_is_its_text_and_the_end_token(template):
    row = ChatEncoder(template, None)([{"role": "assistant", "content": "once upon"}])
    assert trained_text(template, row) == "once upon<|im_end|>"
    assert row["labels"] == row["input_ids"]


def test_tokenised_rows_are_read_again_until_rows_or_settings_differ(template, tmp_path, monkeypatch):
    from datasets import config

    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path)
    tokenised = []
    original = Template.encode_chat
    monkeypatch.setattr(Template, "encode_chat", lambda *a, **k: tokenised.append(a) or original(*a, **k))

    def encoded(*answers, **settings):
        tokenised.clear()
        rows = as_rows([chat("2+3?", answer) for answer in answers])
        table, _ = encode_table(rows, ChatEncoder(template, **settings), cached=True, packing=Packing("bfd", 128))
        return len(tokenised), table.to_list(), table.cache_files

    first, rows, files = encoded("5", "6", max_length=64)
    again, same, _ = encoded("5", "6", max_length=64)
    assert (first, again, rows) == (2, 0, same)
    assert {tmp_path / "swift"} == {Path(file["filename"]).parent for file in files}
    assert encoded("5", "7", max_length=64)[0] == 2
    assert encoded("5", "6", max_length=65)[0] == 2
    assert encoded("5", "6", max_length=64, loss="all")[0] == 2
    template.tokenizer.add_tokens(["zz"])
    assert encoded("5", "6", max_length=64)[0] == 2


def test_a_cache_that_cannot_be_written_names_the_variable(template, tmp_path, monkeypatch):
    from datasets import config

    (tmp_path / "file").write_text("")
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "file")
    with pytest.raises(ResourceError, match=r"HF_DATASETS_CACHE: .*--load_from_cache_file false"):
        encode_table(as_rows([chat("q", "a")]), ChatEncoder(template, None), cached=True)


def test_a_process_that_is_lost_while_rows_are_encoded_is_not_the_caches_fault(template, tmp_path, monkeypatch):
    from datasets import config

    class Lost(ChatEncoder):
        def encode(self, *args, **kwargs):
            raise BrokenPipeError

    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path)
    with pytest.raises(BrokenPipeError):
        encode_table(as_rows([chat("q", "a")]), Lost(template, None), cached=True)


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def test_tools_and_tool_calls_reach_the_template_or_the_row_is_left_out(template):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    messages = [
        {"role": "user", "content": "2+3?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "It is 5."},
    ]
    shows = qwen3()
    row = ChatEncoder(shows, None)(messages, TOOLS)
    text = shows.decode(row["input_ids"], skip_special_tokens=False)
    assert '"name": "add"' in text.partition("<|im_end|>")[0] and "<tool_response>\n5" in text
    assert '{"name": "add", "arguments": {"a": 2}}' in trained_text(shows, row)
    for given in ((messages, None), (chat("q", "a"), TOOLS)):
        assert "the chat template shows no tool" in ChatEncoder(template, None)(*given)["problem"]
