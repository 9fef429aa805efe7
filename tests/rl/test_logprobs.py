import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swift.rl.logprobs import entropy, selected_logprobs, selected_logprobs_and_entropy


def reference(logits_NV, ids_N, temperature):
    logprobs_NV = torch.log_softmax(logits_NV / temperature, dim=1)
    selected_N = logprobs_NV.gather(1, ids_N.unsqueeze(1)).squeeze(1)
    entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(dim=1)
    return selected_N, entropy_N


def example(rows, vocabulary, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits_NV = 4 * torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64)
    ids_N = torch.randint(vocabulary, (rows,), generator=generator)
    return logits_NV.to(dtype).requires_grad_(), ids_N, torch.randn(rows, generator=generator).double()


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 13), st.integers(1, 10), st.sampled_from([0.3, 1.0, 1.7]))
def test_values_and_gradients_are_those_of_log_softmax_for_every_chunking(rows, vocabulary, chunk, temperature):
    logits_NV, ids_N, weights_N = example(rows, vocabulary)
    expected_N, _ = reference(logits_NV, ids_N, temperature)
    (expected_grad,) = torch.autograd.grad((expected_N * weights_N).sum(), logits_NV)
    actual_N = selected_logprobs(logits_NV, ids_N, temperature=temperature, chunk_rows=chunk)
    (actual_grad,) = torch.autograd.grad((actual_N * weights_N).sum(), logits_NV)
    torch.testing.assert_close(actual_N, expected_N, rtol=0, atol=1e-12)
    torch.testing.assert_close(actual_grad, expected_grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("entropy_weight", [0.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_entropy_carries_its_gradient_beside_that_of_the_logprob(chunk, entropy_weight):
    logits_NV, ids_N, weights_N = example(7, 11)
    expected = reference(logits_NV, ids_N, 0.8)
    actual = selected_logprobs_and_entropy(logits_NV, ids_N, temperature=0.8, chunk_rows=chunk)

    def gradient(logprobs_N, entropy_N):
        total = (weights_N * (logprobs_N + entropy_weight * entropy_N * entropy_N)).sum()
        return torch.autograd.grad(total, logits_NV)[0]

    torch.testing.assert_close(actual[1], expected[1], rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient(*actual), gradient(*expected), rtol=0, atol=1e-12)


def test_entropy_alone_passes_gradcheck():
    logits_NV, _, _ = example(3, 5)
    assert torch.autograd.gradcheck(lambda z: entropy(z, temperature=1.3, chunk_rows=2), (logits_NV,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_logits_are_computed_in_fp32_and_their_gradient_comes_back_narrow(dtype):
    logits_NV, ids_N, _ = example(6, 50, dtype)
    actual_N = selected_logprobs(logits_NV, ids_N, chunk_rows=4)
    expected_N, _ = reference(logits_NV.detach().float(), ids_N, 1.0)
    assert actual_N.dtype == torch.float32
    torch.testing.assert_close(actual_N, expected_N, rtol=1e-6, atol=1e-6)
    actual_N.sum().backward()
    assert logits_NV.grad.dtype == dtype
    exact = logits_NV.detach().double().requires_grad_()
    reference(exact, ids_N, 1.0)[0].sum().backward()
    torch.testing.assert_close(logits_NV.grad.double(), exact.grad, rtol=1e-2, atol=1e-6)


def test_a_forbidden_token_has_no_probability_and_poisons_nothing():
    logits_NV = torch.tensor([[0.0, -torch.inf, 1.0]], dtype=torch.float64, requires_grad=True)
    logprobs_N, entropy_N = selected_logprobs_and_entropy(logits_NV, torch.tensor([2]))
    expected_N, expected_entropy_N = reference(logits_NV.detach()[:, [0, 2]], torch.tensor([1]), 1.0)
    torch.testing.assert_close(logprobs_N, expected_N)
    torch.testing.assert_close(entropy_N, expected_entropy_N)
    (logprobs_N + entropy_N).sum().backward()
    assert logits_NV.grad.isfinite().all() and logits_NV.grad[0, 1] == 0


def test_large_logits_do_not_overflow():
    logits_NV = torch.tensor([[3e4, 2e4, -3e4]])
    logprobs_N, entropy_N = selected_logprobs_and_entropy(logits_NV, torch.tensor([0]), temperature=0.01)
    assert logprobs_N.item() == 0.0 and entropy_N.item() == 0.0


def test_no_rows_give_no_logprobs():
    logits_NV = torch.zeros(0, 5, requires_grad=True)
    logprobs_N = selected_logprobs(logits_NV, torch.zeros(0, dtype=torch.long))
    assert logprobs_N.shape == (0,)
    logprobs_N.sum().backward()
    assert logits_NV.grad.shape == (0, 5)


def test_the_forward_and_backward_hold_one_chunk_in_fp32_besides_the_gradient():
    logits_NV, ids_N, _ = example(64, 512, torch.bfloat16)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.dtype == torch.float32:
                largest = max(largest, result.untyped_storage().nbytes())
            return result

    with Watch():
        selected_logprobs(logits_NV, ids_N, chunk_rows=4).sum().backward()
    assert largest == 4 * 512 * 4


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_without_logprobs_is_refused(temperature):
    with pytest.raises(ValueError, match="must be positive"):
        selected_logprobs(torch.zeros(1, 2), torch.tensor([0]), temperature=temperature)


def test_mismatched_shapes_are_refused():
    with pytest.raises(ValueError, match=r"logits \(2, 3\) and ids \(1,\)"):
        selected_logprobs(torch.zeros(2, 3), torch.tensor([0]))
