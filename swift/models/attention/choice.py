"""Choice between packed attention and a model's own, by a trial on short sequences.

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
from swift.models.forward import TokenBatch, TokenSequence, completion_logits, pack, pad
from swift.models.quantisation import is_quantised

PACKED_LAYERS = {"full_attention", "sliding_attention"}
"""Types of layers that can be packed, as configurations name them."""

WHOLE = ("hidden_size_per_layer_input", "output_router_logits", "output_hidden_states", "output_attentions")
"""Settings of models whose trial needs all layers: inputs of each layer, and outputs that transformers collects by
hooks on the layers of the first pass."""

REQUESTED: dict[str, Kernel] = {"flash_attention_2": "flash", "flex_attention": "flex"}
"""transformers' name of an `--attn_impl` -> kernel that it requests."""


def choose_attention(model: nn.Module) -> str | None:
    """Give `model` packed attention if a trial finds its logits equal to those of its own attention.

    A model on the device "meta" stays as it is, because its weights have no values for a trial.

    Returns:
        why the model keeps its own attention, in a few words; None when it is packed now.
    """
    if is_packed(model):
        return None
    base = transformers_model(model)
    own = requested = base.config.get_text_config()._attn_implementation
    if own == "sdpa" and has_soft_cap(base.config):
        own = "eager"
        base.set_attn_implementation(own)
    obstacle = packing_obstacle(model)
    if obstacle is None and base.device.type != "meta":
        if own == "flex_attention":  # it would compile for each length of the trial
            base.set_attn_implementation("eager")
        obstacle = _packing_gap(model, REQUESTED.get(requested))
        if obstacle is not None:
            base.set_attn_implementation(own)
    return obstacle


def has_soft_cap(config: Any) -> bool:
    """Whether attention caps its scores, which transformers' sdpa silently omits."""
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
    """Leave `model` the shortest run of first layers that has a layer of each kind.

    Layers are of the same kind if the classes of their modules and the plain attributes of these are equal. The trial
    needs no others, and is short even if the weights of a large model are still on the host.
    """
    base = transformers_model(model)
    decoder, config = base.get_decoder(), base.config.get_text_config()
    layers, number = getattr(decoder, "layers", None), getattr(config, "num_hidden_layers", None)
    needs_all = any(getattr(config, name, None) for name in WHOLE)
    if not isinstance(layers, nn.ModuleList) or number != len(layers) or needs_all:
        yield
        return
    types = getattr(config, "layer_types", None) or [None] * number
    kinds = []
    for kind, layer in zip(types, layers, strict=True):
        traits = []
        for module in layer.modules():
            plain = {k: v for k, v in vars(module).items() if isinstance(v, int | float | str) and k != "layer_idx"}
            traits.append((type(module), plain))
        kinds.append((kind, traits))
    config.num_hidden_layers = 1 + max(map(kinds.index, kinds))
    decoder.layers = layers[: config.num_hidden_layers]
    try:
        yield
    finally:
        decoder.layers, config.num_hidden_layers = layers, number


@contextlib.contextmanager
def trial(model: nn.Module) -> Iterator[tuple[list[TokenSequence], torch.device]]:
    """Prepare `model` for a trial: evaluation mode, no gradients, only its first layers.

    The layers of a model on the host are on the GPU inside the block, if there is one, so that the trial runs its
    kernels.

    Yields:
        sequences for the trial, and the device of the model.
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
    placement = _on_gpu(model) if torch.cuda.is_available() else contextlib.nullcontext()
    try:
        with torch.no_grad(), _shallow(model), placement:
            yield sequences, next(model.parameters()).device
    finally:
        model.train(was_training)


@contextlib.contextmanager
def _on_gpu(model: nn.Module) -> Iterator[None]:
    """Move the tensors of a model on the host to the current GPU, and back at the end.

    Not if the free memory is short, or the model is quantised.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    tensors = (*model.parameters(), *model.buffers())
    on_host = {tensor: tensor.data for tensor in tensors if tensor.device.type == "cpu"}
    short = sum(tensor.nbytes for tensor in on_host) >= torch.cuda.mem_get_info(device)[0] // 2
    if short or is_quantised(model):  # whose scales are no tensors of the model, and would stay behind
        on_host = {}
    try:
        for tensor in on_host:
            tensor.data = tensor.data.to(device)
        yield
    finally:
        for tensor, data in on_host.items():
            tensor.data = data


def _packing_gap(model: nn.Module, kernel: Kernel | None) -> str | None:
    """Enable packing and compare the logits of a few sequences with those of the model's own attention."""
    variants: list[Variant] = []  # of each layer that calls attention

    def attend(query: Tensor, key: Tensor, value: Tensor, scale: float | None, variant: Variant, *rest: Any) -> Tensor:
        variants.append(variant)
        return SegmentLayout.attend(layout, query, key, value, scale, variant, *rest)

    try:
        with trial(model) as (sequences, device):
            rows = [_outputs(model, pad([sequence], device=device)) for sequence in sequences]
            own_NV = torch.cat(rows).float()
            enable_packed_attention(model, kernel)
            tokens = pack(sequences, device=device)
            layout: SegmentLayout = tokens.inputs["attention_layout"]
            layout.attend = attend  # type: ignore[method-assign, assignment]
            config = transformers_model(model).config.get_text_config()
            num_layers, num_windows = getattr(config, "num_hidden_layers", None) or 1, _num_windows(config)
            gap_N = (_outputs(model, tokens).float() - own_NV).abs().mean(-1)
    except NotImplementedError as error:
        return str(error)
    except Exception as error:  # models fail on packed inputs in types of their own; they keep their own attention
        return f"packing fails ({type(error).__name__}: {first_line(error)[:120]})"
    if len(variants) < num_layers:
        return "not all of its layers ask transformers' attention interface"
    if sum(variant.window is not None for variant in variants) < num_windows:
        return "not all of its layers hand their sliding window to attention"
    lengths = [len(sequence.completion_ids) for sequence in sequences]
    gaps = torch.stack([sequence_gap.mean() for sequence_gap in gap_N.split(lengths)])
    tolerance = 1e-2 if next(model.parameters()).dtype == torch.float32 else 1e-1
    agree = float(gaps.max()) <= tolerance * float(own_NV.std())  # NaN does not
    return None if agree else "packed logits differ from its own"


def _outputs(model: nn.Module, tokens: TokenBatch) -> Tensor:
    """Logits [N, V] that predict each completion token; hidden states [N, H] of a model without a language head."""
    base = transformers_model(model)
    if base.get_output_embeddings() is not None:
        return completion_logits(model, tokens)
    return base.base_model(**tokens.inputs, use_cache=False)[0].flatten(0, 1)[tokens.predict_index]  # type: ignore[no-any-return]


def _num_windows(config: Any) -> int:
    """Number of layers with a sliding window, which a trial on short sequences does not show."""
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return sum(kind == "sliding_attention" for kind in kinds[: config.num_hidden_layers])
    windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return config.num_hidden_layers if windowed else 0


def _masks_windows(base: nn.Module) -> bool:
    """Whether the model's own code makes masks of sliding windows; some pass a window on and have none."""
    files = {type(module).__module__ for module in base.modules()}
    return any(hasattr(sys.modules[file], "create_sliding_window_causal_mask") for file in files)
