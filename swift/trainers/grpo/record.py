"""What the record of rollouts needs of an optimizer step: the log-probs that its micro-batches computed, by sample."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swift.observability.rollout_record import RolloutRecord, keeps
from swift.rollout.samples import FROZEN, FrozenName, RolloutBatch
from swift.rollout.saved_state import decode
from swift.trainers.distributed import Collectives
from swift.types import Completion

Copied = tuple[list[int], Tensor]
"""Indexes of samples, and the log-probs of their tokens."""


@dataclass(eq=False)
class StepRecord:
    """Collects the log-probs of a step on every rank; rank 0 writes them.

    setting: `--record_rollouts`. file: None on other ranks than 0.
    """

    setting: str
    collectives: Collectives
    file: RolloutRecord | None
    _wanted: bool = False
    _parts: dict[str, list[Copied]] = field(default_factory=dict)

    def begin(self, step: int) -> None:
        """Before a step."""
        self._wanted = keeps(self.setting, step, step)
        self._parts.clear()

    def clear(self) -> None:
        """The step begins again."""
        self._parts.clear()

    def add(
        self,
        held: Sequence[int],
        policy_logprobs_N: Tensor,
        frozen_N: Mapping[FrozenName, Tensor],
        entropy_N: Tensor | None,
    ) -> None:
        """The log-probs of a micro-batch, and the entropies, if it has computed some; nothing waits for the device."""
        if self._wanted:
            computed: list[tuple[str, Tensor]] = [("policy_logprobs", policy_logprobs_N), *frozen_N.items()]
            computed += [] if entropy_N is None else [("entropy", entropy_N)]
            for name, values_N in computed:
                self._parts.setdefault(name, []).append((list(held), values_N.detach()))

    def copy(self) -> None:
        """Begin to copy them to the host, at the end of the step's passes; they are there once its metrics are."""
        for parts in self._parts.values():
            parts[:] = [(held, values_N.to("cpu", non_blocking=values_N.is_cuda)) for held, values_N in parts]

    def write(self, step: int, batch: RolloutBatch, metrics: Mapping[str, float]) -> None:
        """Write the global batch of the step that was made; collective."""
        if not self._wanted:
            return
        mine = {name: _by_sample(batch, parts) for name, parts in self._parts.items()}
        own = {number: batch.samples[number].old_logprobs for number in mine.get("policy_logprobs", ())}
        mine["old_logprobs"] = {number: old for number, old in own.items() if old is not None}
        found = self.collectives.gather(mine)
        self._parts.clear()
        if found is None or self.file is None:
            return
        computed: dict[str, dict[int, np.ndarray]] = {}
        for of_rank in found:
            for name, values in of_rank.items():
                computed.setdefault(name, {}).update(values)
        rows = [self._row(batch, number, computed) for number in batch.global_batch()]
        references = {reference.group: reference for reference in batch.references}
        for row in rows:
            if row["index"] == 0 and (reference := references.get(row["group"])) is not None:
                row |= {"reference_ids": reference.token_ids, "reference_trained": reference.trained}
        self.file.write(step, rows, metrics)

    def _row(self, batch: RolloutBatch, number: int, computed: dict[str, dict[int, np.ndarray]]) -> dict[str, Any]:
        sample = batch.samples[number]
        row = {name: getattr(sample, name) for name in SAME}
        for name in ("policy_logprobs", "old_logprobs", "entropy", *FROZEN):
            row[name] = computed.get(name, {}).get(number, getattr(sample, name, None))
        return {
            **row,
            "turns": _turns(sample.completion),
            "versions": np.asarray(sample.versions, dtype=np.int64).reshape(-1),
        }


SAME = (
    "group", "group_id", "prompt_id", "index", "finish_reason", "completion", "excluded", "advantage", "rewards",
    "reward_kl", "prompt_ids", "token_ids", "trained", "sampler_logprobs", "token_advantages",
    "teacher_prompt_ids",
)  # fmt: skip
"""Fields of a sample that are columns of the record."""


def _turns(encoded: bytes | None) -> str | None:
    """JSON of the messages after the prompt, of several turns."""
    episode = None if encoded is None else decode(encoded, Completion).episode
    return None if episode is None else json.dumps(episode.turns, default=str)


def _by_sample(batch: RolloutBatch, parts: Sequence[Copied]) -> dict[int, np.ndarray]:
    """Log-probs of each sample of this rank."""
    if not parts:
        return {}
    held = [number for numbers, _ in parts for number in numbers]
    values = torch.cat([values_N for _, values_N in parts]).float().numpy()
    sizes = np.cumsum([batch.samples[number].token_ids.size for number in held])[:-1]
    return dict(zip(held, np.split(values, sizes), strict=True))
