"""A CUDA device that is not there: whole runs on it, with the numbers of its tensors in host memory.

    with simulated_gpu() as ledger:
        main(["rlhf", ...])
    ledger.waits, ledger.copies     what made the host wait, and pageable copies, by line of swift

A tensor of the device is a wrapper: Python sees `cuda:0`, C++ sees the device `meta`, and every operation passes
`SimulatedGpu`, which

    refuses operands on different devices, as CUDA does
    records what makes the host wait: `.item()`, `.tolist()`, a boolean index, a blocking copy to the host
    records copies from and to pageable memory; those from pinned memory with `non_blocking=True` are free
    records attention with a mask and grouped keys, for which CUDA has only a kernel with quadratic memory
    counts the bytes alive

There are no streams, no times and no compiled kernels. FSDP2 and DeepSpeed run with one process, whose NCCL is gloo.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import threading
import types
import weakref
from collections import Counter
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _device
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_map

aten = torch.ops.aten
DEVICE = torch.device("cuda", 0)
TOTAL_BYTES = 80 << 30
ALLOCATION = 512
SWIFT = str(Path(__file__).resolve().parents[2] / "swift") + "/"

READS = {aten._local_scalar_dense.default: "item", aten.equal.default: "equal"}
SIZED_BY_VALUES = {
    aten.nonzero.default: "nonzero",
    aten.masked_select.default: "masked_select",
    aten._unique2.default: "unique",
    aten.unique_consecutive.default: "unique",
    aten.unique_dim.default: "unique",
    aten.bincount.default: "bincount",
}
"""Operations whose result's shape depends on values, which the host has to wait for."""
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
ON_THE_HOST = {aten.histc.default: lambda values, *more: aten.histc(values.float(), *more).to(values.dtype)}
"""Operations whose kernel of the host takes fewer types."""
SETS_STORAGE = {aten.set_.source_Tensor, aten.set_.source_Storage}


class Ledger:
    """What happened on the device.

    waits, copies, attention: (what, line) -> how often. live_bytes, peak_bytes: allocated, in blocks of 512 bytes.
    """

    def __init__(self):
        self.waits, self.copies, self.attention = Counter(), Counter(), Counter()
        self.live_bytes = self.peak_bytes = self.operations = 0
        self._sizes, self._pinned = {}, set()
        self._lock = threading.RLock()

    def note(self, counter, what):
        with self._lock:
            counter[what, line()] += 1

    def clear(self):
        """Forget waits, copies and attention so far."""
        for counter in (self.waits, self.copies, self.attention):
            counter.clear()

    def allocate(self, tensor):
        storage = tensor.untyped_storage()
        key = storage._cdata
        with self._lock:
            if key in self._sizes:
                return
            self._sizes[key] = 0
            self.resize(key, storage.nbytes())
        weakref.finalize(storage, self._free, key)

    def resize(self, key, num_bytes):
        """A storage has so many bytes now; FSDP empties those of gathered weights, and fills them again."""
        with self._lock:
            if key in self._sizes:
                size = -(-num_bytes // ALLOCATION) * ALLOCATION
                self.live_bytes += size - self._sizes[key]
                self._sizes[key] = size
                self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _free(self, key):
        with self._lock:
            self.live_bytes -= self._sizes.pop(key)

    def pin(self, tensor):
        storage = tensor.untyped_storage()
        self._pinned.add(storage._cdata)
        weakref.finalize(storage, self._pinned.discard, storage._cdata)
        return tensor

    def is_pinned(self, tensor):
        return tensor.untyped_storage()._cdata in self._pinned


LEDGER = Ledger()
MEANT = threading.local()
"""meta: whether the call of torch under way asks for the device `meta` itself."""


def line():
    """The innermost line of swift on the stack, else of whoever called torch."""
    frame, outer = sys._getframe(1), None
    while frame is not None:
        file = frame.f_code.co_filename
        name = f"{frame.f_lineno} {frame.f_code.co_qualname}"
        if file.startswith(SWIFT):
            return f"swift/{file.removeprefix(SWIFT)}:{name}"
        if outer is None and file != __file__ and "/torch/" not in file:
            outer = f"{Path(file).name}:{name}"
        frame = frame.f_back
    return outer or "?"


class CudaTensor(torch.Tensor):
    """A tensor on the device; `host` has its numbers."""

    @staticmethod
    def __new__(cls, host):
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, host.size(), strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype,
            layout=host.layout, device="meta",
        )  # fmt: skip
        tensor.host = host
        LEDGER.allocate(host)
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: DEVICE)
    is_cuda = property(lambda self: True)
    is_cpu = is_meta = property(lambda self: False)

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return run(operation, args, kwargs or {})

    def get_device(self):
        return 0

    def data_ptr(self):
        return self.host.data_ptr()

    def untyped_storage(self):
        return self.host.untyped_storage()

    def cpu(self, *args, **kwargs):
        return self.to("cpu")

    def cuda(self, *args, **kwargs):
        return self

    def tolist(self):
        LEDGER.note(LEDGER.waits, "tolist")
        return self.host.detach().tolist()

    def numpy(self, *args, **kwargs):
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy it first")

    __array__ = numpy

    def __reduce_ex__(self, protocol):  # torch.save: a checkpoint has tensors of the host
        return self.host.detach().__reduce_ex__(protocol)

    def __deepcopy__(self, memo):
        made = CudaTensor(self.host.detach().clone()).requires_grad_(self.requires_grad)
        memo[id(self)] = made = torch.nn.Parameter(made, self.requires_grad) if hasattr(self, "_is_param") else made
        return made

    def __repr__(self):
        return f"CudaTensor({self.host!r})"


