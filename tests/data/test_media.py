"""Rows of ms-swift, TRL, OpenAI and Axolotl with the same images become the same messages and images."""

import base64
import copy
import io

import pytest
from hostile_images import encoded
from PIL import Image as Pictures

from swift.data.images import ImageSource, digest_of, open_image
from swift.data.media import TAG_IS_TEXT, read_media
from swift.data.records import RowError

RED, BLUE = (encoded(Pictures.new("RGB", (8, 8), colour)) for colour in ("red", "blue"))
R, B = ({"type": "image", "image": digest_of(content)} for content in (RED, BLUE))
RED_URL = "data:image/png;base64," + base64.b64encode(RED).decode()
ANSWER = {"role": "assistant", "content": "red"}


@pytest.fixture
def source(tmp_path):
    (tmp_path / "red.png").write_bytes(RED)
    (tmp_path / "blue.png").write_bytes(BLUE)
    return ImageSource(folder=tmp_path)


def user(content, **others):
    return {"role": "user", "content": content, **others}


def text(text):
    return {"type": "text", "text": text}


def refusal(row, messages, source):
    with pytest.raises(RowError) as caught:
        read_media(row, messages, source)
    return str(caught.value)


NORMAL = [user([R, text("What?")]), ANSWER]
SAME = {
    "ms-swift": ({"images": ["red.png"]}, "<image>What?"),
    "ms-swift, bytes": ({"images": [RED]}, "<image>What?"),
    "ms-swift, a single one": ({"images": "red.png"}, "<image>What?"),
    "ms-swift, without a tag": ({"images": ["red.png"]}, "What?"),
    "csv": ({"images": '["red.png"]'}, "<image>What?"),
    "LLaVA": ({"image": "red.png"}, "<image>What?"),
    "parquet": ({"images": [{"bytes": RED, "path": "elsewhere.png"}]}, "<image>What?"),
    "parquet, a single one": ({"image": {"bytes": RED, "path": None}}, "What?"),
    "an empty column beside": ({"image": None, "images": ["red.png"]}, "What?"),
    "TRL": ({"images": ["red.png"]}, [{"type": "image"}, text("What?")]),
    "TRL, without a part": ({"image": "red.png"}, "What?"),
    "TRL, texts as parts": ({"image": "red.png"}, [text("What?")]),
    "TRL, index": ({"images": [RED]}, [{"type": "image", "index": 0, "text": None}, text("What?")]),
    "tags in text parts": ({"images": [RED]}, [text("<image>"), text("What?")]),
    "decoded": ({"image": Pictures.open(io.BytesIO(RED))}, "What?"),
    "OpenAI": ({}, [{"type": "image_url", "image_url": {"url": RED_URL, "detail": "high"}}, text("What?")]),
    "OpenAI, plain": ({}, [{"type": "image_url", "image_url": RED_URL}, text("What?")]),
    "image": ({}, [{"type": "image", "image": "red.png"}, text("What?")]),
    "image of bytes": ({}, [{"type": "image", "image": {"bytes": RED, "path": None}}, text("What?")]),
    "url": ({}, [{"type": "image", "url": RED_URL}, text("What?")]),
    "path": ({}, [{"type": "image", "path": "red.png", "url": None}, text("What?")]),
    "base64": ({}, [{"type": "image", "base64": base64.b64encode(RED).decode()}, text("What?")]),
    "base64 of several lines": ({}, [{"type": "image", "base64": base64.encodebytes(RED).decode()}, text("What?")]),
    "base64 as a data URL": ({}, [{"type": "image", "base64": RED_URL}, text("What?")]),
    "split text": ({}, [{"type": "image", "image": RED}, text("Wh"), text(""), text("at?")]),
}


@pytest.mark.parametrize("name", SAME)
def test_all_forms_of_a_row_are_one(name, source):
    row, content = SAME[name]
    found = read_media(row, [user(content), ANSWER], source)
    picture = open_image(found.images[0])
    assert len(found.images) == 1 and picture.getpixel((0, 0)) == (255, 0, 0)
    if name != "decoded":  # whose PNG is another
        assert found.messages == NORMAL
    assert found.messages[0]["content"][0] == {"type": "image", "image": found.images[0].digest}
    assert found.notes == ()


