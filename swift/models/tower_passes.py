"""One pass of the tower in each forward pass of a model that sees, with and without images.

Where parameters or their gradients are shared by processes, these meet in each layer of the tower: one whose rows have
no images computes a drawn image there. Nothing of it reaches the loss, and its gradient is 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from swift.models.attention.interface import decoder_of, transformers_model
from swift.models.vision import Vision


def always_see(model: nn.Module, vision: Vision) -> None:
    """Let `model`, possibly under PEFT, compute its tower in every forward pass; once is enough, also of a copy."""
    base = transformers_model(model)
    if getattr(base, "_swift_always_sees", False):
        return
    base._swift_always_sees = True
    passes = TowerPasses(base.base_model, vision)
    base.base_model.register_forward_pre_hook(passes.begin, with_kwargs=True)
    decoder_of(model).register_forward_pre_hook(passes.see, with_kwargs=True)


class TowerPasses:
    """The hooks of one model. It embeds tokens, then images, and hands all of them to its decoder."""

    def __init__(self, model: Any, vision: Vision) -> None:
        self._model, self._vision = model, vision
        self._blind = False

    def begin(self, _: nn.Module, __: Any, inputs: dict[str, Any]) -> None:
        """Before a forward pass."""
        self._blind = not any(inputs.get(name) is not None for name in self._vision.drawn())

    def see(self, _: nn.Module, arguments: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """Before the pass of the decoder, where backward passes come to the tower as they do with images."""
        if not self._blind:
            return None
        self._blind = False
        embedded: Tensor = inputs["inputs_embeds"]
        features = {name: value.to(embedded.device) for name, value in self._vision.drawn().items()}
        for output in _tensors(_used(self._model.get_image_features(**features))):
            embedded = embedded + output.flatten()[:0].sum().to(embedded)  # of no numbers, but part of the graph
        return arguments, {**inputs, "inputs_embeds": embedded}


def _used(output: Any) -> list[Any]:
    """What the language model gets of a tower: embeddings, and those of its first layers (Qwen3-VL)."""
    return [getattr(output, "pooler_output", output), getattr(output, "deepstack_features", None)]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
