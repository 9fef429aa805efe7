"""Images in training: settings that do not work with a model that sees, and batches of TRL's trainers.

Rows of token ids name their images (`swift.models.vision`). TRL pads them to batches as it does with texts, on the
right; then ids are turned back, and the pixels of each row stand beside them. TRL's own batches of images are not used:
they pad prompts on the left and move the rows afterwards, in which some processors mark other tokens as images.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from swift.models.attention.spans import packed_rows
from swift.models.forward import stream_inputs
from swift.models.tower_passes import always_see
from swift.models.vision import TOKEN_KINDS, Vision, vision_of
from swift.trainers.rows import IGNORED


def vision_problems(args: Any) -> list[str]:
    """What does not work yet in the training of a model that is loaded with its vision tower, one line each."""
    problems = []
    if getattr(args, "packing_strategy", "bfd") != "bfd":
        problems.append(f"--packing_strategy: {args.packing_strategy}: cuts rows, and images are not cut; use bfd")
    return problems


def show_images(vision: Vision, model: nn.Module, args: Any) -> None:
    """Give a model of a run what it sees images with; if processes meet in its tower, it computes that always."""
    vision.show(model)
    if args.sharded_by:
        always_see(model, vision)


@dataclass(frozen=True)
class ImageCollator:
    """Batches of rows whose ids name images.

    collator: of TRL, for the same rows without images. Its ids are `input_ids`, and `KL_input_ids` of KTO, whose rows
    are other answers to the same prompts.
    """

    collator: Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]]
    vision: Vision

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The batch of the collator, with what the model takes beside ids."""
        batch = self.collator(rows)
        if "cu_seq_lens_q" in batch:
            return {**batch, **self._of_stream(batch["input_ids"][0].tolist(), batch["cu_seq_lens_q"].tolist())}
        named = batch["input_ids"].tolist()
        for prefix in ("KL_", ""):
            if (ids := batch.get(f"{prefix}input_ids")) is None:
                continue
            batch[f"{prefix}input_ids"] = visible = ids.masked_fill(ids < 0, self.vision.placeholder)
            batch |= {f"{prefix}{name}": value for name, value in self.vision.kinds_of(visible).items()}
        return {**batch, **self.vision.features(named, "cpu")}

    def _of_stream(self, ids: list[int], bounds: list[int]) -> dict[str, Tensor]:
        """What differs in a batch of rows without padding, which begin and end at these places."""
        rows = [ids[start:stop] for start, stop in pairwise(bounds)]
        return stream_inputs(ids, rows, packed_rows([len(row) for row in rows]), "cpu", self.vision)


@dataclass(frozen=True)
class ImagePairCollator:
    """Batches of chosen and rejected rows, each with its `input_ids`, whose ids name images.

    Their placeholders become `IGNORED`, in `SeesPairs` they are turned back: ORPO's loss counts the tokens of prompts.

    collator: of TRL, for the same rows without images.
    """

    collator: Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]]
    vision: Vision

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The batch of the collator, and as `images` what the model takes beside the ids of all its rows."""
        batch = self.collator(rows)
        ids: list[list[int]] = [row[f"{answer}_input_ids"] for answer in ("chosen", "rejected") for row in rows]
        width = max(map(len, ids))
        kinds = self.vision.token_kinds([[*row, *[0] * (width - len(row))] for row in ids], "cpu")
        for name in ("chosen_input_ids", "rejected_input_ids"):
            batch[name] = batch[name].masked_fill(batch[name] < 0, IGNORED)
        return {**batch, "images": {**kinds, **self.vision.features(ids, "cpu")}}


class SeesPairs:
    """Mixin before TRL's trainers of CPO and ORPO, whose forward pass takes ids alone."""

    def __init__(self, *, model: Any, **arguments: Any) -> None:
        super().__init__(model=model, **arguments)  # type: ignore[call-arg]
        self._vision = vision_of(model)
        if self._vision is not None:
            self.data_collator = ImagePairCollator(self.data_collator, self._vision)  # type: ignore[has-type]

    def concatenated_forward(self, model: Any, batch: dict[str, Any]) -> Any:
        """As TRL's, with images."""
        if self._vision is None:
            return super().concatenated_forward(model, batch)  # type: ignore[misc]
        placeholder = self._vision.placeholder

        def seen(ids: Tensor, **named: Any) -> Any:
            return model(ids.masked_fill(ids == IGNORED, placeholder), **batch["images"], **named)

        return super().concatenated_forward(seen, batch)  # type: ignore[misc]


class SeesVerdicts:
    """Mixin before KTOTrainer, which computes log-probs of a reference before training from ids alone."""

    model: Any

    def compute_ref_log_probs(self, model: Any, inputs: dict[str, Any]) -> Any:
        """As TRL's, with images."""
        if (vision := vision_of(self.model)) is None:
            return super().compute_ref_log_probs(model, inputs)  # type: ignore[misc]
        pixels = {name: inputs[name] for name in vision.drawn() if name in inputs}

        def seen(**named: Any) -> Any:
            prefix = "KL_" if named["input_ids"] is inputs.get("KL_input_ids") else ""
            kinds = {name: inputs[f"{prefix}{name}"] for name in TOKEN_KINDS if name in inputs}
            return model(**pixels, **kinds, **named)

        return super().compute_ref_log_probs(seen, inputs)  # type: ignore[misc]
