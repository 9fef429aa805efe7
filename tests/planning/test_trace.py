"""What a trace counts."""

import pytest
import torch

from swift.planning.devices import DEVICES, Device
from swift.planning.trace import Trace, fused_on_meta

SLOW = Device("slow", memory=1 << 30, half=1e12, single=1e11, bandwidth=1e12)


@pytest.fixture
def trace():
    with Trace(SLOW) as made:
        yield made


def made(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="meta")


def test_bytes_are_those_alive_in_blocks(trace):
    a = made(1000)
    assert trace.live == trace.peak == 4096  # 4000, in blocks of 512
    b = a + a
    assert trace.live == 8192
    view = b.view(10, 100)
    del b
    assert trace.live == 8192, "the view holds it"
    del view
    assert (trace.live, trace.peak) == (4096, 8192)
    trace.reset_peak()
    assert trace.peak == 4096


def test_what_was_made_before_is_counted_once():
    layer = torch.nn.Linear(10, 10, device="meta")
    layer.tied = layer.weight
    with Trace(SLOW) as trace:
        trace.hold(layer)
        trace.hold(layer)
        assert trace.live == 2 * 512


def test_the_backward_pass_is_seen(trace):
    weight = torch.nn.Parameter(made(64, 64))
    (made(8, 64) @ weight).sum().backward()
    assert weight.grad is not None and trace.peak >= 2 * 64 * 64 * 4
    assert trace.flops == 2 * 2 * 8 * 64 * 64  # the product, and that of the weight's gradient


def test_a_product_takes_its_flops_and_a_sum_its_bytes(trace):
    a, b = made(4096, 4096, dtype=torch.bfloat16), made(4096, 4096, dtype=torch.bfloat16)
    before = trace.seconds
    a @ b
    assert trace.seconds - before == pytest.approx(2 * 4096**3 / (0.7 * 1e12))
    before = trace.seconds
    a + b
    assert trace.seconds - before == pytest.approx(3 * a.nbytes / (0.85 * 1e12))


def test_a_fused_update_needs_nothing_beside_its_state(trace):
    with fused_on_meta():
        weight = torch.nn.Parameter(made(1 << 20))
        optimizer = torch.optim.AdamW([weight], fused=True)
        weight.grad = made(1 << 20)
        before = trace.live
        optimizer.step()
        assert trace.live == trace.peak
        assert trace.live - before == pytest.approx(8 << 20, abs=2048)


def test_what_only_numbers_tell_is_answered(trace):
    mask, table = made(4, 6, dtype=torch.bool), torch.nn.Parameter(made(4, 6, 8))
    with trace.reading({24: 5}):
        assert made(3).sum().item() == 1.0 and made(2, dtype=torch.long).sum().item() == 1
        assert bool((made(3) > 0).all())
        chosen = table[mask]
        assert chosen.shape == (5, 8)
        made(4, 6).masked_scatter(mask, chosen[:, 0]).sum().backward()
        assert table.grad.shape == table.shape
        assert made(4, 6).masked_select(mask).shape == (5,) and mask.nonzero().shape == (5, 2)
        assert made(2, 2, dtype=torch.bool).nonzero().shape == (4, 2), "all of one that was not named"
        table.detach()[mask] = 0.0
        here = torch.tensor([1.0, 2.0, 3.0])
        assert here[here > 1.5].tolist() == [2.0, 3.0], "numbers of the host are known"
    with pytest.raises(RuntimeError):
        made(3).sum().item()


def test_integers_of_the_host_are_followed(trace):
    with trace.knowing():
        grid, hidden = torch.tensor([[2, 3], [4, 1]]).to("meta"), made(10, 8)
        ends = grid.prod(1).cumsum(0)
        assert ends.tolist() == [6, 10] and ends.is_meta
        assert [part.shape[0] for part in hidden.split(grid.prod(1).tolist())] == [6, 4]
        assert torch.repeat_interleave(grid[:, 0], grid[:, 1]).tolist() == [2, 2, 2, 4]
        chosen = (torch.arange(10, device="meta") % 3 == 0).unsqueeze(1).expand_as(hidden)
        assert hidden[chosen].numel() == 4 * 8
        assert torch.tensor([ends[0], ends[1]], device="meta").unique_consecutive().tolist() == [6, 10]
        with pytest.raises(RuntimeError):
            hidden.sum().item()


def test_integers_that_hidden_states_overwrite_are_not_known_any_more(trace):
    with trace.knowing():
        places = torch.arange(4, device="meta")
        first = places[:2]
        places[1:] += 1
        assert first.tolist() == [0, 2], "views share numbers"
        places[1:] = made(3).long()
        for one in (places, first):
            with pytest.raises(RuntimeError):
                one.sum().item()


def test_what_comes_from_the_host_and_goes_there(trace):
    with trace.moving():
        weight = made(1000)
        moved = weight.to("cpu")
        del weight
        assert moved.is_meta and (trace.live, trace.host_live) == (0, 4096)
        moments = torch.zeros_like(moved) + moved
        assert (trace.live, trace.host_live) == (0, 8192)
        back = moments.to("meta")
        assert back is not moments and (trace.live, trace.host_live) == (4096, 8192)
        assert (trace.peak, trace.host_peak) == (4096, 12288), "and what was added up"


def test_h100_has_the_figures_of_its_data_sheet():
    h100 = DEVICES["h100-80gb"]
    assert (h100.half, h100.bandwidth) == (989e12, 3.35e12)
    assert h100.memory / 2**30 == pytest.approx(79.6, abs=0.1)
