"""Log-probs from logits, and straight from hidden states, equal log_softmax in every way of keeping and cutting."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from swift.rl.linear_logprobs import LogitMap, choose_way, linear_logprobs
from swift.rl.logprobs import selected_logprobs

MAPS = [
    LogitMap(),
    LogitMap(temperature=0.7),
    LogitMap(scale=0.25),
    LogitMap(softcap=3.0),
    LogitMap(scale=1.5, softcap=2.0, temperature=1.3),
]
WAYS = [(2**20, False), (0, False), (0, True)]
"""Bytes to keep and whether the output layer is frozen: keep, recompute, direction."""


def reference(hidden, weight, bias, ids, logit_map):
    logits = (hidden @ weight.T + (0 if bias is None else bias)) * logit_map.scale
    if logit_map.softcap is not None:
        logits = logit_map.softcap * torch.tanh(logits / logit_map.softcap)
    return of_logits(logits / logit_map.temperature, ids)


def of_logits(logits, ids):
    logprobs = torch.log_softmax(logits, dim=1)
    return logprobs.gather(1, ids.unsqueeze(1)).squeeze(1), -(logprobs.exp() * logprobs).sum(dim=1)


def example(rows=7, hidden=5, vocabulary=11, *, bias=True, dtype=torch.float64, scale=1.5, frozen=False):
    generator = torch.Generator().manual_seed(rows + vocabulary)

    def draw(*shape, learns=True):
        return (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_(learns)

    ids = torch.randint(vocabulary, (rows,), generator=generator)
    return draw(rows, hidden), draw(vocabulary, hidden, learns=not frozen), draw(vocabulary) if bias else None, ids


def gradients(pair, inputs, entropy):
    logprobs, entropies = pair
    weights = torch.linspace(-1, 1, logprobs.numel()).to(logprobs)
    loss = (logprobs * weights).sum()
    if entropy == "gradient":
        loss = loss + (entropies * entropies * weights.flip(0)).sum()
    return torch.autograd.grad(loss, [one for one in inputs if one is not None and one.requires_grad])


class Watch(TorchDispatchMode):
    """The largest tensor that is made, in bytes; of one dtype."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype, self.largest = dtype, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == self.dtype:
            self.largest = max(self.largest, result.untyped_storage().nbytes())
        return result


