"""Whole runs with LoRA on experts: vLLM in the trainer's process has the trainer's log-probs, and so has the merge."""

import shutil

import pytest
import torch
from cli_runs import Cli, error_lines, log_rows
from experts import ENGINE_SIZES, EXPERTS
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from swift.models.tiny import build_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.long]
FLAGS = {
    "tuner_type": "lora", "torch_dtype": "float32", "learning_rate": 1e-2, "use_vllm": "true", "vllm_mode": "colocate",
    "vllm_enforce_eager": "true", "vllm_max_num_seqs": 16, "max_length": 40, "parity_check": "every:1", "max_steps": 3,
    "save_steps": 3,
}  # fmt: skip
LIMIT = 1e-4
OUTER_ONLY = """
import sys

from swift.cli.main import main
from swift.models import checkpoint_tensors

inner, tuned, has = set(), checkpoint_tensors._tuned, checkpoint_tensors._has


def noted(layer, prefix):
    inner.add(id(layer.base_layer))
    return tuned(layer, prefix)


checkpoint_tensors._tuned = noted
checkpoint_tensors._has = lambda layer, adapter: id(layer) not in inner and has(layer, adapter)
if __name__ == "__main__":
    sys.exit(main())
"""
"""A fault of the past: PEFT wraps fused experts once for each parameter, and only the outermost wrapper is merged."""


@pytest.fixture
def arch():
    return "qwen3_moe"


@pytest.fixture
def runs(arch, small_model, material, tmp_path):
    base = tmp_path / "base"
    small_model(arch, **ENGINE_SIZES, **EXPERTS[arch][0]).save_pretrained(base)
    build_tokenizer(256).save_pretrained(base)
    with Cli(base, material[1], tmp_path) as cli:
        yield cli


@pytest.mark.parametrize("arch", ["qwen3_moe", "mixtral"])
def test_lora_on_experts_is_what_vllm_samples_with_and_what_is_merged(runs):
    folder = runs.finish("run", **FLAGS)
    assert "(as loaded, with noise, restored)" in runs.printed
    rows = log_rows(folder)
    assert len(rows) == 3 and all(row["grad_norm"] > 0 for row in rows)
    for name in ("mismatch/parity_abs_diff_max", "mismatch/logp_abs_diff_max"):
        assert all(row[name] < LIMIT for row in rows), [(row["step"], row.get(name)) for row in rows]
    checkpoint = folder / "checkpoint-3"
    runs.finish("merged", mode="merge-lora", model=None, adapters=checkpoint, report_to=None, add_version=None)
    ids = torch.arange(10, 90).view(2, 40)
    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(runs.model).eval()
        start = base(input_ids=ids).logits.log_softmax(-1)
        policy = PeftModel.from_pretrained(base, str(checkpoint)).eval()
        wanted = policy(input_ids=ids).logits.log_softmax(-1)
        merged = AutoModelForCausalLM.from_pretrained(runs.folder / "merged").eval()
        assert float((merged(input_ids=ids).logits.log_softmax(-1) - wanted).abs().max()) < LIMIT
    assert float((wanted - start).abs().max()) > 100 * LIMIT
    changed = [name for name, one in policy.named_parameters() if "experts" in name and "lora_B" in name and one.any()]
    assert len(changed) == 4  # two parameters in each of two layers


def test_an_engine_that_lacks_a_part_of_the_experts_adapters_ends_the_run(runs):
    script = runs.folder / "outer_only.py"
    script.write_text(OUTER_ONLY)
    code, _, err = runs.start("run", **FLAGS, program=[script]).wait()
    assert code == 6, err
    assert "--parity_check: with noise: max " in error_lines(err)[0]


def test_an_adapter_on_experts_is_not_sent_to_vllm_alone(runs):
    code, _, err = runs.start("refused", **FLAGS, vllm_enable_lora="true").wait()
    assert (code, [line.split()[2] for line in error_lines(err)]) == (2, ["--vllm_enable_lora:"])


NOISE = """
import contextlib

import torch

from swift.rollout.engines.transformers.engine import TransformersEngine

own, generator, SIZE = TransformersEngine._inference, torch.Generator().manual_seed(0), 1e-3


def disturb(router, args):
    (hidden,) = args
    noise = torch.randn(hidden.shape, generator=generator).to(hidden.dtype)
    return (hidden + SIZE * hidden.std() * noise,)


@contextlib.contextmanager
def disturbed(self):
    routers = [module for name, module in self.model.named_modules() if name.endswith(".gate")]
    hooks = [router.register_forward_pre_hook(disturb) for router in routers]
    try:
        with own(self):
            yield
    finally:
        for hook in hooks:
            hook.remove()


TransformersEngine._inference = disturbed
"""
"""A plugin: noise on the routers whenever the engine computes with the trainer's model."""


def test_with_noise_on_the_samplers_routers_replay_lowers_the_mismatch_tenfold(runs):
    plugin = runs.folder / "noise.py"
    plugin.write_text((runs.material / "odd_plugin.py").read_text() + NOISE)
    flags = {
        "torch_dtype": "float32", "num_generations": 8, "per_device_train_batch_size": 32, "max_completion_length": 32,
        "max_steps": 4, "parity_check": "off", "external_plugins": plugin, "router_aux_loss_coef": 0.01,
    }  # fmt: skip
    means = {}
    for mode in ("off", "rollout"):
        rows = log_rows(runs.finish(mode, **flags, moe_router_replay=mode))
        assert len(rows) == 4 and all(row["aux_loss"] >= 2 for row in rows)
        means[mode] = sum(row["mismatch/k3"] for row in rows) / 4
    assert all(0 < row["routing/tokens_differ_frac"] < 0.2 for row in rows)
    assert means["rollout"] < means["off"] / 10, means


def test_one_run_shows_the_mismatch_with_replay_and_without(runs):
    plugin = runs.folder / "noise.py"
    plugin.write_text((runs.material / "odd_plugin.py").read_text() + NOISE.replace("1e-3", "5e-3"))
    flags = {
        "torch_dtype": "bfloat16", "num_generations": 8, "per_device_train_batch_size": 32, "max_completion_length": 32,
        "max_steps": 3, "parity_check": "every:1", "external_plugins": plugin, "moe_router_replay": "rollout",
    }  # fmt: skip
    rows = log_rows(runs.finish("run", **flags))
    assert sum(row["mismatch/parity_k3"] for row in rows) > 2 * sum(row["mismatch/k3"] for row in rows), rows


def test_experts_of_an_engine_in_a_process_of_its_own_are_replayed_and_resumed(runs):
    flags = {
        "torch_dtype": "float32", "infer_backend": "transformers", "vllm_mode": "dedicated", "async_generate": "true",
        "moe_router_replay": "rollout", "num_iterations": 2, "max_steps": 6, "save_steps": 3, "parity_check": "off",
    }  # fmt: skip
    whole = runs.finish("whole", **flags)
    rows = log_rows(whole)
    assert len(rows) == 6 and max(row["routing/tokens_differ_frac"] for row in rows) > 0
    assert {row["mismatch/k3"] < 1e-8 for row in rows[:1]} == {True}
    file = whole / "checkpoint-6" / "model.safetensors"
    start, ended = load_file(runs.model / file.name), {name: one.clone() for name, one in load_file(file).items()}
    shutil.rmtree(file.parent)
    runs.finish("whole", **flags, resume_from_checkpoint=whole / "checkpoint-3")
    again = load_file(file)
    assert all(torch.allclose(one, again[name], atol=1e-5) for name, one in ended.items())
    assert any((one - start[name]).abs().max() > 1e-3 for name, one in ended.items() if ".experts." in name)
