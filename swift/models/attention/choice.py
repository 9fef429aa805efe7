"""Choice between packed attention, forked states and padded rows, by trials on short sequences.

Models whose layers need more than a `Variant` (recurrent or linear attention layers, positions that are not rotary)
keep their own attention. Completions continue from the states of their prompts (`forked`), or, where a trial of that
fails, too, they are padded rows, which is slower and equal.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from swift.errors import first_line
from swift.models.attention.forked import disable_forking, enable_forking, forks
from swift.models.attention.interface import (
    decoder_of,
    enable_packed_attention,
    is_packed,
    set_attention,
    transformers_model,
)
from swift.models.attention.layout import Kernel, SegmentLayout
from swift.models.attention.spans import Variant
from swift.models.forward import TokenBatch, TokenSequence, completion_logits, pack, pad
from swift.models.multimodal import seeing
from swift.models.quantisation import is_quantised
from swift.models.vision import SEE_THEMSELVES, possible, vision_of

PACKED_LAYERS = {"full_attention", "sliding_attention"}
"""Types of layers that can be packed, as configurations name them."""

FORKED = {
    "qwen3_5_text", "qwen3_next", "qwen3_5_moe_text", "olmo_hybrid", "nemotron_h", "falcon_h1", "granitemoehybrid",
    "bamba", "zamba2", "mamba2", "lfm2", "lfm2_moe",
}  # fmt: skip
"""Architectures of text models whose completions continue from the states of prompts, as trials find."""

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
        set_attention(model, own)
    obstacle = packing_obstacle(model)
    if obstacle is None and base.device.type != "meta":
        if own == "flex_attention":  # it would compile for each length of the trial
            set_attention(model, "eager")
        obstacle = _packing_gap(model, REQUESTED.get(requested))
        if obstacle is not None:
            set_attention(model, own)
    return obstacle


def choose_streams(model: nn.Module, unless: str = "") -> str | None:
    """Let `model` take packed streams, by packed attention or else by forking the states of prompts.

    unless: why states cannot be forked in this run, if something in it is in the way.

    Returns:
        why it takes padded rows, in a few words; None when it takes streams now.
    """
    obstacle = choose_attention(model)
    if obstacle is None or forks(model):
        return None
    if transformers_model(model).device.type == "meta":
        return obstacle
    gap = unless or _unforkable(model) or _forking_gap(model)
    return None if gap is None else "; ".join(dict.fromkeys((obstacle, gap)))


def likely_streams(model: nn.Module, kernel: Kernel | None) -> None:
    """Let a model on the device "meta" take packed streams in the way that trials find for its architecture.

    Raises NotImplementedError: they find none, or it is not known.
    """
    base = transformers_model(model)
    sees = getattr(seeing(base.config), "vision_config", None) is not None
    both = sees and _images_see_themselves(base, SEE_THEMSELVES)  # `packing_obstacle` asks for a processor, too
    obstacle = "tokens of an image see each other" if both else packing_obstacle(model)
    if obstacle is None:
        enable_packed_attention(model, kernel)
    elif not both and base.config.get_text_config().model_type in FORKED:
        enable_forking(model)
    else:
        raise NotImplementedError(f"{obstacle}: models on padded rows are not planned yet")


def _unforkable(model: nn.Module) -> str | None:
    """What a trial on short sequences would not show."""
    base = transformers_model(model)
    config = base.config.get_text_config()
    if vision_of(model) is not None and _images_see_themselves(base):
        return "tokens of an image see each other"
    if _num_windows(config) and not _masks_windows(base):
        return "a sliding window that its own attention does not know"
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {part.get("rope_type") for part in (rope, *rope.values()) if isinstance(part, dict)}
    if kinds & {"dynamic", "longrope"}:  # each pass would have its own
        return "positions that depend on the longest sequence"
    return None


def has_soft_cap(config: Any) -> bool:
    """Whether attention caps its scores, which transformers' sdpa silently omits."""
    return bool(getattr(config.get_text_config(), "attn_logit_softcapping", None))


def packing_obstacle(model: nn.Module) -> str | None:
    """Why packed segments would be wrong for this model, in a few words; None when they are right."""
    base = transformers_model(model)
    config = base.config.get_text_config()
    if vision_of(model) is not None and _images_see_themselves(base, SEE_THEMSELVES):
        return "tokens of an image see each other"
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
    decoder, config = decoder_of(model), base.config.get_text_config()
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
    if (vision := vision_of(model)) is not None:
        prompt = vision.example()
        sequences += [TokenSequence(prompt, ids[completion]) for completion in (slice(10, 15), slice(15, 22))]
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
            vision = vision_of(model)
            rows = [_outputs(model, pad([sequence], device=device, vision=vision)) for sequence in sequences]
            own_NV = torch.cat(rows).float()
            enable_packed_attention(model, kernel)
            tokens = pack(sequences, device=device, vision=vision)
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


