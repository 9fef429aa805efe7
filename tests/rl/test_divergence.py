"""Divergences of distillation: TRL's over the whole vocabulary, and the bound of what the teacher's top-k loses."""

from __future__ import annotations

import math

import pytest
import torch
from torch import tensor
from trl.experimental.gkd import GKDTrainer

from swift.rl import linear_distillation
from swift.rl.distillation import generalized_jsd, student_bins, tail_bound, teacher_bins
from swift.rl.linear_distillation import Compared, Head, TopTokens, compare
from swift.rl.linear_logprobs import LogitMap

BETAS = [0.0, 0.1, 0.5, 0.9, 1.0]


def pair(rows, vocabulary, *, scale=3.0, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    student, teacher = scale * torch.randn(2, rows, vocabulary, generator=generator, dtype=dtype)
    return student, teacher


def test_values_by_hand():
    teacher, student = tensor([[0.5, 0.5]]).log(), tensor([[0.9, 0.1]]).log()
    found = [float(generalized_jsd(student, teacher, beta)) for beta in (0, 1, 0.5)]
    forward = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    reverse = 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)
    mixed = 0.5 * (0.5 * math.log(0.5 / 0.7) + 0.5 * math.log(0.5 / 0.3))
    mixed += 0.5 * (0.9 * math.log(0.9 / 0.7) + 0.1 * math.log(0.1 / 0.3))
    assert found == pytest.approx([forward, reverse, mixed], abs=1e-6)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_value_and_gradient_are_trls(beta, temperature):
    student, teacher = pair(11, 50)
    mine, theirs = student.clone().requires_grad_(), student.clone().requires_grad_()
    values = generalized_jsd(*((x / temperature).log_softmax(-1) for x in (mine, teacher)), beta)
    expected = GKDTrainer.generalized_jsd_loss(
        theirs[None], teacher[None], labels=torch.zeros(1, 11).long(), beta=beta, temperature=temperature
    )
    assert float(values.detach().mean()) == pytest.approx(float(expected.detach()), abs=1e-12)
    values.mean().backward()
    expected.backward()
    assert torch.allclose(mine.grad, theirs.grad, atol=1e-12)


@pytest.mark.parametrize("beta", [0.0, 0.05, 0.5, 0.95])
def test_the_error_of_the_likeliest_tokens_is_inside_its_bound(beta):
    """2500 random cases for each beta: flat and peaked distributions, near and far, few and many tokens."""
    generator, tight = torch.Generator().manual_seed(int(100 * beta)), 0.0
    for case in range(50):
        scale, vocabulary = 0.3 + 0.15 * case, int(torch.randint(8, 400, (1,), generator=generator))
        top_k = int(torch.randint(1, vocabulary, (1,), generator=generator))
        student, teacher = pair(50, vocabulary, scale=scale, seed=case)
        student = teacher + student / (1 + case % 5) if case % 3 else student
        student, teacher = student.log_softmax(-1), teacher.log_softmax(-1)
        top, ids = teacher.topk(top_k)
        bins, least = student_bins(student, ids)
        binned, exact = generalized_jsd(bins, teacher_bins(top), beta), generalized_jsd(student, teacher, beta)
        bound = tail_bound(bins, teacher_bins(top), least, beta)
        assert (binned <= exact + 1e-9).all(), "bins never tell more apart"
        assert (exact <= binned + bound + 1e-9).all()
        tight = max(tight, float(((exact - binned) / bound.clamp_min(1e-9)).max()))
    assert tight > 0.3, "the bound is of the size of the error"


def test_the_reverse_kl_of_the_likeliest_tokens_has_no_bound():
    student, teacher = tensor([[0.5, 0.25, 0.25]]).log(), tensor([[0.5, 0.5 - 1e-30, 1e-30]], dtype=torch.float64).log()
    bins, least = student_bins(student.double(), tensor([[0]]))
    binned = generalized_jsd(bins, teacher_bins(teacher[:, :1]), 1.0)
    exact = generalized_jsd(student.double(), teacher, 1.0)
    assert float(binned) == pytest.approx(0, abs=1e-6) and float(exact) > 16
    assert tail_bound(bins, teacher_bins(teacher[:, :1]), least, 1.0) is None


