"""The parity check: a right engine passes, each planted fault is refused, and nothing is changed by the check."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from experts import on_experts
from oracle import load
from parity_engines import END, SAMPLING, SmallEngine, make_check, some_prompts

from swift.errors import NumericError
from swift.rollout.engines.transformers import TransformersEngine
from swift.rollout.weights.sync import TRIAL_VERSION


def with_lora(model, **options):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    targets = ["q_proj", "v_proj", "down_proj"]
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=16, target_modules=targets, **options))


def bits(model):
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def random_state():
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()


def test_an_engine_with_its_own_copy_of_the_weights_passes_all_stages(nano_folder):
    model = load(nano_folder)
    engine = SmallEngine(model)
    report = make_check(engine, model).run()
    assert report.verdict == "pass", report.line()
    assert [stage.name for stage in report.stages] == ["as loaded", "with noise", "restored"]
    assert [stage.version for stage in report.stages] == [0, TRIAL_VERSION, 0]
    assert max(stage.gaps.maximum for stage in report.stages) < 1e-5
    assert report.error() == ""
    report.require()


REFUSED_AT = {
    "rope_base": "as loaded",
    "stale_weights": "with noise",
    "head_not_sent": "with noise",
    "temperature_ignored": "as loaded",
    "shifted": "as loaded",
    "padding_leak": "as loaded",
    "undeclared_dtype": "as loaded",
    "end_missing": "as loaded: contract",
    "end_doubled": "as loaded: contract",
    "cache_kept": "with noise",
}


@pytest.mark.parametrize("fault", REFUSED_AT)
def test_a_planted_fault_is_refused_in_its_stage(nano_folders, fault):
    model = load(nano_folders["qwen2"])  # its head is tied to the embedding
    report = make_check(SmallEngine(model, fault=fault), model).run()
    assert report.verdict == "refuse", report.line()
    with pytest.raises(NumericError) as caught:
        report.require()
    assert caught.value.exit_code == 6
    line = str(caught.value)
    assert line.startswith(f"--parity_check: {REFUSED_AT[fault]}: ")
    assert "worst at prompt" in line and "trainer float32, small float32" in line
    assert "\n" not in line


@pytest.mark.parametrize("fault", ["cache_kept", "stale_weights"])
def test_a_fault_of_the_second_sync_alone_is_refused_too(nano_folders, fault):
    model = load(nano_folders["qwen2"])
    engine = SmallEngine(model)
    check = make_check(engine, model)
    refresh = check.weight_sync.refresh

    def faulty():
        engine.fault = fault
        return refresh()

    check.weight_sync.refresh = faulty
    assert check.run().error().startswith("--parity_check: restored: ")


@pytest.mark.parametrize(
    "tensor", ["lm_head.weight", "model.norm.weight", "mlp.up_proj.weight", "self_attn.k_proj.weight"]
)
def test_a_single_tensor_that_does_not_arrive_is_refused(nano_folders, tensor):
    model = load(nano_folders["llama"])
    engine = SmallEngine(model)
    true = {name: value.clone() for name, value in engine.model.state_dict().items() if name.endswith(tensor)}
    assert true
    forget = engine._forget

    def lose_it(version):
        engine.model.load_state_dict(true, strict=False)
        forget(version)

    engine._forget = lose_it
    assert make_check(engine, model).run().error().startswith("--parity_check: with noise: ")


@pytest.mark.parametrize("tuned", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("lost", ["nothing", "experts.gate_up_proj", "experts.down_proj", "mlp.gate.weight"])
@pytest.mark.parametrize("arch", ["qwen3_moe", "mixtral"])
def test_experts_that_do_not_arrive_are_refused_in_16_bits(small_model, monkeypatch, arch, lost, tuned):
    model = small_model(arch, vocab_size=256, hidden_size=64, initializer_range=0.02).bfloat16().eval()
    start = copy.deepcopy(model)
    engine = TransformersEngine(copy.deepcopy(start), eos_token_ids=[END], max_model_len=256, reload=lambda: start)
    base = {name: one.clone() for name, one in engine.model.state_dict().items() if name.endswith(lost)}
    assert base or lost == "nothing"
    arrived = engine._weights_arrived

    def lose(version):
        engine.model.load_state_dict(base, strict=False)
        arrived(version)

    monkeypatch.setattr(engine, "_weights_arrived", lose)
    policy = on_experts(arch, model, r=8, lora_alpha=32, scale=0.0) if tuned else model
    report = make_check(engine, policy).run()
    assert report.dtypes == ("bfloat16", "bfloat16")
    wanted = "--parity_check: with noise: " if lost != "nothing" else ""
    assert report.error()[:28] == wanted, report.line()


def test_routers_near_a_tie_are_no_fault_in_16_bits(small_model):
    sizes = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 8, "initializer_range": 0.05}
    gaps = []
    for apart in (0.01, 0.05, 1.0):  # which tokens rounding gives to other experts depends on the processor
        model = small_model("qwen3_moe", **sizes).bfloat16().eval()
        for layer in model.model.layers:
            rows = layer.mlp.gate.weight.data
            rows.copy_(rows[:1] + apart * rows)
        start = copy.deepcopy(model)
        engine = TransformersEngine(
            copy.deepcopy(start), eos_token_ids=[END], max_model_len=256, reload=lambda start=start: start
        )
        report = make_check(engine, model).run()
        gaps += [stage.gaps.maximum for stage in report.stages]
        assert report.verdict != "refuse", report.line()
    assert max(gaps) > 0.2, "no token had other experts"


# --- LoRA --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["lora_scale", "stale_weights"])
def test_an_adapter_without_its_scale_or_that_does_not_arrive_is_refused(nano_folders, fault):
    base = load(nano_folders["qwen2"])
    engine = SmallEngine(base, lora=dict(base.state_dict()), fault=fault)
    report = make_check(engine, with_lora(base), adapter=True).run()
    assert report.error().startswith("--parity_check: with noise: ")


def test_noise_on_an_adapter_that_is_sent_alone_leaves_the_base_weights_out(nano_folders):
    from swift.rollout.parity.noise import choose

    model = with_lora(load(nano_folders["qwen2"]), modules_to_save=["lm_head"])
    alone, merged = choose(model, adapter_only=True), choose(model, adapter_only=False)
    assert all("lora_B" in name for name in alone)
    assert len(alone) == 2 * 3  # layers x targets
    assert set(alone) < set(merged)
    assert not any(".original_module." in name or "lora_A" in name for name in merged)


# --- nothing is changed by it --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["full", "merged", "adapter", "wrapped"])
def test_the_trainer_is_the_same_bit_for_bit_afterwards(nano_folders, kind):
    model = base = load(nano_folders["qwen2"])
    engine = SmallEngine(base, lora=dict(base.state_dict()))
    if kind in ("merged", "adapter"):
        model = with_lora(base, lora_dropout=0.5)
    if kind == "wrapped":
        model = Wrapped(base)
    model.train()
    check = make_check(engine, model, adapter=kind == "adapter", inner=base if kind == "wrapped" else None)
    before, state, storage = bits(model), random_state(), [one.data_ptr() for one in model.parameters()]
    report = check.run()
    assert report.verdict == "pass", report.line()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert [one.data_ptr() for one in model.parameters()] == storage
    assert random_state() == state
    assert all(module.training for module in model.modules() if isinstance(module, torch.nn.Linear))
    assert engine.version == check.weight_sync.version == 0


class Wrapped(torch.nn.Module):
    """What DDP looks like from outside."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def test_a_check_that_fails_in_the_middle_leaves_the_weights_as_they_were(nano_folders):
    from swift.errors import SyncFailed

    model = load(nano_folders["qwen2"])
    engine = SmallEngine(model)
    before = bits(model)

    def broken(stream):
        raise SyncFailed("weights: version 1 for small: planted")

    engine.update = broken
    engine.rebuild = lambda: None
    check = make_check(engine, model)
    with pytest.raises(SyncFailed, match="planted"):
        check.run()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert check.weight_sync._must_send  # the next update sends the weights again


