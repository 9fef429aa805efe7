"""The in-process engine over weights of its own: updates in place, folded adapters, sleep, and other threads.

What every backend promises is in tests/engines/test_conformance.py; here is what only this one can be asked.
"""

from __future__ import annotations

import copy
import threading
import time

import pytest
import torch

from swift.errors import ConfigError, EngineAsleep, EngineDead, EngineError, RequestRefused, SyncFailed, Unsupported
from swift.models.checkpoint_tensors import read_adapter
from swift.models.forward import TokenSequence, padded_logits
from swift.rollout.engines.spec import EngineSpec, build_engine
from swift.rollout.engines.transformers import TransformersEngine
from swift.rollout.engines.transformers.adapter import MergedAdapter
from swift.rollout.weights.base import AdapterWeights, Bucket, TensorInfo
from swift.rollout.weights.policy import PolicyWeights
from swift.types import Request, SamplingParams

PROMPT = [40, 41, 42, 43, 44]


def ask(name="r", prompt=PROMPT, **sampling):
    return Request(name, prompt, SamplingParams(**{"max_new_tokens": 12, "seed": 7, **sampling}))


def copy_engine(model, **options):
    """An engine whose own copy starts with the weights of `model`."""
    start = copy.deepcopy(model)
    return TransformersEngine(copy.deepcopy(start), eos_token_ids=[], reload=lambda: copy.deepcopy(start), **options)


def noisy(model, seed=1, scale=0.2):
    changed = copy.deepcopy(model).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    return changed


def gap(model, request, completion):
    """Largest difference of log-probs to a plain forward of `model`."""
    with torch.no_grad():
        logits = padded_logits(model.eval(), [TokenSequence(request.prompt_ids, completion.token_ids)]).float()
    expected = logits.log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    return float((torch.tensor(completion.logprobs) - expected).abs().max())


def sampled(engine, request=None):
    (completion,) = engine.generate([request or ask()])
    return completion


def load(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


# --- whose weights -----------------------------------------------------------------------------------------------


def test_over_the_trainers_weights_there_is_nothing_to_copy(nano_folders):
    engine = TransformersEngine(load(nano_folders["qwen2"]), eos_token_ids=[])
    assert engine.capabilities.shares_weights
    source = PolicyWeights(engine.model)
    for change in (
        lambda: engine.load_weights(source, 1),
        lambda: engine.sleep(1),
        engine.drop_adapter,
        lambda: engine.load_adapter(AdapterWeights({}, {}), 1),
        engine.rebuild,
    ):
        with pytest.raises(Unsupported, match="transformers"):
            change()
    assert engine.sleep(0).freed_bytes == 0
    assert engine.wake() is True
    engine.close()
    assert all(parameter.numel() for parameter in engine.model.parameters())


def test_an_engine_of_its_own_is_made_from_a_folder(nano_folders):
    folder = nano_folders["llama"]
    state = torch.get_rng_state()
    spec = EngineSpec(backend="transformers", model=str(folder), eos_token_ids=(262,), max_model_len=40)
    engine = build_engine(spec)
    assert torch.equal(torch.get_rng_state(), state)
    assert not engine.capabilities.shares_weights
    assert engine.capabilities.max_model_len == 40
    assert gap(load(folder), ask(), sampled(engine)) < 1e-5
    info = engine.info()
    assert (info["own_copy"], info["version"], info["state"]) == (True, 0, "ready")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"tensor_parallel_size": 2, "devices": ("cpu", "cpu")}, "tensor_parallel_size: 2"),
        ({"engine_kwargs": {"block_size": 32}}, "block_size: the transformers engine has no such argument"),
    ],
)
def test_settings_that_it_does_not_have_are_refused_before_loading(nano_folders, change, line):
    with pytest.raises(ConfigError, match=line):
        build_engine(EngineSpec(backend="transformers", model=str(nano_folders["llama"]), **change))


# --- updates -----------------------------------------------------------------------------------------------------

FUSED = {
    "mixtral": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "sliding_window": None},
    "deepseek_v3": {"first_k_dense_replace": 1},
}