def host_of(value):
    return value.host if isinstance(value, CudaTensor) else value


def on_device(value):
    return CudaTensor(value) if isinstance(value, torch.Tensor) and not isinstance(value, CudaTensor) else value


def is_cuda(device):
    """Whether a device that was asked for is the simulated one; C++, which takes it for `meta`, asks for that."""
    kind = None if device is None else torch.device(device).type
    return kind == "cuda" or (kind == "meta" and not getattr(MEANT, "meta", False))


class SimulatedGpu(TorchDispatchMode):
    """Sees every operation of its thread."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its shards come here next
        return run(operation, args, kwargs or {})


@functools.cache
def is_composite(operation):
    """Whether it has no kernel of its own; `silu_backward` has one, and a composite for other devices."""
    has_kernel = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, operation.name())
    return has_kernel("CompositeImplicitAutograd") and not has_kernel("CPU")


@functools.cache
def has_aliases(operation):
    """Whether it views or changes an operand."""
    return any(argument.alias_info is not None for argument in operation._schema.arguments)


def tensors_of(values):
    """Those among operands, which are values and lists of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_of(value)


def each(function, value):
    """The function of an operand or a result, or of all in a list: a fast `tree_map`."""
    return type(value)(each(function, one) for one in value) if type(value) in (list, tuple) else function(value)


def run(operation, args, kwargs):
    """One operation, on the host; results are on the device if an operand is, or if it was asked for."""
    if is_composite(operation):
        with SimulatedGpu():  # in inference mode such operations arrive before they are taken apart
            made = operation.decompose(*args, **kwargs)
        if made is not NotImplemented:
            return made
    LEDGER.operations += 1
    tensors = list(tensors_of((args, list(kwargs.values()))))
    there = [tensor for tensor in tensors if isinstance(tensor, CudaTensor)]
    here = [tensor for tensor in tensors if not isinstance(tensor, CudaTensor) and tensor.device.type == "cpu"]
    if operation is aten._to_copy.default:
        return copied(args[0], kwargs)
    if operation is aten.is_pinned.default:
        return not there and LEDGER.is_pinned(args[0])
    if operation is aten.copy_.default and there and here:
        waits_not = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        note_copy(args[1], to_device=isinstance(args[0], CudaTensor), pinned=here[0], non_blocking=waits_not)
        host_of(args[0]).copy_(host_of(args[1]))
        return args[0]
    if there:
        check(operation, args, kwargs, here)
    device = kwargs.get("device")
    asked = is_cuda(device)
    plain, settings = each(host_of, args), {name: each(host_of, value) for name, value in kwargs.items()}
    if asked:
        settings["device"] = "cpu"
    pin = settings.pop("pin_memory", None)
    made = ON_THE_HOST.get(operation, operation)(*plain, **settings)
    if pin and not asked:
        LEDGER.pin(made)
    if operation in READS or not (there or asked) or (device is not None and not asked):
        return made
    of_a_weight = operation.is_view and torch.is_inference_mode_enabled() and not tensors[0].is_inference()
    with torch.inference_mode(False) if of_a_weight else contextlib.nullcontext():  # such a view is like its base
        made = each(on_device, made)
    return return_and_correct_aliasing(operation, args, kwargs, made) if there and has_aliases(operation) else made


