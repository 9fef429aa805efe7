"""Numbers that are known of tensors without numbers: of integers that the host made, and what is computed of them.

Towers read the sizes of images, masks of patches and places of tokens, and go on by what they say. So a tensor on
"meta" that came from the host keeps its integers beside it, and operations on such tensors alone are computed there,
too. Hidden states have none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten
MOST = 1 << 20
"""Numbers of a tensor that are kept; a mask of queries and keys has more."""
SIZED_BY_NUMBERS = {
    aten._local_scalar_dense, aten.equal, aten.nonzero, aten.masked_select, aten.unique_consecutive, aten._unique2,
    aten.unique_dim, aten.repeat_interleave, aten.bincount, aten.index,
}  # fmt: skip
"""Operations whose result, or its shape, is told by numbers."""
UNKNOWN = {aten.empty, aten.new_empty, aten.empty_like, aten.empty_strided, aten.new_empty_strided, aten.empty_permuted}
CPU, META = torch.device("cpu"), torch.device("meta")


def of(tensor: Any) -> Tensor | None:
    """The numbers of a tensor; None if they are not known."""
    if not isinstance(tensor, Tensor) or not tensor.is_meta:
        return tensor if type(tensor) is Tensor else None
    kept: Tensor | None = getattr(tensor, "_swift_numbers", None)
    return None if kept is None or getattr(kept.untyped_storage(), "_swift_lost", False) else kept


def results_of(operation: Any, args: Any, kwargs: Any) -> Any:
    """The results of an operation on tensors whose numbers are known, which keep theirs; NotImplemented for others."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    packet, device = operation.overloadpacket, kwargs.get("device")
    if packet is aten._to_copy and tensors[0].is_meta != ((device or tensors[0].device).type == "meta"):
        return _moved(operation, args, kwargs)
    there = any(tensor.is_meta for tensor in tensors) or (not tensors and device == META)
    drawn = torch.Tag.nondeterministic_seeded in operation.tags
    computes = there and operation.namespace == "aten" and packet not in UNKNOWN and not drawn
    known = computes and all(of(tensor) is not None for tensor in tensors)
    if not known:
        if there and operation._schema.is_mutable:
            _lose(operation, args)
        return NotImplemented
    results = NotImplemented
    if packet not in SIZED_BY_NUMBERS:
        results = operation(*args, **kwargs)
        if not operation.is_view and any(one.numel() > MOST for one in _tensors(results)):
            return results
    plain, named = tree_map_only(Tensor, of, (args, kwargs))
    found = operation(*plain, **(named | ({"device": CPU} if device is not None else {})))
    if results is NotImplemented:
        results = tree_map_only(Tensor, lambda one: torch.empty_like(one, device=META), found)
    for one, values in zip(_tensors(results), _tensors(found), strict=True):
        if one.is_meta and of(one) is not values:
            one._swift_numbers = values  # type: ignore[attr-defined]
    return results


def _moved(operation: Any, args: Any, kwargs: Any) -> Any:
    """A tensor that comes from the host, or goes there."""
    tensor = args[0]
    if tensor.is_meta:
        numbers = of(tensor)
        return NotImplemented if numbers is None else operation(numbers, **kwargs).clone()
    moved = operation(tensor, **kwargs)
    if not tensor.is_floating_point() and tensor.numel() <= MOST:
        moved._swift_numbers = tensor.to(moved.dtype, copy=True)
    return moved


def _lose(operation: Any, args: Any) -> None:
    """Forget what an operation writes that has unknown operands, also of views of it."""
    for argument, value in zip(operation._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            for one in _tensors(value):
                if one.is_meta and (kept := of(one)) is not None:
                    kept.untyped_storage()._swift_lost = True  # type: ignore[attr-defined]


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


@contextlib.contextmanager
def made_on_host() -> Iterator[None]:
    """Tensors that Python's numbers are made into on "meta" come from the host, so that theirs are known."""

    def through_host(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
            if isinstance(data, Tensor) or device is None or torch.device(device) != META:
                return make(data, *args, device=device, **kwargs)
            read = tree_map_only(Tensor, Tensor.item, data)  # which is not dispatched in there
            return make(read, *args, device=CPU, **kwargs).to(META)

        return made

    with (
        mock.patch.object(torch, "tensor", through_host(torch.tensor)),
        mock.patch.object(torch, "as_tensor", through_host(torch.as_tensor)),
    ):
        yield
