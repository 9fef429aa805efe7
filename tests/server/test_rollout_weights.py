"""New weights on a `swift rollout` server: every way they can take, and every way it can go wrong."""

import copy
import json
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from server_parts import KEY, PROMPT, Server, ask, gap, load, run, spec_of, with_noise

from swift.errors import ConfigError, EngineError, SyncFailed
from swift.rollout.server import wire
from swift.rollout.weight_sync import disk
from swift.rollout.weight_sync.base import AdapterWeights, Bucket, StreamDigest, TensorInfo
from swift.rollout.weight_sync.broadcast import BroadcastGroup
from swift.rollout.weight_sync.policy import PolicyWeights

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


@pytest.fixture(params=["tied", "untied"])
def hosted(request, server):
    """A server, and a copy of its model."""
    one = server if request.param == "tied" else request.getfixturevalue("two_engines")
    return one, load(one.model)


def probe(engine, model, *, seed=0):
    """Largest gap of four samples to a plain forward pass of `model`."""
    requests = [ask(f"g/{seed}.{i}", seed=seed + i) for i in range(4)]
    completions = run(engine, requests)
    assert all(one.versions == [(engine.version, 0, len(one.token_ids))] for one in completions)
    return max(gap(model, PROMPT, one.token_ids, one.logprobs) for one in completions)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["http", "disk", "broadcast"])
def test_twenty_updates_arrive_whole(hosted, way):
    server, model = hosted
    engine = server.engine(transport=way)
    try:
        assert way in engine.capabilities.transports
        for version in range(1, 21):
            with_noise(model, version, 0.02)
            ack = engine.load_weights(PolicyWeights(model), version)
            assert (ack.version, engine.version) == (version, version)
            assert probe(engine, model, seed=version) < TOLERANCE
    finally:
        engine.close()


def test_the_disk_is_taken_where_both_sides_see_the_same_folder(server, weights_folder):
    engine = server.engine()
    model = load(server.model)
    for version in (1, 2, 3, 4):
        engine.load_weights(PolicyWeights(with_noise(model, version)), version)
    kept = sorted(path.name for path in (weights_folder / engine.run_folder).iterdir())
    assert kept == ["v0000003", "v0000004"]
    assert not list(weights_folder.rglob("*.partial"))
    engine.close()
    assert not (weights_folder / engine.run_folder).exists()


def test_buckets_longer_than_a_request_travel_in_pieces(server, monkeypatch):
    monkeypatch.setattr(wire, "PIECE_BYTES", 1000)
    engine, model = server.engine(transport="http"), with_noise(load(server.model), 1)
    engine.load_weights(PolicyWeights(model, bucket_bytes=50_000), 1)
    assert probe(engine, model) < TOLERANCE
    engine.close()


class Cut:
    """Weights that end before their last tensor."""

    def __init__(self, model):
        self.tensors = [one for bucket in PolicyWeights(model).buckets() for one in bucket.tensors]

    def manifest(self):
        return tuple(TensorInfo.of(name, tensor) for name, tensor in self.tensors)

    def buckets(self):
        yield Bucket(self.tensors[:-1])


@pytest.mark.parametrize("way", ["http", "disk"])
def test_a_partial_update_leaves_void_weights_until_a_whole_one(server, http, way):
    engine, model = server.engine(transport=way), with_noise(load(server.model), 1)
    with pytest.raises(SyncFailed, match="26 of 27"):
        engine.load_weights(Cut(model), 1)
    assert http.get("/health").status_code == 503
    assert "version 1" in http.get("/health").json()["detail"]
    assert http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1}).status_code == 409
    with pytest.raises(EngineError):
        engine.submit(ask("a"))
    engine.load_weights(PolicyWeights(model), 2)
    assert http.get("/health").status_code == 200
    assert probe(engine, model) < TOLERANCE
    engine.close()


def test_an_update_that_does_not_fit_is_refused_before_a_byte_travels(server, http):
    engine, model = server.engine(), load(server.model)
    tensors = [
        TensorInfo.of(name, tensor) for bucket in PolicyWeights(model).buckets() for name, tensor in bucket.tensors
    ]
    with pytest.raises(SyncFailed, match=r"is missing|missing"):
        engine.begin_update(tensors[:3], 1)
    assert http.get("/health").status_code == 200
    assert probe(engine, model) < TOLERANCE
    engine.close()


def test_bytes_that_changed_on_the_way_are_noticed(server, http):
    engine, model = server.engine(transport="http"), load(server.model)
    send = engine.send_bytes

    def spoiled(number, bucket, data):
        changed = bytearray(data)
        changed[-1] ^= 1
        send(number, bucket, bytes(changed))

    engine.send_bytes = spoiled
    with pytest.raises(SyncFailed, match="digest"):
        engine.load_weights(PolicyWeights(model), 1)
    engine.send_bytes = send
    engine.rebuild()
    assert probe(engine, model) < TOLERANCE
    engine.close()


