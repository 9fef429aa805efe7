"""Log-probs straight from hidden states equal log_softmax over whole logits, in every way of keeping and cutting."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from swift.rl.linear_logprobs import choose_way, linear_logprobs
from swift.rl.logit_blocks import LogitMap, block_shape

CUTS = [(100, 100), (3, 100), (100, 4), (2, 5), (1, 1)]
MAPS = [
    LogitMap(),
    LogitMap(temperature=0.7),
    LogitMap(scale=0.25),
    LogitMap(softcap=3.0),
    LogitMap(scale=1.5, softcap=2.0, temperature=1.3),
]


def reference(hidden, weight, bias, ids, logit_map):
    logits = (hidden @ weight.T + (0 if bias is None else bias)) * logit_map.scale
    if logit_map.softcap is not None:
        logits = logit_map.softcap * torch.tanh(logits / logit_map.softcap)
    logprobs = torch.log_softmax(logits / logit_map.temperature, dim=1)
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


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("logit_map", MAPS)
@pytest.mark.parametrize("entropy", ["none", "value", "gradient"])
@pytest.mark.parametrize(("keep_bytes", "frozen"), [(2**20, False), (0, False), (0, True)])
def test_values_and_gradients_are_those_of_log_softmax(cut, logit_map, entropy, keep_bytes, frozen):
    hidden, weight, bias, ids = example(frozen=frozen)
    bias = None if frozen else bias
    mine = linear_logprobs(
        hidden, weight, ids, bias_V=bias, logit_map=logit_map, entropy=entropy, keep_bytes=keep_bytes, block=cut
    )
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


@pytest.mark.parametrize(("keep_bytes", "frozen"), [(2**20, False), (0, False), (0, True)])
@pytest.mark.parametrize("entropy", ["none", "gradient"])
def test_the_backward_pass_is_the_derivative_of_the_forward_pass(keep_bytes, frozen, entropy):
    hidden, weight, bias, ids = example(3, 2, 5, frozen=frozen)
    logit_map = LogitMap(scale=0.8, softcap=4.0, temperature=1.2)

    def function(hidden, weight, bias):
        pair = linear_logprobs(
            hidden, weight, ids, bias_V=bias, logit_map=logit_map, entropy=entropy, keep_bytes=keep_bytes, block=(2, 3)
        )
        return pair if entropy != "none" else pair[0]

    assert torch.autograd.gradcheck(function, (hidden, weight, None if frozen else bias))


def test_an_entropy_alone_has_its_gradient():
    hidden, weight, _, ids = example(3, 2, 5)
    for keep_bytes in (0, 2**20):
        assert torch.autograd.gradcheck(
            lambda h, w, keep=keep_bytes: linear_logprobs(h, w, ids, entropy="gradient", keep_bytes=keep)[1],
            (hidden, weight),
        )


def test_a_bias_alone_can_learn():
    hidden, weight, bias, ids = example(frozen=True)
    hidden = hidden.detach()
    mine = linear_logprobs(hidden, weight, ids, bias_V=bias, block=(3, 4))
    theirs = reference(hidden, weight, bias, ids, LogitMap())
    torch.testing.assert_close(gradients(mine, [bias], "none"), gradients(theirs, [bias], "none"), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("entropy", ["none", "gradient"])
@pytest.mark.parametrize(("keep_bytes", "frozen"), [(2**20, False), (0, False), (0, True)])
@pytest.mark.parametrize("cut", [(100, 1000), (100, 64), (16, 64)])
def test_narrow_inputs_are_as_exact_as_whole_logits(dtype, entropy, keep_bytes, frozen, cut):
    hidden, weight, bias, ids = example(50, 32, 300, dtype=dtype, scale=0.5, frozen=frozen)
    bias = None if frozen else bias
    inputs = [hidden, weight, bias]
    exact_inputs = [None if one is None else one.detach().double().requires_grad_(one.requires_grad) for one in inputs]
    exact = reference(*exact_inputs, ids, LogitMap())
    mine = linear_logprobs(hidden, weight, ids, bias_V=bias, entropy=entropy, keep_bytes=keep_bytes, block=cut)
    whole = torch.nn.functional.linear(hidden, weight, bias)
    plain_logprobs = torch.log_softmax(whole.float(), dim=1)
    plain = (plain_logprobs.gather(1, ids.unsqueeze(1)).squeeze(1), -(plain_logprobs.exp() * plain_logprobs).sum(1))
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
def test_the_pull_of_a_nearly_certain_token_is_not_rounded_away(dtype):
    hidden = torch.tensor([[1.0, 0.0]], dtype=dtype, requires_grad=True)
    weight = torch.tensor([[9.0, 1.0], [0.0, 3.0]], dtype=dtype)
    logprobs, _ = linear_logprobs(hidden, weight, torch.tensor([0]), keep_bytes=0)
    logprobs.sum().backward()
    other = 1 / (1 + torch.tensor(9.0, dtype=torch.float64).exp())
    expected = other * torch.tensor([9.0, -2.0], dtype=torch.float64)
    torch.testing.assert_close(hidden.grad[0].double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("cut", [(4, 4), (4, 1)])
@pytest.mark.parametrize("frozen", [False, True])
def test_large_logits_do_not_overflow(cut, frozen):
    hidden = torch.tensor([[1.0], [1.0]], requires_grad=True)
    weight = torch.tensor([[-3e4], [2e4], [3e4], [-3e4]], requires_grad=not frozen)
    for keep_bytes in (0, 2**20):
        logprobs, entropies = linear_logprobs(
            hidden, weight, torch.tensor([2, 1]), entropy="gradient", keep_bytes=keep_bytes, block=cut
        )
        assert logprobs.tolist() == [0.0, -1e4]
        assert entropies.tolist() == [0.0, 0.0]
        (grad,) = torch.autograd.grad(logprobs.sum() + entropies.sum(), hidden)
        assert grad.tolist() == [[0.0], [-1e4]]


def test_no_rows_give_no_logprobs_and_no_gradient():
    for frozen in (False, True):
        hidden, weight, _, ids = example(0, frozen=frozen)
        logprobs, entropies = linear_logprobs(hidden, weight, ids, entropy="gradient")
        assert logprobs.shape == entropies.shape == (0,)
        logprobs.sum().backward()
        assert hidden.grad.shape == hidden.shape
        assert frozen or not weight.grad.any()


def test_without_gradients_nothing_is_kept():
    hidden, weight, bias, ids = example()
    with torch.no_grad():
        logprobs, entropies = linear_logprobs(hidden, weight, ids, bias_V=bias, entropy="value", block=(3, 4))
    assert not logprobs.requires_grad and not entropies.requires_grad
    expected = reference(hidden, weight, bias, ids, LogitMap())
    torch.testing.assert_close((logprobs, entropies), expected, rtol=0, atol=1e-12)


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
        (999, True, False, "none", "direction"),
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


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("num_rows", [0, 1, 100, 5000, 100_000])
@pytest.mark.parametrize("vocabulary", [3, 263, 152_000])
def test_a_block_is_never_larger_than_its_buffer(num_rows, vocabulary, on_cpu):
    rows, columns = block_shape(num_rows, vocabulary, on_cpu=on_cpu)
    assert 1 <= columns <= vocabulary and 1 <= rows <= max(1, num_rows)
    assert rows * columns <= (2**20 if on_cpu else 2**26)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("entropy", ["none", "gradient"])
def test_no_tensor_grows_with_rows_times_vocabulary(frozen, entropy):
    """Every tensor of both passes is a block, or as large as an input."""
    hidden, weight, bias, ids = example(512, 16, 1024, dtype=torch.float32, frozen=frozen)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.untyped_storage().nbytes())
            return result

    with Watch():
        logprobs, entropies = linear_logprobs(
            hidden, weight, ids, bias_V=None if frozen else bias, entropy=entropy, keep_bytes=0, block=(64, 128)
        )
        (logprobs.sum() + (0 if entropies is None else entropies.sum())).backward()
    assert largest == max(4 * 64 * 128, 4 * 16 * 1024)


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


def test_shapes_and_types_that_do_not_fit_are_refused():
    hidden, weight, bias, ids = example()
    with pytest.raises(ValueError, match=r"hidden \(7, 5\), weight \(11, 5\) and ids \(6,\) are not"):
        linear_logprobs(hidden, weight, ids[:6])
    with pytest.raises(ValueError, match=r"bias \(3,\)"):
        linear_logprobs(hidden, weight, ids, bias_V=bias[:3])
    with pytest.raises(ValueError, match="not of one type"):
        linear_logprobs(hidden.float(), weight, ids)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_without_log_probs_is_refused_here_too(temperature):
    hidden, weight, _, ids = example()
    with pytest.raises(ValueError, match="must be positive"):
        linear_logprobs(hidden, weight, ids, logit_map=LogitMap(temperature=temperature))
