"""The reference model of DPO, IPO and KTO, and how one that moves goes on after a restart.

A full policy gets a frozen copy, which TRL shards as it does the policy. Of an adapter TRL keeps a second one, frozen
as it starts: for a fresh adapter of LoRA that is the base model.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from swift.models.checkpoint_tensors import is_peft
from swift.models.reference import FrozenReference, load_reference
from swift.trainers.atomic_trainer import AtomicTrainer

STATE = "reference.pt"
"""A reference that has moved. No safetensors: whoever reads a checkpoint as a model takes all of those."""


def reference_parts(args: Any, model: Any) -> dict[str, Any]:
    """What TRL's trainers of DPO and KTO take beside the model: the reference, if it has weights of its own."""
    if args.precompute_ref_log_probs and args.ref_model in (None, args.model):
        return {}
    reference = load_reference(args, model)
    return {"ref_model": reference.module} if isinstance(reference, FrozenReference) else {}


class ReferenceInCheckpoint(AtomicTrainer):
    """Keeps a frozen adapter out of checkpoints, and puts a reference that has moved into them."""

    ref_model: Any

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        if is_peft(self.model):
            # the reference's adapter follows from --model and --adapters
            self.model.save_pretrained = functools.partial(self.model.save_pretrained, selected_adapters=["default"])

    def add_to_checkpoint(self, folder: Path, state: Any) -> None:
        """See `AtomicTrainer`."""
        if self.args.sync_ref_model and not self.args.save_only_model:
            torch.save(self.ref_model.state_dict(), folder / STATE)

    def train(self, resume_from_checkpoint: str | None = None, **arguments: Any) -> Any:
        """See `AtomicTrainer`."""
        if resume_from_checkpoint is not None and self.args.sync_ref_model:
            moved = torch.load(Path(resume_from_checkpoint) / STATE, map_location="cpu", weights_only=True)
            self.ref_model.load_state_dict(moved)
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **arguments)
