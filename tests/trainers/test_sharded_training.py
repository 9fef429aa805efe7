"""Two processes train like one, whichever way the model is on them: DDP, ZeRO or FSDP2; and resume bit for bit.

One launch of processes does all runs of one library, another the long ones; the tests look at what came out.
"""

from __future__ import annotations

import json
import math

import pytest
import torch
from experts import ENGINE_SIZES
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from sharded_worker import launch
from timings import is_timing
from transformers import AutoModelForCausalLM

from swift.rl.entropy import AdaptiveEntropy
from swift.trainers.grpo.entropy import EntropySettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

PARTS = {"max_samples": 2, "num_global_batches": 2, "iterations": 2}
SCHEDULED = {"max_steps": 4, "adam_epsilon": 1e-6, "lr_scheduler_type": "linear"}
"""At the usual 1e-8, AdamW turns the rounding of a gradient that is nearly 0 (1e-9 here) into updates of up to 5e-5."""
FULL = {"policy": "full", "beta": 0.1, "parts": PARTS, "arguments": SCHEDULED}
EVERYTHING = {
    "beta": 0.1,
    "moves": [3, 0.6],
    "settings": {
        "entropy": EntropySettings(quantile=0.6, adaptive=AdaptiveEntropy(coefficient=0.05, target=5.455, step=0.02)),
        "off_policy_delta": 0.01,
        "log_offpolicy": True,
    },
    "loss": {"loss_type": "cispo", "epsilon_high": 1.1, "kl_bias_correction": True},
    "parts": PARTS,
    "arguments": {"max_steps": 5, "learning_rate": 2e-3},
}
MIXTURE = {"policy": "full", "base": "experts", "parts": PARTS, "arguments": SCHEDULED}
KINDS = {
    "full": FULL,
    "other": {**FULL, "reference": "llama"},
    "lora": {**FULL, "policy": "lora"},
    "adapter": {**FULL, "policy": "adapter"},
    "experts": {**FULL, "policy": "experts", "base": "experts"},
    "balanced": {**MIXTURE, "settings": {"router_aux_loss_coef": 0.3}, "parts": {"max_samples": 4}},
    "replayed": {**MIXTURE, "settings": {"router_replay": "rollout"}},
    "replayed-trainer": {**MIXTURE, "settings": {"router_replay": "trainer"}},
    "skipping": {
        "parts": {"max_samples": 2},
        "arguments": {**SCHEDULED, "max_grad_norm": 0.5},
        "flat_steps": ["p2", "p3"],  # the second global batch has no signal
        "poisoned_step": 2,  # and the third gradient is not finite, on one rank
    },
    "bf16": {"dtype": "bfloat16", "parts": {"max_samples": 8}, "arguments": {"max_steps": 2, "learning_rate": 1e-4}},
    "objective": EVERYTHING,
    "objective-lora": {
        **EVERYTHING, "policy": "lora", "loss": {"loss_type": "luspo", "epsilon_high": 0.05, "epsilon": 0.05}
    },
}  # fmt: skip
LATE = {"late": True}
"""Rewards come only after the reference has scored; in one process before."""
ZERO3, FSDP = {"deepspeed": "zero3"}, {"fsdp": "full_shard"}
SHARING = {"sharing": 2}
"""Both ranks compute the same micro-batches, half of the tokens each."""
RUNS = {
    "ddp-objective": ("objective", LATE),
    "ddp-objective-lora": ("objective-lora", LATE),
    "zero1": ("full", {"deepspeed": "zero1"}),
    "zero2": ("full", {"deepspeed": "zero2"}),
    "zero3": ("full", ZERO3),
    "zero3-on-shards": ("full", {**ZERO3, "gather": False}),
    "zero2_offload": ("full", {"deepspeed": "zero2_offload"}),
    "zero2-lora": ("lora", {"deepspeed": "zero2"}),
    "zero3-lora": ("lora", ZERO3),
    "zero3-adapter": ("adapter", ZERO3),
    "zero3-experts": ("experts", ZERO3),
    "zero0-skipping": ("skipping", {"deepspeed": "zero0"}),
    "zero2-skipping": ("skipping", {"deepspeed": "zero2"}),
    "zero3-skipping": ("skipping", ZERO3),
    "zero3-objective": ("objective", {**ZERO3, **LATE}),
    "zero3-objective-lora": ("objective-lora", {**ZERO3, **LATE}),
    "fsdp": ("full", FSDP),
    "fsdp-on-shards": ("full", {**FSDP, "gather": False}),
    "fsdp-shard_grad_op": ("full", {"fsdp": "shard_grad_op"}),
    "fsdp-other": ("other", FSDP),
    "fsdp-shard_grad_op-adapter": ("adapter", {"fsdp": "shard_grad_op"}),
    "fsdp-lora": ("lora", FSDP),
    "fsdp-adapter": ("adapter", FSDP),
    "fsdp-experts": ("experts", FSDP),
    "ddp-balanced": ("balanced", {}),
    "zero3-balanced": ("balanced", ZERO3),
    "fsdp-balanced": ("balanced", FSDP),
    "ddp-replayed": ("replayed", {}),
    "zero3-replayed": ("replayed", ZERO3),
    "fsdp-replayed": ("replayed", FSDP),
    "ddp-replayed-trainer": ("replayed-trainer", {}),
    "zero3-replayed-trainer": ("replayed-trainer", ZERO3),
    "fsdp-replayed-trainer": ("replayed-trainer", FSDP),
    "fsdp-skipping": ("skipping", FSDP),
    "fsdp-bf16": ("bf16", FSDP),
    "fsdp-objective": ("objective", {**FSDP, **LATE}),
    "ddp-sharing": ("objective", {**LATE, **SHARING}),
    "zero2-sharing": ("full", {"deepspeed": "zero2", **SHARING}),
    "zero3-sharing": ("full", {**ZERO3, **SHARING}),
    "zero3-lora-sharing": ("lora", {**ZERO3, **SHARING}),
    "zero3-skipping-sharing": ("skipping", {**ZERO3, **SHARING}),
    "fsdp-sharing": ("full", {**FSDP, **SHARING}),
    "fsdp-lora-sharing": ("lora", {**FSDP, **SHARING}),
    "fsdp-experts-sharing": ("experts", {**FSDP, **SHARING}),
    "fsdp-objective-sharing": ("objective", {**FSDP, **LATE, **SHARING}),
}
"""What is compared with one process: the kind of run, and how the model is on two."""