def test_a_file_that_changed_on_the_disk_is_noticed(server, weights_folder):
    engine, model = server.engine(transport="disk"), load(server.model)
    send = engine.send_file

    def spoiled(number, bucket, entry):
        path = weights_folder / entry["path"]
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        send(number, bucket, entry)

    engine.send_file = spoiled
    with pytest.raises(SyncFailed, match="announced was"):
        engine.load_weights(PolicyWeights(model), 1)
    engine.close()


def test_weights_come_back_to_those_of_the_start_with_another_run(server):
    first = server.engine()
    first.load_weights(PolicyWeights(with_noise(load(server.model), 3)), 1)
    first.close()
    second = server.engine()
    assert second.capabilities.name == "transformers"
    assert second.version == 0
    assert probe(second, load(server.model)) < TOLERANCE
    second.close()


# --- adapters --------------------------------------------------------------------------------------------------------


def adapted(model, *, seed, dtype=None):
    """A policy with a LoRA adapter, and the adapter alone."""
    from peft import LoraConfig, get_peft_model

    from swift.models.checkpoint_tensors import read_adapter

    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "up_proj"])
    policy = get_peft_model(copy.deepcopy(model), config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
                if dtype is not None:
                    parameter.copy_(parameter.to(dtype))
    settings, tensors = read_adapter(policy)
    return policy, AdapterWeights(settings, {name: t.to(dtype or t.dtype) for name, t in tensors.items()})


def test_an_adapter_is_effective_before_the_reply_and_bfloat16_is_bit_exact(server):
    engine, model = server.engine(), load(server.model)
    for version, dtype in ((1, None), (2, torch.bfloat16), (3, None)):
        policy, adapter = adapted(model, seed=version, dtype=dtype)
        ack = engine.load_adapter(adapter, version)
        assert (ack.version, ack.digest) == (version, adapter.digest())
        assert probe(engine, policy, seed=version) < TOLERANCE
    body = {"prompt": PROMPT, "model": server.model, "max_tokens": 8, "return_token_ids": True, "logprobs": 0}
    with server.client() as agent:  # an agent of the run asks for its model, however the weights have come
        choice = agent.post("/v1/completions", json=body).json()["choices"][0]
    assert gap(policy, PROMPT, choice["token_ids"], choice["logprobs"]["token_logprobs"]) < TOLERANCE
    engine.drop_adapter()
    assert probe(engine, model) < TOLERANCE
    engine.close()


def save_adapter(adapter, folder):
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(adapter.config, default=str))
    content = disk.as_bytes(sorted(adapter.tensors.items()))
    (folder / "adapter_model.safetensors").write_bytes(content)
    return content


@pytest.mark.parametrize("form", ["path", "multipart"])
def test_adapters_of_other_clients_come_as_a_folder_or_a_form(server, http, weights_folder, form):
    model = load(server.model)
    policy, adapter = adapted(model, seed=9)
    content = save_adapter(adapter, weights_folder / f"adapter-{form}")
    if form == "path":
        reply = http.post("/v1/load_lora_adapter", json={"lora_name": "mine", "lora_path": "adapter-path"})
    else:
        fields = {"lora_name": "mine", "adapter_config": json.dumps(adapter.config, default=str)}
        reply = http.post("/v1/load_lora_adapter", data=fields, files={"adapter_model": content})
    assert reply.status_code == 200, reply.text
    assert reply.json()["ack"]["digest"] == adapter.digest()
    assert [one["id"] for one in http.get("/v1/models").json()["data"]] == [server.model, "mine"]
    body = {"prompt": PROMPT, "model": "mine", "max_tokens": 8, "return_token_ids": True, "logprobs": 0}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert gap(policy, PROMPT, choice["token_ids"], choice["logprobs"]["token_logprobs"]) < TOLERANCE
    reply = http.post("/v1/completions", json={**body, "model": server.model})
    assert reply.status_code == 409, "its answer would be the adapter's"
    assert "the adapter mine" in reply.json()["error"]["message"]
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "other"}).status_code == 404
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "mine"}).status_code == 200
    choice = http.post("/v1/completions", json={**body, "model": server.model}).json()["choices"][0]
    assert gap(model, PROMPT, choice["token_ids"], choice["logprobs"]["token_logprobs"]) < TOLERANCE


# --- trainers of other makes -----------------------------------------------------------------------------------------


