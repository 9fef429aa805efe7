"""The forward pass of a plain decoder, computed directly: what sampling needs of a model, without what it does not.

transformers' forward spends more on masks, wrappers and small operations than a decode step of a small model takes,
and its products go through MKL. Here a step is the arithmetic alone: one product for queries, keys and values,
attention that reads a shared prompt once (`prompt_cache`), and on a CPU packed weights and compiled kernels
(`native_step`, `swift.native`) or, where there are none, oneDNN's products (`swift.models.cpu_linear`). LoRA adapters
are added into the packed copies.

It is used for models that are known to be no more than this, and after a trial against their own forward pass. Anything
else (hooks, patched layers, autocast, quantised or spread weights, other types) keeps the model's own forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from swift.models import cpu_linear
from swift.models.cpu_panels import Panels
from swift.models.cpu_rows import constant
from swift.models.forward import Span, TokenSequence, is_packed, pack, packed_logits, transformers_model
from swift.models.sharded import is_spread
from swift.native import Kernels, kernels
from swift.rollout.engines import decode_step, native_step
from swift.rollout.engines.decode_step import BLOCK
from swift.rollout.engines.native_step import NativeLayer, NativeStep
from swift.rollout.engines.prompt_cache import Prefill, PromptCache
from swift.rollout.engines.scripted import scripted

TOLERANCE = 1e-3
"""Largest difference from the model's own logits, in their standard deviations; roundings are a thousandth of it."""