def check(operation, args, kwargs, here):
    """Refuse operands of the host, and note what the host has to wait for."""
    if operation in INDEXING:
        indices = [index for index in args[1] if isinstance(index, torch.Tensor)]
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            LEDGER.note(LEDGER.waits, "boolean index")
        if any(not isinstance(index, CudaTensor) for index in indices):
            LEDGER.note(LEDGER.copies, "index on the host")
        here = [tensor for tensor in here if not any(tensor is index for index in indices)]
    wide = [tensor for tensor in here if tensor.dim() > 0]
    if wide and operation not in SETS_STORAGE:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
            f"({operation}, {tuple(wide[0].shape)}, {line()})"
        )
    if what := READS.get(operation) or SIZED_BY_VALUES.get(operation):
        LEDGER.note(LEDGER.waits, what)
    elif operation.overloadpacket is aten.repeat_interleave and kwargs.get("output_size") is None:
        LEDGER.note(LEDGER.waits, "repeat_interleave")


def copied(source, kwargs):
    """`Tensor.to` with another type or device."""
    settings = dict(kwargs)
    device = settings.pop("device", None)
    non_blocking = settings.pop("non_blocking", False)
    pin = settings.pop("pin_memory", False)
    there = isinstance(source, CudaTensor)
    device = source.device if device is None else DEVICE if is_cuda(device) else torch.device(device)
    if device.type == "meta":
        return torch.empty_like(host_of(source), device="meta", **settings)
    made = aten._to_copy.default(host_of(source), device="cpu", **settings)
    if device.type == "cpu":
        if there:
            if non_blocking:
                LEDGER.pin(made)  # torch allocates it so
            note_copy(source, to_device=False, pinned=made, non_blocking=non_blocking)
        return LEDGER.pin(made) if pin else made
    if not there:
        note_copy(source, to_device=True, pinned=source, non_blocking=non_blocking)
    return CudaTensor(made)


def note_copy(source, *, to_device, pinned, non_blocking=False):
    """A copy between host and device; `pinned`: the tensor on the host."""
    is_free = non_blocking and LEDGER.is_pinned(pinned)
    if not to_device and not is_free:
        LEDGER.note(LEDGER.waits, "copy to the host")
    if to_device and not is_free and source.dim() > 0 and source.numel():
        LEDGER.note(LEDGER.copies, "pageable" if not LEDGER.is_pinned(pinned) else "blocking")


# --- what torch says of the device --------------------------------------------------------------------------------


class Event:
    """A CUDA event; waiting for one is a wait."""

    def __init__(self, **settings):
        pass

    def record(self, stream=None):
        pass

    def wait(self, stream=None):
        pass

    def query(self):
        return True

    def synchronize(self):
        LEDGER.note(LEDGER.waits, "synchronize")

    def elapsed_time(self, other):
        return 0.0


class Stream:
    """A CUDA stream; everything is done in order."""

    def __init__(self, *_args, **_settings):
        self.device = DEVICE

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def wait_event(self, event):
        pass

    def wait_stream(self, stream):
        pass

    def record_event(self, event=None):
        return event or Event()

    def synchronize(self):
        LEDGER.note(LEDGER.waits, "synchronize")

    def is_capturing(self):
        return False


def waits_for_all(*_args, **_kwargs):
    LEDGER.note(LEDGER.waits, "synchronize")


def nothing(*_args, **_kwargs):
    return None


def own(value):
    """Another function that does nothing: dynamo has a rule for each of torch's."""
    return (lambda *_, **__: None) if value is nothing else value