# --- later in the run ----------------------------------------------------------------------------------------------


def test_a_check_in_the_run_sees_weights_that_did_not_arrive(nano_folders):
    model = load(nano_folders["llama"])
    engine = SmallEngine(model)
    check = make_check(engine, model)
    check.run()
    with torch.no_grad():
        for one in model.parameters():
            one.mul_(1.05)
    engine.fault = "stale_weights"
    check.weight_sync.sync(1)
    report = check.now()
    assert [stage.name for stage in report.stages] == ["now"]
    with pytest.raises(NumericError, match="--parity_check: now: max"):
        report.require()


# --- engines that share the trainer's weights -----------------------------------------------------------------------


def test_an_engine_on_the_trainers_own_weights_follows_the_noise_without_a_sync(nano_folders):
    model = load(nano_folders["qwen2"])
    engine = TransformersEngine(model, eos_token_ids=[END], max_model_len=256)
    report = make_check(engine, model).run()
    assert report.verdict == "pass", report.line()
    assert [stage.name for stage in report.stages] == ["as loaded", "with noise"]


def test_an_engine_that_only_says_that_it_shares_weights_is_refused(nano_folders):
    model = load(nano_folders["qwen2"])
    engine = TransformersEngine(copy.deepcopy(model), eos_token_ids=[END], max_model_len=256)
    report = make_check(engine, model).run()
    assert report.error().startswith("--parity_check: with noise: ")