def test_all_tokens_among_the_likeliest_give_the_exact_divergence():
    student, teacher = (x.log_softmax(-1) for x in pair(5, 9))
    top, ids = teacher.topk(9)
    bins, _ = student_bins(student, ids)
    for beta in BETAS:
        expected = generalized_jsd(student, teacher, beta)
        assert torch.allclose(generalized_jsd(bins, teacher_bins(top), beta), expected, atol=1e-9)


def heads(rows, width, vocabulary, logit_map):
    generator = torch.Generator().manual_seed(3)
    hidden, other = torch.randn(2, rows, width, generator=generator, dtype=torch.float64)
    weight, theirs = torch.randn(2, vocabulary, width, generator=generator, dtype=torch.float64)
    bias = torch.randn(vocabulary, generator=generator, dtype=torch.float64)
    student = Head(hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), logit_map)
    return student, Head(other, theirs, None, logit_map)


@pytest.mark.parametrize("top_k", [None, 5])
@pytest.mark.parametrize("logit_map", [LogitMap(), LogitMap(0.5, 2.0)], ids=["plain", "capped"])
def test_blocks_computed_again_give_the_gradients_of_whole_logits(monkeypatch, top_k, logit_map):
    student, teacher = heads(13, 6, 40, logit_map)
    ids = torch.arange(13) % 40

    def gradients():
        found = Compared(*compare(student, ids, teacher=teacher, beta=0.3, top_k=top_k))
        loss = (found.divergence_N - 0.2 * found.logprobs_N).sum()
        inputs = student.hidden_NH, student.weight_VH, student.bias_V
        return loss, torch.autograd.grad(loss, inputs)

    loss, whole = gradients()
    monkeypatch.setattr(linear_distillation, "KEEP_BYTES", 0)
    monkeypatch.setattr(linear_distillation, "BLOCK_ELEMENTS", {"cpu": 4 * 40, "device": 0})
    in_blocks, parts = gradients()
    assert float(in_blocks) == pytest.approx(float(loss), abs=1e-10)
    assert all(torch.allclose(a, b, atol=1e-10) for a, b in zip(whole, parts, strict=True))
    logits = (student.hidden_NH @ student.weight_VH.T + student.bias_V) * logit_map.scale
    if logit_map.softcap:
        logits = logit_map.softcap * (logits / logit_map.softcap).tanh()
    found = Compared(*compare(student, ids, teacher=teacher, beta=0.3, top_k=top_k, temperature=1.7))
    for logprobs, temperature in ((found.logprobs_N, 1.0), (found.sampling_logprobs_N, 1.7)):
        expected = (logits / temperature).log_softmax(-1).gather(1, ids[:, None])[:, 0]
        assert torch.allclose(logprobs, expected)
    assert (found.bound_N is None) == (top_k is None)


def test_a_teacher_elsewhere_is_the_local_one_with_its_likeliest_tokens():
    student, teacher = heads(7, 6, 40, LogitMap())
    ids = torch.zeros(7, dtype=torch.long)
    top = TopTokens(*reversed(teacher.logits(slice(None)).log_softmax(-1).topk(4)))
    for beta in BETAS:
        local = compare(student, ids, teacher=teacher, beta=beta, top_k=4)
        remote = compare(student, ids, teacher=top, beta=beta)
        assert all(torch.equal(a, b) for a, b in zip(local, remote, strict=True))


def test_tokens_that_one_of_the_two_has_as_padding_are_left_out():
    student, teacher = heads(5, 6, 40, LogitMap())
    wider = Head(teacher.hidden_NH, torch.cat([teacher.weight_VH, torch.ones(3, 6, dtype=torch.float64)]))
    ids = torch.zeros(5, dtype=torch.long)
    assert torch.equal(
        compare(student, ids, teacher=wider, beta=0.5)[0], compare(student, ids, teacher=teacher, beta=0.5)[0]
    )
    narrow = Head(teacher.hidden_NH, teacher.weight_VH[:30])
    expected = generalized_jsd(
        student.logits(slice(None))[:, :30].log_softmax(-1), narrow.logits(slice(None)).log_softmax(-1), 0.5
    )
    assert torch.allclose(compare(student, ids, teacher=narrow, beta=0.5)[0], expected)
