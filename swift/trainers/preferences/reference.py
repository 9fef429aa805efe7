"""The reference model of DPO, IPO and KTO, and how one that moves goes on after a restart.

A full policy gets a frozen copy, sharded as the policy is. Of an adapter TRL keeps a second one, frozen
as it starts: for a fresh adapter of LoRA that is the base model, for PiSSA and OLoRA what they took out of it, too.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_from_disk
from torch import nn

from swift.models.checkpoint_tensors import is_peft
from swift.models.lora_products import multiplies_in_input_type, multiply_in_input_type
from swift.models.reference import FrozenReference, load_reference
from swift.models.sharded import is_sharding, shard
from swift.models.vision import vision_of
from swift.observability.files import writing
from swift.trainers.atomic_trainer import AtomicTrainer
from swift.trainers.checkpoint import loading
from swift.trainers.parallel.sequence import require_shareable
from swift.trainers.preferences.packing import stream

STATE = "reference.pt"
"""A reference that has moved. No safetensors: whoever reads a checkpoint as a model takes all of those."""


def reference_parts(args: Any, model: Any) -> dict[str, Any]:
    """What TRL's trainers of DPO and KTO take beside the model: the reference, and whether pairs are packed.

    Both models are made ready for streams of pairs, if the method has them.
    """
    parts, packs = _reference(args, model), getattr(args, "packing", False)
    if packs or getattr(args, "padding_free", False):
        stream([model, *parts.values()], args)
    return {**parts, "packs": True} if packs else parts


def _reference(args: Any, model: Any) -> dict[str, nn.Module]:
    """The reference, if it has weights of its own."""
    # with FSDP, TRL would load the base of the files instead, whatever was merged into it here
    if args.precompute_ref_log_probs and not args.fsdp and args.ref_model in (None, args.model):
        return {}
    reference = load_reference(args, model, moves=args.sync_ref_model)
    if not isinstance(reference, FrozenReference):
        return {}
    if (vision := vision_of(model)) is not None:
        vision.show(reference.module)
    require_shareable(reference.module, args, "ref_model")
    return {"ref_model": reference.module}


class ReferenceInCheckpoint(AtomicTrainer):
    """Keeps a frozen adapter out of checkpoints, and puts a reference that has moved into them."""

    ref_model: Any
    start: Mapping[str, torch.Tensor] = {}
    """While the trainer is made: tensors of the adapter, before TRL rounds (quantised weights) or shards them."""
    _precompute_model_hash: str | None

    def __init__(self, *, model: Any, ref_model: Any = None, **arguments: Any) -> None:
        self.ref_model = ref_model
        if hasattr(model, "adapter_start"):  # a second start would be taken out of the base weights once more
            model.peft_config["default"].init_lora_weights = True
        if is_peft(model):
            self.start = {name: one.data for name, one in model.named_parameters() if one.requires_grad}
        super().__init__(model=model, ref_model=ref_model, **arguments)
        if is_peft(self.model):
            self._complete()
            # the reference's adapter follows from --model and --adapters
            self.model.save_pretrained = functools.partial(self.model.save_pretrained, selected_adapters=["default"])

    def create_accelerator_and_postprocess(self) -> None:
        """Trainer's; the reference is sharded before TRL prepares it."""
        super().create_accelerator_and_postprocess()
        precomputes = self.args.precompute_ref_log_probs  # then TRL first hashes the weights
        if self.ref_model is not None and not precomputes and is_sharding(self.accelerator):
            shard(self.ref_model, self.accelerator)

    def _precompute_ref_logps(self, dataset: Dataset, name: str, batch_size: int) -> Dataset:
        """TRL's: rank 0 writes a file beside those of the rows, which the other ranks read; so rows need a folder.

        The file's name is a digest of rows and reference; what else decides the log-probs is added here.
        """
        self._complete()
        if self.is_fsdp_enabled and self.ref_model is None:  # the model itself computes, and is sharded later
            self.model.to(self.accelerator.device)
        self._precompute_model_hash = f"{self._precompute_model_hash} {getattr(self, 'ld_alpha', None)}"
        if self.collectives.active:
            folder = Path(self.args.output_dir) / "reference_logps" / name
            with self.collectives.together(), writing(folder.parent):
                if self.collectives.is_main:
                    dataset.save_to_disk(folder)
            dataset = load_from_disk(folder)
        rows: Dataset = super()._precompute_ref_logps(dataset, name, batch_size)  # type: ignore[misc]
        return rows

    def _complete(self) -> None:
        """See `complete_reference`; once, before anything shards the model."""
        if self.start:
            complete_reference(self.model, self.start)
            self.start = {}

    def add_to_checkpoint(self, folder: Path, state: Any) -> None:
        """See `AtomicTrainer`."""
        if self.args.sync_ref_model and not self.args.save_only_model:
            torch.save(self.ref_model.state_dict(), folder / STATE)

    def train(self, resume_from_checkpoint: str | None = None, **arguments: Any) -> Any:
        """See `AtomicTrainer`."""
        if resume_from_checkpoint is not None and self.args.sync_ref_model:
            with loading(resume_from_checkpoint):
                moved = torch.load(Path(resume_from_checkpoint) / STATE, map_location="cpu", weights_only=True)
                self.ref_model.load_state_dict(moved)
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **arguments)


def complete_reference(model: Any, start: Mapping[str, torch.Tensor]) -> None:
    """Gives TRL's copy of the adapter the values of `start`, also those that PEFT keeps in a ParameterDict.

    TRL passes over these (IA3, VeRA, BOFT, embeddings of LoRA), over dropout, which a reference has not, and over the
    type of LoRA's products.
    """
    named = dict(model.named_parameters())
    for name, data in start.items():
        if (other := named.get(re.sub(r"\.default(?=\.|$)", ".ref", name))) is not None and other is not named[name]:
            other.data.copy_(data)
    for name, module in model.named_modules():
        if name.endswith("dropout.ref"):
            module.p = 0.0
    if multiplies_in_input_type(model):
        multiply_in_input_type(model)
