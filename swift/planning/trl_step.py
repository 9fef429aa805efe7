"""The optimizer step of TRL's trainers on tensors without numbers: their collator, `training_step`, optimizer."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from swift.models.attention.interface import enable_packed_attention, transformers_model
from swift.models.attention.layout import SegmentLayout
from swift.models.attention.sequence_parallel import spread_rows
from swift.models.attention.spans import packed_rows
from swift.models.autocast import autocasting
from swift.models.reference import FrozenReference
from swift.models.tiny import build_tokenizer
from swift.models.vision import vision_of
from swift.planning.cost import Passes, StepCost, cost_of_step, forget_gradients, passes_of, recompute, set_experts
from swift.planning.devices import Device
from swift.planning.kernels import as_on_gpu, fused_head, kernel_of
from swift.planning.sharded import World
from swift.planning.trace import Trace, fused_on_meta
from swift.trainers.preferences.rows import COLUMNS, Layout
from swift.trainers.rows import IGNORED
from swift.trainers.trl.method import Method

META = torch.device("meta")
OF_ONE: dict[str, Any] = {
    "fsdp": None, "deepspeed": None, "sequence_parallel_size": 1, "optim": "adamw_torch", "report_to": [],
    "async_save": False, "full_determinism": False, "tf32": None, "lr_scheduler_type": "constant",
    "lr_scheduler_kwargs": {},
}  # fmt: skip
"""Settings of the trainer that is made to be traced; what shards, shares and updates its model is around it."""


@dataclass(frozen=True, slots=True)
class RowShape:
    """The rows of a micro-batch, all of the same length, in tokens; a pair has two sequences of it.

    packed: rows in a stream, 1 where rows are padded. counts_prompts: the loss counts the tokens of prompts, too.
    images: ids with which each prompt begins, see `swift.planning.step.Shape`. anchors: where blocks begin in a row of
    strided EBFT.
    """

    rows: int
    prompt_tokens: int
    tokens: int
    packed: int = 1
    counts_prompts: bool = False
    images: tuple[int, ...] = ()
    anchors: tuple[int, ...] = ()

    def columns(self, layout: Layout | None) -> list[dict[str, Any]]:
        """As the method's `encode` makes them; what they say does not matter."""
        return [self._row(layout, number) for number in range(self.rows)]

    def _row(self, layout: Layout | None, number: int) -> dict[str, Any]:
        prompt = [*self.images, *[0] * (self.prompt_tokens - len(self.images))]
        answer = [0] * (self.tokens - self.prompt_tokens)
        whole, labels = prompt + answer, [IGNORED] * len(prompt) + answer
        if layout in (None, "turn"):
            lengths = {"seq_lengths": [self.tokens] * self.packed} if self.packed > 1 else {}
            labels = whole if self.counts_prompts else labels
            if self.anchors:
                return {"input_ids": whole, "labels": labels, "anchors": list(self.anchors), "digest": str(number)}
            return {"input_ids": whole * self.packed, "labels": labels * self.packed, **lengths}
        values: dict[str, Any] = {
            "prompt_ids": prompt,
            "completion_ids": answer,
            "label": number % 2 == 0,
            "margin": 0.0,
        }
        for which in ("chosen", "rejected"):
            values[f"{which}_ids"] = whole if layout == "scored pair" else answer
            values[f"{which}_input_ids"], values[f"{which}_labels"] = whole, labels
            values[f"{which}_attention_mask"] = [1] * self.tokens
        others = {"KL_completion_ids": answer} if layout == "unpaired" else {}
        return {name: values[name] for name in COLUMNS[layout]} | others


def trace_trl(
    mode: str,
    method: Method,
    args: Any,
    policy: nn.Module,
    parts: dict[str, Any],
    shape: RowShape,
    device: Device,
    *,
    optimizer: Callable[[nn.Module], Optimizer | None],
    world: World,
) -> StepCost:
    """What one optimizer step of a method of TRL costs on `device`.

    Args:
        mode: of the method.
        method: whose trainer is made.
        args: settings of the run.
        policy: on "meta", with its adapter.
        parts: of the method, such as a reference.
        shape: of a micro-batch.
        device: that it runs on.
        optimizer: makes that of the policy; None if it is not on the device.
        world: of the process.
    """
    with TemporaryDirectory() as folder, _trainer_on_meta():
        with META:  # adapters of references, too
            trainer = _trainer(mode, method, args, Path(folder), policy, parts, shape)
        batch = _with_padding(dict(trainer.data_collator(shape.columns(method.rows))))
    lengths = batch["cu_seq_lens_q"].diff().tolist() if "cu_seq_lens_q" in batch else []
    chosen, strided = _chosen(batch), "documents" in batch
    modules = [policy, *_beside(trainer)]
    with (
        _trainer_on_meta(),
        _known_lengths(lengths),
        world.joined(),
        Trace(device) as trace,
        trace.resizing(),
        trace.knowing() if vision_of(policy) is not None else nullcontext(),
        trace.moving() if world.offloads or strided else nullcontext(),
        trace.reading(chosen, holds=shape.rows == 1 or bool(lengths)),  # padded rows of a run differ, and have a mask
        as_on_gpu(trace),
        fused_head(trace),
        fused_on_meta(),
    ):
        _make_ready(modules, args, world, packed=bool(lengths) or strided)
        trace.hold(*modules)
        count = args.gradient_accumulation_steps
        trainer.current_gradient_accumulation_steps = count

        def there() -> dict[str, Any]:
            return tree_map_only(Tensor, lambda value: value.to(META), batch)  # type: ignore[no-any-return]

        def run(number: int) -> None:
            counted = _counted(trainer, args, batch) if strided else torch.ones((), device=META)
            for inputs in batches[:number]:
                trainer.training_step(policy, dict(inputs), num_items_in_batch=counted)

        batches = [there()]
        if world.fsdp:  # whose first pass lets go of what was whole
            run(1)
            forget_gradients(policy)
        batches.clear()
        weights = trace.live
        made = optimizer(policy)
        batches += [there() for _ in range(count)]  # Trainer has all of a step on the device until the next one

        def passes() -> Passes:
            return passes_of(trace, count, run)

        of_tokens = ("input_ids", "chosen_input_ids", "rejected_input_ids")
        tokens = sum(value.numel() for name, value in batch.items() if name in of_tokens)
        if strided:
            columns = args.ebft_n_samples_per_prompt * len(shape.anchors) if args.ebft_rl_coef else 0
            tokens = shape.rows * (shape.tokens + columns * args.ebft_generate_max_len)
        return cost_of_step(
            trace, policy, made, passes, weights=weights, micro_batches=count, tokens=tokens, more=world.of_zero(policy)
        )