class Trainer:
    """Broadcasts the way vLLM's and TRL's trainers do, over gloo."""

    def __init__(self):
        limit = timedelta(seconds=60)
        self.store = dist.TCPStore("127.0.0.1", 0, 2, True, timeout=limit, wait_for_workers=False)
        self.group = None

    def join(self):
        self.group = BroadcastGroup(
            self.store, 0, 2, backend="gloo", device=torch.device("cpu"), timeout_s=60, host="127.0.0.1"
        )

    def send(self, tensors):
        for tensor in tensors:
            self.group.broadcast(tensor.detach().contiguous().reshape(-1).view(torch.uint8))

    def together(self, post, work):
        """Work while a request is under way; its reply."""
        replies = []
        thread = threading.Thread(target=lambda: replies.append(post()))
        thread.start()
        work()
        thread.join(60)
        assert replies[0].status_code == 200, replies[0].text
        return replies[0].json()


def choice_of(http):
    body = {"prompt": PROMPT, "max_tokens": 8, "return_token_ids": True, "logprobs": 0}
    return http.post("/v1/completions", json=body).json()["choices"][0]


@pytest.mark.parametrize("label", ["5", "step-12"])
def test_vllms_routes_take_a_broadcast(server, http, label):
    before = http.get("/info").json()["version"]
    model, trainer = with_noise(load(server.model), 21), Trainer()
    init = {"master_address": "127.0.0.1", "master_port": trainer.store.port, "rank_offset": 1, "world_size": 2,
            "backend": "gloo"}  # fmt: skip
    trainer.together(lambda: http.post("/init_weight_transfer_engine", json={"init_info": init}), trainer.join)
    assert http.post("/start_weight_update", json={"is_checkpoint_format": True}).status_code == 200
    named = list(model.named_parameters())  # without the tied head, as TRL sends them
    for half in (named[:5], named[5:]):
        info = {
            "names": [name for name, _ in half],
            "dtype_names": ["float32" for _ in half],
            "shapes": [list(one.shape) for _, one in half],
        }
        trainer.together(
            lambda info=info: http.post("/update_weights", json={"update_info": info}),
            lambda half=half: trainer.send(one for _, one in half),
        )
    reply = http.post("/finish_weight_update", json={"weight_version": label}).json()
    version = 5 if label == "5" else before + 1
    assert reply["ack"]["version"] == version
    assert http.get("/weight_info").json() == {"weight_version": label}
    choice = choice_of(http)
    assert choice["weight_version"] == version
    assert gap(model, PROMPT, choice["token_ids"], choice["logprobs"]["token_logprobs"]) < TOLERANCE
    assert http.post("/shutdown_weight_transfer_engine").status_code == 200


def test_an_update_over_vllms_routes_that_lacks_a_tensor_is_refused(server, http):
    trainer = Trainer()
    init = {"master_address": "127.0.0.1", "master_port": trainer.store.port, "rank_offset": 1, "world_size": 2,
            "backend": "gloo"}  # fmt: skip
    trainer.together(lambda: http.post("/init_weight_transfer_engine", json={"init_info": init}), trainer.join)
    http.post("/start_weight_update")
    name, tensor = next(iter(load(server.model).named_parameters()))
    info = {"names": [name], "dtype_names": ["float32"], "shapes": [list(tensor.shape)]}
    trainer.together(lambda: http.post("/update_weights", json={"update_info": info}), lambda: trainer.send([tensor]))
    reply = http.post("/finish_weight_update")
    assert reply.status_code == 409
    assert "missing" in reply.json()["error"]["message"]


def test_trls_older_routes_reply_before_the_broadcast(server, http):
    model, trainer = with_noise(load(server.model), 22), Trainer()
    body = {"host": "127.0.0.1", "port": trainer.store.port, "world_size": 2, "backend": "gloo"}
    assert http.post("/init_communicator/", json=body).status_code == 200
    trainer.join()
    for name, tensor in model.named_parameters():
        body = {"name": name, "dtype": "torch.float32", "shape": list(tensor.shape)}
        assert http.post("/update_named_param/", json=body).status_code == 200
        trainer.send([tensor])
    assert http.post("/reset_prefix_cache/").status_code == 200
    reply = http.post("/generate/", json={"prompts": ["The quick"], "max_tokens": 8}).json()
    values = [value[0] for value in reply["logprobs"][0]]
    assert gap(model, reply["prompt_ids"][0], reply["completion_ids"][0], values) < TOLERANCE
    assert http.post("/close_communicator/").status_code == 200


