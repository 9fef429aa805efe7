"""Tensors leave and come back: memory is released, bits and identities stay. Here host and device are the same."""

import copy

import pytest
import torch
from torch import nn

from swift.errors import ResourceError
from swift.trainers.memory.offload import HostBuffer, Offloader, model_tensors, optimizer_tensors
from swift.trainers.optimizers.master_weights import keep_master_weights

CPU = torch.device("cpu")


class TiedPair(nn.Module):
    """A head that is the embedding, a stored view of it, and an odd number of bytes in a buffer."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.embedding = nn.Embedding(7, 6, dtype=dtype)
        self.head = nn.Linear(6, 7, bias=False, dtype=dtype)
        self.head.weight = self.embedding.weight
        self.body = nn.Linear(6, 6, dtype=dtype)
        self.register_buffer("turned", torch.arange(12.0).reshape(3, 4).T)
        self.register_buffer("part", self.embedding.weight.detach()[2:5, ::2], persistent=False)
        self.register_buffer("odd", torch.arange(3, dtype=torch.int8))

    def forward(self, ids):
        return self.head(torch.tanh(self.body(self.embedding(ids))))


def moved(model):
    return Offloader(lambda: model_tensors(model), CPU)


def released(tensors):
    return all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)


def train(model, optimizer, steps):
    for step in range(steps):
        optimizer.zero_grad()
        ids = torch.arange(7) + step
        nn.functional.cross_entropy(model(ids % 7).float(), ids % 7).backward()
        optimizer.step()


def test_what_leaves_has_no_memory_and_comes_back_bit_for_bit():
    model = TiedPair()
    model(torch.arange(4)).sum().backward()
    before, gradient = copy.deepcopy(model.state_dict()), model.body.weight.grad.clone()
    offloader = moved(model)
    size = offloader.resident_bytes()
    assert size == 4 * (2 * (42 + 36 + 6) + 12) + 3, "each storage and each gradient counts once"
    offloader.leave()
    assert released(model.parameters()) and released(model.buffers()) and released([model.body.weight.grad])
    assert offloader.resident_bytes() == 0 and offloader.away
    offloader.come_back()
    assert not offloader.away and offloader.resident_bytes() == size
    assert torch.equal(model.body.weight.grad, gradient)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_objects_hooks_of_gradients_tied_weights_views_and_strides_stay():
    model = TiedPair()
    identities = [id(parameter) for parameter in model.parameters()]
    alias = model.embedding.weight.detach()[0]  # that nobody told us about
    node = model.body.weight.view_as(model.body.weight).grad_fn.next_functions[0][0]
    seen = []
    node.register_hook(lambda *_: seen.append("reduced"))
    offloader = moved(model)
    offloader.leave()
    offloader.come_back()
    assert [id(parameter) for parameter in model.parameters()] == identities
    assert model.head.weight is model.embedding.weight
    assert model.turned.stride() == (1, 4) and model.turned[1].tolist() == [1.0, 5.0, 9.0]
    model(torch.arange(3)).sum().backward()
    assert seen == ["reduced"], "DDP would no longer average this gradient"
    with torch.no_grad():
        model.embedding.weight.fill_(3.0)
    assert model.part.eq(3).all() and alias.eq(3).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_can_be_read_while_the_parameters_are_away(dtype):
    model = TiedPair(dtype)
    before = copy.deepcopy(model.state_dict())
    offloader = moved(model)
    offloader.leave()
    copies = offloader.copies()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        seen = copies[id(tensor)]
        assert seen.shape == tensor.shape and seen.stride() == tensor.stride() and seen.dtype == tensor.dtype
        assert name not in before or torch.equal(seen, before[name]), name
    assert torch.equal(copies[id(model.part)], before["embedding.weight"][2:5, ::2])
    offloader.come_back()
    assert offloader.copies() == {}


def test_the_optimizers_state_leaves_without_the_model():
    model = TiedPair(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    offloader = Offloader(lambda: optimizer_tensors(optimizer), CPU, keep=lambda: model_tensors(model))
    offloader.leave()
    assert not offloader.away, "there is no state yet"
    keep_master_weights(optimizer)
    train(model, optimizer, 1)
    numbers = 42 + 36 + 6
    assert offloader.resident_bytes() == numbers * 3 * 4 + 3 * 4, "two moments, a master and a step each"
    offloader.leave()
    assert offloader.resident_bytes() == 0
    assert not released(model.parameters())
    assert all(released(state.values()) for state in optimizer.state.values())
    assert released(optimizer.param_groups[0]["params"]), "the masters"
    offloader.come_back()
    train(model, optimizer, 1)


def test_wrapped_optimizers_are_looked_into():
    model = TiedPair()
    inner = torch.optim.AdamW(model.parameters())
    train(model, inner, 1)

    class Wrapper:
        def __init__(self, optimizer, **more):
            self.optimizer, self.param_groups = optimizer, optimizer.param_groups
            self.__dict__.update(more)

    flat = torch.zeros(5)
    wrapped = Wrapper(Wrapper(inner, single_partition_of_fp32_groups=[flat], state="not a mapping"))
    found = {id(tensor) for tensor in optimizer_tensors(wrapped)}
    assert id(flat) in found
    assert {id(state["exp_avg"]) for state in inner.state.values()} <= found
    assert list(optimizer_tensors(None)) == []


def test_half_a_return_can_be_finished(monkeypatch):
    model = TiedPair()
    before = copy.deepcopy(model.state_dict())
    offloader = moved(model)
    size = offloader.resident_bytes()
    offloader.leave()
    resize, calls = torch.UntypedStorage.resize_, []

    def full(storage, nbytes):
        calls.append(nbytes)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate a lot")
        return resize(storage, nbytes)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", full)
    with pytest.raises(ResourceError, match=r"memory: cpu: 0 MiB of the trainer do not fit back beside the engine"):
        offloader.come_back()
    assert offloader.away and 0 < offloader.resident_bytes() < size
    offloader.come_back()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_a_host_without_room_leaves_everything_in_place(monkeypatch):
    model = TiedPair()
    offloader = moved(model)
    monkeypatch.setattr("swift.trainers.memory.offload.ALIGNMENT", 1 << 60)  # bytes that no host has
    with pytest.raises(ResourceError, match=r"no room for .* MiB of the trainer; --offload_optimizer false"):
        offloader.leave()
    offloader.come_back()
    assert not offloader.away
    model(torch.arange(3))


def test_tensors_elsewhere_and_memory_that_is_not_ours_stay(tmp_path):
    (tmp_path / "numbers").write_bytes(bytes(16))
    mapped = torch.from_file(str(tmp_path / "numbers"), size=4, dtype=torch.float32)
    mine, meta = torch.ones(3), torch.empty(3, device="meta")
    offloader = Offloader(lambda: [mapped, meta, mine, mine[1:]], CPU)
    assert offloader.resident_bytes() == 28
    offloader.leave()
    assert mapped.tolist() == [0.0] * 4 and released([mine])
    offloader.come_back()
    assert mine.tolist() == [1.0] * 3


def test_host_memory_is_used_again_and_grows_to_what_is_asked_for():
    host = HostBuffer(CPU)
    first = host.take(100)
    assert host.take(64).data_ptr() == host.take(100).data_ptr() == first.data_ptr()
    assert [host.take(n).numel() for n in (0, 64, 100, 5000)] == [0, 64, 100, 5000]


class Locker:
    """The part of CUDA's runtime that locks memory."""

    def __init__(self):
        self.refuses, self.locked = False, {}

    def cudaHostRegister(self, address, nbytes, flags):  # noqa: N802
        if self.refuses:
            return 712
        assert address % 4096 == 0, "a page of somebody else"
        self.locked[address] = nbytes
        return 0

    def cudaHostUnregister(self, address):  # noqa: N802
        del self.locked[address]
        return 0


