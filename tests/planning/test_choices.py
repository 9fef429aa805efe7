"""What makes a run fit, and which placement is fastest."""

from types import SimpleNamespace

import pytest

from swift.arguments.rlhf import RLHFArguments
from swift.errors import ConfigError
from swift.flags import spellings_of
from swift.planning.choices import compared, fitted, require_rollouts, table, with_flags
from swift.planning.cost import StepCost
from swift.planning.devices import DEVICES, GIB
from swift.planning.report import Phase, Plan

DEVICE = DEVICES["a100-40gb"]
SPELLINGS = spellings_of(RLHFArguments)


def plan(*phases, tokens=16384, rollout_s=10.0, passes_s=20.0, devices=1, ahead=False):
    cost = StepCost(
        parameters=10**9, trained=10**9, weights=2 * GIB, resident=14 * GIB, gradients=2 * GIB, training=20 * GIB,
        update=18 * GIB, micro_batches=2, tokens=tokens, flops=1e15, training_s=passes_s, update_s=1.0,
    )  # fmt: skip
    held = [Phase(name, {"trainer": trainer * GIB, "engine": engine * GIB}) for name, trainer, engine in phases]
    return Plan(
        "plan", DEVICE, devices, cost, held, {"rollout": rollout_s, "passes": passes_s, "update": 1.0}, None,
        rows=8, noun="completion", tokens_per_step=62_000, ahead=ahead, heads=8,
    )  # fmt: skip


def settings(words):
    """What changes look at, of a command."""
    given = dict(zip(words[::2], words[1::2], strict=True))
    names = {"gradient_checkpointing", "offload_optimizer", "offload_model"}
    level = int(given.get("--sleep_level", 1))
    flags = {name: given.get(f"--{name}") == "true" for name in names}
    return SimpleNamespace(
        **flags,
        sleep_level=level,
        optim=given.get("--optim", "adamw_torch_fused"),
        master_weights=given.get("--master_weights", "fp32"),
        torch_dtype="bfloat16",
        tuner_type=given.get("--tuner_type", "full"),
        max_completion_length=1024,
        max_tokens_per_micro_batch=None,
        use_vllm=True,
        fsdp=given.get("--fsdp"),
        fsdp_offload_params=given.get("--fsdp_offload_params") == "true",
        sequence_parallel_size=int(given.get("--sequence_parallel_size", 1)),
    )


def resolved(words):
    return SimpleNamespace(args=settings(words))


def test_a_flag_takes_the_place_of_the_one_that_was_given():
    words = ["--a", "1", "--tuner-type", "full", "--list", "x", "y", "--train_type=lora", "--b"]
    assert with_flags(SPELLINGS, words, [("tuner_type", "lora"), ("list", "z")]) == [
        "--a", "1", "--b", "--tuner_type", "lora", "--list", "z",
    ]  # fmt: skip


def test_changes_are_made_one_by_one_until_it_fits_those_that_cost_least_first():
    def planned(words):
        args = settings(words)
        gib = 90 - 30 * args.gradient_checkpointing - 15 * (args.optim == "adamw_cpu")
        given = dict(zip(words[::2], words[1::2], strict=True))
        tokens = int(given.get("--max_tokens_per_micro_batch", 16384))
        gib -= {16384: 0, 8192: 10, 4096: 15, 2048: 17}[tokens]
        return plan(("rollout", 10, 20), ("forward, backward", gib, 1), tokens=tokens), resolved(words)

    first, start = planned([])
    words, found = fitted(first, start.args, [], SPELLINGS, planned)
    assert found.fits
    assert words == [
        "--gradient_checkpointing", "true", "--max_tokens_per_micro_batch", "2048", "--optim", "adamw_cpu",
    ]  # fmt: skip


def test_the_engines_share_is_what_is_left():
    def planned(words):
        given = dict(zip(words[::2], words[1::2], strict=True))
        share = float(given.get("--vllm_gpu_memory_utilization", 0.9))
        return plan(("start", 10, share * DEVICE.memory / GIB)), resolved(words)

    first, start = planned([])
    words, found = fitted(first, start.args, [], SPELLINGS, planned)
    assert found.fits and words == ["--vllm_gpu_memory_utilization", "0.75"]


def test_what_a_later_change_has_made_needless_is_taken_back():
    def planned(words):
        args = settings(words)
        gib = 60 - args.gradient_checkpointing - 30 * (args.optim == "adamw_cpu")
        return plan(("forward, backward", gib, 0)), resolved(words)

    first, start = planned([])
    words, found = fitted(first, start.args, [], SPELLINGS, planned)
    assert found.fits and words == ["--optim", "adamw_cpu"]


def test_several_devices_share_the_model_and_then_rows():
    def planned(words):
        args = settings(words)
        gib = 300 / args.sequence_parallel_size - (100 if args.fsdp else 0) - 20 * args.gradient_checkpointing
        return plan(("forward, backward", gib, 0), tokens=1500, devices=8), resolved(words)

    first, start = planned([])
    words, found = fitted(first, start.args, [], SPELLINGS, planned)
    assert found.fits
    assert words == [
        "--gradient_checkpointing", "true", "--fsdp", "full_shard", "--sequence_parallel_size", "2",
    ]  # fmt: skip


def test_what_nothing_makes_fit_ends():
    first, start = _huge([])
    words, found = fitted(first, start.args, [], SPELLINGS, _huge)
    assert not found.fits and words[-2:] == ["--tuner_type", "lora"]


def _huge(words):
    return plan(("update", 500, 0)), resolved(words)


def test_placements_are_compared_by_tokens_per_second_those_that_fit_first():
    def planned(words, trainers):
        given = dict(zip(words[::2], words[1::2], strict=True))
        if given["--vllm_mode"] == "colocate":
            return plan(("start", 10, 20), rollout_s=10.0, devices=4), None
        engines = int(given["--num_infer_workers"])
        if engines == 3:
            raise ConfigError("--num_generations: 8: does not divide the batch")
        return plan(("start", 10, 20 if engines == 1 else 90), rollout_s=30 / engines, ahead=True), None

    rows = compared(settings([]), [], 4, SPELLINGS, planned)
    assert [row["engines"] for row in rows] == [1, 4, 2, 3]
    assert rows[0]["step_seconds"] == 30, "the rollout takes longer than the passes"
    assert rows[1]["tokens_per_second"] == pytest.approx(2000) and rows[1]["trainers"] == 4
    assert rows[2]["fits"] is False and "does not divide" in rows[3]["problem"]
    lines = table(rows)
    assert "2,000" in lines[2] and "NPROC_PER_NODE=4 --vllm_mode colocate --num_infer_workers 4" in lines[2]
    assert "does not divide" in lines[4]


def test_without_an_engine_there_is_nothing_to_compare():
    with pytest.raises(ConfigError, match="--compare: true: compares placements of vLLM"):
        require_rollouts(SimpleNamespace(use_vllm=False))
    with pytest.raises(ConfigError, match="this run has no rollouts"):
        require_rollouts(SimpleNamespace())