def _trainer(
    mode: str, method: Method, args: Any, folder: Path, policy: nn.Module, parts: dict[str, Any], shape: RowShape
) -> Any:
    """The method's trainer, of a process by itself whose batch is `shape`."""
    from datasets import Dataset

    from swift.trainers.trl.frame import build_trainer

    alone = copy.copy(args)
    for name, value in OF_ONE.items():
        setattr(alone, name, value)
    tokenizer = build_tokenizer()
    template: Any = SimpleNamespace(tokenizer=tokenizer, pad_token_id=tokenizer.pad_token_id, vision=vision_of(policy))
    rows = Dataset.from_list(shape.columns(method.rows))
    ranks = World().collectives()
    return build_trainer(
        method, alone, folder, policy, template, rows, None, [], collectives=ranks, settings={}, parts=parts
    )


def _beside(trainer: Any) -> list[nn.Module]:
    """Frozen models of a trainer: a reference, the network of features."""
    reference, features = getattr(trainer, "ref_model", None), getattr(trainer, "features", None)
    own = [features.model.module] if features is not None and isinstance(features.model, FrozenReference) else []
    return [*([reference] if reference is not None else []), *own]


def _counted(trainer: Any, args: Any, batch: dict[str, Any]) -> Any:
    """What strided EBFT counts of the documents of a step."""
    documents = [*batch["documents"]] * args.gradient_accumulation_steps
    return trainer._global_batch(documents, len(documents), samples=bool(args.ebft_rl_coef))


def _make_ready(modules: Sequence[nn.Module], args: Any, world: World, *, packed: bool) -> None:
    """Models as the run prepares them on a GPU."""
    from accelerate.utils import convert_outputs_to_fp32

    group = world.group()
    for module in modules:
        if packed or group is not None:
            enable_packed_attention(module, kernel_of(args))
        set_experts(module)
        if group is not None:
            spread_rows(transformers_model(module).base_model, group)
    if args.gradient_checkpointing:
        recompute(modules[0])
    if args.autocast or args.torch_dtype != "float32":  # what a model gives leaves accelerate's autocast so
        for module in modules:
            module.forward = _in_autocast(module)  # type: ignore[method-assign]
        modules[0].forward = convert_outputs_to_fp32(modules[0].forward)  # type: ignore[assignment]
    for module in modules if world.fsdp else ():
        world.shard(module)
    gc.collect()  # what was whole


def _in_autocast(module: nn.Module) -> Callable[..., Any]:
    """The forward pass of a module, as accelerate prepares it for `--autocast`."""
    forward = module.forward

    def cast(*args: Any, **kwargs: Any) -> Any:
        with autocasting(module):
            return forward(*args, **kwargs)

    return cast


def _with_padding(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch in which one of several padded rows is a token shorter, as those of a run differ, and have a mask."""
    for name, value in batch.items():
        if name.endswith("attention_mask") and len(value) > 1:
            value[0, -1] = 0
    return batch


def _chosen(batch: dict[str, Any]) -> dict[int, int]:
    """Places of the mask of a batch -> how many tokens the loss counts."""
    found = {}
    for name, value in batch.items():
        if name.endswith(("labels", "completion_mask")):
            mask = value[..., 1:] != (IGNORED if name.endswith("labels") else 0)
            found[mask.numel()] = int(mask.sum())
    return found


@contextmanager
def _trainer_on_meta() -> Iterator[None]:
    """The trainer's device is "meta"."""
    from accelerate import Accelerator
    from transformers import TrainingArguments

    with (
        mock.patch.object(TrainingArguments, "device", META),
        mock.patch.object(Accelerator, "device", META),
        mock.patch.object(torch.cuda, "is_available", lambda: False),  # a GPU that is here is another one
    ):
        yield


@contextmanager
def _known_lengths(lengths: Sequence[int]) -> Iterator[None]:
    """The lengths of rows in a packed batch, and of padded ones, which have no numbers on "meta"."""
    from swift.models.attention import sequence_parallel
    from swift.trainers import sft_packing

    def layout_of(boundaries: Tensor, ids: Tensor, vision: Any) -> SegmentLayout:
        return SegmentLayout(packed_rows(list(lengths)), ids.device)

    def lengths_of(mask: Tensor) -> list[int]:
        return [mask.shape[1]] * mask.shape[0]

    with (
        mock.patch.object(sft_packing, "layout_of", layout_of),
        mock.patch.object(sequence_parallel, "lengths_of", lengths_of),
    ):
        yield