def test_the_text_of_a_prompt_becomes_a_user_turn(source):
    assert read_media({"image": RED}, "What?", source).messages == [user([R, text("What?")])]
    assert read_media({}, "What?", source).messages == [user("What?")]


def test_images_fill_places_in_their_order_over_all_turns(source):
    messages = [
        {"role": "system", "content": "Look: <image>"},
        user("<image> or <image>?", name="me"),
        ANSWER,
        {"role": "tool", "content": [{"type": "image"}, text("found")], "tool_call_id": "1"},
    ]
    found = read_media({"images": ["red.png", "blue.png", BLUE, "red.png"]}, messages, source)
    assert found.messages == [
        {"role": "system", "content": [text("Look: "), R]},
        {"role": "user", "content": [B, text(" or "), B, text("?")], "name": "me"},
        ANSWER,
        {"role": "tool", "content": [R, text("found")], "tool_call_id": "1"},
    ]
    assert [image.digest for image in found.images] == [part["image"] for part in (R, B, B, R)]


def test_images_without_a_place_come_before_the_first_user_turn_in_their_order(source):
    messages = [{"role": "system", "content": "Look."}, user("Which?"), ANSWER, user("Why?")]
    found = read_media({"images": [BLUE, RED]}, messages, source)
    assert found.messages == [messages[0], user([B, R, text("Which?")]), *messages[2:]]


def test_rows_without_images_stay_as_they_are(source):
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    messages = [
        {"role": "system", "content": " s "}, user(""), {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "assistant", "content": None, "tool_calls": calls}, {"role": "tool", "content": "1"}, ANSWER,
    ]  # fmt: skip
    for row in ({}, {"images": []}, {"image": None, "images": None}, {"videos": [], "solution": "1"}):
        found = read_media(row, messages, source)
        assert found.messages == messages and (found.images, found.notes) == ((), ())
        assert all(one is other for one, other in zip(found.messages, messages, strict=True))


def test_text_parts_alone_are_joined_to_a_text(source):
    assert read_media({}, [user([text("Wh"), text("at?")])], source).messages == [user("What?")]


def test_the_turns_without_images_of_a_row_with_some_keep_their_texts(source):
    found = read_media({"images": [RED]}, [user("Hello"), ANSWER, user("<image>")], source)
    assert found.messages == [user("Hello"), ANSWER, user([R])]


def test_the_row_s_own_messages_are_not_changed(source):
    messages = [user([{"type": "image"}, text("<image>")]), ANSWER]
    before = copy.deepcopy(messages)
    read_media({"images": [RED, BLUE]}, messages, source)
    assert messages == before


def test_a_tag_without_a_column_is_text(source):
    found = read_media({"solution": "1"}, [user("Write <image> in HTML"), ANSWER], source)
    assert found.messages == [user("Write <image> in HTML"), ANSWER]
    assert found.notes == (TAG_IS_TEXT,)