SAVED = ["zero2", "zero3", "zero3-lora", "zero3-objective", "fsdp", "fsdp-lora", "fsdp-sharing"]
"""What is saved at every second step, and resumed from its middle."""

ASYNC = {"fsdp-lora", "fsdp"}
"""What is written while training goes on."""

TURNS = {"sleep_level": 2, "offload_model": True, "offload_optimizer": True, "gc_collect_after_offload": True}
LONG = {
    "ddp-objective", "ddp-objective-lora", "zero1", "zero2", "zero2_offload", "zero3-adapter", "zero0-skipping",
    "zero2-skipping",
    "zero3-objective-lora", "fsdp-shard_grad_op", "fsdp-adapter", "resumed zero2", "resumed zero3-lora",
    "resumed fsdp", "cycled zero2", "zero3-experts", "fsdp-experts", "zero2-lora", "zero3-skipping", "fsdp-other",
    "fsdp-shard_grad_op-adapter", "fsdp-on-shards", "resumed zero3", "zero2-sharing", "zero3-lora-sharing",
    "zero3-skipping-sharing", "fsdp-lora-sharing", "fsdp-experts-sharing", "fsdp-objective-sharing",
    "resumed fsdp-sharing", "ddp-balanced", "zero3-balanced", "fsdp-balanced", "ddp-replayed", "zero3-replayed",
    "fsdp-replayed", "ddp-replayed-trainer", "zero3-replayed-trainer", "fsdp-replayed-trainer",
    "zero3", "zero3-on-shards", "zero3-lora", "fsdp", "fsdp-skipping", "fsdp-sharing", "ddp-sharing", "plain zero2",
    "plain ddp", "cycled ddp",
}  # fmt: skip
"""Runs beside which a shorter one shows the same."""