@pytest.mark.parametrize("arch", FUSED)
def test_experts_that_loading_fused_are_updated_under_the_names_of_their_checkpoint(small_model, arch):
    model = small_model(arch, **FUSED[arch]).eval()
    changed = noisy(model)
    names = {info.name for info in PolicyWeights(changed).manifest()}
    assert names != set(changed.state_dict()), "nothing is rearranged; choose another architecture"
    engine = copy_engine(model)
    ack = engine.load_weights(PolicyWeights(changed, move_model_batches=2), 3)
    assert (ack.version, ack.tensors) == (3, len(names))
    for name, parameter in engine.model.named_parameters():
        assert torch.equal(parameter, changed.state_dict()[name]), name
    assert gap(changed, ask(), sampled(engine)) < 1e-5


@pytest.mark.parametrize(
    ("sent", "stored", "rounded"),
    [("float32", "bfloat16", True), ("bfloat16", "float32", False), ("float16", "bfloat16", True)],
)
def test_an_update_says_when_it_rounds(nano_folders, sent, stored, rounded):
    model = noisy(load(nano_folders["qwen2"]))
    engine = copy_engine(load(nano_folders["qwen2"]).to(getattr(torch, stored)))
    assert engine.capabilities.dtype == stored
    ack = engine.load_weights(PolicyWeights(model, dtype=sent), 1)
    assert ack.rounded is rounded
    for name, parameter in engine.model.named_parameters():
        value = model.state_dict()[name].to(getattr(torch, sent)).to(getattr(torch, stored))
        assert torch.equal(parameter, value), name


def tensors_of(model):
    return [one for bucket in PolicyWeights(model).buckets() for one in bucket.tensors]


class Given:
    """A source of exactly these tensors."""

    def __init__(self, tensors):
        self.tensors = tensors

    def manifest(self):
        return tuple(TensorInfo.of(name, tensor) for name, tensor in self.tensors)

    def buckets(self):
        yield Bucket(self.tensors)


def test_tied_weights_come_under_either_name_or_both(nano_folders):
    model = load(nano_folders["qwen2"])
    changed = noisy(model)
    both = tensors_of(changed)
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= {name for name, _ in both}
    for left_out in ("", "lm_head.weight", "model.embed_tokens.weight"):
        engine = copy_engine(model)
        engine.load_weights(Given([one for one in both if one[0] != left_out]), 1)
        assert gap(changed, ask(), sampled(engine)) < 1e-5
    neither = [one for one in both if "embed" not in one[0] and "lm_head" not in one[0]]
    with pytest.raises(SyncFailed, match=r"model.embed_tokens.weight is missing; lm_head.weight is missing"):
        copy_engine(model).load_weights(Given(neither), 1)


def test_a_head_that_differs_from_the_embedding_it_is_tied_to_is_refused(nano_folders):
    model = load(nano_folders["qwen2"])
    tensors = [(name, tensor + (name == "lm_head.weight")) for name, tensor in tensors_of(model)]
    engine = copy_engine(model)
    with pytest.raises(SyncFailed, match="to which this model ties it"):
        engine.load_weights(Given(tensors), 1)
    with pytest.raises(SyncFailed, match="the update to version 1 ended early; rebuild"):
        engine.submit(ask())
    assert not engine.health().alive


def test_a_refused_manifest_names_what_is_wrong_and_changes_nothing(nano_folders):
    model = load(nano_folders["llama"])
    tensors = dict(tensors_of(noisy(model)))
    norm, up = tensors["model.norm.weight"], tensors["model.layers.0.mlp.up_proj.weight"]
    engine = copy_engine(model)
    for change, line in (
        ({"model.norm.weight": norm[:3]}, r"model.norm.weight has shape \[3\], the engine's \[32\]"),
        ({"model.layers.0.mlp.up_proj.weight": up.long()}, "up_proj.weight of type int64 cannot be stored"),
        ({"extra": up}, "extra is not one of the model's"),
    ):
        with pytest.raises(SyncFailed, match=line):
            engine.load_weights(Given(list((tensors | change).items())), 1)
    engine.begin_update(PolicyWeights(model).manifest(), 1).abort()  # before its first tensor
    assert engine.version == 0
    assert gap(model, ask(), sampled(engine)) < 1e-5


