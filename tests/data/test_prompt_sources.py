"""Prompts with token ids, in memory and streamed."""

import json
from pathlib import Path

import pytest
import vlms
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st
from row_files import jsonl, settings

from swift.data import image_store
from swift.data import stream as stream_module
from swift.data.image_store import images_in
from swift.data.prompts import Tokenizer, load_prompts
from swift.data.source import IndexedPrompts, StreamingPrompts, open_prompts
from swift.errors import ConfigError, RefusedChat


def tokenize(messages):
    """One token per character of all turns."""
    return [ord(letter) for turn in messages for letter in turn["content"]]


def load(*datasets, limit=None, strategy="left", split="train", **changes):
    return load_prompts(settings(*datasets, **changes), Tokenizer(tokenize, limit, strategy), split)


def stream(*datasets, limit=None, strategy="left", **changes):
    changes = {"streaming": True, "shuffle_buffer_size": 7, **changes}
    return StreamingPrompts(settings(*datasets, **changes), Tokenizer(tokenize, limit, strategy))


@pytest.fixture
def ten(tmp_path):
    return jsonl(tmp_path / "ten.jsonl", [{"query": "abcdefghijklmno"[: n + 1], "solution": n} for n in range(10)])


def test_a_prompt_has_ids_messages_and_columns(ten):
    prompt = load(ten, system="S")[2]
    assert prompt.messages == [{"role": "system", "content": "S"}, {"role": "user", "content": "abc"}]
    assert prompt.token_ids == [ord(letter) for letter in "Sabc"]
    assert prompt.columns == {"solution": 2}
    assert len(prompt.prompt_id) == 16
    int(prompt.prompt_id, 16)


def test_ids_depend_on_content_only_and_the_fingerprint_on_content_and_order(tmp_path):
    def loaded(*rows, limit=None):
        return load(jsonl(tmp_path / "a.jsonl", rows), limit=limit)

    x, y, z = {"query": "x", "a": 1, "b": 2}, {"query": "y", "a": 1}, {"query": "x", "a": 2, "b": 2}
    one, two = loaded(x, y, z), loaded({"b": 2, "a": 1, "query": "x"}, limit=1)
    assert one[0].prompt_id == two[0].prompt_id
    assert len({prompt.prompt_id for prompt in one}) == 3
    assert loaded(x, y).fingerprint == loaded(x, y).fingerprint
    assert len({loaded(*rows).fingerprint for rows in ([x, y], [y, x], [x])}) == 3


@pytest.mark.parametrize(("strategy", "kept"), [("left", "hij"), ("right", "abc")])
def test_longer_prompts_are_cut_on_one_side_and_counted_once(ten, strategy, kept):
    dataset = load(ten, limit=3, strategy=strategy)
    for _ in range(2):
        assert dataset[9].token_ids == [ord(letter) for letter in kept]
        assert dataset[2].token_ids == [ord(letter) for letter in "abc"]
    assert dataset.report.num_truncated == 1
    assert dataset[9].messages[0]["content"] == "abcdefghij"


def test_longer_prompts_can_be_deleted(ten):
    dataset = load(ten, limit=3, strategy="delete")
    assert [prompt.columns["solution"] for prompt in dataset] == [0, 1, 2]
    assert dataset.report.num_deleted == 7
    with pytest.raises(ConfigError, match="all of 10 prompts longer, the shortest has 2 tokens"):
        load(ten, limit=1, strategy="delete", system="S")


def test_tokenising_is_lazy_happens_once_and_ids_are_the_callers_own(ten):
    seen = []

    def counting(messages):
        seen.append(messages)
        return [1]

    dataset = load_prompts(settings(ten), Tokenizer(counting, 5))
    assert seen == []
    dataset[4].token_ids.append(5)
    assert dataset[4].token_ids == [1]
    assert len(seen) == 1


def test_several_processes_delete_the_same_rows(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"query": "x" * (1 + n % 7), "n": n} for n in range(1500)])
    alone = load(path, limit=4, strategy="delete")
    shared = load(path, limit=4, strategy="delete", dataset_num_proc=2)
    assert shared.fingerprint == alone.fingerprint
    assert [p.token_ids for p in shared] == [p.token_ids for p in alone]


def test_a_refusal_of_the_template_names_the_row(ten):
    def refuse(messages):
        raise ConfigError("--template: roles must alternate")

    dataset = load_prompts(settings(ten), Tokenizer(refuse))
    with pytest.raises(ConfigError, match=r"ten\.jsonl:4: --template: roles must alternate"):
        dataset[3]


# ---- sources


def take(source, count):
    return [source.next() for _ in range(count)]