def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Scaled dot-product attention of a fused kernel, which keeps its inputs, its output and a number per query."""
    if attn_mask is not None and enable_gqa:
        LEDGER.note(LEDGER.attention, "mask and grouped keys")
    assert not dropout_p, "dropout in attention"
    tensors = [tensor for tensor in (query, key, value, attn_mask) if tensor is not None]
    here = [tensor for tensor in tensors if not isinstance(tensor, CudaTensor)]
    check(aten.scaled_dot_product_attention.default, tensors, {}, here)
    settings = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    return FusedAttention.apply(query, key, value, attn_mask, settings)


class FusedAttention(torch.autograd.Function):
    """Computed on the host, beside the ledger."""

    @staticmethod
    def forward(ctx, query, key, value, mask, settings):
        ctx.settings = settings
        output = on_device(FusedAttention.on_host(query, key, value, mask, settings))
        ctx.save_for_backward(query, key, value, mask, output, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx, gradient):
        query, key, value, mask, *_ = ctx.saved_tensors
        with torch._C._DisableTorchDispatch(), torch.enable_grad():
            states = [state.host.detach().requires_grad_() for state in (query, key, value)]
            output = FusedAttention.on_host(*states, mask, ctx.settings)
            found = torch.autograd.grad(output, states, gradient.host)
        return (*map(on_device, found), None, None)

    @staticmethod
    def on_host(query, key, value, mask, settings):
        hosts = [host_of(tensor) for tensor in (query, key, value, mask)]
        with torch._C._DisableTorchDispatch():
            return HOST_ATTENTION(*hosts[:3], attn_mask=hosts[3], **settings)


HOST_ATTENTION = torch.nn.functional.scaled_dot_product_attention

FACTORIES = (
    "zeros", "ones", "empty", "full", "arange", "rand", "randn", "randint", "randperm", "eye", "linspace", "zeros_like",
    "ones_like", "empty_like", "full_like", "empty_strided",
)  # fmt: skip


def patches():
    """(owner, name, value) of everything that Python asks about the device."""
    properties = types.SimpleNamespace(
        total_memory=TOTAL_BYTES, name="Simulated H100", major=9, minor=0, multi_processor_count=132, uuid="0",
        gcnArchName="", L2_cache_size=50 << 20,
    )  # fmt: skip
    stream = Stream()

    def free_and_total(*_):
        return TOTAL_BYTES - LEDGER.live_bytes, TOTAL_BYTES

    def live(*_):
        return LEDGER.live_bytes

    def random_state(*_):
        return torch.zeros(16, dtype=torch.uint8)

    def statistics(*_):
        return Counter({"allocated_bytes.all.current": LEDGER.live_bytes})

    shared = {
        "is_available": lambda: True, "device_count": lambda: 1, "empty_cache": nothing, "synchronize": waits_for_all,
        "memory_allocated": live, "memory_reserved": live, "max_memory_allocated": lambda *_: LEDGER.peak_bytes,
        "max_memory_reserved": lambda *_: LEDGER.peak_bytes, "reset_peak_memory_stats": nothing,
        "current_stream": lambda *_: stream, "memory_stats": statistics,
    }  # fmt: skip
    of_cuda = shared | {
        "current_device": lambda: 0, "_lazy_init": nothing, "init": nothing, "is_initialized": lambda: True,
        "mem_get_info": free_and_total, "get_device_properties": lambda *_: properties,
        "get_device_name": lambda *_: properties.name, "get_device_capability": lambda *_: (9, 0),
        "set_device": nothing, "get_rng_state": random_state, "set_rng_state": nothing,
        "get_rng_state_all": lambda *_: [random_state()], "set_rng_state_all": nothing, "manual_seed": nothing,
        "manual_seed_all": nothing, "seed_all": nothing, "is_bf16_supported": lambda *_, **__: True, "Event": Event,
        "Stream": Stream,
        "device": lambda *_: contextlib.nullcontext(), "stream": lambda *_: contextlib.nullcontext(),
        "is_current_stream_capturing": lambda: False, "default_stream": lambda *_: stream,
    }  # fmt: skip
    of_accelerators = shared | {
        "current_accelerator": lambda *_, **__: torch.device("cuda"), "current_device_index": lambda: 0,
        "get_memory_info": free_and_total, "set_device_index": nothing,
    }  # fmt: skip
    for owner, values in ((torch.cuda, of_cuda), (torch.accelerator, of_accelerators)):
        yield from ((owner, name, value) for name, value in values.items())
    for name in ("get_rng_state", "set_rng_state", "get_rng_state_all", "set_rng_state_all"):
        yield torch.cuda.random, name, of_cuda[name]

    yield torch.cuda.nvtx, "_nvtx", types.SimpleNamespace(rangePushA=nothing, rangePop=nothing)
    yield torch.Tensor, "data", data_setter()
    yield torch, "_has_compatible_shallow_copy_type", lambda *_: True  # so `Module.to` sets data too
    for name in ("device", "is_cuda", "is_cpu", "is_meta"):  # C++ would say what it knows of the shard
        yield DTensor, name, property(lambda tensor, name=name: getattr(tensor._local_tensor, name))
    yield torch._C, "_get_accelerator", lambda *_: torch.device("cuda")
    joined = torch.distributed.init_process_group
    yield (
        torch.distributed,
        "init_process_group",
        lambda backend=None, *args, **kwargs: joined("gloo", *args, **kwargs),  # computes in host memory too
    )
    usual = torch.nn.functional.scaled_dot_product_attention
    yield (
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda query, *args, **kwargs: (attention if isinstance(query, CudaTensor) else usual)(query, *args, **kwargs),
    )
    for owner, names in ((torch.Tensor, ("to",)), (torch, FACTORIES)):
        yield from ((owner, name, with_index(getattr(owner, name))) for name in names)
    yield torch, "tensor", made_there(torch.tensor)
    yield torch, "as_tensor", made_there(torch.as_tensor)
    yield torch.Tensor, "pin_memory", lambda tensor, *_: LEDGER.pin(tensor.clone())
    yield torch.Tensor, "record_stream", nothing
    yield torch.UntypedStorage, "resize_", resizing(torch.UntypedStorage.resize_)
    optimizers = importlib.import_module("torch.optim.optimizer")
    yield optimizers, "_foreach_supported_types", [torch.Tensor, torch.nn.Parameter, CudaTensor]


def data_setter():
    """`Tensor.data`, which can be set to a tensor on the other device too: C++ would take it for another kind."""
    data = torch._C.TensorBase.data

    def set_data(tensor, value):
        if isinstance(tensor, CudaTensor) == isinstance(value, CudaTensor) or isinstance(tensor, DTensor):
            data.__set__(tensor, value)
            if isinstance(tensor, CudaTensor):
                tensor.host = value.host
            return
        made = value.detach()
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        torch.utils.swap_tensors(tensor, torch.nn.Parameter(made, tensor.requires_grad) if is_parameter else made)

    return property(data.__get__, set_data)


def with_index(function):
    """torch's function, for which "cuda" is the current device, and "meta" what it says."""

    def known(value):
        return DEVICE if isinstance(value, str | torch.device) and str(value) == "cuda" else value

    def call(*args, **kwargs):
        if "device" in kwargs:
            kwargs["device"] = known(kwargs["device"])
        given = [value for value in (*args, kwargs.get("device")) if isinstance(value, str | torch.device)]
        before, MEANT.meta = getattr(MEANT, "meta", False), "meta" in map(str, given or [torch.get_default_device()])
        try:
            if MEANT.meta and isinstance(args[0], CudaTensor):  # which is there already, for C++
                return torch.empty_like(args[0].host, device="meta")
            return function(*map(known, args), **kwargs)
        finally:
            MEANT.meta = before

    return call