# --- what is compared ------------------------------------------------------------------------------------------------


def test_raw_logprobs_are_compared_at_temperature_one(nano_folders):
    model = load(nano_folders["qwen2"])
    report = make_check(SmallEngine(model, logprob_support="raw"), model).run()
    assert report.verdict == "pass", report.line()


def test_sixteen_bits_pass_by_their_own_limits(nano_folders):
    model = load(nano_folders["qwen2"], torch.bfloat16)
    report = make_check(SmallEngine(model, declared="bfloat16"), model).run()
    assert report.verdict != "refuse", report.line()
    assert report.limits.row == "16 bits on CPU or mixed types"
    assert report.dtypes == ("bfloat16", "bfloat16")


@pytest.mark.parametrize("fault", ["rope_base", "stale_weights", "shifted", "temperature_ignored", "cache_kept"])
def test_faults_show_in_sixteen_bits_too(nano_folders, fault):
    model = load(nano_folders["qwen2"], torch.bfloat16)
    report = make_check(SmallEngine(model, declared="bfloat16", fault=fault), model).run()
    assert report.verdict == "refuse", report.line()


@pytest.mark.parametrize("prompts", [some_prompts(length=12), some_prompts(1), some_prompts(40)])
def test_there_are_always_prompts_of_different_lengths_and_a_long_one(nano_folders, prompts):
    model = load(nano_folders["llama"])
    check = make_check(SmallEngine(model), model, prompts=prompts)
    lengths = [len(one.prompt_ids) for one in check._requests]
    assert len(lengths) == 16
    assert len(set(lengths)) > 1
    assert max(lengths) >= 128
    assert max(lengths) + SAMPLING.max_new_tokens <= 256


def test_the_sampling_of_the_check_is_plain(nano_folders):
    model = load(nano_folders["llama"])
    check = make_check(
        SmallEngine(model), model, sampling=replace(SAMPLING, top_k=5, min_p=0.1, repetition_penalty=1.3)
    )
    assert all(not one.sampling.truncates and not one.sampling.stop for one in check._requests)
    assert {one.sampling.repetition_penalty for one in check._requests} == {1.0}
    assert {one.sampling.temperature for one in check._requests} == {SAMPLING.temperature}


# --- several ranks -------------------------------------------------------------------------------------------------


def on_two_ranks(folder, output, way, fault="none"):
    """What `parity_worker.py` came to on each of two ranks."""
    from pathlib import Path

    from preloaded import run_ranks

    script = Path(__file__).with_name("parity_worker.py")
    run_ranks([script, folder, way, fault, output], Path(f"{output}-logs"), limit_s=240)
    return [torch.load(f"{output}.{rank}") for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "fsdp", "zero3"])
def test_policies_on_several_ranks_pass_and_keep_their_bits(nano_folders, tmp_path, way):
    found = on_two_ranks(nano_folders["qwen2"], tmp_path / "found", way)
    assert [one["verdict"] for one in found] == ["pass", "pass"], found
    assert [one["same"] for one in found] == [True, True]
    assert [one["now"] for one in found] == ["pass", "pass"]
    assert "as loaded, with noise, restored" in found[1]["line"]


@pytest.mark.slow
def test_every_rank_refuses_what_one_engine_did(nano_folders, tmp_path):
    found = on_two_ranks(nano_folders["qwen2"], tmp_path / "found", "fsdp", "stale_weights")
    assert found[0]["error"] == found[1]["error"]
    assert found[0]["error"].startswith("--parity_check: with noise: ")
    assert [one["same"] for one in found] == [True, True]


@pytest.mark.slow
def test_a_rank_whose_policy_differs_from_the_others_is_found(nano_folders, tmp_path):
    found = on_two_ranks(nano_folders["qwen2"], tmp_path / "found", "ddp", "rank 1 differs")
    assert [one["verdict"] for one in found] == ["refuse", "refuse"]