def position(source):
    """Epoch, and how far it is."""
    return tuple(source.state_dict()[name] for name in ("epoch", "cursor"))


def opened(path, streaming, **changes):
    return stream(path, **changes) if streaming else IndexedPrompts(load(path, **changes), 3, True)


@pytest.mark.parametrize("streaming", [True, False])
def test_a_source_gives_every_prompt_once_per_epoch(ten, streaming):
    source = opened(ten, streaming)
    assert source.size == (None if streaming else 10)
    orders = []
    for epoch in range(3):
        orders.append([prompt.columns["solution"] for prompt in take(source, 10)])
        assert position(source) == (epoch, 10)
    assert [sorted(order) for order in orders] == [list(range(10))] * 3
    assert orders[0] != orders[1]


def test_an_indexed_source_refuses_a_position_in_other_rows(ten, tmp_path):
    state = opened(ten, False).state_dict()
    other = jsonl(tmp_path / "o.jsonl", [{"query": str(n)} for n in range(10)])
    with pytest.raises(ConfigError, match="content of --dataset"):
        opened(other, False).load_state_dict(state)


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_that_the_template_refuses_are_passed_over_unless_strict(ten, streaming, caplog):
    def refusing(messages):
        if len(messages[-1]["content"]) in (4, 7):
            raise RefusedChat("roles must alternate")
        return tokenize(messages)

    def source(**more):
        return open_prompts(settings(ten, streaming=streaming, shuffle_buffer_size=3, **more), Tokenizer(refusing))

    lenient = source(max_skipped_fraction=0.5)
    seen = [lenient.next().columns["solution"] for _ in range(16)]
    assert sorted(seen) == sorted([*range(3), 4, 5, *range(7, 10)] * 2)
    assert lenient.report.num_skipped == 2 and caplog.text.count("roles must alternate") == 2
    again = source(max_skipped_fraction=0.5)
    again.next()
    state = again.state_dict()
    rest = source(max_skipped_fraction=0.5)
    rest.load_state_dict(state)
    assert [rest.next().columns["solution"] for _ in range(15)] == seen[1:]
    strict = source(strict=True)
    with pytest.raises(RefusedChat, match=r"ten.jsonl:\d: roles must alternate"):
        [strict.next() for _ in range(10)]


def test_a_source_without_a_row_that_the_template_takes_ends(ten):
    def refusing(messages):
        raise RefusedChat("no")

    with pytest.raises(RefusedChat):
        open_prompts(settings(ten), Tokenizer(refusing)).next()


def test_a_stream_and_a_dataset_give_equal_prompts(ten):
    streamed = {prompt.prompt_id: prompt for prompt in take(stream(ten, limit=4), 10)}
    assert streamed == {prompt.prompt_id: prompt for prompt in load(ten, limit=4)}


def test_without_shuffling_a_stream_keeps_the_order_and_n_takes_the_first(ten):
    prompts = take(stream(f"{ten}#3", dataset_shuffle=False), 4)
    assert [prompt.columns["solution"] for prompt in prompts] == [0, 1, 2, 0]


@limits(max_examples=40, deadline=None)
@given(
    taken=st.integers(0, 45),
    buffer=st.integers(1, 25),
    strategy=st.sampled_from(["left", "delete"]),
    streaming=st.booleans(),
    skip=st.booleans(),
)
def test_a_resumed_source_gives_the_same_next_prompts(tmp_path_factory, taken, buffer, strategy, streaming, skip):
    rows = [{"query": "x" * (1 + n % 5), "n": n} if n % 6 else {"query": ""} for n in range(20)]
    path = jsonl(tmp_path_factory.mktemp("resume") / "a.jsonl", rows)

    def fresh():
        return opened(path, streaming, limit=3, strategy=strategy, shuffle_buffer_size=buffer)

    source = fresh()
    take(source, taken)
    if skip:
        source.skip_to_epoch_end()
    resumed = fresh()
    resumed.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert take(resumed, 40) == take(source, 40)


@pytest.mark.parametrize("streaming", [True, False])
def test_skipping_starts_the_next_epoch_once_and_only_from_within_one(ten, streaming):
    source = opened(ten, streaming)
    source.skip_to_epoch_end()
    source.next()
    assert position(source) == (0, 1)
    source.skip_to_epoch_end()
    source.skip_to_epoch_end()
    source.next()
    assert position(source) == (1, 1)


def test_a_resumed_stream_does_not_tokenise_what_it_passes(ten):
    source = stream(ten)
    take(source, 7)
    count = []
    counting = Tokenizer(lambda messages: count.append(1) or [1], None, "left")
    resumed = StreamingPrompts(settings(ten, streaming=True, shuffle_buffer_size=7), counting)
    resumed.load_state_dict(source.state_dict())
    assert count == []