def resizing(resize):
    """`UntypedStorage.resize_`, which is not dispatched."""

    def call(storage, size):
        found = resize(storage, size)
        LEDGER.resize(storage._cdata, size)
        return found

    return call


def number(value):
    """What a tensor of one number on the device holds, which the host waits for."""
    if isinstance(value, CudaTensor):
        LEDGER.note(LEDGER.waits, "item")
        return value.host.detach().item()
    return value


def made_there(function):
    """`torch.tensor` or `torch.as_tensor`, which are not dispatched."""

    def call(data, *args, device=None, requires_grad=False, **kwargs):
        if isinstance(data, CudaTensor):
            made = data.detach().clone() if function is torch.tensor else data
            return made if device is None else made.to(device)
        made = function(tree_map(number, data), *args, **kwargs)
        made = made if device is None else made.to(device)
        return made.requires_grad_() if requires_grad else made

    return call


@contextlib.contextmanager
def simulated_gpu():
    """Inside, torch has a CUDA device, in every thread that starts meanwhile. Gives the `Ledger` of the process."""
    for name in ("accelerate", "torch._dynamo", "transformers.generation.utils", "transformers.trainer"):
        importlib.import_module(name)  # they ask about devices, or keep functions of torch, when they are imported
    _device._device_constructors()  # cached, of torch's own functions
    started = threading.Thread.run

    def in_mode(thread):
        with SimulatedGpu():
            started(thread)

    with contextlib.ExitStack() as stack:
        for owner, name, value in [*patches(), (threading.Thread, "run", in_mode)]:
            missing = not hasattr(owner, name)
            stack.callback(delattr if missing else setattr, owner, name, *([] if missing else [getattr(owner, name)]))
            setattr(owner, name, own(value))
        with SimulatedGpu():
            yield LEDGER
