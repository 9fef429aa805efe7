"""vLLM's NCCL transfer as far as it can be seen without a GPU: nothing waits without a bound, and names are checked."""

import contextlib
import sys
import threading
import time
from types import ModuleType, SimpleNamespace

import pytest
import torch

from swift.errors import SyncFailed
from swift.rollout.engines import vllm_transfer
from swift.rollout.weight_sync.base import TensorInfo

INIT = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
INFOS = [TensorInfo("a", "float32", (2,)), TensorInfo("b", "float32", (3,))]


class Communicator:
    """Delivers so many tensors, then hangs; `destroy` ends that."""

    def __init__(self, delivers):
        self.delivers = delivers
        self.destroyed = threading.Event()

    def broadcast(self, tensor, src, stream=None):
        if not self.delivers:
            self.destroyed.wait(60)
            raise RuntimeError("NCCL error: aborted")
        self.delivers -= 1
        tensor.fill_(self.delivers)

    def destroy(self):
        self.destroyed.set()


@pytest.fixture
def transfer(monkeypatch):
    """Installs a vLLM of this test's making; returns what a test may change."""
    state = SimpleNamespace(communicator=Communicator(2), joins_s=0.0, buffers=None)

    def stateless_init_process_group(master_address, master_port, rank, world_size, device):
        time.sleep(state.joins_s)
        return state.communicator

    def packed_nccl_broadcast_consumer(
        iterator, group, src, post_unpack_func, buffer_size_bytes=0, num_buffers=2, device="cuda"
    ):
        state.buffers = (buffer_size_bytes, num_buffers)
        for name, (shape, dtype) in iterator:
            tensor = torch.empty(shape, dtype=dtype)
            group.broadcast(tensor, src=src)
            post_unpack_func([(name, tensor)])

    common, packing = (ModuleType(name) for name in vllm_transfer.USED)
    common.stateless_init_process_group = stateless_init_process_group
    packing.packed_nccl_broadcast_consumer = packed_nccl_broadcast_consumer
    packing.DEFAULT_PACKED_BUFFER_SIZE_BYTES, packing.DEFAULT_PACKED_NUM_BUFFERS = 1 << 20, 2
    for name, module in zip(vllm_transfer.USED, (common, packing), strict=True):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    empty = torch.empty

    def on_the_host(*shape, device=None, **options):
        return empty(*shape, **options)

    monkeypatch.setattr(torch, "empty", on_the_host)
    state.common, state.packing = common, packing
    return state


@pytest.mark.parametrize("packed", [False, True])
def test_tensors_arrive(transfer, packed):
    receiver = vllm_transfer.NcclReceiver({**INIT, "packed": packed})
    came = dict(receiver.receive(INFOS))
    assert (came["a"].tolist(), came["b"].tolist()) == ([1.0] * 2, [0.0] * 3)
    receiver.close()
    assert transfer.communicator.destroyed.is_set()


def test_an_announcement_says_how_its_tensors_are_packed_over_what_the_group_said(transfer):
    transfer.communicator.delivers = 6
    receiver = vllm_transfer.NcclReceiver({**INIT, "packed_num_buffers": 3})
    receiver.receive(INFOS)
    assert transfer.buffers is None
    receiver.receive(INFOS, {"packed": True, "packed_buffer_size_bytes": 4096})
    assert transfer.buffers == (4096, 3)
    transfer.buffers = None
    receiver.receive(INFOS)
    assert transfer.buffers is None
    receiver.close()


@pytest.mark.parametrize("packed", [False, True])
def test_a_broadcast_that_never_comes_ends_in_bounds_and_destroys_the_group(transfer, packed):
    transfer.communicator.delivers = 1
    receiver = vllm_transfer.NcclReceiver({**INIT, "packed": packed}, limit_s=0.3)
    began = time.monotonic()
    with pytest.raises(SyncFailed, match=r"nccl broadcast: the trainer did not come within 0\.3 s"):
        receiver.receive(INFOS)
    assert time.monotonic() - began < 5
    assert transfer.communicator.destroyed.is_set()
    with pytest.raises(SyncFailed, match="its group is gone"):
        receiver.receive(INFOS)


def test_a_trainer_that_never_joins_is_waited_for_in_bounds(transfer):
    transfer.joins_s = 30
    began = time.monotonic()
    with pytest.raises(SyncFailed, match=r"nccl group: the trainer did not come within 0\.3 s"):
        vllm_transfer.NcclReceiver(INIT, limit_s=0.3)
    assert time.monotonic() - began < 5


def test_a_vllm_that_calls_things_otherwise_is_refused_with_the_names(transfer):
    transfer.common.stateless_init_process_group = lambda address, port: None
    del transfer.packing.DEFAULT_PACKED_NUM_BUFFERS
    with pytest.raises(SyncFailed) as caught:
        vllm_transfer.NcclReceiver(INIT)
    assert "nccl_common.stateless_init_process_group(master_address, master_port, rank" in str(caught.value)
    assert "packed_tensor.DEFAULT_PACKED_NUM_BUFFERS" in str(caught.value)