def test_a_resumed_stream_knows_the_images_of_prompts_of_an_earlier_epoch(tmp_path, monkeypatch):
    names = [f"{number}.png" for number in range(4)]
    for seed, name in enumerate(names):
        (tmp_path / name).write_bytes(vlms.image(seed, 8, 8))
    rows = [{"query": f"<image>{name}", "images": [name]} for name in names]
    path = jsonl(tmp_path / "a.jsonl", rows)

    def fresh():
        args = settings(path, streaming=True, shuffle_buffer_size=2)
        return StreamingPrompts(args, Tokenizer(lambda _: [1], sees=True))

    source = fresh()
    waiting, state = take(source, 5)[:4], source.state_dict()
    assert state["epoch"] == 1
    shown = [images_in(prompt.messages) for prompt in waiting]
    assert sorted(Path(image.path).name for (image,) in shown) == names
    monkeypatch.setattr(image_store._store.get(), "images", {})
    monkeypatch.setattr(stream_module, "PEEKED_ROWS", 1)
    fresh().load_state_dict(state)
    assert [images_in(prompt.messages) for prompt in waiting] == shown


def test_a_stream_skips_bad_rows_once_and_stops_when_strict_or_damaged(tmp_path):
    rows = [{"query": "a"}, {"query": ""}, {"query": "b"}]
    path = jsonl(tmp_path / "a.jsonl", rows)
    source = stream(path, max_skipped_fraction=0.4)
    take(source, 8)
    assert source.report.num_skipped == 1
    with pytest.raises(ConfigError, match=r"a\.jsonl:2: query is empty"):
        take(stream(path, strict=True), 3)
    damaged = tmp_path / "b.jsonl"
    damaged.write_text('{"query": "a"}\n' * 99 + "{\n")
    with pytest.raises(ConfigError, match=r"b\.jsonl:100: broken JSON"):
        take(stream(damaged), 99)


def test_a_stream_stops_where_too_many_rows_are_bad(tmp_path):
    good, bad = {"query": "a"}, {"query": ""}
    with pytest.raises(ConfigError, match="2 of 3 rows bad"):
        stream(jsonl(tmp_path / "a.jsonl", [good, bad, bad]))
    later = stream(jsonl(tmp_path / "b.jsonl", [good] * 80 + [bad] * 80), dataset_shuffle=False)
    take(later, 80)
    with pytest.raises(ConfigError, match="21 of 101 rows bad"):
        later.next()


def test_a_stream_deletes_long_prompts_and_ends_when_none_is_left(ten):
    source = stream(ten, limit=3, strategy="delete")
    assert {len(prompt.token_ids) for prompt in take(source, 6)} == {1, 2, 3}
    resumed = stream(ten, limit=3, strategy="delete")
    resumed.load_state_dict(source.state_dict())
    assert resumed.report.num_deleted == source.report.num_deleted > 0, "a resumed run logs the same count"
    with pytest.raises(ConfigError, match="no usable row in the stream"):
        stream(ten, limit=1, strategy="delete", system="S").next()


@pytest.mark.parametrize(("strategy", "per_epoch"), [("left", 10), ("delete", 3)])
def test_a_stream_counts_a_long_prompt_once_in_all_epochs_and_after_a_resume(ten, strategy, per_epoch):
    def counts(source):
        return source.report.num_truncated, source.report.num_deleted

    source, resumed = (stream(ten, limit=3, strategy=strategy) for _ in range(2))
    take(source, 3 * per_epoch + 1)
    assert sum(counts(source)) == 7 and 0 in counts(source)
    resumed.load_state_dict(json.loads(json.dumps(source.state_dict())))
    for each in (source, resumed):
        take(each, 2 * per_epoch)
        assert sum(counts(each)) == 7


def test_a_stream_resumed_on_a_shorter_file_is_refused(ten):
    source = stream(ten)
    take(source, 9)
    ten.write_text('{"query": "a", "solution": 1}\n')
    with pytest.raises(ConfigError, match="fewer rows than the saved run had read"):
        stream(ten).load_state_dict(source.state_dict())


def test_streamed_procedural_rows():
    prompts = take(stream("reasoning_gym:chain_sum#4?seed=1", dataset_shuffle=False), 5)
    assert prompts[0] == prompts[4]
    assert prompts[0].columns["metadata"]["source_dataset"] == "chain_sum"


def test_open_prompts_chooses_the_source(ten):
    for streaming, kind in ((False, IndexedPrompts), (True, StreamingPrompts)):
        assert isinstance(open_prompts(settings(ten, streaming=streaming), Tokenizer(tokenize)), kind)