def test_weights_that_came_by_half_are_healed_by_a_rebuild(nano_folders):
    model = load(nano_folders["llama"])
    changed = noisy(model)
    engine = copy_engine(model)
    update = engine.begin_update(PolicyWeights(changed).manifest(), 1)
    update.send(Bucket(tensors_of(changed)[:5]))
    with pytest.raises(SyncFailed, match="version 1 is being loaded; commit it first"):
        engine.submit(ask())
    with pytest.raises(SyncFailed, match="while version 1 is being loaded"):
        engine.begin_update(PolicyWeights(changed).manifest(), 2)
    update.abort()
    update.abort()
    with pytest.raises(SyncFailed, match="the update to version 1 ended early; rebuild"):
        engine.submit(ask())
    with pytest.raises(SyncFailed, match="the update has ended"):
        update.commit()
    engine.rebuild()
    engine.load_weights(PolicyWeights(changed), 2)
    update.abort()
    assert engine.health().alive
    assert gap(changed, ask(), sampled(engine)) < 1e-5


def test_a_copy_that_cannot_be_loaded_again_is_dead(nano_folders, tmp_path):
    import shutil

    folder = shutil.copytree(nano_folders["llama"], tmp_path / "model")
    engine = build_engine(EngineSpec(backend="transformers", model=str(folder)))
    shutil.rmtree(folder)
    with pytest.raises(EngineDead, match="cannot be made again"):
        engine.rebuild()
    with pytest.raises(EngineDead, match="it cannot be made again"):
        engine.submit(ask())
    assert not engine.health().alive


def test_a_row_without_a_distribution_names_request_and_version(nano_folders):
    model = load(nano_folders["qwen2"])
    engine = copy_engine(model)
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.model.norm.weight[0] = torch.nan
    engine.load_weights(PolicyWeights(broken), 5)
    with pytest.raises(EngineError, match=r"request: odd: token 1 .* version 5.*not finite"):
        sampled(engine, ask("odd"))
    engine.load_weights(PolicyWeights(model), 6)
    assert gap(model, ask("odd"), sampled(engine, ask("odd"))) < 1e-5


@pytest.mark.parametrize("first", [True, False])
def test_one_row_without_a_distribution_ends_alone(nano_folders, caplog, first):
    """Tokens without an embedding are only the end of the rows that meet them."""
    model = load(nano_folders["llama"])
    assert not model.config.tie_word_embeddings
    engine = copy_engine(model)
    plain = {one.request_id: one for one in engine.generate(asked_eight())}
    poison = plain["r3"].token_ids[4]  # the other rows of this prompt may meet it, too
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.model.embed_tokens.weight[[poison, 250]] = torch.nan
    engine.load_weights(PolicyWeights(broken), 5)
    bad_prompt = Request("bad", [*PROMPT[:3], 250, *PROMPT[3:]], SamplingParams(max_new_tokens=6))
    asked = [bad_prompt, *asked_eight()] if first else [*asked_eight(), bad_prompt]
    done = {one.request_id: one for one in engine.generate(asked)}
    assert len(done) == 9
    assert (done["bad"].finish_reason, done["bad"].token_ids, done["bad"].versions) == ("error", [], [])
    reasons = {}
    for name, before in plain.items():
        after, ids = done[name], before.token_ids
        met = ids.index(poison) + 1 if poison in ids[:-1] else None
        assert after.token_ids == ids[:met]
        assert after.logprobs == pytest.approx(before.logprobs[:met], abs=1e-5)
        assert after.versions == [(5, 0, len(after.token_ids))]
        assert after.finish_reason == (before.finish_reason if met is None else "error")
        reasons[name] = after.finish_reason
    assert reasons["r3"] == "error"
    assert {"error", "length"} <= set(reasons.values())
    assert "cannot be sampled with the weights of version 5: their logits are not finite; it is left out" in caplog.text
    assert list(engine.stream()) == []


def asked_eight():
    return [Request(f"r{i}", PROMPT, SamplingParams(max_new_tokens=12, seed=i)) for i in range(8)]