def _forking_gap(model: nn.Module) -> str | None:
    """Enable forking, and compare logits and a gradient of a few sequences with those of rows; undone if they differ.

    Prompts differ in length; a completion without a second token, one with a single one, and one longer than the
    chunks in which linear attention is computed are among the completions. Layers are computed again in the backward
    pass, if the model can.
    """
    base = transformers_model(model)
    size = min(97, base.config.get_text_config().vocab_size)
    ids = [(7 * i + 3) % size for i in range(160)]
    prompts, completions = [ids[:40], ids[40:49]], (ids[50:51], ids[60:62], ids[62:132], ids[140:145])
    if (vision := vision_of(model)) is not None:
        prompts.append(vision.example())
    sequences = [TokenSequence(prompt, completion) for prompt in prompts for completion in completions]
    enable_forking(model)  # all its layers; the trial has the first ones
    try:
        with trial(model) as (_, device), torch.enable_grad(), _recomputing(base):
            own_NV, own = _with_gradient(
                model, [pad([sequence], device=device, vision=vision) for sequence in sequences]
            )
            forked_NV, forked = _with_gradient(model, [pack(sequences, device=device, vision=vision)])
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # as in `_packing_gap`
        disable_forking(model)
        return f"states cannot be forked ({type(error).__name__}: {first_line(error)[:120]})"
    gaps = (forked_NV - own_NV).abs().mean(-1).split([len(sequence.completion_ids) for sequence in sequences])
    gap = float(torch.stack([gap.mean() for gap in gaps]).max() / own_NV.std())
    of_gradient = float((forked - own).norm() / own.norm())
    tolerance = 2e-3 if next(model.parameters()).dtype == torch.float32 else 1e-1
    if gap <= tolerance and of_gradient <= 2 * tolerance:  # NaN is not
        return None
    disable_forking(model)
    return "forked states give other logits" if gap > tolerance else "forked states give another gradient"


def _with_gradient(model: nn.Module, batches: Sequence[TokenBatch]) -> tuple[Tensor, Tensor]:
    """Logits [N, V] of all batches, and the gradient of their squares by the embedding of each token id."""
    embedded: list[tuple[Tensor, Tensor]] = []

    def keep(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        embedded.append((args[0], output.detach().requires_grad_()))
        return embedded[-1][1]

    hook = transformers_model(model).get_input_embeddings().register_forward_hook(keep)
    try:
        logits_NV = torch.cat([_outputs(model, tokens) for tokens in batches]).float()
        loss = logits_NV.square().sum() / logits_NV.shape[1] ** 0.5  # whose gradients float16 has numbers for
        gradients = torch.autograd.grad(loss, [output for _, output in embedded])
    finally:
        hook.remove()
    ids = torch.cat([ids.flatten() for ids, _ in embedded])
    of_tokens = torch.cat([gradient.flatten(0, 1).float() for gradient in gradients])
    total = torch.zeros(int(ids.max()) + 1, of_tokens.shape[1], device=ids.device)
    return logits_NV.detach(), total.index_add_(0, ids, of_tokens)


@contextlib.contextmanager
def _recomputing(base: Any) -> Iterator[None]:
    """Compute layers again in the backward pass, as in training, but without dropout."""
    layers = [module for module in base.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers or base.is_gradient_checkpointing:
        yield
        return
    asked = [base.base_model, *layers]  # some decoders ask, too, and forget states
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in asked:
        module.training = True
    try:
        yield
    finally:
        base.gradient_checkpointing_disable()
        base.disable_input_require_grads()
        for module in asked:
            module.training = False


def _outputs(model: nn.Module, tokens: TokenBatch) -> Tensor:
    """Logits [N, V] that predict each completion token; hidden states [N, H] of a model without a language head."""
    base = transformers_model(model)
    if base.get_output_embeddings() is not None:
        return possible(model, completion_logits(model, tokens))
    return base.base_model(**tokens.inputs, use_cache=False)[0].flatten(0, 1)[tokens.predict_index]  # type: ignore[no-any-return]


def _images_see_themselves(base: Any, known: Collection[str] = ()) -> bool:
    """Whether attention between the tokens of an image goes both ways, which a trial in 16 bits may miss.

    known: architectures of which it is taken into account.
    """
    both = getattr(base.config.get_text_config(), "use_bidirectional_attention", None)
    kinds = "token_type_ids" in inspect.signature(type(base.base_model).forward).parameters
    return bool(both) or (kinds and base.config.model_type not in known)


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
