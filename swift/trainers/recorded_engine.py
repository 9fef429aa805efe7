"""The engine of `--replay_from`: gives the completions that another run has on record, and samples nothing.

They are whole: those of several turns have what their environment said, so that no environment is played.

The trainer draws prompts, scores and trains as ever, so that with equal settings it is the same run again, bit for bit
on a CPU; with others, it is another objective on the same samples.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from swift.errors import ConfigError, EngineError, Unsupported
from swift.observability.rollout_record import read_rollouts, read_step, recorded_steps
from swift.observability.run_dir import list_versions
from swift.rollout.engines.base import Capabilities, EngineCounters, Health, InferenceEngine
from swift.rollout.saved_state import LOST, decode
from swift.types import Completion, Request

CACHED_STEPS = 4


class RecordedEngine(InferenceEngine):
    """See the module. It has no weights, so that it shares the trainer's.

    run: folder of the run, or of runs, of which it is the newest with a record.

    Raises:
        ConfigError: there is no record.
    """

    def __init__(self, run: str) -> None:
        folders = (Path(run).expanduser(), *reversed(list_versions(Path(run).expanduser())))
        found = next((one for one in folders if recorded_steps(one)), None)
        if found is None:
            raise ConfigError(f"--replay_from: {run}: no rollouts on record there; record with --record_rollouts all")
        self.run, self.counters = found, EngineCounters()
        self._places: dict[str, tuple[int, int]] = {}
        for step in recorded_steps(found):
            table, about = read_step(found, step)
            names = zip(table["group_id"].to_pylist(), table["index"].to_pylist(), strict=True)
            for number, (group, index) in enumerate(names):
                self._places.setdefault(f"{group}/{index}", (step, number))
        self._rows = lru_cache(CACHED_STEPS)(lambda step: list(read_rollouts(found, [step])))
        self.capabilities = Capabilities(
            name="recorded",
            logprob_support=about["logprob_support"],
            shares_weights=True,
            max_model_len=1 << 30,
            guided=True,
            sampling_fields=("frequency_penalty", "presence_penalty", "min_tokens", "top_logprobs"),
        )

    async def generate(self, request: Request) -> Completion:
        """The completion on record.

        Raises:
            EngineError: it is not on record, or its prompt was another one.
        """
        if request.request_id not in self._places:
            steps = recorded_steps(self.run)
            raise EngineError(
                f"--replay_from: {self.run}: completion {request.request_id} is not on record (steps {steps[0]} to "
                f"{steps[-1]}); use the same data, seeds and batches, a run with --record_rollouts all, and fewer "
                "--max_steps"
            )
        step, number = self._places[request.request_id]
        row = self._rows(step)[number]
        made = Completion(request.request_id, [], [], row["finish_reason"])
        if row["completion"] is not None:
            made = decode(row["completion"], Completion)
        elif row["turns"] is not None or 0 < row["trained"].sum() < len(row["trained"]):
            raise EngineError(
                f"--replay_from: {self.run}: completion {request.request_id} has several turns, of which an older "
                "version has not recorded enough; record the run again"
            )
        if LOST in made.columns:
            raise EngineError(
                f"--replay_from: {self.run}: completion {request.request_id}: its environment has returned "
                f"{made.columns[LOST]}, which the record cannot hold; return text, numbers, lists or bytes"
            )
        own_prompt = made.episode is not None and made.episode.prompt_ids
        if not own_prompt and row["prompt_ids"].tolist() != list(request.prompt_ids):
            raise EngineError(
                f"--replay_from: {self.run}: completion {request.request_id} has another prompt on record; use the "
                "same model, template and data"
            )
        self.counters.decode_rows += len(row["token_ids"])
        made.token_ids, made.logprobs = row["token_ids"].tolist(), row["sampler_logprobs"].tolist()
        made.versions = [*row["versions"]]
        return made

    def abort(self, request_ids: Collection[str] | None = None) -> None:
        """Nothing is ever outstanding."""

    def update(self, stream: Any) -> NoReturn:
        """Raises Unsupported: there are no weights."""
        raise Unsupported("engine: recorded: it has no weights; this is a defect")

    def health(self) -> Health:
        """Always well."""
        return Health(True)

    def close(self) -> None:
        """Forgets what it has read."""
        self._rows.cache_clear()
