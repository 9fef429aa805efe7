"""New weights on a `swift rollout` server: every way they can take, and every way it can go wrong."""

from dataclasses import replace

import pytest
import torch
from given_weights import Given, tensors_of
from oracle import PROMPT, ask, difference, load, run, with_adapter, with_noise
from server_parts import KEY, Server, spec_of

from swift.errors import ConfigError, EngineError, ResourceError, SyncFailed
from swift.rollout.weights import disk
from swift.rollout.weights.base import Bucket, TensorInfo
from swift.rollout.weights.digest import digest_of
from swift.rollout.weights.policy import PolicyWeights

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def two_engines(nano_folders, weights_folder, tmp_path_factory):
    """llama nano, whose head is its own, on two engines."""
    one = Server(
        nano_folders["llama"], tmp_path_factory.mktemp("two"), "--vllm_data_parallel_size", "2",
        "--weights_folder", str(weights_folder), key=KEY,
    )  # fmt: skip
    yield one
    assert one.stop() == 0, one.text()[-3000:]
    assert one.left() == []


@pytest.fixture(params=["tied", pytest.param("untied", marks=pytest.mark.long)])
def hosted(request, server):
    """A server, and a copy of its model."""
    one = server if request.param == "tied" else request.getfixturevalue("two_engines")
    return one, load(one.model)


def probe(engine, model, *, seed=0):
    """Largest gap of four samples to a plain forward pass of `model`."""
    requests = [ask(f"g/{seed}.{i}", seed=seed + i) for i in range(4)]
    completions = run(engine, requests)
    assert all(one.versions == [(engine.version, 0, len(one.token_ids))] for one in completions)
    return max(difference(model, PROMPT, one.token_ids, one.logprobs) for one in completions)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["http", "disk", "broadcast"])
def test_updates_arrive_whole(hosted, way):
    server, model = hosted
    engine = server.engine(weight_transport=way)
    try:
        for version in range(1, 6):
            with_noise(model, seed=version)
            ack = engine.load_weights(PolicyWeights(model), version)
            assert (ack.version, engine.version) == (version, version)
            assert probe(engine, model, seed=version) < TOLERANCE
    finally:
        engine.close()


def test_the_disk_is_taken_where_both_sides_see_the_same_folder(server, weights_folder):
    engine = server.engine()
    model = load(server.model)
    for version in (1, 2, 3, 4):
        engine.load_weights(PolicyWeights(with_noise(model, seed=version, scale=0.05)), version)
    kept = sorted(path.name for path in (weights_folder / f"run-{engine.engines[0].run_id}").iterdir())
    assert kept == ["v0000003", "v0000004"]
    assert not list(weights_folder.rglob("*.partial"))
    engine.close()
    assert not (weights_folder / f"run-{engine.engines[0].run_id}").exists()


@pytest.mark.parametrize("way", ["http", "disk"])
def test_a_partial_update_leaves_void_weights_until_a_rebuild(server, http, way):
    engine, model = server.engine(weight_transport=way), with_noise(load(server.model), seed=1, scale=0.05)
    with pytest.raises(SyncFailed, match="26 of 27"):
        engine.load_weights(Given(tensors_of(model), tensors_of(model)[:-1]), 1)
    assert http.get("/health").status_code == 503
    assert "version 1" in http.get("/health").json()["detail"]
    assert http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1}).status_code == 409
    with pytest.raises(EngineError):
        run(engine, [ask("a")])
    engine.rebuild()
    engine.load_weights(PolicyWeights(model), 2)
    assert http.get("/health").status_code == 200
    assert probe(engine, model) < TOLERANCE
    engine.close()


@pytest.mark.parametrize(("way", "said"), [("http", "digest"), ("disk", "announced was")])
def test_bytes_that_changed_on_the_way_are_noticed(server, weights_folder, way, said):
    engine, model = server.engine(weight_transport=way), load(server.model)
    client = engine.engines[0]
    whole = client.payload

    def last_bit_turned(content):
        return content[:-1] + bytes([content[-1] ^ 1])

    def spoiled(way, bucket, version):
        made = whole(way, bucket, version)
        if way == "http":
            return last_bit_turned(bytes(made))
        path = weights_folder / made["path"]
        path.write_bytes(last_bit_turned(path.read_bytes()))
        return made

    client.payload = spoiled
    with pytest.raises(SyncFailed, match=said):
        engine.load_weights(PolicyWeights(model), 1)
    client.payload = whole
    engine.rebuild()
    assert probe(engine, model) < TOLERANCE
    engine.close()


def test_weights_come_back_to_those_of_the_start_with_another_run(server):
    first = server.engine()
    first.load_weights(PolicyWeights(with_noise(load(server.model), seed=3, scale=0.05)), 1)
    first.close()
    second = server.engine()
    assert second.capabilities.name == "transformers"
    assert second.version == 0
    assert probe(second, load(server.model)) < TOLERANCE
    second.close()


