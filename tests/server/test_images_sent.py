"""Images of prompts on their way to a server: once per POST, checked there."""

import msgspec
import pytest
import vlms
from oracle import ask

from swift.data.image_store import name_of, remember, remember_shown
from swift.data.images import digest_of
from swift.rollout.engines import server_client, wire
from swift.rollout.engines.client import with_images
from swift.rollout.server.access import Refused
from swift.rollout.server.infer import _requests
from swift.types import Image, ShownImage


@pytest.fixture
def pictures(tmp_path):
    """An image in a file, another one as bytes."""
    (tmp_path / "a.png").write_bytes(vlms.image(1))
    first = Image(digest_of(vlms.image(1)), path=str(tmp_path / "a.png"))
    second = Image(digest_of(vlms.image(2)), content=vlms.image(2))
    shown = [ShownImage(image, 7, (5, *[-1] * (4 + number), 6)) for number, image in enumerate((first, second))]
    remember_shown(shown)
    remember_shown(shown[1:])
    return first, second


def prompts(first, second):
    """Ids of prompts with both images, with one of them, with none."""
    named = []
    for images in ((first, second), (second,)):
        remember(images)
        named.append([1, *name_of(images), 2])
    return [*named, [1, 2]]


def received(requests):
    return _requests(msgspec.json.decode(wire.encode(wire.InferRequest.of(requests, 3)), type=wire.InferRequest))


def test_a_server_gets_each_image_once_with_what_its_engine_needs(pictures):
    first, second = pictures
    asked = [ask(f"{number}/{sample}", ids) for number, ids in enumerate(prompts(*pictures)) for sample in range(2)]
    body = wire.InferRequest.of(with_images(asked), 3)
    assert [digest_of(sent.content) for sent in body.images] == [first.digest, second.digest]
    assert body.shown == {0: [0, 1], 1: [1]}
    got = received(with_images(asked))
    assert [request.prompt_ids for request in got] == [request.prompt_ids for request in asked]
    shown = [[one.image.digest for one in request.images] for request in got]
    assert shown == [[first.digest, second.digest]] * 2 + [[second.digest]] * 2 + [[]] * 2
    assert got[0].images[1] == ShownImage(second, 7, (5, -1, -1, -1, -1, -1, 6))
    assert all(one.image.content for request in got for one in request.images)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"images": [wire.SentImage(b"no image", 7, [-1])]}, "images: 0: "),
        ({"shown": {0: [2]}}, "shown: 0: of 3 prompts and 2 images"),
        ({"shown": {3: [0]}}, "shown: 3: of 3 prompts"),
        ({"shown": {0: [-1]}}, "shown: 0: "),
    ],
)
def test_what_names_no_image_is_refused(change, problem, pictures):
    asked = [ask(str(number), ids) for number, ids in enumerate(prompts(*pictures))]
    body = msgspec.structs.replace(wire.InferRequest.of(with_images(asked), 3), **change)
    with pytest.raises(Refused, match=problem):
        _requests(body)


def test_images_count_for_the_size_of_a_post(pictures, monkeypatch):
    asked = with_images([ask(str(number), ids) for number, ids in enumerate(prompts(*pictures))])
    assert len(list(server_client._parts(asked))) == 1
    monkeypatch.setattr(server_client, "BATCH_TOKENS", 2 * len(vlms.image(1)) // server_client.IMAGE_BYTES - 1)
    assert [[request.request_id for request in part] for part in server_client._parts(asked)] == [["0"], ["1", "2"]]
