"""Whole runs of the other methods on the simulated GPU; DeepSpeed there, and a run that is resumed."""

import json

import pytest
from gpu_runs import BUDGET, CHECKED, DECODE, EBFT, GRPO, LONG, STEPS, TWO, beyond, image_rows
from safetensors.torch import load_file
from torch import equal
from vlms import build_vlm

FEATURES = "rewards.py FeatureRewards._features"


@pytest.mark.parametrize(
    ("way", "own"),
    [
        ("zero2", 0),
        pytest.param("zero2_offload", 6, marks=LONG),
        pytest.param("zero3", 3, marks=LONG),
        pytest.param("zero3_offload", 7, marks=LONG),
    ],
)
def test_zero_runs_there(on_gpu, way, own):
    """`own`: pageable copies of DeepSpeed's, which waits as it likes."""
    code, err, found = on_gpu(f"{GRPO} --deepspeed {way} --tuner_type full")
    assert code == 0, err[-3000:]
    assert found["steps"] == STEPS
    assert sum(count for *_, count in found["copies"]) <= own and found["attention"] == []


def test_ebft_waits_once_a_step_and_for_its_features(on_gpu):
    code, err, found = on_gpu(f"rlhf --rlhf_type ebft {EBFT} --tuner_type full --ebft_ce_coef 0.1")
    assert code == 0, err[-3000:]
    assert found["steps"] == STEPS
    assert beyond(found, {**BUDGET, FEATURES: STEPS, DECODE: STEPS * 16}) == {}


def test_strided_ebft_waits_once_a_micro_batch(on_gpu, tmp_path):
    documents = tmp_path / "documents.jsonl"
    lines = [{"text": " ".join(f"{row} plus {more} is {row + more}." for more in range(12))} for row in range(12)]
    documents.write_text("\n".join(map(json.dumps, lines)))
    strided = f"rlhf --rlhf_type ebft --ebft_mode strided {TWO} --tuner_type full"
    code, err, found = on_gpu(strided, dataset=documents)
    assert code == 0, err[-3000:]
    assert beyond(found, {"energy.py energies": 2 * STEPS}) == {}


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(f"sft {TWO} --tuner_type full", id="sft", marks=LONG),
        pytest.param(f"sft {TWO} --tuner_type lora --packing true --max_length 64", id="sft-packed-lora"),
        pytest.param(f"rlhf --rlhf_type dpo {TWO} --tuner_type full", id="dpo", marks=LONG),
        pytest.param(f"rlhf --rlhf_type dpo {TWO} --tuner_type full --packing true --max_length 64", id="dpo-packed"),
        pytest.param(f"rlhf --rlhf_type rm {TWO} --tuner_type lora", id="rm", marks=LONG),
        pytest.param(f"rlhf --rlhf_type orpo {TWO} --tuner_type lora", id="orpo", marks=LONG),
        pytest.param(f"rlhf --rlhf_type simpo {TWO} --tuner_type full", id="simpo", marks=LONG),
    ],
)
def test_trainers_of_trl_run_without_pageable_copies(on_gpu, command):
    """TRL's own losses and metrics wait for the device several times a micro-batch."""
    code, err, found = on_gpu(command)
    assert code == 0, err[-3000:]
    assert found["steps"] == STEPS
    assert found["copies"] == found["attention"] == []


def test_positions_of_packed_pairs_with_images_are_found_on_the_host(on_gpu, tmp_path):
    model = build_vlm(tmp_path / "model", "qwen2_5_vl")
    command = f"rlhf --rlhf_type dpo {TWO} --tuner_type lora --packing true --max_length 300"
    code, err, found = on_gpu(command, model=model, dataset=image_rows(tmp_path))
    assert code == 0, err[-3000:]
    lines = [line for _, line, _ in found["waits"]]
    assert any("transfer.py" in line for line in lines)
    assert not any("sequence_parallel.py" in line for line in lines)


@pytest.mark.long
@pytest.mark.parametrize("method", ["kto", "gkd --lmbda 1 --teacher_model {teacher} --max_completion_length 4"])
def test_kto_and_gkd_run_there(on_gpu, nano_folders, method):
    command = f"rlhf --rlhf_type {method} {TWO} --tuner_type full".replace("{teacher}", str(nano_folders["qwen2"]))
    code, err, found = on_gpu(command)
    assert code == 0, err[-3000:]
    assert found["steps"] == STEPS and found["attention"] == []


@pytest.mark.long
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(f"{GRPO} --tuner_type full", id="grpo"),
        pytest.param(f"rlhf --rlhf_type ebft {EBFT} --tuner_type lora --ebft_ce_coef 0.1", id="ebft"),
        pytest.param(f"sft {TWO} --tuner_type full --lora_dropout 0", id="sft"),
        pytest.param(f"rlhf --rlhf_type dpo {TWO} --tuner_type lora", id="dpo"),
        pytest.param(f"rlhf --rlhf_type kto {TWO} --tuner_type full", id="kto"),
        pytest.param(f"rlhf --rlhf_type rm {TWO} --tuner_type full", id="rm"),
    ],
)
def test_activations_that_wait_on_the_host_change_nothing(on_gpu, command):
    """They go and come without pageable copies; the host waits twice at the end of a pass, for both streams."""
    ends = []
    for offloads in ("false", "true"):
        code, err, found = on_gpu(f"{command} --activation_offloading {offloads} --gradient_checkpointing false")
        assert code == 0, err[-3000:]
        end = on_gpu.folder / "out"
        weights = next((end / "checkpoint-3").glob("*model.safetensors"))
        waits = sum(count for what, _, count in found["waits"] if what == "synchronize")
        ends.append((load_file(weights), found["training_bytes"], sum(count for *_, count in found["copies"]), waits))
        end.rename(on_gpu.folder / f"out-{offloads}")
    (plain, bytes_held, copies, _), (same, fewer_bytes, same_copies, waits) = ends
    assert all(equal(same[name], value) for name, value in plain.items())
    assert fewer_bytes < bytes_held and same_copies == copies
    assert waits >= 2 * STEPS and waits % 2 == 0


def test_a_resumed_run_ends_with_the_same_weights(on_gpu):
    command = f"{CHECKED} --tuner_type lora --torch_dtype bfloat16 --save_steps 2"
    code, err, _ = on_gpu(command)
    assert code == 0, err[-3000:]
    end = on_gpu.folder / "out" / "checkpoint-3"
    undisturbed = load_file(end / "adapter_model.safetensors")
    end.rename(on_gpu.folder / "first-end")
    code, err, _ = on_gpu(f"{command} --resume_from_checkpoint {end.with_name('checkpoint-2')}")
    assert code == 0, err[-3000:]
    resumed = load_file(end / "adapter_model.safetensors")
    assert resumed.keys() == undisturbed.keys()
    assert all(equal(resumed[name], value) for name, value in undisturbed.items())