KNOWN_ATTENTION = ("LlamaAttention", "Qwen2Attention", "Qwen3Attention", "MistralAttention")
"""Rotary attention with grouped heads and nothing else, but for a norm of queries and keys."""
LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
ATTENTION_PARTS = (
    {"q_proj", "k_proj", "v_proj", "o_proj"},
    {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"},
)
EQUAL_FORWARDS = tuple(
    f"swift.models.{name}"
    for name in ("cpu_blocks", "cpu_layers", "cpu_norms", "cpu_training", "direct_gradients", "scoring")
)
"""What these put in the place of a module's forward gives the same logits, where logits are asked for."""
PACKED_BYTES = 1 << 30
"""Weights above this are not packed, because packing holds them twice while sampling."""
FIRST_POSITIONS = 512
"""Positions of the first table of rotary angles."""


class Attention(Protocol):
    """Where a layer's attention happens; see `PromptCache.attend`."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, rows: int) -> Tensor:
        """[R, H, D], [R, Hkv, D], [R, Hkv, D] -> [N, H * D], N = rows"""
        ...


def obstacle(model: nn.Module) -> str | None:
    """Why the model keeps its own forward pass for sampling, in a few words; None when it needs nothing else.

    Looks at structure only and takes well below a millisecond per layer, so that it can be asked before every batch.
    """
    if not is_packed(model):
        return "attention of its own"
    if is_spread(model):
        return "weights that are spread over processes"
    base = transformers_model(model)
    first = next(model.parameters())
    if first.dtype != torch.float32 or torch.is_autocast_enabled(first.device.type):
        return "another precision than float32"
    return _structure(base) or _changed(model)


def _structure(base: Any) -> str | None:
    decoder: Any = getattr(base, "model", None)
    if {name for name, _ in base.named_children()} != {"model", "lm_head"}:
        return "parts that a plain decoder does not have"
    if {name for name, _ in decoder.named_children()} != {"embed_tokens", "layers", "norm", "rotary_emb"}:
        return "parts that a plain decoder does not have"
    if type(decoder.embed_tokens) is not nn.Embedding:
        return f"an embedding of type {type(decoder.embed_tokens).__name__}"
    for layer in decoder.layers:
        parts = {name for name, _ in layer.named_children()}
        mlp = {name for name, _ in layer.mlp.named_children()} if "mlp" in parts else set()
        attention = {name for name, _ in layer.self_attn.named_children()} if "self_attn" in parts else set()
        if parts != LAYER_PARTS or mlp != MLP_PARTS or attention not in ATTENTION_PARTS:
            return "layers with other parts than a plain decoder's"
        if type(layer.self_attn).__name__ not in KNOWN_ATTENTION:
            return f"attention of type {type(layer.self_attn).__name__}"
        if getattr(layer.self_attn, "sliding_window", getattr(base.config, "sliding_window", None)):
            return "a sliding window"
    linear = (found for module in _linears(base) if (found := cpu_linear.lora_obstacle(module)) is not None)
    return next(linear, None)


def _linears(base: Any) -> Iterator[nn.Module]:
    for layer in base.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        yield from (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        yield from (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    yield base.lm_head


def _changed(model: nn.Module) -> str | None:
    """Whether somebody wants to see or change what passes through a module, or weights are not all alike."""
    peft = getattr(model, "peft_type", None)
    if peft is not None and str(getattr(peft, "value", peft)) != "LORA":
        return f"a PEFT method other than LoRA ({peft})"
    modules, seen = [model], {id(model)}
    kinds: set[tuple[torch.device, torch.dtype]] = set()
    for module in modules:  # grows; `modules()` takes three times as long
        parts = [part for part in module._modules.values() if part is not None and id(part) not in seen]
        modules += parts
        seen.update(map(id, parts))
        forward = vars(module).get("forward")
        replaced = forward is not None and getattr(forward, "__module__", "") not in EQUAL_FORWARDS
        if replaced or module._forward_hooks or module._forward_pre_hooks:
            return f"hooks or a patched forward of {type(module).__name__}"
        kinds.update((weight.device, weight.dtype) for weight in module._parameters.values() if weight is not None)
    if any(not dtype.is_floating_point for _, dtype in kinds):
        return "quantised weights"
    return "weights of several devices or precisions" if len(kinds) > 1 else None


def plain_decoder(model: nn.Module) -> PlainDecoder | None:
    """The direct forward pass of a model for which it is right, which is tried out; None for any other."""
    if obstacle(model) is not None:
        return None
    decoder = PlainDecoder(model)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return decoder if _gap(model, decoder) <= TOLERANCE else None
    finally:
        model.train(was_training)
        decoder.drop()


def _gap(model: nn.Module, decoder: PlainDecoder) -> float:
    """Largest difference of logits for prompts of two lengths and what follows them, in standard deviations."""
    device = next(model.parameters()).device
    size = min(97, decoder.vocab_size)
    ids = [(7 * i + 3) % size for i in range(24)]
    sequences = [
        TokenSequence(ids[prompt], ids[start : start + 4])
        for prompt in (slice(0, 3), slice(3, 9))
        for start in (10, 15)
    ]
    own_NV = packed_logits(model, pack(sequences, device=device)).view(len(sequences), 4, -1)
    decoder.refresh()
    spans = [Span(0, 3), Span(3, 6)]
    prefill, cache = Prefill(spans), PromptCache()
    stream = torch.tensor(ids[:9], device=device)
    positions = torch.tensor([*range(3), *range(6)], device=device)
    first_PV = decoder.logits(stream, positions, prefill, torch.tensor([2, 8], device=device))
    cache.add(prefill.captured, spans, [0, 0, 1, 1], [3] * 4)
    found = [first_PV[[0, 0, 1, 1]]]
    lengths = torch.tensor([3, 3, 6, 6], device=device)
    for step in range(3):
        cache.begin_step()
        tokens = torch.tensor([one.completion_ids[step] for one in sequences], device=device)
        found.append(decoder.step(tokens, lengths + step, cache))
    return float((torch.stack(found, 1) - own_NV).abs().max() / own_NV.std())


class PlainDecoder:
    """Computes what `model` computes, for a model without `obstacle`.

    Args:
        model: its weights are read at every step, or from packed copies until the next `refresh`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        base = transformers_model(model)
        self._base, self._decoder = base, base.model
        self._layers = [_Layer(layer) for layer in self._decoder.layers]
        self._turns = _Turns(self._decoder.rotary_emb)
        weights = sum(weight.numel() for weight in {module_weight(one) for one in _linears(base)}) * 4
        self._small = weights <= PACKED_BYTES
        self.fast = False
        self._head: _Product | None = None
        self._weights: list[list[Tensor | None]] = []  # of `decode_step`, where all are packed
        self._last: list[Tensor | None] = []
        self._native: NativeStep | None = None

    @property
    def vocab_size(self) -> int:
        """V, the columns of the logits."""
        return int(module_weight(self._base.lm_head).shape[0])

    def same_in_any_batch(self) -> bool:
        """Whether a row gets the same bits whatever rows are beside it; tries what swift's kernels do not do."""
        assert self._head is not None, "refresh comes first"
        generator = torch.Generator().manual_seed(0)
        layer = self._layers[0]

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(self._decoder.norm.weight.device)

        for product in (layer.to_heads, layer.to_output, layer.to_inner, layer.to_down, self._head):
            rows = random(128, product.width)
            whole = product(rows)
            if any(not torch.equal(product(rows[:few].contiguous()), whole[:few]) for few in (8, 24, 64)):
                return False
        if self._native is not None:
            return True  # its kernels compute each row from that row alone
        spans = [Span(0, 5), Span(5, BLOCK + 40), Span(BLOCK + 45, 2 * BLOCK + 90)]
        stream = random(spans[-1].stop, layer.groups, layer.depth), random(spans[-1].stop, layer.groups, layer.depth)
        steps = [(random(1, layer.heads, layer.depth), random(1, layer.groups, layer.depth)) for _ in range(24)]

        def attended(before: Sequence[int], late: int, after: Sequence[int], later: int) -> Tensor:
            """What a row gets that joins others `late` steps after them, and is joined itself `later` steps after."""
            cache, outputs = PromptCache(), []
            for step in range(late + len(steps)):
                own = step - late
                for at, which in ((0, before), (late, [1]), (late + later, after)):
                    if step == at and which:
                        cache.add([stream], spans, which, [late + len(steps)] * len(which))
                cache.begin_step()
                query, key = (part.expand(cache.num_rows, -1, -1) for part in steps[max(0, own)])
                outputs.append(
                    cache.attend(0, query, key, key, layer.scale, cache.num_rows)[len(before) if own >= 0 else 0]
                )
            return torch.stack(outputs[late:])

        alone = attended([], 0, [], 0)
        others: list[tuple[list[int], int, list[int], int]] = [
            ([], 0, [1, 2, 2], 3),
            ([2, 1, 0, 0, 0], 0, [], 0),
            ([2, 2], 19, [0], 5),
            ([0], BLOCK - 9, [2], 1),
        ]
        return all(torch.equal(alone, attended(*other)) for other in others)

    def refresh(self) -> None:
        """Take the weights as they are now, where they are now."""
        on_cpu = next(self.model.parameters()).device.type == "cpu"
        self.fast = on_cpu and cpu_linear.available()
        found = kernels() if on_cpu and self._small and self._is_for_kernels() else None
        packs = self._small and (self.fast or found is not None)
        for layer in self._layers:
            layer.refresh(fast=self.fast, packs=packs, kernels=found)
        self._head = _Product([self._base.lm_head], fast=self.fast, packs=packs, kernels=found)
        norm = _Norm(self._decoder.norm)
        scripts = packs and found is None and all(layer.is_silu for layer in self._layers)
        self._weights = [layer.weights() for layer in self._layers] if scripts else []
        self._last = [norm.weight, norm.epsilon, *self._head.packed] if self._weights else []
        self._native = self._compiled(found, norm) if found is not None else None

    def _is_for_kernels(self) -> bool:
        """Whether all layers are of one shape that they take, and angles lie in a table."""
        hidden = self._decoder.embed_tokens.weight.shape[1]
        shapes = {(one.depth, one.heads, one.groups, one.inner, one.is_silu) for one in self._layers}
        depth, _, _, inner, silu = next(iter(shapes))
        return len(shapes) == 1 and silu and self._turns.fixed and native_step.takes(hidden, depth, inner)

    def _compiled(self, found: Kernels, norm: _Norm) -> NativeStep:
        assert self._head is not None and self._head.panels is not None
        embeddings, first = self._decoder.embed_tokens.weight, self._layers[0]
        layers = [layer.native() for layer in self._layers]
        epsilon = float(norm.epsilon)
        return NativeStep(found, embeddings, layers, norm.weight, epsilon, self._head.panels, first.depth, first.groups)

    def drop(self) -> None:
        """Give packed copies back; `refresh` comes before the next use."""
        self._head = None
        self._weights, self._last, self._native = [], [], None
        self._turns.drop()
        for layer in self._layers:
            layer.drop()

    def logits(self, ids: Tensor, positions: Tensor, attention: Attention, select: Tensor | None = None) -> Tensor:
        """Logits [N, V] of a stream of tokens.

        Args:
            ids: [N].
            positions: [N].
            attention: of each layer, with what came before.
            select: which of the N are wanted; None: all.
        """
        count = ids.shape[0]
        hidden, turn = self._begin(ids, positions)
        for index, layer in enumerate(self._layers):
            hidden = layer.forward(index, hidden, turn, attention, count)
        return self._end(hidden[:count] if select is None else hidden.index_select(0, select))

    def step(self, ids: Tensor, positions: Tensor, cache: PromptCache) -> Tensor:
        """`logits` of the next token of each row of a cache, whose step has begun; all layers in one call if possible.

        Args:
            ids: [R].
            positions: [R].
            cache: of the rows.
        """
        table = None
        if self._weights or self._native is not None:
            table = self._turns.table(cache.most_positions, self._decoder.norm.weight)
        if table is None:
            return self.logits(ids, positions, cache)
        if self._native is not None:
            return self._native(ids, positions, table, cache)
        count = ids.shape[0]
        ids, positions = self._filled(ids, positions)
        caches = [list(layer) for layer in cache.layers]
        scales = [decode_step.scalar(layer.scale) for layer in self._layers]
        fixed = (self._decoder.embed_tokens.weight, *table, self._weights, self._last)
        return scripted(decode_step.decode)(ids, positions, *fixed, caches, scales, count, *cache.places(ids.shape[0]))

    def _begin(self, ids: Tensor, positions: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The states before the first layer and the angles, for as many rows as the products want."""
        ids, positions = self._filled(ids, positions)
        hidden = nn.functional.embedding(ids, self._decoder.embed_tokens.weight)
        return hidden, self._turns(positions, hidden)

    @property
    def _rounds(self) -> bool:
        """Whether products want few different numbers of rows."""
        return self.fast and self._native is None

    def _filled(self, ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        if self._rounds and (more := cpu_linear.rounded_rows(ids.shape[0]) - ids.shape[0]):
            return nn.functional.pad(ids, (0, more)), nn.functional.pad(positions, (0, more))
        return ids, positions

    def _end(self, hidden: Tensor) -> Tensor:
        """Logits of the states behind the last layer."""
        assert self._head is not None, "refresh comes first"
        wanted = hidden.shape[0]
        if self._rounds and (more := cpu_linear.rounded_rows(wanted) - wanted):
            hidden = nn.functional.pad(hidden, (0, 0, 0, more))
        return self._head(_Norm(self._decoder.norm)(hidden))[:wanted]


class _Turns:
    """Rotary positions: the cosine, and the sine with the sign of its half, [N, 1, D] each.

    They are looked up in a table where an angle depends on nothing but its own position.

    Args:
        rotary: the module that computes them.
    """

    def __init__(self, rotary: Any) -> None:
        self._rotary = rotary
        kind = str(getattr(rotary, "rope_type", "dynamic"))
        self.fixed = "dynamic" not in kind and kind != "longrope"  # those look at the longest sequence
        self._table: tuple[Tensor, Tensor] | None = None

    def __call__(self, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Of `positions` [N], in the precision of `like`."""
        if not self.fixed or positions.device.type != "cpu":  # a look at the positions would wait for a device
            return self._compute(positions, like)
        cos, sin = self._up_to(int(positions.max()) + 1, like)
        return cos.index_select(0, positions), sin.index_select(0, positions)

    def table(self, count: int, like: Tensor) -> tuple[Tensor, Tensor] | None:
        """Of the first `count` positions or more on the CPU, where an angle depends on nothing else; else None."""
        return self._up_to(count, like[None]) if self.fixed and like.device.type == "cpu" else None

    def _up_to(self, count: int, like: Tensor) -> tuple[Tensor, Tensor]:
        if self._table is None or count > self._table[0].shape[0]:
            size = max(FIRST_POSITIONS, 1 << (count - 1).bit_length())
            self._table = self._compute(torch.arange(size), like)
        return self._table

    def _compute(self, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self._rotary(like[None], positions[None])
        half = sin.shape[-1] // 2
        return cos[0, :, None], torch.cat((-sin[0, :, None, :half], sin[0, :, None, half:]), -1)

    def drop(self) -> None:
        """Hold no table."""
        self._table = None


class _Layer:
    """One decoder layer."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        attention = layer.self_attn
        self.depth = attention.head_dim
        self.scale = attention.scaling
        self.heads = module_weight(attention.q_proj).shape[0] // self.depth
        self.groups = module_weight(attention.k_proj).shape[0] // self.depth
        self.inner = module_weight(layer.mlp.gate_proj).shape[0]
        self.normed = hasattr(attention, "q_norm")

    def refresh(self, *, fast: bool, packs: bool, kernels: Kernels | None) -> None:
        """Take the weights as they are now."""
        attention, mlp = self.layer.self_attn, self.layer.mlp

        def product(*modules: nn.Module) -> _Product:
            return _Product(modules, fast=fast, packs=packs, kernels=kernels)

        self.to_heads = product(attention.q_proj, attention.k_proj, attention.v_proj)
        self.to_output = product(attention.o_proj)
        self.to_inner, self.to_down = product(mlp.gate_proj, mlp.up_proj), product(mlp.down_proj)
        self.norms = _Norm(self.layer.input_layernorm), _Norm(self.layer.post_attention_layernorm)
        if self.normed:
            self.head_norms = _Norm(attention.q_norm), _Norm(attention.k_norm)
        self.activation = mlp.act_fn

    @property
    def is_silu(self) -> bool:
        """Whether the activation is the one of `decode_step`."""
        return type(self.layer.mlp.act_fn).__name__ in ("SiLUActivation", "SiLU")

    def weights(self) -> list[Tensor | None]:
        """Those of `decode_step.decode`."""
        before_attention, before_mlp = self.norms
        queries, keys = self.head_norms if self.normed else (None, None)
        return [
            *(before_attention.weight, before_attention.epsilon),
            *self.to_heads.packed,
            *(queries and queries.weight, keys and keys.weight, queries and queries.epsilon),
            *self.to_output.packed,
            before_mlp.weight,
            *self.to_inner.packed,
            *self.to_down.packed,
        ]

    def native(self) -> NativeLayer:
        """Those of `native_step`; all are packed in panels."""
        before_attention, before_mlp = self.norms
        queries, keys = self.head_norms if self.normed else (None, None)
        heads, output, inner, down = (
            product.panels for product in (self.to_heads, self.to_output, self.to_inner, self.to_down)
        )
        assert heads is not None and output is not None and inner is not None and down is not None
        return NativeLayer(
            norm=before_attention.weight,
            epsilon=float(before_attention.epsilon),
            heads=heads,
            query_norm=queries.weight if queries else None,
            key_norm=keys.weight if keys else None,
            head_epsilon=float(queries.epsilon) if queries else 0.0,
            scale=self.scale,
            output=output,
            inner_norm=before_mlp.weight,
            inner=inner,
            down=down,
        )

    def drop(self) -> None:
        """Hold no weights."""
        for name in ("to_heads", "to_output", "to_inner", "to_down", "norms", "head_norms"):
            vars(self).pop(name, None)

    def forward(
        self, index: int, hidden: Tensor, turn: tuple[Tensor, Tensor], attention: Attention, count: int
    ) -> Tensor:
        """[N, hidden] -> [N, hidden], of which the first `count` rows are tokens; `hidden` is overwritten."""
        rows = hidden.shape[0]
        before_attention, before_mlp = self.norms
        heads = self.to_heads(before_attention(hidden)).view(rows, -1, self.depth)
        turning = heads[:, : self.heads + self.groups]
        if self.normed:
            of_queries, of_keys = self.head_norms
            turning = torch.cat((of_queries(turning[:, : self.heads]), of_keys(turning[:, self.heads :])), 1)
        turned = decode_step.turned(turning, *turn)[:count]
        query, key = turned[:, : self.heads], turned[:, self.heads :]
        attended = attention.attend(index, query, key, heads[:count, self.heads + self.groups :], self.scale, rows)
        hidden = hidden.add_(self.to_output(attended))
        gate, up = self.to_inner(before_mlp(hidden)).chunk(2, -1)
        return hidden.add_(self.to_down(self.activation(gate).mul_(up)))


class _Norm:
    """Root-mean-square norm over the last dimension."""

    def __init__(self, norm: Any) -> None:
        self.weight, self._value = norm.weight, norm.variance_epsilon

    @property
    def epsilon(self) -> Tensor:
        """[1]"""
        return constant(self._value, self.weight.dtype)

    def __call__(self, rows: Tensor) -> Tensor:
        if rows.device.type != "cpu":
            return nn.functional.rms_norm(rows, self.weight.shape, self.weight, self._value)
        return decode_step.rms_norm(rows, self.weight, self.epsilon)


class _Product:
    """One or more linear layers with the same input, their outputs side by side."""

    def __init__(
        self, modules: Sequence[nn.Module], *, fast: bool, packs: bool, kernels: Kernels | None = None
    ) -> None:
        self._modules, self._fast = modules, fast
        self.width = module_weight(modules[0]).shape[1]
        self.packed: tuple[Tensor, Tensor | None] | tuple[()] = ()
        self.panels: Panels | None = None
        if packs:
            parts = [cpu_linear.lora_weight(module) for module in modules]
            bias = None
            if any(part[1] is not None for part in parts):
                bias = torch.cat([b if b is not None else w.new_zeros(w.shape[0]) for w, b in parts])
            weight = torch.cat([weight for weight, _ in parts])
            if kernels is not None:
                self.panels = Panels(kernels, weight, bias)
            else:
                small = cpu_linear.is_small(weight)
                self.packed = weight.t().contiguous() if small else cpu_linear.pack(weight), bias

    def __call__(self, rows: Tensor) -> Tensor:
        if self.panels is not None:
            return self.panels(rows.contiguous())
        if self.packed:
            return decode_step.product(rows, *self.packed)
        product = cpu_linear.linear if self._fast else nn.functional.linear
        outputs = [product(rows, *cpu_linear.lora_weight(module)) for module in self._modules]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)


def module_weight(module: nn.Module) -> Tensor:
    """The base weight of a linear layer, with or without LoRA."""
    linear: Any = getattr(module, "base_layer", module)
    weight: Tensor = linear.weight
    return weight
