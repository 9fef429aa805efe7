"""Tokens of a completion: found in the steps that trained on it, with texts of the nearest tokenizer."""

import numpy as np
import pytest
from run_folders import completion, recorded
from tokenizers import Tokenizer

from swift.viewing.tokens import pieces, tokenizer_file

LOGPROBS = np.array([-0.5, -1.5, -0.25], np.float32)


@pytest.fixture
def tokenizer(nano_folders):
    return Tokenizer.from_file(str(nano_folders["qwen2"] / "tokenizer.json"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ab c", ["a", "b", " ", "c"]),
        ("é😀x", ["é", "", "😀", "", "", "", "x"]),
        ("<think>1</think><|im_end|>", ["<think>", "1", "</think>", "<|im_end|>"]),
    ],
)
def test_pieces_are_the_texts_of_tokens(tokenizer, text, expected):
    assert pieces(tokenizer, tokenizer.encode(text).ids) == expected


def test_bytes_of_no_character_are_shown_as_such(tokenizer):
    whole = tokenizer.encode("a😀b").ids
    assert pieces(tokenizer, whole[:3]) == ["a", "\ufffd", "\ufffd"]
    assert pieces(tokenizer, [whole[2], *tokenizer.encode("é").ids]) == ["\ufffd", "é", ""]
    assert pieces(tokenizer, []) == []


def test_spaces_between_words_are_kept_where_a_decoder_removes_the_first():
    from tokenizers import decoders, models

    made = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1, "c": 2}, unk_token="c"))
    made.decoder = decoders.Metaspace()
    assert pieces(made, [0, 1, 2, 1]) == ["a", " b", "c", " b"]


def test_the_steps_of_a_batch_are_those_before_the_next_one(folder):
    folder.completions(completion(1), completion(3), completion(3, split="eval"), completion(5))
    for step in (1, 2, 3):
        folder.record(step, recorded(), recorded(index=1))
    found = folder.run().tokens(1, "p0-1", 0)
    assert [one["step"] for one in found["steps"]] == [1, 2]
    assert found["ids"] == [72, 105, 33] and found["texts"] is None
    first = found["steps"][0]
    assert first["versions"] == [[2, 0, 1], [3, 1, 3]] and first["trained"] == [True, True, False]
    assert first["sampler_logprobs"] == [-0.5, -1.0, -0.25] and first["policy_logprobs"] is None
    assert folder.run().tokens(5, "p0-1", 0) is None
    assert folder.run().tokens(1, "p0-1", 7) is None


def test_a_step_that_was_recorded_again_is_read_again(folder):
    folder.completions(completion(1))
    folder.record(1, recorded())
    run = folder.run()
    assert run.tokens(1, "p0-1", 0)["steps"][0]["policy_logprobs"] is None
    folder.record(1, recorded(policy_logprobs=LOGPROBS))
    assert run.tokens(1, "p0-1", 0)["steps"][0]["policy_logprobs"] == LOGPROBS.tolist()


def test_the_tokenizer_is_that_of_the_newest_checkpoint_else_of_the_model(folder, tmp_path):
    assert tokenizer_file(folder.path) is None
    model = tmp_path / "model"
    (folder.path / "args.json").write_text(f'{{"model": "{model}"}}')
    for path in (model, folder.path / "checkpoint-2", folder.path / "checkpoint-10"):
        path.mkdir()
        (path / "tokenizer.json").write_text("{}")
        assert tokenizer_file(folder.path).parent == path
    (folder.path / "checkpoint-11").mkdir()
    assert tokenizer_file(folder.path).parent.name == "checkpoint-10"


def test_texts_come_with_the_tokens(folder, tokenizer):
    (folder.path / "checkpoint-1").mkdir()
    tokenizer.save(str(folder.path / "checkpoint-1" / "tokenizer.json"))
    folder.completions(completion(1))
    ids = np.array(tokenizer.encode("2+2").ids, np.int32)
    folder.record(1, recorded(token_ids=ids))
    assert folder.run().tokens(1, "p0-1", 0)["texts"] == ["2", "+", "2"]