MISMATCHED = {
    "too few images": (
        {"images": ["red.png"]}, "<image><image>",
        "column images: 1 image for 2 places (<image>, or parts without an image); give one for each",
    ),
    "too many images": ({"images": [RED, BLUE]}, "<image>", "column images: 2 images for 1 place (<image>, or"),
    "no image in the column": ({"images": []}, "<image>What?", "column images: 0 images for 1 place (<image>, or"),
    "no column": ({}, [{"type": "image"}], "no column images: 0 images for 1 place (<image>, or"),
    "images twice": ({"images": [RED]}, [{"type": "image", "image": RED}], "column images: 1 image for 0 places"),
    "two columns": ({"images": [RED], "image": RED}, "What?", "columns images and image: both hold images; keep one"),
    "broken list": ({"images": '["red.png"'}, "What?", "images is text that is not JSON"),
    "null in the list": ({"images": [None]}, "What?", "image 1: NoneType: no image; give a path, a data URL, or bytes"),
    "second outside": ({"images": [RED, "../x.png"]}, "What?", "image 2: ../x.png: leads out of "),
    "other order": (
        {"images": [RED, BLUE]}, [{"type": "image", "index": 1}, {"type": "image", "index": 0}],
        "an image part with index 1 in place 0; put the images into this order",
    ),
    "two references": (
        {}, [{"type": "image", "url": "a", "path": "b"}], "turn 1: an image with url and path; keep one of them"
    ),
    "no url": ({}, [{"type": "image_url", "image_url": {"detail": "low"}}], "turn 1: an image_url without url; add it"),
    "broken base64": ({}, [{"type": "image", "base64": "@"}], "image 1: data:;base64,...: broken base64"),
    "raw base64 elsewhere": ({}, [{"type": "image", "image": RED_URL.partition(",")[2]}], "image 1: "),
    "unknown part": ({}, [{"type": "point"}], "turn 1: a part of type point; valid: text with a text, image, image_"),
    "part without a type": ({}, [{"text": "a"}], "turn 1: a part of type None; valid: text with a text, image"),
    "text without text": ({}, [{"type": "text", "text": 5}], "turn 1: a part of type text; valid: text with a text"),
    "no object": ({}, ["What?"], "turn 1: a part of type None; valid: text with a text, image"),
    "rejected images": ({"rejected_images": [RED]}, "What?", "column rejected_images: rejected answers have"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISMATCHED)
def test_rows_whose_images_do_not_fit(name, source):
    row, content, expected = MISMATCHED[name]
    line = refusal(row, [user(content), ANSWER], source)
    assert line.startswith(expected) and "\n" not in line


def test_images_need_a_user_turn(source):
    line = refusal({"images": [RED]}, [{"role": "system", "content": "a"}, ANSWER], source)
    assert line == "no user turn that the images could belong to"


@pytest.mark.parametrize("content", ["<image>", [{"type": "image", "image": RED}], [{"type": "image"}]])
def test_answers_have_no_images(content, source):
    line = refusal({"images": [RED]}, [user("Draw"), {"role": "assistant", "content": content}], source)
    assert line == "turn 2: an image in an assistant turn; answers are texts: move it to a user turn"


def test_a_document_has_images_anywhere(source):
    def read(row, content):
        found = read_media(row, [{"role": "assistant", "content": content}], source, document=True)
        (turn,) = found.messages
        return turn["content"], [image.digest for image in found.images]

    both = [text("a "), R, text(" b "), B]
    assert read({"images": [RED, "blue.png"]}, "a <image> b <image>") == (both, [R["image"], B["image"]])
    assert read({}, [text("a "), {"type": "image", "path": "red.png"}, text(" b "), {"type": "image", "image": BLUE}])[
        0
    ] == (both)
    assert read({"image": RED}, "a")[0] == [R, text("a")]
    assert read({}, "a <image>") == ("a <image>", [])


@pytest.mark.parametrize("name", ["video", "videos", "audio", "audios"])
def test_columns_of_video_and_audio_are_refused(name, source):
    line = refusal({name: ["a.mp4"]}, [user("What?")], source)
    assert line == f"column {name}: video and audio are not supported; use text and images, or rename it with --columns"


@pytest.mark.parametrize("name", ["video", "audio"])
def test_so_are_their_tags_beside_a_column(name, source):
    line = refusal({f"{name}s": []}, [user(f"<{name}>")], source)
    assert line == f"<{name}> beside the column {name}s: video and audio are not supported; use text and images"
    assert read_media({}, [user(f"<{name}>")], source).messages == [user(f"<{name}>")]


@pytest.mark.parametrize("kind", ["video", "audio", "video_url", "audio_url", "input_audio"])
def test_so_are_their_parts(kind, source):
    line = refusal({}, [user([{"type": kind, kind: "a.mp4"}])], source)
    assert line == f"turn 1: a part of type {kind}: video and audio are not supported; use text and images"
