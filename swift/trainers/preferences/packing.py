"""`--packing` and `--padding_free` of pairs: a batch is one stream of tokens, in which two answers share their prompt.

The loss of a micro-batch of packed rows is the mean over all their pairs, that of a step the mean over micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from swift.models.attention.choice import choose_attention, choose_streams
from swift.models.attention.interface import decoder_of, transformers_model
from swift.models.attention.sequence_parallel import spread_decoder, stream_pairs
from swift.models.template import Template
from swift.models.vision import vision_of
from swift.trainers.parallel.sequence import cutting_obstacle
from swift.trainers.preferences.rows import COLUMNS, encoding
from swift.trainers.sft_packing import Packing, best_fit, keeps_apart, packed_length
from swift.trainers.trl.method import Encoded

Batch = Mapping[str, Sequence[Any]]


@dataclass(frozen=True, slots=True)
class PairPacking(Packing):
    """Pairs in rows of at most `length` tokens; a longer pair has a row of its own.

    prompts: how often that of a pair is computed.
    """

    prompts: int = 1

    def __call__(self, table: Any, options: Mapping[str, Any] | None = None) -> Any:
        """As `Packing`; a column of a row has a list with that of each of its pairs."""
        from datasets import Features, List, Value

        features = Features({name: List(List(Value("int64"))) for name in COLUMNS["pair"]})
        return table.map(self.pack, batched=True, features=features, **(options or {}))

    def pack(self, rows: Batch) -> dict[str, list[list[Any]]]:
        """A batch of pairs, packed by best-fit decreasing.

        >>> PairPacking("bfd", 4).pack({"prompt_ids": [[1], [2], [3]], "chosen_ids": [[4, 4], [5], [6]]})
        {'prompt_ids': [[[1]], [[2], [3]]], 'chosen_ids': [[[4, 4]], [[5], [6]]]}
        >>> PairPacking("bfd", 4, prompts=2).pack({"prompt_ids": [[2], [3]], "chosen_ids": [[5], [6]]})
        {'prompt_ids': [[[2]], [[3]]], 'chosen_ids': [[[5]], [[6]]]}
        """
        prompts, *answers = rows.values()
        sizes = [self.prompts * len(p) + sum(map(len, own)) for p, *own in zip(prompts, *answers, strict=True)]
        packs = best_fit(sizes, self.length)
        return {name: [[values[index] for index in pack] for pack in packs] for name, values in rows.items()}


def encode(args: Any, template: Template) -> Encoded:
    """The rows of pairs; those of training are packed if `--packing` says so."""
    from swift.models.policy import context_length

    prompts = 2 if args.sequence_parallel_size > 1 else 1
    packing = PairPacking("bfd", packed_length(args, context_length(args)), prompts) if args.packing else None
    return encoding("pair", packing)(args, template)


def stream(models: Sequence[nn.Module], args: Any) -> None:
    """Let models compute rows of pairs as streams; those that cannot keep answers apart compute rows, with a note."""
    shares, reentrant = args.sequence_parallel_size > 1, (args.gradient_checkpointing_kwargs or {}).get("use_reentrant")
    unless = "use_reentrant forgets states" if reentrant else "its weights are sharded" if args.sharded_by else ""
    choose = choose_attention if shares else partial(choose_streams, unless=unless)
    for model in models:
        if keeps_apart(model, args, partial(cutting_obstacle, choose=choose)) and not shares:
            vision = vision_of(model)
            seen = vision.spans if vision is not None and vision.see_themselves else None
            stream_pairs(transformers_model(model).base_model, seen)
            spread_decoder(decoder_of(model))


@dataclass(frozen=True)
class PairCollator:
    """Batches of pairs, packed or not. collator: of pairs."""

    collator: Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]]

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The batch of all pairs in these rows."""
        return self.collator([pair for row in rows for pair in self._pairs(row)])

    def _pairs(self, row: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        if isinstance(row["chosen_ids"][0], int):  # a prompt may be empty
            yield row
        else:
            yield from (dict(zip(row, pair, strict=True)) for pair in zip(*row.values(), strict=True))


class PackedPairs:
    """Mixin before DPOTrainer, which takes packed rows of pairs. packs: whether ranks have different numbers of pairs.

    TRL gathers a metric of each pair from all ranks.
    """

    data_collator: Any
    accelerator: Any

    def __init__(self, *, packs: bool = False, **arguments: Any) -> None:
        self._packs = packs
        super().__init__(**arguments)
        self.data_collator = PairCollator(self.data_collator)

    def create_accelerator_and_postprocess(self) -> None:
        """Trainer's."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        accelerator = self.accelerator
        if not self._packs or accelerator.num_processes == 1:
            return
        gather = accelerator.gather

        def of_any_size(values: Any) -> Any:
            if not isinstance(values, Tensor) or not values.ndim:
                return gather(values)
            sizes = gather(torch.tensor([len(values)], device=values.device)).tolist()
            parts = gather(accelerator.pad_across_processes(values)).chunk(len(sizes))
            return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

        accelerator.gather = of_any_size
