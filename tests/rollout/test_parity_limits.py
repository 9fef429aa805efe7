"""The table of limits, the measures that are held against it, and the contract of a completion."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from swift.rollout.parity.tolerance import Gaps, Sample, contract_faults, limits_for, measure
from swift.types import Completion, Request, SamplingParams


def gaps(*, maximum=0.0, mean=0.0, k3=0.0):
    return Gaps(10, mean, maximum, maximum, k3, None)


TABLE = [
    # trainer, engine, device, tf32: measure, passes, is a warning, is refused
    (("float32", "float32", "cpu", False), "maximum", 1e-5, 1e-4, 1.1e-4),
    (("float32", "float32", "cuda", False), "maximum", 1e-4, 1e-3, 1.1e-3),
    (("bfloat16", "bfloat16", "cpu", False), "mean", 1e-2, 5e-2, 5.1e-2),
    (("bfloat16", "bfloat16", "cpu", False), "k3", 1e-4, 1e-3, 1.1e-3),
    (("float32", "bfloat16", "cuda", False), "mean", 1e-2, 5e-2, 5.1e-2),
    (("float32", "float16", "cpu", False), "k3", 1e-4, 1e-3, 1.1e-3),
    (("bfloat16", "bfloat16", "cuda", False), "mean", 2e-2, 5e-2, 5.1e-2),
    (("bfloat16", "float16", "cuda", False), "k3", 1e-3, 1e-2, 1.1e-2),
    (("float32", "float32", "cuda", True), "mean", 2e-2, 5e-2, 5.1e-2),
]


@pytest.mark.parametrize(("case", "name", "passes", "warns", "refuses"), TABLE)
def test_the_table(case, name, passes, warns, refuses):
    trainer, engine, device, tf32 = case
    limits = limits_for(trainer, engine, device, tf32=tf32)
    short = {"maximum": "max"}.get(name, name)
    assert limits.judge(gaps(**{name: passes})) == ("pass", "")
    assert limits.judge(gaps(**{name: passes * 1.01}))[0] == "warn"
    assert limits.judge(gaps(**{name: warns}))[0] == "warn"
    assert limits.judge(gaps(**{name: refuses})) == ("refuse", f"{short} {refuses:.1e} above {warns:.0e}")


@pytest.mark.parametrize("case", [("float32", "int4", "cuda"), ("uint8", "bfloat16", "cuda")])
def test_quantised_weights_are_only_refused_far_off(case):
    for quantised in (limits_for(*case), limits_for("bfloat16", "bfloat16", "cuda", quantised=True)):
        assert quantised.judge(gaps(maximum=5.0, mean=0.5, k3=0.1))[0] == "pass"
        assert quantised.judge(gaps(k3=0.11))[0] == "refuse"


def test_a_gap_that_is_no_number_is_refused():
    limits = limits_for("float32", "float32", "cpu")
    assert limits.judge(gaps(maximum=math.nan))[0] == "refuse"
    assert limits.judge(gaps(maximum=math.inf))[0] == "refuse"


def test_tf32_is_what_torch_is_set_to():
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert limits_for("float32", "float32", "cuda").row == "16 bits on GPU"
        torch.set_float32_matmul_precision("highest")
        assert limits_for("float32", "float32", "cuda").row == "float32 on GPU"
    finally:
        torch.set_float32_matmul_precision(before)


def drawn(ids, logprobs, reason="length", *, prompt=0, tokens=3, **fields):
    request = Request("0/0", [1, 2], SamplingParams(max_new_tokens=tokens, stop_token_ids=(8,)))
    return Sample(request, prompt, Completion("0/0", ids, logprobs, reason, **fields))


def test_the_measures_of_three_tokens_by_hand():
    found = measure([drawn([4, 5], [-1.0, -2.0]), drawn([6], [-0.5], prompt=1)], torch.tensor([-1.0, -2.1, -0.2]))
    assert found.tokens == 3
    assert found.mean == pytest.approx(0.4 / 3, abs=1e-6)
    assert found.maximum == pytest.approx(0.3, abs=1e-6)
    k3 = [math.exp(d) - 1 - d for d in (0.0, -0.1, 0.3)]
    assert found.k3 == found.whole_k3 == pytest.approx(sum(k3) / 3, abs=1e-6)
    assert found.worst is not None
    assert (found.worst.prompt, found.worst.position, found.worst.token_id) == (1, 0, 6)
    assert (found.worst.engine, found.worst.trainer) == pytest.approx((-0.5, -0.2))


def test_routing_that_differs_for_some_tokens_is_no_fault_of_a_mixture_in_16_bits():
    delta = [0.9] * 5 + [1e-3] * 95
    trainer = torch.tensor(delta) - 1
    few = limits_for("bfloat16", "bfloat16", "cpu", experts=True)
    samples = [drawn([4] * 100, [-1.0] * 100)]
    found = measure(samples, trainer, left_out=few.left_out)
    assert few.judge(found)[0] == "pass"
    assert found.whole_k3 == pytest.approx(sum(math.exp(d) - 1 - d for d in delta) / 100)
    trainer[5:8] = -0.1
    assert few.judge(measure(samples, trainer, left_out=few.left_out))[0] == "refuse"
    trainer[5:8] = -math.inf
    assert measure(samples, trainer, left_out=0.5).k3 == math.inf
    for plain in (limits_for("bfloat16", "bfloat16", "cpu"), limits_for("float32", "float32", "cpu", experts=True)):
        assert plain.left_out == 0


def test_a_token_that_is_impossible_to_the_trainer_is_an_infinite_gap():
    assert measure([drawn([4], [-1.0])], torch.tensor([-math.inf])).maximum == math.inf
    assert measure([drawn([4], [math.nan])], torch.tensor([-1.0])).maximum == math.inf


GOOD = drawn([4, 5, 6], [-1.0, -1.0, -1.0])
STOPPED = drawn([4, 7], [-1.0, -1.0], "stop")


@pytest.mark.parametrize("one", [GOOD, STOPPED, drawn([8], [0.0], "stop"), drawn([4, 5, 7], [-1.0] * 3, "stop")])
def test_completions_that_keep_the_contract(one):
    assert contract_faults([one], end_token_ids=[7], limit=100, version=0) == ""


BROKEN = {
    "end token is missing": drawn([4, 5], [-1.0, -1.0], "stop"),
    "the end token 7 is followed by another": drawn([4, 7, 7], [-1.0] * 3, "stop"),
    "the end token 8 is not the last token": drawn([8, 4, 5], [-1.0] * 3),
    "'length' with an end token in last place": drawn([4, 5, 7], [-1.0] * 3),
    "3 tokens came with 2 log-probs": drawn([4, 5, 6], [-1.0, -1.0]),
    "not finite or above 0": drawn([4, 5, 6], [-1.0, 0.5, -1.0]),
    "2 tokens with finish reason 'length' where 3 are the limit": drawn([4, 5], [-1.0, -1.0]),
    "4 tokens with finish reason 'length'": drawn([4, 5, 6, 4], [-1.0] * 4),
    "marked with version 1 where 0 was synced": drawn([4, 5, 6], [-1.0] * 3, versions=[(0, 0, 1), (1, 1, 3)]),
    "ended with 'abort'": drawn([4], [-1.0], "abort"),
}


@pytest.mark.parametrize("text", BROKEN)
def test_completions_that_break_it(text):
    found = contract_faults([GOOD, replace(BROKEN[text], prompt=5)], end_token_ids=[7], limit=100, version=0)
    assert any(text in one and one.endswith("(prompt 5)") for one in found.split("; ")), found


def test_the_context_is_a_limit_too():
    assert contract_faults([drawn([4], [-1.0])], end_token_ids=[], limit=3, version=0) == ""


def test_deeper_models_may_differ_more():
    usual, same = limits_for("bfloat16", "bfloat16", "cuda"), limits_for("bfloat16", "bfloat16", "cuda", layers=24)
    assert same == usual
    deep = limits_for("bfloat16", "bfloat16", "cuda", layers=96, experts=True)
    assert deep.row == "16 bits on GPU, 96 layers, experts"
    assert deep.measures["mean"][1] == pytest.approx(5e-2 * 4**0.55)
    assert deep.measures["k3"][1] == pytest.approx(1e-2 * 4**1.1)
    assert deep.judge(gaps(mean=1e-1))[0] == "warn" and deep.judge(gaps(mean=1.1e-1))[0] == "refuse"
    assert limits_for("float32", "int4", "cuda", layers=96) == limits_for("float32", "int4", "cuda")
