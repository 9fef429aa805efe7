"""Rows become documents whose blocks lie where something is learnt."""

import pytest

from swift.models import load_chat
from swift.models.arguments import ModelArguments
from swift.trainers.ebft.documents import NO_BLOCK, DocumentEncoder
from swift.trainers.rows import IGNORED, TOO_LONG


@pytest.fixture(scope="module")
def template(nano_folders):
    return load_chat(ModelArguments(model=str(nano_folders["qwen2"])))


def encoder(template, **settings):
    usual = {"max_length": 200, "context_length": 4, "stride": 4, "length": 4}
    return DocumentEncoder(template, **{**usual, **settings})


def test_a_text_above_max_length_is_several_documents(template):
    found = list(encoder(template, max_length=20).rows({"text": "a" * 45}))
    assert [len(one["input_ids"]) for one in found] == [20, 20, 0]
    assert found[0]["anchors"] == [4, 8, 12, 16] and found[0]["labels"] == found[0]["input_ids"]
    assert found[2]["problem"] == NO_BLOCK
    assert found[0]["digest"] == found[1]["digest"], "equal texts have equal samples"


def test_blocks_of_a_completion_begin_behind_its_own_prompt(template):
    row = {"prompt": "p" * 10, "completion": "c" * 20}
    (found,) = encoder(template).rows(row)
    assert found["anchors"] == [10, 14, 18, 22, 26]
    assert found["labels"][:10] == [IGNORED] * 10 and IGNORED not in found["labels"][10:]
    (found,) = encoder(template, min_completion_prefix=3).rows(row)
    assert found["anchors"] == [13, 17, 21, 25]
    (found,) = encoder(template, context_length=16).rows(row)
    assert found["anchors"][0] == 16, "the context counts from the beginning"


@pytest.mark.parametrize(("prompt", "kept"), [(10, 2), (40, 1)])
def test_a_completion_is_cut_before_its_prompt_and_keeps_a_token(template, prompt, kept):
    (found,) = encoder(template, max_length=12, length=1, context_length=1).rows(
        {"prompt": "p" * prompt, "completion": "c" * 30}
    )
    assert len(found["input_ids"]) == 12 and sum(label != IGNORED for label in found["labels"]) == kept


CHAT = [
    {"role": "user", "content": "question"},
    {"role": "assistant", "content": "<think>so and so</think>an answer"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "short one"},
]


def test_blocks_of_a_chat_lie_in_assistant_turns(template):
    (found,) = encoder(template, stride=1).rows({"messages": CHAT})
    ids, mask = template.encode_chat(CHAT)
    assert found["labels"] == [token if learnt else IGNORED for token, learnt in zip(ids, mask, strict=True)]
    assert found["anchors"] == [at for at in range(len(ids) - 3) if mask[at : at + 4] == [1, 1, 1, 1]]
    (found,) = encoder(template, max_length=len(ids) - 1).rows({"messages": CHAT})
    assert found["problem"] == TOO_LONG, "a chat is never cut"


def test_thoughts_without_cross_entropy_still_have_blocks(template):
    (plain,) = encoder(template).rows({"messages": CHAT})
    (masked,) = encoder(template, masks_thoughts=True).rows({"messages": CHAT})
    assert masked["anchors"] == plain["anchors"]

    def said(one):
        return template.decode([label for label in one["labels"] if label != IGNORED], skip_special_tokens=True)

    assert said(plain) == "<think>so and so</think>an answershort one"
    assert said(masked) == "an answershort one"


def test_a_thought_that_the_prompt_has_opened_is_masked_from_the_turn_on(template):
    chat = [CHAT[0], {"role": "assistant", "content": "so and so</think>an answer"}]
    (masked,) = encoder(template, masks_thoughts=True).rows({"messages": chat})
    kept = [label for label in masked["labels"] if label != IGNORED]
    assert template.decode(kept, skip_special_tokens=True) == "an answer"