COLOCATED = {"ddp": {}, "zero2": {"deepspeed": "zero2"}, "zero3": ZERO3, "fsdp": FSDP}
"""What takes turns with an engine on its device."""


def all_tasks(folder):
    """Every run on two processes by name."""
    tasks = {name: {**KINDS[kind], **way} for name, (kind, way) in RUNS.items()}
    tasks["fsdp-bf16"]["output"] = str(folder / "bf16")
    for name in SAVED:
        saving = {**tasks[name]["arguments"], "save_strategy": "steps", "save_steps": 2}
        tasks[name] |= {"arguments": saving, "output": str(folder / name)}
        tasks[name]["parts"] = {**tasks[name].get("parts", {}), "async_save": name in ASYNC}
        again = {"output": str(folder / f"{name}-again"), "resume": str(folder / name / "checkpoint-2")}
        tasks[f"resumed {name}"] = {**tasks[name], **again}
    for name, way in COLOCATED.items():
        for flags in (None, TURNS):
            tasks[f"{'cycled' if flags else 'plain'} {name}"] = {**way, "cycle": flags, "arguments": {"max_steps": 3}}
    return tasks


def each(names, run=""):
    """Parameters of a test; long where its run is."""
    return [pytest.param(name, marks=[pytest.mark.long] if run + name in LONG else []) for name in names]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def experts(small_model, folder):
    """A mixture of experts."""
    small_model("qwen3_moe", **ENGINE_SIZES).save_pretrained(folder / "experts")
    return str(folder / "experts")


@pytest.fixture(scope="module")
def common(nano_folders, folder, experts):
    """The model, and an adapter to start from, with random weights."""
    base = AutoModelForCausalLM.from_pretrained(nano_folders["qwen2"])
    policy = get_peft_model(base, LoraConfig(target_modules="all-linear"))
    torch.manual_seed(5)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0, 0.1)
    policy.save_pretrained(folder / "adapter")
    return {name: str(nano_folders[one]) for name, one in (("model", "qwen2"), ("llama", "llama"))} | {
        "adapter": str(folder / "adapter"),
        "experts": experts,
    }


class Runs(dict):
    """Runs by name, launched together with those of their kind when one is looked at."""

    def __init__(self, folder, common, processes, tasks, kind):
        super().__init__()
        self.folder, self.common, self.processes, self.tasks, self.kind = folder, common, processes, tasks, kind

    def __missing__(self, name):
        kind = self.kind(name)
        chosen = {other: task for other, task in self.tasks.items() if self.kind(other) == kind}
        folder = self.folder / f"{self.processes}-{len(self)}"
        made = launch(folder, self.processes, list(chosen.values()), **self.common)
        self.update(zip(chosen, made, strict=True))
        return self[name]


@pytest.fixture(scope="module")
def alone(common, folder):
    """Each kind of run in one process; and one process under ZeRO."""
    tasks = {**KINDS, "under zero2": {**FULL, "deepspeed": "zero2"}}
    short = {kind for name, (kind, _) in RUNS.items() if name not in LONG}
    return Runs(folder, common, 1, tasks, lambda name: name in short)


@pytest.fixture(scope="module")
def sharded(common, folder):
    """Runs in two processes; a process has one of the two libraries."""
    tasks = all_tasks(folder)
    return Runs(folder, common, 2, tasks, lambda name: ("fsdp" in tasks[name], name in LONG))


def assert_same_training(ours, theirs, tolerance):
    """The same completions, logs, weights and weight syncs."""
    assert ours["lengths"] == theirs["lengths"]
    assert len(set(ours["lengths"])) > 1, "ranks decode for different numbers of steps"
    assert len(ours["logs"]) == len(theirs["logs"])
    for mine, other in zip(ours["logs"], theirs["logs"], strict=True):
        for name in ("loss", "grad_norm", "learning_rate", "kl"):
            value, expected = mine.get(name, 0.0), other.get(name, 0.0)
            assert math.isfinite(value) == math.isfinite(expected), (name, value, expected)
            assert not math.isfinite(expected) or abs(value - expected) < tolerance, (name, value, expected)
        for name in ("health/steps_without_signal", "health/nan_skips", "tokens/trained"):
            assert mine.get(name, 0) == other.get(name, 0), name
    for part in ("state", "synced", "adapter"):
        assert list(ours[part]) == list(theirs[part])
        assert gap(ours[part], theirs[part]) < tolerance, part


