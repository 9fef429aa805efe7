"""The LMDeploy adapter against a stand-in of 0.18.0: what is called, with what, in which order, and what follows."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from dataclasses import replace

import fake_lmdeploy
import pytest
import torch
from image_rows import data_url, turn
from oracle import load
from sources import asking, leave, nothing_left, on_a_loop, source_of
from transformers import AutoConfig

from swift.data.image_store import remember
from swift.data.images import ImageSource, read_image
from swift.errors import ConfigError, EngineAsleep, EngineDead, EngineError, RequestRefused, ResourceError, SyncFailed
from swift.models import load_chat, load_for_inference
from swift.models.arguments import SeeingArguments
from swift.models.vision import placeholder_ids
from swift.rollout.engines import lmdeploy
from swift.rollout.engines.spec import EngineSpec, build_engine
from swift.rollout.weights.base import WeightStream
from swift.rollout.weights.policy import PolicyWeights
from swift.types import Request, SamplingParams

END = 3
PLAIN = SamplingParams(max_new_tokens=12, temperature=0.9, seed=5)


@pytest.fixture
def start(monkeypatch, nano_folders):
    """Makes engines on the stand-in, and closes them."""
    made = []
    monkeypatch.setattr(lmdeploy, "placed", lambda tensor, device, dtype: tensor.detach().to(dtype))

    def build(*, kwargs=None, **options):
        spec_names = set(EngineSpec.__dataclass_fields__)
        settings = {name: options.pop(name) for name in list(options) if name in spec_names}
        build.recorder = fake_lmdeploy.install(monkeypatch, **options)
        spec = EngineSpec(
            **{
                "backend": "lmdeploy", "model": str(nano_folders["qwen2"]), "dtype": "bfloat16",
                "eos_token_ids": (END,), "devices": ("cuda:0",), "max_model_len": 64, "max_num_seqs": 4,
                "engine_kwargs": kwargs or {}, **settings,
            }
        )  # fmt: skip
        made.append(build_engine(spec))
        return made[-1]

    yield build
    for engine in made:
        engine.close()


def requests(count=3, **sampling):
    return [Request(f"r{i}", [5, 6 + i, 7], replace(PLAIN, seed=i, **sampling)) for i in range(count)]


def run(engine, wanted):
    return {one.request_id: one for one in engine.sample(wanted)}


def policy(folder, factor=1.0):
    model = load(folder)
    with torch.no_grad():
        for one in model.parameters():
            one.mul_(factor)
    return PolicyWeights(model, move_model_batches=1)


# --- where it cannot run --------------------------------------------------------------------------------------


def test_without_the_package_the_start_says_what_to_install_and_what_to_use_instead():
    assert "lmdeploy" not in sys.modules
    with pytest.raises(ResourceError) as caught:
        lmdeploy.require()
    assert caught.value.exit_code == 3
    assert "the package lmdeploy is not installed" in str(caught.value)
    assert "--use_vllm true" in str(caught.value)


def test_without_a_gpu_the_start_says_so(monkeypatch):
    fake_lmdeploy.install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ResourceError, match="NVIDIA GPUs only, and none is visible"):
        lmdeploy.require()


def test_another_version_is_refused(monkeypatch):
    fake_lmdeploy.install(monkeypatch, version="0.17.1")
    with pytest.raises(ResourceError, match=r"0\.17\.1: only 0\.18 is supported"):
        lmdeploy.require()


def test_a_symbol_that_is_gone_is_named(monkeypatch, start):
    fake_lmdeploy.install(monkeypatch)
    monkeypatch.delattr(sys.modules["lmdeploy.utils"], "serialize_state_dict")
    monkeypatch.setattr(fake_lmdeploy, "install", lambda *_, **__: fake_lmdeploy.RECORDER)
    with pytest.raises(ResourceError, match=r"lmdeploy\.utils:serialize_state_dict cannot be used"):
        start()


REFUSED = {
    "float32": ({"dtype": "float32"}, ResourceError, "bfloat16 or float16 only; use --torch_dtype bfloat16"),
    "cpu": ({"devices": ("cpu",)}, ResourceError, "--lmdeploy_device: cpu: LMDeploy runs on NVIDIA GPUs only"),
    "tp in ranks": ({"in_ranks": True}, ConfigError, "cannot run over the training processes"),
    "devices": ({"tensor_parallel_size": 2}, ConfigError, "1 devices for 2 tensor-parallel ranks"),
    "turbomind": ({"kwargs": {"engine": "turbomind"}}, ConfigError, "only LMDeploy's PyTorch engine"),
    "lora": ({"lora": True}, ConfigError, "--vllm_enable_lora: true: LMDeploy reads adapters at its start only"),
    "memory": ({"memory_share": 1.0}, ConfigError, "--lmdeploy_cache_max_entry_count: 1.0"),
    "unknown": ({"kwargs": {"cache_size": 3}}, ConfigError, "engine_kwargs: cache_size: LMDeploy refuses"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_lmdeploy_does_not_have_are_refused_before_it_starts(start, case):
    options, error, text = REFUSED[case]
    with pytest.raises(error, match=text):
        start(**options)
    assert "Pipeline" not in start.recorder.names()


def test_a_start_that_fails_is_an_engine_error(start):
    with pytest.raises(EngineError, match="it failed to start"):
        start(start_error=SystemExit(1))


# --- configuration --------------------------------------------------------------------------------------------


def test_the_spec_in_the_words_of_the_pytorch_engine(start):
    start(memory_share=0.6, enforce_eager=True, devices=("cuda:2",), trust_remote_code=True)
    call = start.recorder.of("Pipeline")[0]
    config = call["config"]
    assert isinstance(config, fake_lmdeploy.PytorchEngineConfig)
    assert (config.dtype, config.session_len, config.max_batch_size) == ("bfloat16", 64, 4)
    assert (config.cache_max_entry_count, config.eager_mode) == (0.6, True)
    assert config.logprobs_mode == "raw_logprobs"
    assert config.distributed_executor_backend == "ray"  # the others have no update_params
    assert not config.enable_prefix_caching
    assert call["remote_code"] is True
    assert start.recorder.environment == ["2"]  # where Ray's workers will run
    capabilities = start().capabilities
    assert (capabilities.logprob_support, capabilities.lora, capabilities.in_flight_updates) == ("raw", False, False)
    assert (capabilities.sleep_levels, capabilities.max_model_len) == ((0, 1, 2), 64)


def test_the_devices_of_ray_are_counted_as_this_process_sees_them(start, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    start(devices=("cuda:1",))
    assert start.recorder.environment == ["5"]
    import os

    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,5,6"


# --- sampling -------------------------------------------------------------------------------------------------


def test_defaults_that_would_change_the_sampling_are_set(start):
    engine = start()
    run(engine, requests(1, top_k=-1, stop_token_ids=(9,)))
    call = start.recorder.of("infer")[-1]
    config = call["config"]
    assert call["ids"] == [5, 6, 7]
    assert (config.n, config.do_sample, config.temperature) == (1, True, 0.9)
    assert (config.top_k, config.top_p, config.min_p) == (0, 1.0, 0.0)  # its own default of top_k is 50
    assert (config.random_seed, config.max_new_tokens) == (0, 12)
    assert config.include_stop_str_in_output is True
    assert config.stop_token_ids == [END, 9]
    assert config.stop_words is None  # it would make single tokens of them
    assert config.logprobs == 1
    run(engine, requests(1, temperature=0.0))
    config = start.recorder.of("infer")[-1]["config"]
    assert (config.do_sample, config.top_k, config.temperature) == (False, 1, 1.0)


def test_every_request_comes_back_once_with_a_logprob_per_token(start):
    wanted = [Request(f"r{i}", [i % 7 + 1] * (i % 9 + 1), replace(PLAIN, seed=i)) for i in range(40)]
    engine = start()
    done = list(engine.sample(wanted))
    assert sorted(one.request_id for one in done) == sorted(one.request_id for one in wanted)
    for one in done:
        assert one.finish_reason in ("stop", "length")
        assert len(one.logprobs) == len(one.token_ids) <= 12
        assert all(value <= 0 for value in one.logprobs)
        assert (one.token_ids[-1] == END) == (one.finish_reason == "stop")
        assert one.token_ids.count(END) == (one.finish_reason == "stop")
        assert one.versions == [(0, 0, len(one.token_ids))]
    assert {one.finish_reason for one in done} == {"stop", "length"}


def test_a_temperature_above_its_limit_is_refused(start):
    with pytest.raises(EngineError, match=r"--temperature: 2\.5: LMDeploy takes at most 2\.0"):
        run(start(), requests(1, temperature=2.5))


def test_the_same_id_twice_is_refused(start):
    engine = start(gate=threading.Event())
    with asking(engine, *requests(1)) as caller:
        with pytest.raises(EngineError, match="outstanding already"):
            caller.loop.run(engine.generate(requests(1)[0]))
        start.recorder.gate.set()
        assert len(list(caller.completions())) == 1


def test_a_stop_word_ends_the_request_and_leaves_lmdeploys_generator(start, nano_folders):
    from transformers import AutoTokenizer

    engine = start(eos_token_ids=())
    free = run(engine, requests(1))["r0"]
    assert "left" not in start.recorder.names()
    word = AutoTokenizer.from_pretrained(nano_folders["qwen2"]).decode(free.token_ids[3:5])
    done = run(engine, requests(1, stop=(word,)))["r0"]
    assert done.finish_reason == "stop"
    assert done.token_ids == free.token_ids[: len(done.token_ids)]
    assert len(done.token_ids) <= 5
    assert "left" in start.recorder.names()


def test_aborted_requests_come_back_with_the_tokens_they_have(start):
    engine = start(eos_token_ids=(), max_model_len=2000, step_s=0.002)
    wanted = requests(6, max_new_tokens=1500)  # four handles: two of them wait
    with asking(engine, *wanted) as caller:
        time.sleep(0.1)
        engine.abort(["r0", "nobody"])
        engine.abort()
        engine.abort()
        done = {one.request_id: one for one in caller.completions()}
    assert len(done) == 6
    assert {one.finish_reason for one in done.values()} == {"abort"}
    assert 0 < len(done["r0"].token_ids) == len(done["r0"].logprobs) < 1500
    # LMDeploy is told, or left while it yields: whichever comes first on its loop
    assert {"async_cancel", "left"} & set(start.recorder.names())
    assert len(run(engine, requests(2))) == 2


def test_a_request_that_takes_too_long_is_tried_twice_and_given_up_alone(start):
    engine = start(eos_token_ids=(), max_model_len=2000, step_s=0.002)
    slow, quick = requests(2, max_new_tokens=1900)
    done = run(engine, [replace(slow, limit_s=0.1), replace(quick, sampling=replace(PLAIN, seed=8))])
    assert {name: one.finish_reason for name, one in done.items()} == {"r0": "error", "r1": "length"}
    assert engine.counters.late == 2
    assert [one["config"].random_seed for one in start.recorder.of("infer")] == [0, 8, 0]
    assert len(run(engine, requests(2))) == 2


def test_who_leaves_leaves_nothing_behind(start):
    engine = start(eos_token_ids=(), max_model_len=2000, step_s=0.002)
    leave(engine, requests(6, max_new_tokens=1900), lambda: engine.counters.decode_rows)
    assert nothing_left(engine)
    assert not start.recorder.pipelines[-1].async_engine.session_mgr.sessions
    assert len(run(engine, requests(2))) == 2


def test_one_failing_request_is_the_end_of_that_request_only(start, monkeypatch):
    engine = start()
    real = fake_lmdeploy._Handle._draw

    def broken(self, ids, config, generator):
        if ids[1] == 7:
            raise RuntimeError("out of blocks")
        return real(self, ids, config, generator)

    monkeypatch.setattr(fake_lmdeploy._Handle, "_draw", broken)
    done = run(engine, requests(3))
    assert [done[name].finish_reason == "error" for name in ("r0", "r1", "r2")] == [False, True, False]


def test_each_token_is_a_sign_of_progress(start):
    engine, seen = start(eos_token_ids=(), max_model_len=2000, step_s=0.002), set()
    with asking(engine, *requests(1, max_new_tokens=200)) as caller:
        while caller.ended.empty():
            seen.add(engine.counters.decode_rows)
            assert len(engine.so_far("r0")[0]) <= 200
        (one,) = caller.completions()
    assert len(one.token_ids) == 200
    assert len(seen) > 2


def test_what_is_asked_for_while_others_are_sampled_is_sampled(start):
    source = source_of(start(step_s=0.02))

    async def sample():
        first = [asyncio.create_task(source.generate(request)) for request in requests(2)]
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        added = await source.generate(Request("added", [5, 6, 7], replace(PLAIN, max_new_tokens=2)))
        return [*await asyncio.gather(*first), added]

    assert [one.request_id for one in on_a_loop(sample)] == ["r0", "r1", "added"]


# --- weights --------------------------------------------------------------------------------------------------


def test_the_pytorch_engine_gets_a_call_per_bucket_and_the_last_one_finishes(start, nano_folders):
    engine = start()
    source = policy(nano_folders["qwen2"], 1.1)
    before = run(engine, requests(1))["r0"]
    ack = engine.load_weights(source, 4)
    updates = start.recorder.of("update_params")
    assert [one["finished"] for one in updates] == [False] * (len(updates) - 1) + [True]
    assert [name for one in updates for name in one["names"]] == [info.name for info in source.manifest()]
    assert all(one["dtypes"] == {"torch.bfloat16"} for one in updates)
    assert (ack.version, ack.tensors) == (4, len(source.manifest()))
    after = run(engine, requests(1))["r0"]
    assert engine.version == 4
    assert after.versions[0][0] == 4
    assert after.logprobs != before.logprobs


def test_each_tensor_parallel_rank_gets_its_own_handles(start, nano_folders):
    engine = start(tensor_parallel_size=2, devices=("cuda:0", "cuda:1"))
    engine.load_weights(policy(nano_folders["qwen2"]), 1)
    assert {one["ranks"] for one in start.recorder.of("update_params")} == {2}


def test_a_missing_tensor_is_refused_before_anything_is_sent(start, nano_folders):
    engine = start()
    manifest = policy(nano_folders["qwen2"]).manifest()
    with pytest.raises(SyncFailed, match="is missing"):
        engine.update(WeightStream([one for one in manifest if "layers.1.mlp.up_proj" not in one.name], [], 1))
    wrong = [replace(one, shape=(3, 3)) if one.name.endswith("embed_tokens.weight") else one for one in manifest]
    with pytest.raises(SyncFailed, match=r"has shape \[3, 3\]"):
        engine.update(WeightStream(wrong, [], 1))
    assert start.recorder.of("update_params") == []
    assert len(run(engine, requests())) == 3
    assert engine.version == 0


def test_an_update_that_fails_half_way_invalidates_the_engine_until_it_is_made_anew(start, nano_folders):
    engine = start()
    start.recorder.fail_update_at = start.recorder.pipelines[-1].async_engine.engine.updates + 1
    with pytest.raises(SyncFailed, match="planted"):
        engine.load_weights(policy(nano_folders["qwen2"], 1.1), 1)
    with pytest.raises(SyncFailed, match=r"half-way \(.*planted.*; rebuild"):
        run(engine, requests(1))
    assert not engine.health().alive
    start.recorder.fail_update_at = None
    engine.rebuild()
    assert start.recorder.names().count("close") == 1
    assert engine.version == 0
    assert len(run(engine, requests())) == 3
    engine.load_weights(policy(nano_folders["qwen2"], 1.1), 1)
    assert engine.version == 1


def test_adapters_of_the_spec_are_merged_into_the_first_weights(start, nano_folders, monkeypatch):
    monkeypatch.setattr(lmdeploy, "merged_adapters", lambda spec: policy(spec.model, 1.1))
    assert start(adapters=("adapter",)).version == 0
    assert start.recorder.of("update_params")[-1]["finished"] is True


def test_updates_that_never_show_are_refused_after_a_few(start, nano_folders):
    engine = start(ignores_updates=True)
    for version in (1, 2, 3):
        engine.load_weights(policy(nano_folders["qwen2"], 1.0 + version / 10), version)
    with pytest.raises(SyncFailed, match="3 updates in a row with changed weights left all 16 log-probs"):
        engine.load_weights(policy(nano_folders["qwen2"], 1.4), 4)
    assert engine.version == 3


def test_equal_weights_may_leave_the_probe_as_it_is(start, nano_folders):
    engine = start()
    for version in range(1, 7):
        assert engine.load_weights(policy(nano_folders["qwen2"]), version).version == version


def test_nonsense_after_an_update_is_refused(start, nano_folders, monkeypatch):
    engine = start()
    monkeypatch.setattr(fake_lmdeploy._Handle, "_draw", lambda *_: (4, {4: float("nan")}))
    with pytest.raises(SyncFailed, match=r"the probe after the update failed .*log-prob nan"):
        engine.load_weights(policy(nano_folders["qwen2"], 1.1), 1)


# --- memory ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [1, 2])
def test_the_cycle_of_sleep_update_and_wake(start, nano_folders, level):
    engine = start()
    engine.sleep(level)
    with pytest.raises(EngineAsleep):
        run(engine, requests(1))
    with pytest.raises(EngineAsleep, match="wake its weights first"):
        engine.load_weights(policy(nano_folders["qwen2"]), 1)
    with pytest.raises(EngineAsleep):
        engine.wake(["kv_cache"])
    assert engine.wake(["weights"]) is False
    engine.load_weights(policy(nano_folders["qwen2"], 1.1), 1)
    assert "infer" not in start.recorder.names()  # nothing can be sampled yet
    assert engine.wake(["kv_cache"]) is True
    assert engine.wake() is True
    names = [name for name in start.recorder.names() if name in ("sleep", "wakeup", "update_params", "infer")]
    tail = names[names.index("sleep") :]
    assert tail[:2] == ["sleep", "wakeup"]
    assert set(tail[2:-2]) == {"update_params"}
    assert tail[-2:] == ["wakeup", "infer"]  # the probe
    assert [one["tags"] for one in start.recorder.of("wakeup")] == [["weights"], ["kv_cache"]]
    assert {one["thread"] for one in start.recorder.of("wakeup")} == {"lmdeploy loop"}
    assert len(run(engine, requests())) == 3  # with handles made after the wake


def test_a_kv_cache_without_room_does_not_keep_the_weights_awake(start, monkeypatch):
    engine = start()
    engine.sleep(1)
    engine.wake(["weights"])

    def full(tag):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(engine, "_wake_up", full)
    with pytest.raises(torch.OutOfMemoryError):
        engine.wake(["kv_cache"])
    engine.sleep(1)
    monkeypatch.undo()
    with pytest.raises(EngineAsleep):
        run(engine, requests(1))
    assert engine.wake() is True


# --- images ---------------------------------------------------------------------------------------------------


def prompt_with_images(template, count):
    images = [read_image(data_url(seed), ImageSource()) for seed in range(count)]
    remember(images)
    parts = [{"type": "image", "image": one.digest} for one in images]
    return template.encode_prompt([turn("user", [*parts, {"type": "text", "text": "What?"}])])


@pytest.mark.parametrize("images", [1, 2])
def test_lmdeploy_makes_the_tensors_of_images(start, vlm_folders, images):
    folder = vlm_folders("qwen2_5_vl")
    template = load_chat(SeeingArguments(model=str(folder)))
    ids = prompt_with_images(template, images)
    engine = start(model=str(folder), sees=True, max_model_len=256)
    assert engine.capabilities.images
    found = run(engine, [Request(name, ids, PLAIN) for name in "abc"] + [Request("text", [5, 6, 7], PLAIN)])
    assert all(one.finish_reason in ("stop", "length") for one in found.values())
    assert engine._engine.prompt_processor.made == 2  # the probe, and all requests of this prompt
    calls = {call["multimodal"] is not None: call for call in start.recorder.of("infer")}
    config = AutoConfig.from_pretrained(folder)
    assert calls[True]["ids"] == [config.image_token_id if token < 0 else token for token in ids]
    wanted = template.vision.features([ids], "cpu")
    for name in ("pixel_values", "image_grid_thw"):
        assert torch.equal(torch.cat([one[name] for one in calls[True]["multimodal"]]), wanted[name])
    assert all(call["config"].bad_token_ids == placeholder_ids(config) for call in calls.values())


def test_images_of_another_size_than_the_trainers_are_refused(start, vlm_folders):
    folder = vlm_folders("qwen2_5_vl")
    template = load_chat(SeeingArguments(model=str(folder), max_pixels=1024))
    engine = start(model=str(folder), sees=True, max_model_len=256)
    with pytest.raises(RequestRefused, match=r"LMDeploy makes \d+ tokens of its prompt with images, the trainer"):
        run(engine, [Request("seen", prompt_with_images(template, 1), PLAIN)])
    assert run(engine, requests(1))


def test_an_update_of_the_tower_alone_shows_in_the_probe(start, vlm_folders):
    folder = vlm_folders("qwen2_5_vl")
    engine = start(model=str(folder), sees=True, max_model_len=256)
    args = SeeingArguments(model=str(folder))
    model = load_for_inference(args, device="cpu")
    for version in range(1, 5):
        with torch.no_grad():
            for name, one in model.named_parameters():
                if "visual" in name:
                    one.mul_(1.1)
        engine.load_weights(PolicyWeights(model, move_model_batches=1), version)
    assert engine.version == 4


@pytest.mark.parametrize("how", ["rebuild", "abort"])
def test_a_request_whose_images_are_made_ready_can_be_ended(start, vlm_folders, how):
    folder = vlm_folders("qwen2_5_vl")
    ids = prompt_with_images(load_chat(SeeingArguments(model=str(folder))), 1)
    engine = start(model=str(folder), sees=True, max_model_len=256)
    processor = engine._engine.prompt_processor
    make, ready = processor.get_prompt_input, asyncio.Event()

    async def slow(*given, **named):
        await ready.wait()
        return await make(*given, **named)

    processor.get_prompt_input = slow

    async def ended():
        asked = asyncio.ensure_future(engine.generate(Request("seen", ids, PLAIN)))
        await asyncio.sleep(0.1)
        engine.rebuild() if how == "rebuild" else engine.abort(["seen"])
        ready.set()
        return await asked

    assert asyncio.run(ended()).finish_reason == "abort"
    assert not engine._running
    assert start.recorder.names().count("infer") == 0


def test_a_model_of_which_lmdeploy_knows_no_tower_is_refused(start, vlm_folders):
    with pytest.raises(ConfigError, match=r"LMDeploy takes no images for .*; use --use_vllm true"):
        start(model=str(vlm_folders("qwen2_5_vl")), sees=True, blind=True)


# --- the end --------------------------------------------------------------------------------------------------


def test_close_ends_the_pipeline_once(start):
    engine = start()
    assert engine.health().alive
    engine.close()
    engine.close()
    assert start.recorder.names().count("close") == 1
    assert not start.recorder.pipelines[-1].internal_thread.thread.is_alive()
    assert not engine.health().alive
    with pytest.raises(EngineDead):
        run(engine, requests(1))


def test_a_close_that_hangs_has_an_end(start, monkeypatch):
    monkeypatch.setattr(lmdeploy, "CLOSE_S", 0.2)
    engine = start(hang_close=threading.Event())
    with pytest.raises(EngineDead, match="close did not end within"):
        engine.close()
    start.recorder.hang_close.set()
