"""The simulated GPU itself: it computes what the CPU does, and notices each fault that it is there for."""

import pytest
import torch
from simulated_gpu import CudaTensor, simulated_gpu
from torch import nn
from torch.utils.checkpoint import checkpoint


@pytest.fixture
def gpu():
    with simulated_gpu() as ledger:
        ledger.clear()
        yield ledger
    ledger.clear()


def what(counter):
    """What was noted, without the lines."""
    return [name for (name, _), times in counter.items() for _ in range(times)]


class Small(nn.Module):
    """What models consist of: an embedding, grouped attention, a buffer, views and a change in place."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.query, self.states = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("scale", torch.tensor([0.5, 2.0]))

    def forward(self, ids):
        x = self.table(ids)
        query = self.query(x).unflatten(-1, (4, 2)).transpose(1, 2)
        key = self.states(x).unflatten(-1, (2, 2)).transpose(1, 2) * self.scale
        mixed = checkpoint(self.attend, query, key, use_reentrant=False)
        return mixed.mul_(2).transpose(1, 2).flatten(2)[:, 1:].logsumexp(-1)

    def attend(self, query, key):
        return nn.functional.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)


def gradients(device):
    model = Small().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.arange(10).view(2, 5).to(device)).square().sum().backward()
        optimizer.step()
    return [tensor.detach().to("cpu") for one in model.parameters() for tensor in (one, one.grad)]


def test_steps_on_it_are_those_of_the_cpu(gpu):
    expected = gradients("cpu")
    for found, tensor in zip(gradients("cuda"), expected, strict=True):
        torch.testing.assert_close(found, tensor, rtol=1e-5, atol=1e-6)
    assert gpu.attention == {}


@pytest.mark.parametrize(
    "mixed",
    [
        lambda here, there: here + there,
        lambda here, there: torch.cat([there, here]),
        lambda here, there: torch.where(here > 0, there, there),
        lambda here, there: there.index_select(0, here.long()),
        lambda here, there: there.mul_(here),
    ],
)
def test_operands_on_two_devices_are_refused(gpu, mixed):
    with pytest.raises(RuntimeError, match=r"same device.*cuda:0 and cpu"):
        mixed(torch.ones(3), torch.ones(3, device="cuda"))


def test_scalars_of_the_host_are_allowed(gpu):
    assert (torch.ones(3, device="cuda") * torch.tensor(2.0)).device.type == "cuda"
    assert gpu.waits == gpu.copies == {}


@pytest.mark.parametrize(
    ("wait", "noted"),
    [
        (lambda x: x.sum().item(), ["item"]),
        (lambda x: float(x[0]), ["item"]),
        (lambda x: bool((x > 0).any()), ["item"]),
        (lambda x: x.tolist(), ["tolist"]),
        (lambda x: x.nonzero(), ["nonzero"]),
        (lambda x: x[x > 0], ["boolean index"]),
        (lambda x: x.cpu(), ["copy to the host"]),
        (lambda x: x.to("cpu"), ["copy to the host"]),
        (lambda x: torch.empty(3).copy_(x), ["copy to the host"]),
        (lambda x: x.unique(), ["unique"]),
        (lambda x: torch.cuda.synchronize(), ["synchronize"]),
        (lambda x: x.to("cpu", non_blocking=True), []),
        (lambda x: torch.where(x > 0, x, 0).sum(), []),
        (lambda x: x.repeat_interleave(2), []),
        (lambda x: x[1:].double().amax(), []),
    ],
)
def test_what_makes_the_host_wait_is_noted(gpu, wait, noted):
    x = torch.ones(3, device="cuda")
    gpu.clear()
    wait(x)
    assert what(gpu.waits) == noted
    assert all("test_device.py" in line for _, line in gpu.waits)


@pytest.mark.parametrize(
    ("copy", "noted"),
    [
        (lambda host: host.to("cuda"), ["pageable"]),
        (lambda host: host.to("cuda", non_blocking=True), ["pageable"]),
        (lambda host: host.pin_memory().to("cuda"), ["blocking"]),
        (lambda host: host.pin_memory().to("cuda", non_blocking=True), []),
        (lambda host: torch.empty(3, pin_memory=True).to("cuda", non_blocking=True), []),
        (lambda host: torch.tensor([1.0, 2.0], device="cuda"), ["pageable"]),
        (lambda host: torch.zeros(3, device="cuda").copy_(host), ["pageable"]),
        (lambda host: torch.zeros(3, device="cuda")[torch.tensor([0, 1])], ["index on the host"]),
        (lambda host: torch.arange(3, device="cuda"), []),
    ],
)
def test_copies_that_are_not_free_are_noted(gpu, copy, noted):
    copy(torch.ones(3))
    assert what(gpu.copies) == noted


def test_a_mask_with_grouped_keys_is_noted(gpu):
    query, key = torch.ones(1, 4, 3, 2, device="cuda"), torch.ones(1, 2, 3, 2, device="cuda")
    attend = nn.functional.scaled_dot_product_attention
    mask = torch.ones(3, 3, dtype=torch.bool, device="cuda").tril()
    same = attend(query, key, key, attn_mask=mask, enable_gqa=True)
    assert what(gpu.attention) == ["mask and grouped keys"]
    assert torch.equal(same, attend(query, key, key, is_causal=True, enable_gqa=True))
    assert what(gpu.attention) == ["mask and grouped keys"]


def test_a_meta_tensor_stays_one(gpu):
    with torch.device("meta"):
        layer = nn.Linear(2, 2)
    for tensor in (layer.weight, torch.empty(2, device="meta"), torch.ones(2, device="cuda").to("meta")):
        assert not isinstance(tensor, CudaTensor) and tensor.device.type == "meta"


def test_bytes_alive_are_counted(gpu):
    before = gpu.live_bytes
    tensor = torch.zeros(1000, device="cuda")
    view = tensor[10:]
    assert gpu.live_bytes == before + 4096
    assert torch.cuda.mem_get_info()[0] == torch.cuda.mem_get_info()[1] - gpu.live_bytes
    del tensor
    assert gpu.live_bytes == before + 4096
    del view
    assert gpu.live_bytes == before and gpu.peak_bytes >= before + 4096


def test_a_storage_that_is_emptied_and_filled_is_counted(gpu):
    before = gpu.live_bytes
    gathered = torch.empty(1000, device="cuda")
    for size, live in ((0, 0), (4000, 4096)):
        gathered.untyped_storage().resize_(size)
        assert gpu.live_bytes - before == live


def test_outside_there_is_none():
    with simulated_gpu():
        assert torch.cuda.is_available() and torch.accelerator.current_accelerator().type == "cuda"
    assert not torch.cuda.is_available() and not torch.accelerator.is_available()
    assert type(torch.zeros(2)) is torch.Tensor