def gap(ours, theirs):
    """The largest difference of any number."""
    return max((float((ours[name].float() - theirs[name].float()).abs().max()) for name in theirs), default=0.0)


@pytest.mark.parametrize("name", each(name for name in RUNS if name != "fsdp-bf16"))
def test_two_processes_train_as_one_does(alone, sharded, name):
    kind, _ = RUNS[name]
    ours, theirs = sharded[name], alone[kind]
    assert_same_training(ours, theirs, tolerance=2e-5 if kind.startswith("objective") else 1e-5)
    if kind == "skipping":
        logs = ours["logs"]
        assert [row.get("health/steps_without_signal", 0) for row in logs] == [0, 1, 0, 0]
        assert [row.get("health/nan_skips", 0) for row in logs] == [0, 0, 1, 0]
        assert logs[1]["grad_norm"] == 0
    if kind.startswith("objective"):
        assert_same_objective(ours, theirs)
    if kind.startswith(("balanced", "replayed")):
        assert_same_routing(ours, theirs, kind)


def assert_same_routing(ours, theirs, kind):
    """The same load-balancing loss, or the same share of experts that differ."""
    seen = set()
    for mine, other in zip(ours["logs"], theirs["logs"], strict=True):
        for name in (name for name in other if name.startswith(("aux_loss", "routing/"))):
            assert mine[name] == pytest.approx(other[name], rel=1e-3, abs=2e-5), name
            seen.add(name if other[name] > 0 else "")
    assert seen - {""} == (
        {"aux_loss"} if kind == "balanced" else {"routing/tokens_differ_frac", "routing/choices_differ_frac"}
    )


def assert_same_objective(ours, theirs):
    """The same tokens chosen, the same controller steered, the same reference moved."""
    for mine, other in zip(ours["logs"], theirs["logs"], strict=True):
        assert {name for name in mine if not is_timing(name)} == {name for name in other if not is_timing(name)}
        for name in other:
            if name.startswith(("entropy", "off_policy/masked", "logp/", "mismatch/", "kl")):
                assert mine[name] == pytest.approx(other[name], rel=1e-3, abs=2e-5), name
    assert ours["controller"] == pytest.approx(theirs["controller"], rel=1e-4)
    assert gap(ours["reference"], theirs["reference"]) < 2e-5
    assert any(not torch.equal(value, theirs["state"][name]) for name, value in theirs["reference"].items())


FOUR = {
    "hsdp": ("full", {**FSDP, "fsdp_replicas": 2}),
    "hsdp-lora": ("lora", {**FSDP, "fsdp_replicas": 2}),
    "hsdp-sharing": ("full", {**FSDP, "fsdp_replicas": 2, **SHARING}),
    "hsdp-objective": ("objective", {**FSDP, "fsdp_replicas": 2, **LATE}),
    "fsdp-sharing": ("full", {**FSDP, "sharing": 4}),
    "fsdp-lora-sharing": ("lora", {**FSDP, **SHARING}),
    "zero3-sharing": ("full", {**ZERO3, **SHARING}),
    "zero3-lora-sharing": ("lora", {**ZERO3, "sharing": 4}),
}
"""As `RUNS`, on four processes."""


@pytest.fixture(scope="module")
def four(common, folder):
    made = {}
    for library in ("fsdp", "deepspeed"):
        tasks = {name: {**KINDS[kind], **way} for name, (kind, way) in FOUR.items() if library in way}
        made |= zip(tasks, launch(folder / f"four-{library}", 4, list(tasks.values()), **common), strict=True)
    return made


@pytest.mark.long
@pytest.mark.parametrize("name", FOUR)
def test_four_processes_train_as_one_does(alone, four, name):
    kind, _ = FOUR[name]
    assert_same_training(four[name], alone[kind], tolerance=2e-5 if kind.startswith("objective") else 1e-5)
    if kind.startswith("objective"):
        assert_same_objective(four[name], alone[kind])


