"""Micro-batches of TRL's trainers that are computed in parts where memory runs out.

A step that runs out of memory begins again: its gradients are dropped, and its micro-batches so far are computed again
with half the tokens in a pass, which stays so for the rest of the start. Losses that are sums over tokens, divided by
those of the whole step, and means over rows do not depend on the parts; `Method.parting` says which methods have such a
loss. A load-balancing loss of routers is that of each part. Means of metrics are those over parts.

Only one process does so: with several, a rank that fails by itself would leave the others in a collective. That run
ends, and the launcher starts it again from its last checkpoint, with fewer rows in a micro-batch and more of these.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from swift.errors import is_out_of_memory, note_smaller
from swift.observability.memory import collect_garbage

Parting: TypeAlias = Literal["rows", "pairs", ""]
"""rows: of any tensor of a batch, or the sequences of a stream. pairs: rows, whose tensors may have those of chosen
answers before those of rejected ones. "": a batch is never parted."""


class InParts:
    """Mixin between `AtomicTrainer` and a trainer of TRL.

    parting: how batches are parted. divides: whether the loss is the same with fewer rows in a micro-batch and more of
    these. given_accumulation: `--gradient_accumulation_steps`. most_tokens: of a pass, padding included; None is no
    limit. say: prints a line.
    """

    parting: Parting = ""
    divides = False
    given_accumulation = 1
    current_gradient_accumulation_steps: float
    most_tokens: int | None = None
    say: Callable[[str], object] = print
    _batches: Sequence[dict[str, Any]] = ()
    _number = 0

    def get_batch_samples(self, *arguments: Any, **named: Any) -> tuple[list, Any]:
        """Trainer's; the first call of a step."""
        found = super().get_batch_samples(*arguments, **named)  # type: ignore[misc]
        self._batches, self._number, self._metrics_before = found[0], 0, self._metrics_now()
        return found  # type: ignore[no-any-return]

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Trainer's, of one micro-batch; from the first one of the step where memory has run out."""
        first = number = self._number
        self._number += 1
        while True:
            try:
                for batch in [*self._batches[first:number], inputs]:
                    loss = self._in_parts(model, batch, num_items_in_batch)
                return loss
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                if not self._can_part(num_items_in_batch):
                    self._note_smaller()
                    raise
            had = tokens_of(self._part)  # here the traceback, which holds what the failed pass had made, is gone
            first, self.most_tokens = 0, had // 2
            model.zero_grad(set_to_none=True)
            self._restore_metrics()
            collect_garbage(self.args.device)  # type: ignore[attr-defined]
            self.say(f"memory: ran out in a micro-batch of {had} tokens; again, with {had // 2} at most from here on")

    def _in_parts(self, model: Any, batch: dict[str, Any], num_items: Any) -> Tensor:
        """The loss of a micro-batch, whose gradient is made."""
        self._part = batch
        if self.most_tokens is None:
            return super().training_step(model, batch, num_items)  # type: ignore[misc, no-any-return]
        losses, steps, rows = [], self.current_gradient_accumulation_steps, count(batch, self.parting)
        try:
            for part in parted(batch, self.parting, self.most_tokens):
                self._part = part
                # by which Trainer divides a mean over rows
                self.current_gradient_accumulation_steps = steps * rows / count(part, self.parting)
                losses.append(super().training_step(model, part, num_items))  # type: ignore[misc]
        finally:
            self.current_gradient_accumulation_steps = steps
        return torch.stack(losses).sum()

    def _can_part(self, num_items: Any) -> bool:
        """Whether the pass that has failed can be smaller and give the same gradient."""
        trainer: Any = self
        alone = not (trainer.collectives.active or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled)
        counts = self.parting == "pairs" or num_items is not None or "labels" not in self._part
        return bool(self.parting) and alone and counts and count(self._part, self.parting) > 1

    def _note_smaller(self) -> None:
        """The flags of a run with half the rows in a micro-batch, or fewer."""
        args: Any = self.args  # type: ignore[attr-defined]
        rows = args.per_device_train_batch_size
        fewer = next((size for size in range(rows // 2, 0, -1) if rows % size == 0), None)
        if self.divides and fewer:
            updates = self.given_accumulation * rows // fewer
            note_smaller("--per_device_train_batch_size", str(fewer), "--gradient_accumulation_steps", str(updates))

    def _metrics_now(self) -> dict[str, Any]:
        metrics = {
            name: {key: list(values) for key, values in getattr(self, name)["train"].items()}
            for name in ("_metrics", "_stored_metrics")  # TRL's trainers have one or the other
            if hasattr(self, name)
        }
        return {**metrics, "tokens": self.state.num_input_tokens_seen}  # type: ignore[attr-defined]

    def _restore_metrics(self) -> None:
        metrics = dict(self._metrics_before)
        self.state.num_input_tokens_seen = metrics.pop("tokens")  # type: ignore[attr-defined]
        for name, values in metrics.items():
            getattr(self, name)["train"] = defaultdict(list, {key: list(held) for key, held in values.items()})


def tokens_of(batch: dict[str, Any]) -> int:
    """Numbers of token ids in a batch, padding included."""
    return sum(value.numel() for name, value in batch.items() if name.endswith("input_ids"))


def count(batch: dict[str, Any], parting: Parting) -> int:
    """Rows of a batch, or sequences of a stream."""
    if "cu_seq_lens_q" in batch:
        return int(batch["cu_seq_lens_q"].numel()) - 1
    rows = next(value.shape[0] for name, value in batch.items() if name.endswith("input_ids"))
    return int(rows // 2 if parting == "pairs" else rows)


def parted(batch: dict[str, Any], parting: Parting, most_tokens: int) -> Iterator[dict[str, Any]]:
    """The parts of a batch, each of at most so many tokens, or of one row or sequence."""
    if "cu_seq_lens_q" in batch:
        yield from _of_stream(batch, most_tokens)
        return
    rows = count(batch, parting)
    size = max(1, most_tokens * rows // tokens_of(batch))
    size = math.ceil(rows / math.ceil(rows / size))  # of similar size
    for start in range(0, rows, size):
        chosen = range(start, min(start + size, rows))
        yield {name: _rows_of(value, chosen, rows) for name, value in batch.items()}


def _rows_of(value: Any, chosen: range, rows: int) -> Any:
    """Some rows of a column, of which there may be two after each other."""
    if isinstance(value, list):
        return [value[i] for i in chosen] if len(value) == rows else value
    if not isinstance(value, Tensor) or not value.ndim or value.shape[0] not in (rows, 2 * rows):
        return value
    halves = value.split(rows)
    return (
        torch.cat([half[chosen.start : chosen.stop] for half in halves]) if len(halves) > 1 else halves[0][list(chosen)]
    )


def _of_stream(batch: dict[str, Any], most_tokens: int) -> Iterator[dict[str, Any]]:
    """Parts of a stream, between its sequences."""
    bounds = batch["cu_seq_lens_q"].tolist()
    first = 0
    while first < len(bounds) - 1:
        last = first + 1
        while last < len(bounds) - 1 and bounds[last + 1] - bounds[first] <= most_tokens:
            last += 1
        span = slice(bounds[first], bounds[last])
        lengths = batch["cu_seq_lens_q"][first : last + 1] - bounds[first]
        part = {
            name: value[:, span] if isinstance(value, Tensor) and value.ndim == 2 else value
            for name, value in batch.items()
        }
        part |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), lengths)
        part |= dict.fromkeys(("max_length_q", "max_length_k"), int(lengths.diff().max()))
        if "seq_idx" in part:
            part["seq_idx"] = part["seq_idx"] - first
        yield part
        first = last