def test_an_adapter_is_effective_before_the_reply_and_bfloat16_is_bit_exact(server, engine):
    model = load(server.model)
    for version, dtype in ((1, None), (2, torch.bfloat16), (3, None)):
        policy, adapter = with_adapter(model, seed=version, dtype=dtype)
        ack = engine.load_adapter(adapter, version)
        assert (ack.version, ack.digest) == (version, adapter.digest())
        assert probe(engine, policy, seed=version) < TOLERANCE
    body = {"prompt": PROMPT, "model": server.model, "max_tokens": 8, "return_token_ids": True, "logprobs": 0}
    with server.client() as agent:  # an agent of the run asks for its model, however the weights have come
        choice = agent.post("/v1/completions", json=body).json()["choices"][0]
        assert [one["id"] for one in agent.get("/v1/models").json()["data"]] == [server.model, "policy-v3"]
        assert difference(policy, PROMPT, choice["token_ids"], choice["logprobs"]["token_logprobs"]) < TOLERANCE
        run_id = {"X-Swift-Run": engine.engines[0].run_id}
        assert agent.post("/v1/unload_lora_adapter", headers=run_id).json()["version"] == 0
        choice = agent.post("/v1/completions", json=body).json()["choices"][0]
    assert difference(model, PROMPT, choice["token_ids"], choice["logprobs"]["token_logprobs"]) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_tensors_come_back_bit_for_bit(dtype):
    tensors = [
        ("b", torch.randn(3, 5).to(dtype)),
        ("a", torch.zeros(0, 2, dtype=dtype)),
        ("c", torch.ones((), dtype=dtype)),
    ]
    back = disk.from_bytes(disk.as_bytes(tensors, {"note": "x"}), "here")
    for name, tensor in tensors:
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    assert disk.metadata_of(disk.as_bytes(tensors, {"note": "x"})) == {"note": "x"}


def test_a_file_has_its_name_only_when_the_disk_has_it(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    run = disk.open_run(tmp_path, "run-1")
    monkeypatch.setattr(disk.os, "fsync", full)
    with pytest.raises(ResourceError, match=r"bucket-0001\.safetensors: cannot be written"):
        run.add(Bucket([("a", torch.zeros(2))]), 1)
    assert not list(tmp_path.rglob("*/bucket-*"))
    run.close()


def test_a_bucket_must_be_the_next_of_the_manifest():
    tensors = {name: torch.zeros(1) for name in "abc"}
    wanted = [TensorInfo.of(name, tensors[name]) for name in "abc"]
    assert [name for name, _ in disk.in_order({"b": tensors["b"], "a": tensors["a"]}, "x", wanted).tensors] == [
        "a",
        "b",
    ]
    with pytest.raises(SyncFailed, match="a: is missing"):
        disk.in_order({"b": tensors["b"]}, "x", wanted)
    with pytest.raises(SyncFailed, match="z: is not expected"):
        disk.in_order({"a": tensors["a"], "z": tensors["b"]}, "x", wanted)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", ".", "a/../../x", "missing", "link", "a\0b", "a" * 5000])
def test_only_what_lies_below_the_folder_is_inside(tmp_path, name):
    folder = tmp_path / "weights"
    folder.mkdir()
    (tmp_path / "x").write_text("secret")
    (folder / "link").symlink_to(tmp_path / "x")
    with pytest.raises(ConfigError):
        disk.inside(folder, name)
    with pytest.raises(ConfigError, match="--weights_folder"):
        disk.inside(None, "a")


@pytest.mark.parametrize("swapped", ["file", "folder"])
def test_a_path_that_becomes_a_link_after_the_check_is_not_followed(tmp_path, swapped):
    inner, outer = tmp_path / "weights" / "run", tmp_path / "elsewhere"
    for folder in (inner, outer):
        folder.mkdir(parents=True)
        disk.write_whole(folder / "bucket", disk.as_bytes([("a", torch.ones(1))]))
    path, wanted = disk.inside(tmp_path / "weights", "run/bucket"), [TensorInfo.of("a", torch.ones(1))]
    assert disk.read_bucket(path, wanted, None).tensors
    inner.rename(tmp_path / "weights" / "former")
    if swapped == "file":
        inner.mkdir()
        (inner / "bucket").symlink_to(outer / "bucket")
    else:
        inner.symlink_to(outer)
    with pytest.raises(SyncFailed, match="bucket: cannot be read"):
        disk.read_bucket(path, wanted, None)


def test_servers_that_see_one_folder_share_the_files_of_a_version(tmp_path):
    one, other = disk.open_run(tmp_path, "run-1"), disk.open_run(tmp_path / "x" / "..", "run-1")
    buckets = [Bucket([(f"layer.{index}", torch.randn(4))]) for index in range(3)]
    for version in (1, 2, 3, 3, 4):  # 3 has to be written twice
        entries = [(one, other)[index % 2].add(bucket, version) for index, bucket in enumerate(buckets)]
        assert [entry["path"] for entry in entries] == [
            f"run-1/v000000{version}/bucket-000{n}.safetensors" for n in (1, 2, 3)
        ]
        one.update_ended(version, complete=version != 3)
        other.update_ended(version, complete=True)
        for bucket, entry in zip(buckets, entries, strict=True):
            read = disk.read_bucket(tmp_path / entry["path"], [TensorInfo.of(*bucket.tensors[0])], entry["digest"])
            assert torch.equal(read.tensors[0][1], bucket.tensors[0][1])
            assert entry["digest"] == digest_of(bucket.tensors)
    assert sorted(path.name for path in (tmp_path / "run-1").iterdir()) == ["v0000003", "v0000004"]
    one.close()
    assert (tmp_path / entries[0]["path"]).exists()
    other.close()
    assert not (tmp_path / "run-1").exists()


@pytest.mark.parametrize(
    ("field", "value", "theirs"),
    [("model", "llama", None), ("dtype", "bfloat16", "float32"), ("max_model_len", 4000, 512)],
)
def test_another_model_type_or_length_than_the_runs_is_refused_with_both(server, nano_folders, field, value, theirs):
    value, theirs = (str(nano_folders[value]), server.model) if field == "model" else (value, theirs)
    engine = server.engine(spec=replace(spec_of(server.model), **{field: value}))
    with pytest.raises(EngineError) as caught:
        engine.capabilities  # noqa: B018
    assert str(value) in str(caught.value)
    assert str(theirs) in str(caught.value)
    engine.close()
