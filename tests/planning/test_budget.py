"""What a token of a micro-batch takes in memory, by which a run on an accelerator chooses its micro-batches."""

import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from gpu_runs import GRPO, LONG, on_gpu

from swift.arguments import parse
from swift.arguments.derived import Machine
from swift.models.policy import check_policy
from swift.planning.budget import bytes_of_run, main
from swift.planning.devices import find_device
from swift.planning.sharded import World
from swift.planning.step import TRACED_TOKENS, Shape, trace_step
from swift.trainers.distributed import Collectives
from swift.trainers.grpo.arguments import trainer_settings
from swift.trainers.memory import traced
from swift.trainers.micro_batches import Limits
from swift.trainers.token_budget import MicroBatchPlanner

__all__ = ["on_gpu"]

WORDS = "rlhf --rlhf_type grpo --dataset rows.jsonl --reward_funcs accuracy --num_generations 2 --beta 0"


def words_of(folder, **flags):
    given = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    return [*WORDS.split(), "--model", str(folder), *given]


SHORT = [("full", "float32", "true"), ("lora", "bfloat16", "false")]
ALL = itertools.product(("full", "lora"), ("float32", "bfloat16"), ("true", "false"))


@pytest.mark.parametrize(
    ("tuner", "dtype", "recomputes"), [pytest.param(*one, marks=[] if one in SHORT else LONG) for one in ALL]
)
def test_it_is_what_a_step_with_more_tokens_takes_more(nano_folders, tuner, dtype, recomputes):
    flags = {"tuner_type": tuner, "gradient_checkpointing": recomputes, "torch_dtype": dtype}
    words = words_of(nano_folders["qwen3"], **flags)
    args = parse(words[0], words[1:], {}, machine=Machine(True, 1)).args
    peaks = []
    for tokens in (TRACED_TOKENS, 2 * TRACED_TOKENS):
        args.max_tokens_per_micro_batch = tokens
        cost = trace_step(
            check_policy(args, weights=False).train(),
            {},
            trainer_settings(args),
            Shape(2, 1, tokens // 8, tokens - tokens // 8),
            find_device("h100-80gb"),
            optimizer=lambda policy: None,
            recomputes=args.gradient_checkpointing,
            free=lambda held: 1,
        )
        assert cost.micro_batches == 2
        peaks.append(cost.training)
    assert bytes_of_run(words) == pytest.approx((peaks[1] - peaks[0]) / TRACED_TOKENS, rel=0.01)


def test_a_plan_with_fsdp_holds_the_shards_only_whoever_gives_the_budget(nano_folders):
    words, held = words_of(nano_folders["qwen3"], tuner_type="full", torch_dtype="float32"), []
    for tokens in (None, TRACED_TOKENS):
        args = parse(words[0], words[1:], {}, machine=Machine(True, 1)).args
        args.max_tokens_per_micro_batch = tokens
        policy = check_policy(args, weights=False).train()
        cost = trace_step(
            policy,
            {},
            trainer_settings(args),
            Shape(1, 1, 100, TRACED_TOKENS - 100),
            find_device("h100-80gb"),
            optimizer=lambda policy: torch.optim.AdamW(policy.parameters(), lr=1e-6),
            recomputes=False,
            free=lambda held: 1 << 40,
            world=World(4, fsdp="full_shard", dtype=torch.float32),
        )
        held.append((cost.weights, cost.resident, cost.training))
    assert held[0] == held[1]
    assert held[0][0] == pytest.approx(cost.parameters, rel=0.3), "4 bytes, a quarter of them"


def test_a_process_of_its_own_counts_it(nano_folders, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")  # of the run
    words = words_of(nano_folders["qwen2"], tuner_type="lora")
    masked = [*words, "--vllm_server_api_key", "***"]  # as runs write it
    assert traced.TracedActivations(masked).result() == (bytes_of_run(words), "")


def test_what_cannot_be_traced_is_said(tmp_path, nano_folders, capsys):
    main(words_of(tmp_path / "none"))
    assert "no such" in json.loads(capsys.readouterr().out)["obstacle"]
    count, reason = traced.TracedActivations(["rlhf", "--no_such_flag", "1"]).result()
    assert count is None and "no_such_flag" in reason


@pytest.mark.parametrize(("count", "reason"), [(1000, ""), (None, "its router reads numbers")])
def test_the_budget_follows_it(nano_folders, small_model, count, reason):
    model, said = small_model("qwen3"), []

    def planner(device):
        limits = Limits(None, None)
        return MicroBatchPlanner(model, Collectives(), limits, per_device=1, device=device, say=said.append)

    plain, counted = planner(torch.device("meta")), planner(torch.device("meta"))
    counted.traced = SimpleNamespace(result=lambda: (count, reason))
    counted.per_token = counted._count()
    free = 1 << 24
    expected = plain.budget(whole_logits=False, has_state=True, free=free)
    tokens = counted.budget(whole_logits=False, has_state=True, free=free)
    if count is None:
        assert tokens == expected
        assert said == ["memory: activations are estimated by a formula (its router reads numbers)"]
    else:
        assert tokens != expected and not said
        assert counted.budget(whole_logits=True, has_state=True, free=free) == plain.budget(
            whole_logits=True, has_state=True, free=free
        ), "which the trace does not know"


@pytest.mark.long
def test_a_run_on_a_gpu_asks_for_it(on_gpu):
    code, err, _ = on_gpu(GRPO.replace(" --max_tokens_per_micro_batch 60", ""), steps=2)
    assert code == 0, err[-3000:]
    assert "estimated by a formula" not in (on_gpu.folder / "stdout.txt").read_text()