@pytest.mark.parametrize(
    "name", each(["zero2", "zero3", "zero3-on-shards", "zero3-objective", "fsdp", "fsdp-objective"])
)
def test_a_frozen_copy_is_sharded_as_the_policy_is_unless_it_moves(sharded, name):
    whole = name == "zero2" or name.endswith("objective")
    assert sharded[name]["share"] == (1.0 if whole else pytest.approx(0.5, abs=0.05))


@pytest.mark.long
def test_one_process_under_zero_is_one_process(alone):
    assert_same_training(alone["under zero2"], alone["full"], tolerance=1e-5)


@pytest.mark.parametrize("kind", ["objective", pytest.param("objective-lora", marks=pytest.mark.long)])
def test_everything_in_the_objective_acted(alone, kind):
    logs = alone[kind]["logs"]
    assert len({row["entropy_coef"] for row in logs}) > 1
    assert max(row["off_policy/masked_frac"] for row in logs) > 0
    assert max(row["mismatch/logp_abs_diff_max"] for row in logs) < 1e-5, "the engine has the weights of the start"
    assert min(row["mismatch/ess"] for row in logs) > 0.999
    assert max(row["clip_ratio/high_mean"] for row in logs) > 0


def test_masters_are_float32_and_everyone_else_sees_bfloat16(alone, sharded, folder):
    ours, theirs = sharded["fsdp-bf16"], alone["bf16"]
    assert ours["scores"] == theirs["scores"] == "torch.float32"
    assert {tensor.dtype for tensor in ours["synced"].values()} == {torch.bfloat16}
    assert any((value != value.bfloat16()).any() for value in ours["state"].values()), "what is trained has more digits"
    assert gap(ours["synced"], theirs["synced"]) < 2e-3
    saved = folder / "bf16" / "checkpoint-2"
    assert {value.dtype for value in load_file(saved / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((saved / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("name", each(SAVED, "resumed "))
def test_a_resumed_run_is_the_straight_one_bit_for_bit_and_its_checkpoint_holds_a_model(sharded, folder, name):
    straight, again = sharded[name], sharded[f"resumed {name}"]
    steps = len(straight["logs"])
    assert again["controller"] == straight["controller"]
    for part in ("state", "reference"):
        assert all(torch.equal(again[part][key], value) for key, value in straight[part].items()), part
    for ours, theirs in zip(again["logs"][2 - steps :], straight["logs"][2:], strict=True):
        for key in ("loss", "grad_norm", "learning_rate", "kl", "entropy"):
            assert ours.get(key) == theirs.get(key), key
    lora = name.endswith("lora")
    saved = load_file(folder / name / f"checkpoint-{steps}" / f"{'adapter_model' if lora else 'model'}.safetensors")
    expected = straight["adapter" if lora else "synced"]
    assert set(expected) - set(saved) == (set() if lora else {"lm_head.weight"}), "tied weights are saved once"
    assert all(torch.equal(saved[key], expected[key]) for key in saved)


@pytest.mark.parametrize("name", each(COLOCATED, "cycled "))
def test_offloading_changes_no_bit_of_a_run_on_two_ranks(sharded, name):
    plain, cycled = sharded[f"plain {name}"], sharded[f"cycled {name}"]
    assert cycled["state"].keys() == plain["state"].keys()
    assert all(torch.equal(cycled["state"][key], value) for key, value in plain["state"].items())
    assert cycled["tokens"] == plain["tokens"]
    values = [[(row["loss"], row["grad_norm"]) for row in one["logs"]] for one in (cycled, plain)]
    assert values[0] == values[1] and len(set(values[0])) == 3
    for mine, theirs in zip(cycled["ranks"], plain["ranks"], strict=True):
        assert len(mine["optimizer"]) == len(theirs["optimizer"]) > 0
        assert all(torch.equal(a, b) for a, b in zip(mine["optimizer"], theirs["optimizer"], strict=True))
        assert torch.equal(mine["random"], theirs["random"])
        assert mine["seen"] == [[0, 0]] * 3, "something stayed on the device while the engine sampled"
        assert sum(line.startswith("mem ") for line in mine["lines"]) == 9