def test_what_fails_after_the_reply_is_said_by_the_next_call_and_by_health(server, http):
    trainer = Trainer()
    body = {"host": "127.0.0.1", "port": trainer.store.port, "world_size": 2, "backend": "gloo"}
    http.post("/init_communicator/", json=body)
    trainer.join()
    name, tensor = next(iter(load(server.model).named_parameters()))
    wrong = {"name": name, "dtype": "torch.float32", "shape": [*tensor.shape, 2]}
    assert http.post("/update_named_param/", json=wrong).status_code == 200
    trainer.send([tensor])  # half of what was announced
    trainer.group.close()
    del trainer
    reply = http.post("/reset_prefix_cache/")
    assert reply.status_code == 409
    assert reply.json()["error"]["message"].startswith("weights: ")
    health = http.get("/health")
    incomplete = "tensors came" in reply.json()["error"]["message"]
    assert health.status_code == (200 if incomplete else 503)
    assert http.post("/generate/", json={"prompts": ["a"], "max_tokens": 1}).status_code == 409
    http.post("/close_communicator/")
    assert http.post("/reset", json={"run_id": "next"}).status_code == 200
    assert http.get("/health").status_code == 200
    http.post("/release", json={"run_id": "next"})


def test_a_name_that_is_no_tensor_of_the_model_is_refused_at_once(http):
    body = {"name": "model.layers.99.weight", "dtype": "torch.float32", "shape": [1]}
    reply = http.post("/update_named_param/", json=body)
    assert "no tensor of this model" in reply.json()["error"]["message"]


# --- files -----------------------------------------------------------------------------------------------------------


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


def test_a_file_has_its_name_only_when_it_is_whole(tmp_path):
    def broken():
        yield b"half"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        disk.write_whole(tmp_path / "w.safetensors", broken())
    assert not (tmp_path / "w.safetensors").exists()


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


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", ".", "a/../../x", "missing"])
def test_only_what_lies_below_the_folder_is_inside(tmp_path, name):
    folder = tmp_path / "weights"
    folder.mkdir()
    (tmp_path / "x").write_text("secret")
    with pytest.raises(ConfigError):
        disk.inside(folder, name)
    with pytest.raises(ConfigError, match="--weights_folder"):
        disk.inside(None, "a")


def test_the_digest_of_a_file_is_that_of_the_update(tmp_path):
    tensors = [("a", torch.randn(4)), ("b", torch.randn(2))]
    stream = StreamDigest()
    for name, tensor in tensors:
        stream.add(name, tensor)
    entry = disk.VersionWriter(tmp_path, "run", 1).add(Bucket(tensors))
    assert entry == {"path": "run/v0000001/bucket-0001.safetensors", "digest": stream.hexdigest()}


def in_threads(*work):
    failures = []

    def guarded(one):
        try:
            one()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(one,)) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert failures == []


def test_servers_that_see_one_folder_share_the_files_of_a_version(tmp_path):
    one, other = disk.open_run(tmp_path, "run-1"), disk.open_run(tmp_path / "x" / "..", "run-1")
    buckets = [Bucket([(f"layer.{index}", torch.randn(4))]) for index in range(3)]
    manifest = [TensorInfo.of(name, tensor) for bucket in buckets for name, tensor in bucket.tensors]
    for version in range(1, 40):
        writers = [one.writer(version), other.writer(version)]
        entries = [writers[index % 2].add(bucket) for index, bucket in enumerate(buckets)]
        in_threads(*(lambda writer=writer: writer.finish(manifest) for writer in writers))
        other.writer(version + 1).abandon()  # an update that failed
        for bucket, entry in zip(buckets, entries, strict=True):
            read = disk.read_bucket(tmp_path / entry["path"], [TensorInfo.of(*bucket.tensors[0])], entry["digest"])
            assert torch.equal(read.tensors[0][1], bucket.tensors[0][1])
        written = json.loads((tmp_path / "run-1" / f"v{version:07d}" / "manifest.json").read_text())
        assert written["buckets"] == entries
    writers[1].abandon()  # one server has confirmed it, another failed after that
    assert (tmp_path / entries[0]["path"]).exists()
    one.close()
    assert (tmp_path / entries[0]["path"]).exists()
    other.close()
    assert not (tmp_path / "run-1").exists()


def test_another_model_than_the_runs_is_refused_with_both_names(server, nano_folders):
    engine = server.engine(spec=spec_of(nano_folders["llama"]))
    with pytest.raises(EngineError) as caught:
        engine.capabilities  # noqa: B018
    assert str(nano_folders["llama"]) in str(caught.value)
    assert server.model in str(caught.value)
    engine.close()


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [("dtype", "bfloat16", ["float32", "bfloat16"]), ("max_model_len", 4000, ["512", "4000"])],
)
def test_another_type_or_length_than_the_runs_is_refused_with_both(server, field, value, said):
    engine = server.engine(spec=spec_of(server.model, **{field: value}))
    with pytest.raises(EngineError) as caught:
        engine.capabilities  # noqa: B018
    assert all(text in str(caught.value) for text in said)
    engine.close()
