"""What TRL's GKDTrainer lacks: the loss of several processes, a cache for sampling, and images."""

from __future__ import annotations

import contextlib
import functools
from types import SimpleNamespace
from typing import Any

from swift.models.vision import placeholder_ids, vision_of
from swift.trainers.images import ImageTurnCollator


class Distilled:
    """Mixin before TRL's trainer, which divides the loss by the number of tokens of all processes."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        # TRL disables gradient checkpointing while sampling, so the key-value cache can be used
        self.generation_kwargs["use_cache"] = self.generation_config.use_cache = True  # type: ignore[attr-defined]
        self._vision = vision_of(self.model)  # type: ignore[attr-defined]
        if self._vision is not None:
            self.data_collator = ImageTurnCollator(self.data_collator, self._vision)  # type: ignore[has-type]
            # an answer has no images
            self.generation_config.suppress_tokens = placeholder_ids(self.model.config)  # type: ignore[attr-defined]

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """As TRL's, but divides by the mean number of tokens per batch, since gradients are averaged over them."""
        if num_items_in_batch is not None:
            batches = self.args.world_size // self.get_tp_size()  # type: ignore[attr-defined]
            num_items_in_batch = num_items_in_batch / batches
        with contextlib.ExitStack() as seen:
            for one in (model, self.teacher_model):  # type: ignore[attr-defined]
                add = functools.partial(_add, self._images(inputs, "input_ids"))
                seen.callback(one.register_forward_pre_hook(add, with_kwargs=True).remove)
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)  # type: ignore[misc]

    def generate_on_policy_outputs(self, model: Any, inputs: Any, generation_config: Any) -> Any:
        """As TRL's, with the images of prompts."""
        generate = functools.partial(model.generate, **self._images(inputs, "prompts"))
        return super().generate_on_policy_outputs(  # type: ignore[misc]
            SimpleNamespace(generate=generate), inputs, generation_config
        )

    def _images(self, inputs: Any, ids: str) -> dict[str, Any]:
        """What models take beside these ids of a batch."""
        if self._vision is None or not inputs["images"]:
            return {}
        return {**inputs["images"], **self._vision.kinds_of(inputs[ids])}


def _add(more: dict[str, Any], _: Any, arguments: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return arguments, {**named, **more}