def test_weights_that_change_in_flight_act_on_the_tokens_after_them(nano_folders):
    """Keys and values of earlier tokens stay as they were computed: the oracle keeps its cache likewise."""
    old = load(nano_folders["llama"])
    new = noisy(old)
    engine = copy_engine(old)
    request = ask("long", max_new_tokens=30)
    engine.submit(request)
    engine.submit(ask("short", max_new_tokens=10))
    done = {}
    for completion in engine.stream():
        done[completion.request_id] = completion
        if completion.request_id == "short":
            engine.pause("keep")
            engine.load_weights(PolicyWeights(new), 4)
            engine.resume()
    completion = done["long"]
    assert completion.versions == [(0, 0, 10), (4, 10, 30)]
    ids = completion.token_ids
    with torch.no_grad():
        before = old(input_ids=torch.tensor([[*PROMPT, *ids[:9]]]), use_cache=True)
        after = new(input_ids=torch.tensor([ids[9:-1]]), past_key_values=before.past_key_values)
    logits = torch.cat([before.logits[0, len(PROMPT) - 1 :], after.logits[0]])
    expected = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
    assert (torch.tensor(completion.logprobs) - expected).abs().max() < 1e-5


# --- adapters ----------------------------------------------------------------------------------------------------


def adapted(model, *, seed=2, **options):
    """A PEFT policy whose adapter changes something."""
    from peft import LoraConfig, get_peft_model

    settings = {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj", "down_proj"], **options}
    policy = get_peft_model(copy.deepcopy(model), LoraConfig(task_type="CAUSAL_LM", **settings)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_" in name or "modules_to_save" in name or (options.get("bias") and name.endswith("bias")):
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return policy


def adapter_of(policy):
    return AdapterWeights(*read_adapter(policy))


ADAPTERS = {
    "plain": ("qwen2", {}),
    "rank-stabilised": ("qwen2", {"use_rslora": True, "r": 8}),
    "ranks by pattern": ("llama", {"rank_pattern": {"layers.1.self_attn.q_proj": 2, "down_proj": 6}}),
    "alphas by pattern": ("llama", {"alpha_pattern": {r".*\.0\..*v_proj": 3, "down_proj": 40}}),
    "head and embedding of an untied model": (
        "llama", {"target_modules": ["embed_tokens", "lm_head"], "r": 3},
    ),
    "a module trained whole": ("llama", {"modules_to_save": ["lm_head"]}),
    "biases trained whole": ("qwen2", {"bias": "all"}),
    "a bias of the adapter": ("qwen2", {"lora_bias": True, "target_modules": ["q_proj", "k_proj"]}),
}  # fmt: skip


@pytest.mark.parametrize("case", ADAPTERS)
def test_a_folded_adapter_samples_like_the_policy_that_peft_runs(nano_folders, case):
    arch, options = ADAPTERS[case]
    model = load(nano_folders[arch])
    policy = adapted(model, **options)
    engine = copy_engine(model)
    engine.load_adapter(adapter_of(policy), 3)
    completion = sampled(engine)
    assert gap(policy, ask(), completion) < 1e-5
    assert gap(model, ask(), completion) > 1e-3
    assert completion.versions == [(3, 0, 12)]
    engine.drop_adapter()
    assert engine.version == 0
    for name, parameter in engine.model.named_parameters():
        assert torch.equal(parameter, model.state_dict()[name]), name


def test_weights_stored_the_other_way_around_are_folded_the_other_way_around(small_model):
    model = small_model("gpt2").eval()
    policy = adapted(model, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    engine = copy_engine(model)
    engine.load_adapter(adapter_of(policy), 1)
    assert gap(policy, ask(), sampled(engine)) < 1e-5


def test_folding_in_bfloat16_rounds_once(nano_folders):
    model = load(nano_folders["llama"]).to(torch.bfloat16)
    policy = adapted(model)
    engine = copy_engine(model)
    ack = engine.load_adapter(adapter_of(policy), 1)
    assert ack.rounded
    name = "model.layers.0.self_attn.q_proj"
    layer = policy.base_model.model.get_submodule(name)
    product = layer.lora_B["default"].weight.float() @ layer.lora_A["default"].weight.float()
    expected = (model.get_submodule(name).weight.float() + 3.0 * product).to(torch.bfloat16)
    assert torch.equal(engine.model.get_submodule(name).weight, expected)


REFUSED = {
    "another method": (lambda config, _: config.update(peft_type="IA3"), Unsupported, "peft_type IA3: only LoRA"),
    "another base": (
        lambda config, _: config.update(init_lora_weights="pissa_niter_4"), Unsupported, "changes the base weights too"
    ),
    "another rank": (
        lambda config, _: config.update(r=5), SyncFailed, r"lora_A.weight has shape \[4, 128\] instead of \[5, 128\]"
    ),
    "half a pair": (lambda _, t: t.pop(f"{KEY}.lora_B.weight"), SyncFailed, "q_proj.lora_B.weight is missing"),
    "no tensors": (lambda _, t: t.clear(), SyncFailed, "comes without tensors"),
    "an unknown module": (
        lambda _, t: t.update({"base_model.model.nothing.lora_A.weight": t.pop(f"{KEY}.lora_A.weight")}),
        SyncFailed,
        "nothing.lora_A.weight is no tensor of such an adapter",
    ),
    "another shape": (
        lambda _, t: t.update({f"{KEY}.lora_A.weight": torch.zeros(4, 9)}),
        SyncFailed,
        r"q_proj.lora_A.weight has shape \[4, 9\] instead of \[4, 32\]",
    ),
}  # fmt: skip
KEY = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize("case", REFUSED)
def test_adapters_that_do_not_fit_are_refused_by_name_and_change_nothing(nano_folders, case):
    spoil, error, line = REFUSED[case]
    model = load(nano_folders["llama"])
    engine = copy_engine(model)
    good = adapted(model)
    adapter = adapter_of(good)
    engine.load_adapter(adapter, 1)
    config, tensors = dict(adapter.config), dict(adapter.tensors)
    spoil(config, tensors)
    with pytest.raises(error, match=line):
        engine.load_adapter(AdapterWeights(config, tensors), 2)
    assert engine.version == 1
    assert gap(good, ask(), sampled(engine)) < 1e-5


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"use_dora": True}, "DoraLinearVariant changes more than a low-rank sum"),
        ({"target_modules": ["embed_tokens"]}, "the model ties it to"),
    ],
)
def test_adapters_that_are_no_change_of_one_weight_are_refused(nano_folders, options, line):
    model = load(nano_folders["qwen2"])
    with pytest.raises(Unsupported, match=line):
        MergedAdapter(model, adapter_of(adapted(model, **options)), 1)


