"""Whether a model may be packed: a trial says so.

Models whose layers need more than a `Variant` (recurrent or linear attention layers, positions that are not rotary)
keep their own attention and take padded rows, which is slower and equal.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from swift.errors import first_line
from swift.models.attention.interface import enable_packed_attention, is_packed, transformers_model
from swift.models.attention.layout import Kernel, SegmentLayout
from swift.models.attention.spans import Variant
from swift.models.forward import TokenSequence, completion_logits, pack, pad

PACKED_LAYERS = {"full_attention", "sliding_attention"}
"""Types of layers that can be packed, as configurations name them."""

WHOLE = ("hidden_size_per_layer_input", "output_router_logits", "output_hidden_states", "output_attentions")
"""Settings of models that are tried with all layers: inputs of each layer, and outputs that transformers collects by
hooks on the layers of the first pass."""

ASKED: dict[str, Kernel] = {"flash_attention_2": "flash", "flex_attention": "flex"}
"""Kernels that `--attn_impl` asks for, by transformers' names."""


def choose_attention(model: nn.Module) -> str | None:
    """Give `model` packed attention where that computes what its own attention does, which is tried out.

    A model on the device "meta" stays as it is: without numbers nothing can be tried out.

    Returns:
        why the model keeps its own attention, in a few words; None when it is packed now.
    """
    if is_packed(model):
        return None
    base = transformers_model(model)
    own = asked = base.config.get_text_config()._attn_implementation
    if own == "sdpa" and has_soft_cap(base.config):
        own = "eager"
        base.set_attn_implementation(own)
    obstacle = packing_obstacle(model)
    if obstacle is None and base.device.type != "meta":
        if own == "flex_attention":  # it would compile for each length of the trial
            base.set_attn_implementation("eager")
        obstacle = _packing_gap(model, ASKED.get(asked))
        if obstacle is not None:
            base.set_attn_implementation(own)
    return obstacle


def has_soft_cap(config: Any) -> bool:
    """Whether attention caps its scores, which transformers' sdpa leaves out without a word."""
    return bool(getattr(config.get_text_config(), "attn_logit_softcapping", None))


def packing_obstacle(model: nn.Module) -> str | None:
    """Why packed segments would be wrong for this model, in a few words; None when they are right."""
    base = transformers_model(model)
    config = base.config.get_text_config()
    others = set(getattr(config, "layer_types", None) or []) - PACKED_LAYERS
    if others:
        return f"layers of type {', '.join(sorted(others))}"
    if not getattr(base, "_supports_attention_backend", False):
        return "the model does not use transformers' attention interface"
    if not (hasattr(config, "rope_parameters") or hasattr(config, "rope_theta")):
        return "no rotary positions"
    if _num_windows(config) and not _masks_windows(base):
        return "a sliding window that its own attention does not know"
    return None


@contextlib.contextmanager
def _shallow(model: nn.Module) -> Iterator[None]:
    """Leave `model` as many of its first layers as hold one of each kind.

    A trial of those says the same, and is over soon where the weights of a large model are still on the host.
    """
    base = transformers_model(model)
    decoder, config = base.get_decoder(), base.config.get_text_config()
    layers, number = getattr(decoder, "layers", None), getattr(config, "num_hidden_layers", None)
    asks_more = any(getattr(config, one, None) for one in WHOLE)
    if not isinstance(layers, nn.ModuleList) or number != len(layers) or asks_more:
        yield
        return
    types = getattr(config, "layer_types", None) or [None] * number
    kinds = [(kind, _traits(layer)) for kind, layer in zip(types, layers, strict=True)]
    config.num_hidden_layers = 1 + max(map(kinds.index, kinds))
    decoder.layers = layers[: config.num_hidden_layers]
    try:
        yield
    finally:
        decoder.layers, config.num_hidden_layers = layers, number


def _traits(layer: nn.Module) -> list[Any]:
    """What tells layers apart beside their weights: the classes of their modules, with their plain attributes."""
    return [
        (type(module), {k: v for k, v in vars(module).items() if isinstance(v, int | float | str) and k != "layer_idx"})
        for module in layer.modules()
    ]