@pytest.fixture
def cuda(monkeypatch):
    locker = Locker()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: locker)
    return locker


def test_exactly_what_is_needed_is_locked_and_unlocked_before_it_is_released(cuda):
    host = HostBuffer(torch.device("cuda"))
    first = host.take(100_000)
    host.take(77)
    assert cuda.locked == {first.data_ptr(): 100_000}
    second = host.take(200_000).fill_(2)
    assert cuda.locked == {second.data_ptr(): 200_000}
    del host
    assert cuda.locked == {} and int(second.min()) == 2, "still there for whoever holds it"


def test_host_memory_that_cannot_be_locked_is_taken_unlocked(cuda, monkeypatch, caplog):
    def next_kernel(*_, device):
        raise RuntimeError("CUDA error: of the call before")

    monkeypatch.setattr(torch, "zeros", next_kernel)
    cuda.refuses = True
    assert HostBuffer(torch.device("cuda")).take(3).numel() == 3
    assert "CUDA error 712: host memory cannot be locked" in caplog.text and cuda.locked == {}


def test_distributed_tensors_leave_with_their_local_part(tmp_path):
    import torch.distributed as dist
    from torch.distributed.tensor import DeviceMesh, Replicate, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        whole = torch.arange(6.0)
        spread = nn.Parameter(distribute_tensor(whole, DeviceMesh("cpu", [0]), [Replicate()]))
        offloader = Offloader(lambda: [spread], CPU)
        assert offloader.resident_bytes() == 24
        offloader.leave()
        assert released([spread._local_tensor]) and offloader.copies() == {}
        offloader.come_back()
        assert spread.full_tensor().tolist() == whole.tolist()
    finally:
        dist.destroy_process_group()