# --- from hidden states ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [None, 100, 4, 5, 1])
@pytest.mark.parametrize("logit_map", MAPS)
@pytest.mark.parametrize("entropy", ["none", "value", "gradient"])
@pytest.mark.parametrize(("keep_bytes", "frozen"), WAYS)
def test_values_and_gradients_are_those_of_log_softmax(columns, logit_map, entropy, keep_bytes, frozen):
    hidden, weight, bias, ids = example(frozen=frozen)
    bias = None if frozen else bias
    given = {"bias_V": bias, "logit_map": logit_map, "entropy": entropy, "keep_bytes": keep_bytes, "columns": columns}
    mine = linear_logprobs(hidden, weight, ids, **given)
    theirs = reference(hidden, weight, bias, ids, logit_map)
    torch.testing.assert_close(mine[0], theirs[0], rtol=0, atol=1e-12)
    if entropy == "none":
        assert mine[1] is None
    else:
        torch.testing.assert_close(mine[1], theirs[1], rtol=0, atol=1e-12)
        assert mine[1].requires_grad == (entropy == "gradient")
    inputs = [hidden, weight, bias]
    for one, other in zip(gradients(mine, inputs, entropy), gradients(theirs, inputs, entropy), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    with torch.no_grad():
        for one, other in zip(linear_logprobs(hidden, weight, ids, **given), mine, strict=True):
            assert one is None or (torch.equal(one, other) and not one.requires_grad)


@pytest.mark.parametrize("keep_bytes", [0, 2**20])
def test_an_entropy_alone_has_its_gradient_and_a_bias_alone_can_learn(keep_bytes):
    hidden, weight, bias, ids = example(3, 2, 5)
    assert torch.autograd.gradcheck(
        lambda h, w: linear_logprobs(h, w, ids, entropy="gradient", keep_bytes=keep_bytes)[1], (hidden, weight)
    )
    frozen = hidden.detach(), weight.detach()
    mine = linear_logprobs(*frozen, ids, bias_V=bias, keep_bytes=keep_bytes, columns=2)
    theirs = reference(*frozen, bias, ids, LogitMap())
    torch.testing.assert_close(gradients(mine, [bias], "none"), gradients(theirs, [bias], "none"), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("entropy", ["none", "gradient"])
@pytest.mark.parametrize(("keep_bytes", "frozen"), WAYS)
@pytest.mark.parametrize("columns", [1000, 64])
def test_narrow_inputs_are_as_exact_as_whole_logits(dtype, entropy, keep_bytes, frozen, columns):
    hidden, weight, bias, ids = example(50, 32, 300, dtype=dtype, scale=0.5, frozen=frozen)
    bias = None if frozen else bias
    inputs = [hidden, weight, bias]
    exact_inputs = [None if one is None else one.detach().double().requires_grad_(one.requires_grad) for one in inputs]
    exact = reference(*exact_inputs, ids, LogitMap())
    mine = linear_logprobs(hidden, weight, ids, bias_V=bias, entropy=entropy, keep_bytes=keep_bytes, columns=columns)
    plain = of_logits(torch.nn.functional.linear(hidden, weight, bias).float(), ids)
    assert mine[0].dtype == torch.float32
    torch.testing.assert_close(mine[0], plain[0], rtol=1e-5, atol=1e-5)
    found, usual, right = (
        gradients(pair, given, entropy) for pair, given in ((mine, inputs), (plain, inputs), (exact, exact_inputs))
    )
    for one, other, true in zip(found, usual, right, strict=True):
        assert one.dtype == dtype
        error, limit = (one.double() - true).norm(), (other.double() - true).norm()
        assert error <= 1.3 * limit + 1e-3 * true.norm() * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_a_nearly_certain_token_is_not_rounded_away(dtype):
    hidden = torch.tensor([[1.0, 0.0]], dtype=dtype, requires_grad=True)
    weight = torch.tensor([[9.0, 1.0], [0.0, 3.0]], dtype=dtype)
    logprobs, _ = linear_logprobs(hidden, weight, torch.tensor([0]), keep_bytes=0)
    logprobs.sum().backward()
    other = 1 / (1 + torch.tensor(9.0, dtype=torch.float64).exp())
    expected = other * torch.tensor([9.0, -2.0], dtype=torch.float64)
    torch.testing.assert_close(hidden.grad[0].double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("columns", [4, 1])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("keep_bytes", [0, 2**20])
def test_large_logits_do_not_overflow(columns, frozen, keep_bytes):
    hidden = torch.tensor([[1.0], [1.0]], requires_grad=True)
    weight = torch.tensor([[-3e4], [2e4], [3e4], [-3e4]], requires_grad=not frozen)
    for entropy in ("gradient", "value"):  # value: the way of a frozen layer
        logprobs, entropies = linear_logprobs(
            hidden, weight, torch.tensor([2, 1]), entropy=entropy, keep_bytes=keep_bytes, columns=columns
        )
        assert logprobs.tolist() == [0.0, -1e4]
        assert entropies.tolist() == [0.0, 0.0]
        (grad,) = torch.autograd.grad(logprobs.sum() + entropies.sum(), hidden)
        assert grad.tolist() == [[0.0], [-1e4]]


@pytest.mark.parametrize("frozen", [False, True])
def test_no_rows_give_no_logprobs_and_no_gradient(frozen):
    hidden, weight, _, ids = example(0, frozen=frozen)
    logprobs, entropies = linear_logprobs(hidden, weight, ids, entropy="gradient")
    assert logprobs.shape == entropies.shape == (0,)
    logprobs.sum().backward()
    assert hidden.grad.shape == hidden.shape
    assert frozen or not weight.grad.any()


def test_a_second_derivative_is_refused():
    hidden, weight, _, ids = example()
    logprobs, _ = linear_logprobs(hidden, weight, ids)
    (grad,) = torch.autograd.grad(logprobs.square().sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize(
    ("num_bytes", "hidden", "head", "entropy", "way"),
    [
        (10, False, False, "gradient", "value"),
        (10, True, False, "none", "keep"),
        (999, True, False, "value", "direction"),
        (10, True, False, "gradient", "keep"),
        (999, True, False, "gradient", "recompute"),
        (100, True, True, "none", "keep"),
        (101, True, True, "none", "recompute"),
        (101, False, True, "none", "recompute"),
    ],
)
def test_what_is_kept_follows_from_who_learns_and_from_the_budget(num_bytes, hidden, head, entropy, way):
    assert choose_way(num_bytes, hidden_learns=hidden, head_learns=head, entropy=entropy, keep_bytes=100) == way


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("entropy", ["none", "gradient"])
def test_no_tensor_grows_with_rows_times_vocabulary(frozen, entropy):
    """Every tensor of both passes is a block, or as large as an input."""
    hidden, weight, bias, ids = example(512, 16, 4096, dtype=torch.float32, frozen=frozen)
    with Watch(torch.float32) as watch:
        logprobs, entropies = linear_logprobs(
            hidden, weight, ids, bias_V=None if frozen else bias, entropy=entropy, keep_bytes=0, columns=64
        )
        (logprobs.sum() + (0 if entropies is None else entropies.sum())).backward()
    assert watch.largest == max(4 * 512 * 64, 4 * 16 * 4096)


PEAK = """
import resource, sys, torch
torch.set_num_threads(1)
from swift.rl.linear_logprobs import linear_logprobs
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
hidden = torch.randn(int(sys.argv[1]), 8, requires_grad=True)
weight = torch.randn(60_000, 8, requires_grad=True)
ids = torch.zeros(len(hidden), dtype=torch.long)

def work(rows):
    linear_logprobs(hidden[:rows], weight, ids[:rows], entropy="gradient", keep_bytes=0)[0].sum().backward()

work(64)
before = peak()
work(len(hidden))
print(peak() - before)
"""


@pytest.mark.slow
def test_peak_memory_of_a_process_does_not_hold_the_logits():
    """2000 rows of 60 000 logits would be 458 MiB."""
    done = subprocess.run([sys.executable, "-c", PEAK, "2000"], capture_output=True, text=True, check=True, timeout=300)
    assert float(done.stdout) < 50


# --- from logits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("chunk", [1, 3, 100, None])
def test_log_probs_and_entropies_of_logits_have_their_gradients_for_every_chunking(chunk, temperature):
    hidden, weight, _, ids = example()
    logits = (hidden @ weight.T).detach().requires_grad_()
    mine = selected_logprobs(logits, ids, temperature=temperature, chunk_rows=chunk)
    theirs = of_logits(logits / temperature, ids)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    for entropy in ("none", "gradient"):
        found, expected = gradients(mine, [logits], entropy), gradients(theirs, [logits], entropy)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        mine, theirs = selected_logprobs(logits, ids, temperature=temperature), of_logits(logits / temperature, ids)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits_are_upcast_chunk_by_chunk(dtype):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 512, generator=generator).to(dtype).requires_grad_()
    ids = torch.randint(512, (64,), generator=generator)
    with Watch(torch.float32) as watch:
        logprobs, _ = selected_logprobs(logits, ids, chunk_rows=4)
        logprobs.sum().backward()
    assert watch.largest == 4 * 512 * 4
    torch.testing.assert_close(logprobs, of_logits(logits.float(), ids)[0], rtol=1e-6, atol=1e-6)
    exact = logits.detach().double().requires_grad_()
    of_logits(exact, ids)[0].sum().backward()
    assert logits.grad.dtype == dtype
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-2, atol=1e-6)


def test_a_forbidden_token_has_no_probability_and_poisons_nothing():
    logits = torch.tensor([[0.0, -torch.inf, 1.0]], dtype=torch.float64, requires_grad=True)
    found = selected_logprobs(logits, torch.tensor([2]))
    torch.testing.assert_close(found, of_logits(logits.detach()[:, [0, 2]], torch.tensor([1])))
    sum(found).sum().backward()
    assert logits.grad.isfinite().all() and logits.grad[0, 1] == 0


def test_no_logits_give_no_logprobs():
    logits = torch.zeros(0, 5, requires_grad=True)
    logprobs, _ = selected_logprobs(logits, torch.zeros(0, dtype=torch.long))
    assert logprobs.shape == (0,)
    logprobs.sum().backward()
    assert logits.grad.shape == (0, 5)
