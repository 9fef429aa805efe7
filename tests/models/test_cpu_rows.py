"""Norms, gates and rotary positions: every instruction set and PyTorch's operations against float64 and autograd."""

import ctypes
import shutil

import pytest
import torch

from swift.errors import ConfigError
from swift.models import cpu_rows
from swift.native import Kernels, library_path


@pytest.fixture(params=["avx512", "avx2", "plain", "pytorch"])
def way(request, tmp_path, monkeypatch):
    """Compute with this instruction set, or without kernels."""
    if request.param == "pytorch":
        monkeypatch.setattr(cpu_rows, "kernels", lambda: None)
        return None
    if library_path() is None:
        pytest.skip("swift was installed without a compiler")
    try:
        found = Kernels(ctypes.CDLL(str(shutil.copy(library_path(), tmp_path))), request.param)
    except ConfigError:
        pytest.skip(f"this processor has no {request.param}")
    monkeypatch.setattr(cpu_rows, "kernels", lambda: found)
    return found


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def near(found, expected, bound=2e-6):
    assert found.shape == expected.shape
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() <= bound * (1 + expected.abs().max())


def used(monkeypatch, way, name):
    """How often a kernel is called from now on."""
    calls = []
    if way is not None:
        own = getattr(way, name)
        monkeypatch.setattr(way, name, lambda *given: calls.append(1) or own(*given))
    return calls


@pytest.mark.parametrize("shape", [(1, 16), (7, 48), (600, 128), (600, 50), (3, 1)])
def test_gates_and_their_gradients(shape, way, threads, monkeypatch):
    torch.manual_seed(0)
    calls = used(monkeypatch, way, "gate"), used(monkeypatch, way, "gate_back")
    gates, ups, grads = torch.randn(3, *shape) * 4
    exact = [one.double().requires_grad_() for one in (gates, ups)]
    expected = torch.nn.functional.silu(exact[0]) * exact[1]
    dgates, dups = torch.autograd.grad(expected, exact, grads.double())
    near(cpu_rows.gated(gates, ups), expected)
    found = cpu_rows.gated_gradients(grads.clone(), gates, ups)
    for one, other in zip(found, (dgates, dups, expected), strict=True):
        near(one, other)
    if way is not None:
        assert all(len(one) == (shape[1] % 16 == 0) for one in calls)


def test_gates_far_out_are_their_limits_and_nan_stays(way):
    gates = torch.tensor([[-1000.0, 1000.0, torch.nan, -torch.inf, torch.inf] + [0.0] * 11])
    ups = torch.ones(1, 16)
    found = cpu_rows.gated(gates, ups)[0]
    assert found[0].abs() < 1e-30 and found[1] == 1000.0 and found[2].isnan() and found[4] == torch.inf
    dgates, dups, _ = cpu_rows.gated_gradients(torch.ones(1, 16), gates, ups)
    assert dgates[0, 0].abs() < 1e-30 and dgates[0, 1] == 1.0 and dgates[0, 2].isnan()
    assert dups[0, 1] == 1000.0 and dgates[0, 5] == 0.5


@pytest.mark.parametrize("shape", [(1, 16), (5, 3, 32), (600, 128), (600, 50), (2, 1, 1024)])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("added", [False, True])
def test_norms_and_their_gradients(shape, weighted, added, way, threads, monkeypatch):
    torch.manual_seed(0)
    calls = used(monkeypatch, way, "norm"), used(monkeypatch, way, "norm_back")
    states, grads, plus = torch.randn(3, *shape)
    weight = torch.rand(shape[-1]) + 0.5
    exact = states.double().requires_grad_()
    inverse = torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + 1e-5)
    expected = exact * inverse * (weight.double() if weighted else 1.0)
    [dstates] = torch.autograd.grad(expected, exact, grads.double())
    if weighted:
        output, result, found_inverse = cpu_rows.weighted_norm(states, weight, 1e-5)
    else:
        result, found_inverse = cpu_rows.normed(states, 1e-5)
        output = result
    near(output, expected)
    near(found_inverse, inverse)
    given = grads.clone()
    more = {"weight": weight} if weighted else {}
    more |= {"plus": plus} if added else {}
    near(cpu_rows.norm_gradient(given, result, found_inverse, **more), dstates + (plus.double() if added else 0))
    assert not weighted or torch.equal(given, grads)
    if way is not None:
        assert all(len(one) == (shape[-1] % 16 == 0) for one in calls)


def test_a_weight_of_another_width_is_refused(way):
    with pytest.raises(RuntimeError, match="must match"):
        cpu_rows.weighted_norm(torch.randn(4, 32), torch.ones(16), 1e-5)


LAYOUTS = {
    "plain": lambda T, H, D: torch.randn(1, T, H, D),
    "a part of a product": lambda T, H, D: torch.randn(1, T, (H + 3) * D)[..., D : (H + 1) * D].view(1, T, H, D),
    "turned around": lambda T, H, D: torch.randn(1, H, T, D).transpose(1, 2),
    "the same for all": lambda T, H, D: torch.randn(1, 1, 1, D).expand(1, T, H, D),
    "two rows": lambda T, H, D: torch.randn(2, T, H, D),
    "two rows turned around": lambda T, H, D: torch.randn(2, H, T, D).transpose(1, 2),
    "every other number": lambda T, H, D: torch.randn(1, T, H, 2 * D)[..., ::2],
}


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize(("tokens", "heads", "depth"), [(5, 1, 16), (300, 4, 32), (7, 3, 6)])
@pytest.mark.parametrize("shared", [True, False])
def test_rotary_positions_and_back(layout, tokens, heads, depth, shared, way, threads):
    torch.manual_seed(0)
    states = LAYOUTS[layout](tokens, heads, depth)
    batch = 1 if shared else states.shape[0]
    angles = torch.randn(batch, tokens, 1, depth // 2).repeat(1, 1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    sin[..., : depth // 2] *= -1
    exact = states.double().requires_grad_()
    half = exact.roll(depth // 2, -1)
    expected = exact * cos.double() + half * sin.double()
    near(cpu_rows.turned(states, cos, sin), expected)
    grads = LAYOUTS[layout](tokens, heads, depth)
    [back] = torch.autograd.grad(expected, exact, grads.double())
    near(cpu_rows.turned_back(grads, cos, sin), back)
    joint = torch.full((*grads.shape[:2], (heads + 2) * depth), torch.nan)
    out = joint[..., depth : (heads + 1) * depth].view(grads.shape)
    assert cpu_rows.turned_back(grads, cos, sin, out=out).data_ptr() == out.data_ptr()
    near(out, back)
    assert joint[..., :depth].isnan().all() and joint[..., (heads + 1) * depth :].isnan().all()


def test_another_default_type_changes_nothing(way, monkeypatch):
    torch.manual_seed(0)
    states, cos, sin = torch.randn(1, 40, 2, 32), torch.rand(1, 40, 1, 32), torch.rand(1, 40, 1, 32)
    expected = cpu_rows.turned(states, cos, sin), *cpu_rows.normed(states, 1e-6)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = cpu_rows.turned(states, cos, sin), *cpu_rows.normed(states, 1e-6)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