@contextlib.contextmanager
def trial(model: nn.Module) -> Iterator[tuple[list[TokenSequence], torch.device]]:
    """`model` without gradients and dropout, on its first layers; gives sequences to try it with, and the device.

    Of a model on the host these layers are on the GPU meanwhile, if there is one: its kernels are tried.
    """
    size = min(97, transformers_model(model).config.get_text_config().vocab_size)
    ids = [(7 * i + 3) % size for i in range(32)]
    sequences = [
        TokenSequence(ids[prompt], ids[completion])
        for prompt in (slice(0, 6), slice(6, 10))
        for completion in (slice(10, 15), slice(20, 23), slice(15, 22))
    ]
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), _shallow(model), _on_gpu(model):
            yield sequences, next(model.parameters()).device
    finally:
        model.train(was_training)


@contextlib.contextmanager
def _on_gpu(model: nn.Module) -> Iterator[None]:
    """Lend the tensors of a model on the host to the current GPU, unless its free memory is short."""
    lent: dict[Tensor, Tensor] = {}
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        tensors = (*model.parameters(), *model.buffers())
        host = {one: one.data for one in tensors if one.device.type == "cpu"}
        if sum(one.nbytes for one in host) < torch.cuda.mem_get_info(device)[0] // 2:
            lent = host
    try:
        for one in lent:
            one.data = one.data.to(device)
        yield
    finally:
        for one, data in lent.items():
            one.data = data


def _packing_gap(model: nn.Module, kernel: Kernel | None) -> str | None:
    """Enable packing and compare the logits of a few sequences with those of before."""
    try:
        with trial(model) as (sequences, device):
            own_NV = torch.cat([completion_logits(model, pad([one], device=device)) for one in sequences]).float()
            enable_packed_attention(model, kernel)
            tokens = pack(sequences, device=device)
            asked = _noted_calls(tokens.inputs["attention_layout"])
            config = transformers_model(model).config.get_text_config()
            num_layers, num_windows = getattr(config, "num_hidden_layers", None) or 1, _num_windows(config)
            gap_N = (completion_logits(model, tokens).float() - own_NV).abs().mean(-1)
    except NotImplementedError as error:
        return str(error)
    except Exception as error:  # whatever a model does with what it does not expect; its own attention goes on
        return f"packing fails ({type(error).__name__}: {first_line(error)[:120]})"
    if len(asked) < num_layers:
        return "not all of its layers ask transformers' attention interface"
    if sum(variant.window is not None for variant in asked) < num_windows:
        return "not all of its layers hand their sliding window to attention"
    gaps = torch.stack([one.mean() for one in gap_N.split([len(one.completion_ids) for one in sequences])])
    tolerance = 1e-2 if next(model.parameters()).dtype == torch.float32 else 1e-1
    agree = float(gaps.max()) <= tolerance * float(own_NV.std())  # NaN does not
    return None if agree else "packed logits differ from its own"


def _noted_calls(layout: SegmentLayout) -> list[Variant]:
    """A list that grows with each layer that asks for attention, by what it asks for."""
    calls: list[Variant] = []
    attend = layout.attend

    def noted(
        query: Tensor, key: Tensor, value: Tensor, scale: float | None, variant: Variant, kernel: Kernel | None
    ) -> Tensor:
        calls.append(variant)
        return attend(query, key, value, scale, variant, kernel)

    layout.attend = noted  # type: ignore[method-assign, assignment]
    return calls


def _num_windows(config: Any) -> int:
    """How many layers have a sliding window, which a trial on short sequences does not show."""
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return sum(kind == "sliding_attention" for kind in kinds[: config.num_hidden_layers])
    windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return config.num_hidden_layers if windowed else 0


def _masks_windows(base: nn.Module) -> bool:
    """Whether the model's own code makes masks of sliding windows; some pass a window on and have none."""
    files = {type(module).__module__ for module in base.modules()}
    return any(hasattr(sys.modules[file], "create_sliding_window_causal_mask") for file in files)