def test_an_adapter_that_fails_half_way_leaves_nothing_that_samples(nano_folders, monkeypatch):
    model = load(nano_folders["qwen2"])
    engine, policy = copy_engine(model), adapted(model)
    adapter = adapter_of(policy)
    copies = []

    def full(target, source):
        copies.extend(one for one in engine.model.parameters() if one is target)
        if len(copies) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return copy_(target, source)

    copy_ = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", full)
    with pytest.raises(SyncFailed, match="adapter version 3 for transformers: OutOfMemoryError: CUDA out of memory"):
        engine.load_adapter(adapter, 3)
    monkeypatch.undo()
    assert not engine.health().alive
    for attempt in (lambda: engine.submit(ask()), lambda: engine.load_adapter(adapter, 4), engine.drop_adapter):
        with pytest.raises(SyncFailed, match="adapter version 3 is in its weights by half; rebuild"):
            attempt()
    engine.rebuild()
    assert gap(model, ask(), sampled(engine)) < 1e-5
    engine.load_adapter(adapter, 5)
    assert gap(policy, ask(), sampled(engine)) < 1e-5


# --- memory ------------------------------------------------------------------------------------------------------


def test_level_two_gives_the_weights_up_and_level_one_says_that_they_stay(nano_folders):
    model = load(nano_folders["qwen2"])
    engine = copy_engine(model)
    nbytes = sum(parameter.untyped_storage().nbytes() for parameter in engine.model.parameters())
    report = engine.sleep(1)
    assert (report.freed_bytes, "weights stay resident" in report.note) == (0, True)
    assert engine.sleep(2).freed_bytes == nbytes
    assert sum(parameter.untyped_storage().nbytes() for parameter in engine.model.parameters()) == 0
    assert engine.wake() is True
    assert "dropped" in engine.health().detail
    with pytest.raises(EngineAsleep, match="were dropped by sleep"):
        engine.submit(ask())
    engine.load_weights(PolicyWeights(model), 1)
    assert gap(model, ask(), sampled(engine)) < 1e-5


def test_a_copy_made_for_adapters_keeps_both_through_every_level(nano_folders):
    model = load(nano_folders["llama"])
    engine = copy_engine(model, keeps_base=True)
    policy = adapted(model)
    engine.load_adapter(adapter_of(policy), 1)
    assert "only adapters are synced" in engine.sleep(2).note
    engine.wake()
    assert gap(policy, ask(), sampled(engine)) < 1e-5
    engine.drop_adapter()
    assert gap(model, ask(), sampled(engine)) < 1e-5


