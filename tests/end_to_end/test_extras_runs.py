"""Whole runs with guided decoding, further sampling settings, ordered and mixed rows, and a rollout function."""

from __future__ import annotations

import json
import os
import re
from importlib.util import find_spec

import pytest
from cli_runs import ROOT, assert_same_run, completion_rows, log_rows, sampled

pytestmark = pytest.mark.slow

FUNCTIONS = """
import os


def passing(prompts, rollout):
    assert [turn["role"] for turn in prompts[0]] == ["user"]
    done = rollout.generate(rollout.repeated_prompt_ids)
    return {"completion_ids": [one.token_ids for one in done], "logprobs": [one.logprobs for one in done]}


def changing(prompts, rollout):
    import torch

    done = passing(prompts, rollout)
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    return done


def counting(prompts, rollout):
    half = len(prompts) * rollout.num_generations
    return {**passing(prompts, rollout), "place": list(range(half)), "asked": [c["solution"] for c in rollout.columns
                                                                             for _ in range(rollout.num_generations)]}
"""

REWARD = """
from swift.plugin import orms


def placed(completions, place=None, asked=None, solution=None, **kwargs):
    if place is None:  # the call at the start, without a rollout function
        return [0.0] * len(completions)
    assert list(asked) == list(solution)
    return [float(one) for one in place]


orms["placed"] = placed
"""


@pytest.fixture
def functions(tmp_path):
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    (tmp_path / "placed.py").write_text(REWARD)
    return tmp_path


@pytest.mark.long
def test_a_function_that_passes_everything_on_is_the_run_without_it_bit_for_bit(cli, functions):
    flags = {"max_steps": 3, "steps_per_generation": 4, "save_steps": 3}
    plain = cli.finish("plain", **flags)
    own = cli.finish("own", **flags, rollout_func=functions / "functions.py:passing")
    assert_same_run(own, plain)


@pytest.mark.long
def test_what_a_function_changes_of_torch_is_put_back_before_the_step(cli, functions):
    flags = {"max_steps": 1, "save_steps": 1}
    plain = cli.finish("plain", **flags)
    own = cli.finish("own", **flags, rollout_func=functions / "functions.py:changing")
    assert_same_run(own, plain)
    assert "changed by a plugin or library during the run" in (own / "logs/attempt-1/rank-0.log").read_text()


def test_columns_of_a_function_reach_rewards_and_the_log_on_every_rank(cli, functions):
    flags = {
        "max_steps": 2, "rollout_func": functions / "functions.py:counting", "reward_funcs": "placed",
        "external_plugins": functions / "placed.py", "per_device_train_batch_size": 2, "record_rollouts": "all",
    }  # fmt: skip
    folder = cli.finish("ranks", **flags, variables={"NPROC_PER_NODE": 2})
    rows = completion_rows(folder)
    assert {row["columns"]["asked"] == row["columns"]["solution"] for row in rows} == {True}
    assert [row["reward"] for row in rows] == [row["columns"]["place"] for row in rows]
    assert len({row["reward"] for row in rows}) > 1
    again = cli.finish("again", **flags, replay_from=folder, variables={"NPROC_PER_NODE": 2})
    assert sampled(again) == sampled(folder)


@pytest.mark.skipif(find_spec("xgrammar") is None, reason="the package xgrammar is not installed")
def test_all_extras_together_train_and_are_seen_in_what_was_sampled(cli):
    """Answers match the expression, rows come by difficulty out of two datasets, metrics are marked as biased."""
    rows = {
        name: [{"prompt": f"{name}{n}", "solution": str(n), "level": n % 3, "from": name} for n in range(1, 13)]
        for name in "ab"
    }
    for name, part in rows.items():
        (cli.folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    words = {
        "dataset": [cli.folder / "a.jsonl", cli.folder / "b.jsonl"],
        "interleave_prob": [0.5, 0.5],
        "max_steps": 3,
        "vllm_guided_decoding_regex": r"[ab]{3,8}",
        "generation_kwargs": '{"presence_penalty": 0.5, "temperature": 1.5, "min_new_tokens": 4}',
        "curriculum_column": "level",
        "log_completions": "true",
        "log_unique_prompts": "true",
        "report_to": "tensorboard",
    }
    folder = cli.finish("extras", **words)
    found = completion_rows(folder)
    assert all(re.fullmatch("[ab]{4,8}", row["completion"]) for row in found)
    levels = [row["columns"]["level"] for row in found]
    assert levels == sorted(levels)
    assert {row["columns"]["from"] for row in found} == {"a", "b"}
    logged = log_rows(folder)
    assert {row["mismatch/biased"] for row in logged} == {1.0}
    assert {row["completions/unique_prompts"] for row in logged} == {2.0}
    settings = json.loads((folder / "args.json").read_text())
    assert settings["temperature"] == 1.5
    assert settings["_provenance"]["temperature"]["rule"] == "from --generation_kwargs"
    assert "biases the gradient" in cli.printed


LIGER = """
def _apply_liger_kernel_to_instance(model, **config):
    print("patched", type(model).__name__, sorted(config.items()), flush=True)
"""


def test_ligers_kernels_reach_the_policy_but_not_its_loss(cli, tmp_path):
    package = tmp_path / "packages" / "liger_kernel"
    described = package.with_name("liger_kernel-0.8.5.dist-info")
    for folder in (package, described):
        folder.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "transformers.py").write_text(LIGER)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: liger_kernel\nVersion: 0.8.5\n")
    path = {"PYTHONPATH": f"{ROOT}{os.pathsep}{package.parent}"}
    cli.finish("liger", use_liger_kernel="true", liger_kernel_config='{"rope":false}', max_steps=1, variables=path)
    assert "patched Qwen2ForCausalLM [('fused_linear_cross_entropy', False), ('rope', False)]" in cli.printed
