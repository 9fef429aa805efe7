"""One process among many without a device: what FSDP2 holds on "meta" is what it holds with real tensors."""

from __future__ import annotations

import contextlib
import functools
import gc
from unittest import mock

import pytest
import torch
from small_models import small_model
from torch import nn

from swift.models.attention.interface import enable_packed_attention
from swift.models.forward import TokenSequence, pack
from swift.models.scoring import prepare_scoring, score_tokens
from swift.planning import sharded
from swift.planning import trace as trace_module
from swift.planning.devices import find_device
from swift.planning.kernels import as_on_gpu
from swift.planning.sharded import World
from swift.planning.trace import Trace

SIZES = {"hidden_size": 64, "intermediate_size": 160, "vocab_size": 320, "num_key_value_heads": 2, "head_dim": 16}
STREAM = [TokenSequence(list(range(12)), list(range(40))) for _ in range(4)]


@functools.cache
def held(kind: str, world: World, *, tied: bool = False, frozen: bool = False) -> dict[str, int]:
    """Bytes after each part of two steps, and their peaks."""
    device, found = torch.device(kind), {}
    model: nn.Module = small_model("qwen3", **SIZES, tie_word_embeddings=tied, sliding_window=None)
    enable_packed_attention(model)
    assert prepare_scoring(model) is None
    model.bfloat16().to(device).tie_weights()
    if frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("q_proj" in name)
    trace = Trace(find_device("h100-80gb"), place=kind)
    whole_blocks, place = mock.patch.object(trace_module, "BLOCK", 1), mock.patch.object(sharded, "META", device)
    moving = trace.moving() if world.offloads else contextlib.nullcontext()
    with whole_blocks, place, world.joined(), trace, trace.resizing(), moving, as_on_gpu(trace):
        world.shard(model)
        gc.collect()
        trace.hold(model)
        optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3)
        tokens, group = pack(STREAM, device=device), world.group()
        tokens = tokens if group is None else tokens.spread(group)
        for step in range(2):
            for part in ("forward", "backward", "update"):
                trace.reset_peak()
                if part == "forward":
                    loss = score_tokens(model, tokens)[0].sum()
                elif part == "backward":
                    loss.backward()
                    del loss
                else:
                    optimizer.step()
                    optimizer.zero_grad()
                gc.collect()
                found |= {f"{part} {step}": trace.live, f"peak of {part} {step}": trace.peak}
                found["host"] = max(found.get("host", 0), trace.host_peak)
    return found


@pytest.mark.parametrize("fsdp", ["full_shard", "shard_grad_op"])
@pytest.mark.parametrize("options", [{}, {"tied": True}, {"frozen": True}], ids=str)
def test_what_is_held_without_numbers_is_what_is_held_with_them(fsdp, options):
    world = World(4, 1, fsdp)
    ours, theirs = held("meta", world, **options), held("cpu", world, **options)
    for name, value in theirs.items():
        assert ours[name] == pytest.approx(value, rel=0.02), name


def test_shards_on_the_host_leave_the_device():
    """Weights, gradients and two moments of four bytes each are there; the device has a layer at a time."""
    plain, offloaded = (held("meta", World(4, 1, "full_shard", offloads=offloads)) for offloads in (False, True))
    shards = plain["backward 1"] - plain["update 1"]  # of the gradients
    assert offloaded["host"] == pytest.approx(4 * shards, rel=0.1)  # and what an update needs at a time
    assert plain["host"] == 0
    assert plain["update 1"] - offloaded["update 1"] == pytest.approx(3 * shards, rel=0.05)
    assert offloaded["peak of backward 1"] < plain["peak of backward 1"] - 2 * shards


def test_more_ranks_hold_less_and_shared_rows_take_less():
    two, eight = (held("meta", World(size, 1, "full_shard")) for size in (2, 8))
    assert eight["update 1"] == pytest.approx(two["update 1"] / 4, rel=0.1)
    shared = held("meta", World(8, 4, "full_shard"))
    assert shared["peak of forward 1"] < 0.6 * eight["peak of forward 1"]


def test_one_process_has_the_whole():
    assert held("meta", World(1, 1, "full_shard"))["update 1"] > 3 * held("meta", World(4, 1, "full_shard"))["update 1"]


def test_copies_are_sharded_over_fewer_ranks():
    four, copies = held("meta", World(4, 1, "full_shard")), held("meta", World(8, 1, "full_shard", 2))
    assert copies["update 1"] == pytest.approx(four["update 1"], rel=1e-3)


def test_a_gather_that_no_pass_waited_for_is_ended():
    """FSDP2 asks the accelerator for its stream then, and there may be none."""
    with World(4).joined():
        torch.accelerator.current_stream().wait_event(torch.cpu.Event())


def test_nothing_is_left_of_the_group():
    with World(8).joined():
        assert torch.distributed.get_world_size() == 8
    assert not torch.distributed.is_initialized() and not hasattr(torch, "meta")