def test_a_sleeping_engine_can_be_rebuilt(nano_folders):
    model = load(nano_folders["qwen2"])
    engine = copy_engine(model)
    engine.sleep(2)
    engine.rebuild()
    assert engine.wake() is True
    assert gap(model, ask(), sampled(engine)) < 1e-5


def test_a_closed_copy_gives_its_memory_back(nano_folders):
    engine = copy_engine(load(nano_folders["qwen2"]))
    engine.close()
    engine.close()
    assert sum(parameter.untyped_storage().nbytes() for parameter in engine.model.parameters()) == 0
    for call in (lambda: engine.submit(ask()), lambda: engine.sleep(1), engine.wake, engine.rebuild):
        with pytest.raises(EngineDead, match="closed"):
            call()


# --- other threads -----------------------------------------------------------------------------------------------


class Streaming:
    """A thread that consumes the engine's stream."""

    def __init__(self, engine):
        self.done, self.error = [], None
        self.thread = threading.Thread(target=self._run, args=(engine,), daemon=True)
        self.thread.start()
        began = time.monotonic()
        while engine.counters.decode_steps < 5:
            assert time.monotonic() - began < 20
            time.sleep(0.001)

    def _run(self, engine):
        try:
            for completion in engine.stream():
                self.done.append(completion)
        except EngineError as error:
            self.error = error

    def join(self):
        self.thread.join(20)
        assert not self.thread.is_alive()


LONG = 900


@pytest.fixture
def busy(nano_folders):
    """An engine that another thread streams from, with one request that takes its time."""
    engine = copy_engine(load(nano_folders["llama"]))
    engine.submit(ask("long", max_new_tokens=LONG))
    return engine, Streaming(engine)


def test_another_thread_can_abort(busy):
    engine, streaming = busy
    engine.abort(["long"])
    streaming.join()
    (completion,) = streaming.done
    assert completion.finish_reason == "abort"
    assert 0 < len(completion.token_ids) < LONG


def test_another_thread_can_pause_and_change_the_weights_between_two_tokens(busy):
    engine, streaming = busy
    engine.pause("keep")
    steps = engine.counters.decode_steps
    streaming.join()
    assert (streaming.done, streaming.error) == ([], None)
    assert engine.counters.decode_steps == steps
    engine.load_weights(PolicyWeights(noisy(engine.model)), 8)
    engine.resume()
    (completion,) = engine.stream()
    assert completion.versions == [(0, 0, steps), (8, steps, LONG)]


def test_another_thread_can_close(busy):
    engine, streaming = busy
    engine.close()
    streaming.join()
    assert isinstance(streaming.error, EngineDead)


def test_a_failed_step_leaves_no_requests_behind(nano_folders):
    engine = copy_engine(load(nano_folders["llama"]))
    engine.submit(ask("one"))
    next(engine.stream())

    def out_of_memory(*args, **kwargs):
        raise RuntimeError("out of memory")

    forward, engine.model.forward = engine.model.forward, out_of_memory
    engine.submit(ask("two"))
    with pytest.raises(RuntimeError, match="out of memory"):
        list(engine.stream())
    engine.model.forward = forward
    assert list(engine.stream()) == []
    assert sampled(engine, ask("three")).request_id == "three"


@pytest.mark.parametrize(
    ("request_", "line"),
    [
        (ask("big", [40, 10**6]), "token ids outside of 0..262"),
        (ask("negative", [-1, 40]), "token ids outside of 0..262"),
        (ask("word", stop=("x",)), "stop strings need a tokenizer"),
        (ask("none", max_new_tokens=0), "max_new_tokens 0"),
        (ask("empty", []), "no tokens"),
    ],
)
def test_requests_that_cannot_be_sampled_are_refused_by_name(nano_folders, request_, line):
    engine = copy_engine(load(nano_folders["llama"]))
    with pytest.raises(RequestRefused, match=f"request: {request_.request_id}.*{line}") as caught:
        list(engine.generate([ask("fine"), request_]))
    assert caught.value.request_id == request_.request_id
    assert list(engine.stream()) == []
