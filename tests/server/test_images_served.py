"""Models that see behind a server: chats with images, and the requests of trainers."""

import base64
import io
import json

import pytest
import vlms
from image_rows import Plain, data_url, turn
from oracle import ask
from PIL import Image
from server_parts import LocalServer, link_to, spec_of

from swift.data.image_store import remember
from swift.data.images import ImageSource, read_image
from swift.errors import EngineError, RequestRefused
from swift.models import load_chat, load_for_inference
from swift.models.arguments import SeeingArguments
from swift.rollout.engines.pool import EnginePool
from swift.rollout.engines.transformers import TransformersEngine
from swift.rollout.server.access import LIMITS

FAMILY = "qwen3_vl"


@pytest.fixture(scope="module")
def seeing(vlm_folders):
    server = LocalServer(vlm_folders(FAMILY), sees=True, max_model_len=256)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def plain(vlm_folders):
    return Plain(vlm_folders(FAMILY))


def image_url(url, **more):
    return {"type": "image_url", "image_url": {"url": url, **more}}


def text_part(text):
    return {"type": "text", "text": text}


def asked(server, content, route="/v1/chat/completions", **fields):
    with server.client() as http:
        body = {"messages": [turn("user", content)], "temperature": 0, "max_tokens": 4, **fields}
        return http.post(route, json=body)


@pytest.mark.parametrize("urls", [[data_url(0)], [data_url(1), data_url(2)], []])
def test_a_greedy_answer_is_that_of_a_plain_forward_pass(urls, seeing, plain):
    content = [*map(image_url, urls), text_part("What?")]
    reply = asked(seeing, content, return_token_ids=True).json()
    text = plain.text([turn("user", "<image>" * len(urls) + "What?")], add_generation_prompt=True)
    assert reply["choices"][0]["message"]["content"] == plain.likeliest(text, urls, 4)
    ids = plain.processed(text, urls)["input_ids"][0].tolist()
    assert reply["prompt_token_ids"] == ids
    assert reply["usage"]["prompt_tokens"] == len(ids)
    with seeing.client() as http:
        shown = http.post("/tokenize", json={"messages": [turn("user", content)]}).json()
    assert shown["tokens"] == ids


def test_an_answer_about_an_image_is_streamed(seeing):
    content = [image_url(data_url(0), detail="low"), text_part("What?")]
    whole = asked(seeing, content).json()["choices"][0]["message"]["content"]
    lines = asked(seeing, content, stream=True).text.splitlines()
    parts = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert "".join(part["choices"][0]["delta"].get("content", "") for part in parts) == whole


def large():
    content = io.BytesIO()
    Image.new("1", (9000, 9000)).save(content, "PNG")
    return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"


def cut():
    content = base64.b64encode(vlms.image(0)[:-3000]).decode()
    return f"data:image/png;base64,{content}"


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        (image_url("http://127.0.0.1:1/a.png"), "URLs are not fetched; send the image as a data URL"),
        (image_url("https://example.com/a.png"), "URLs are not fetched"),
        (image_url("file:///etc/hostname"), "no files are read here"),
        ({"type": "image", "path": "/etc/hostname"}, "no files are read here"),
        (image_url("data:image/png;base64,!!!"), "broken base64"),
        (image_url("data:image/png;base64,aGVsbG8="), "no image of a format that is read"),
        (image_url("data:image/png,hello"), "a data URL without base64"),
        (image_url(None), "an image_url without url"),
        (image_url({"a": [1]}), "no image; give"),
        ({"type": "image_url"}, "0 images for 1 place"),
        (image_url(cut()), "a damaged image"),
        (image_url(large()), "over 67108864 pixels"),
        ({"type": "video_url", "video_url": {"url": data_url(0)}}, "not a text or an image"),
        (text_part("<|image_pad|>"), "stands for an image"),
    ],
)  # fmt: skip
def test_what_is_no_usable_image_is_refused_in_a_line(part, problem, seeing):
    reply = asked(seeing, [part, text_part("What?")])
    assert reply.status_code == 422
    message = reply.json()["error"]["message"]
    assert problem in message and "\n" not in message and len(message) < 400
    beside = asked(seeing, [image_url(data_url(0)), part])
    assert beside.status_code == 422
    assert asked(seeing, [image_url(data_url(0)), text_part("What?")]).status_code == 200


def test_images_of_a_chat_are_bounded(seeing, monkeypatch):
    too_many = asked(seeing, [image_url(data_url(1))] * (LIMITS.images + 1))
    assert (too_many.status_code, too_many.json()["error"]["kind"]) == (422, "limit")
    monkeypatch.setattr(seeing.service.queue, "image_limit", 1000)
    full = asked(seeing, [image_url(data_url(1))])
    assert (full.status_code, full.json()["error"]["kind"]) == (429, "queue")


@pytest.mark.parametrize("prompt", [[1, -5, 2], "<|image_pad|>"])
def test_a_prompt_of_ids_names_no_image(prompt, seeing):
    with seeing.client() as http:
        reply = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2})
    assert reply.status_code == 422


def test_a_text_model_is_shown_no_image(server):
    with server.client() as http:
        body = {"messages": [turn("user", [image_url(data_url(0))])], "max_tokens": 2}
        reply = http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 422 and "not a text" in reply.json()["error"]["message"]


# --- trainers ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def link(seeing):
    """A trainer's end."""
    engine = EnginePool([link_to(seeing, spec=spec_of(seeing.model, sees=True))])
    yield engine
    engine.close()


def prompts(template):
    found = []
    for seeds in ((0,), (2,), (1, 2), ()):
        images = [read_image(data_url(seed), ImageSource()) for seed in seeds]
        remember(images)
        content = [{"type": "image", "image": one.digest} for one in images] + [text_part("What?")]
        found.append(template.encode_prompt([turn("user", content)]))
    return found


def test_a_trainer_gets_the_samples_of_its_own_engine(seeing, link):
    args = SeeingArguments(model=seeing.model)
    template, model = load_chat(args), load_for_inference(args, device="cpu")
    template.vision.attach(model)
    own = TransformersEngine(model, eos_token_ids=(256,), max_model_len=256)
    requests = [
        ask(f"{number}/{sample}", ids, seed=10 * number + sample, max_new_tokens=6, temperature=1.0)
        for number, ids in enumerate(prompts(template))
        for sample in range(2)
    ]
    assert link.capabilities.images
    ours, theirs = ({one.request_id: one for one in engine.sample(requests)} for engine in (own, link))
    assert {name: one.token_ids for name, one in theirs.items()} == {name: one.token_ids for name, one in ours.items()}
    assert {name: one.logprobs for name, one in theirs.items()} == {name: one.logprobs for name, one in ours.items()}


def test_a_prompt_that_shows_images_in_another_size_is_refused(seeing, link):
    template = load_chat(SeeingArguments(model=seeing.model, max_pixels=1024))
    with pytest.raises(RequestRefused, match="give both sides the same --max_pixels"):
        list(link.sample([ask("0", prompts(template)[0])]))
    assert link.health().alive


def test_other_max_pixels_of_the_server_are_refused_at_the_start(seeing):
    spec = spec_of(seeing.model, sees=True, max_pixels=1024)
    with pytest.raises(EngineError, match="its --max_pixels is not given, that of the run 1024"):
        _ = EnginePool([link_to(seeing, spec=spec)]).capabilities
