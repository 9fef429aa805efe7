"""Scores groups: every reward function on every group, in worker processes, with nothing silently zero.

    group -> one task per function (quick built-ins share one) -> pool -> values and failures -> GroupScores

A function that fails on a group is called again for each of its samples alone (unless its `scope` forbids
it), and only the samples that fail alone are excluded, with the reason. Reward models are not called here:
they live in the trainer's process (`swift.rewards.models`) and their columns are filled in by
`add_model_scores`.

Every group ends exactly once: its future gets scores, or the error that broke the pool.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift.errors import RewardError, SwiftError, join_problems
from swift.plugin import load_external_plugins
from swift.rewards import selfcheck
from swift.rewards.catalogue import Catalogue, aliases_of, flags_of, read_catalogue
from swift.rewards.contract import Signature, group_keywords
from swift.rewards.health import GroupRecord, RewardHealth
from swift.rewards.scores import exclude_without_reward, statistics
from swift.rewards.worker import LoadSpec, Outcome, Payload, call_seed
from swift.rewards.workers import Call, WorkerPool, memory_limit, worker_share
from swift.types import GroupScores, Prompt, RolloutGroup, TrainerProgress

if TYPE_CHECKING:
    from swift.rewards.models import RewardModels

_THINK = "<think>"
_OPENING_TOKENS = 32
_KEPT_RECORDS = 8192


@dataclass
class _Batch:
    """Groups that are scored together (one group, or a generation batch) and what is still missing."""

    groups: Sequence[RolloutGroup]
    futures: list[Future[GroupScores]]
    values: list[list[list[float | None]]]  # [group][sample][function]
    reasons: list[list[dict[int, str]]]  # [group][sample]{function: reason}
    records: list[GroupRecord]
    missing: list[int]  # outstanding calls per group; after submission only the pool's thread touches it


class RewardPipeline:
    """The reward functions and models of a run.

    Args:
        args: the resolved arguments: `reward_funcs`, `reward_model`, `reward_weights`, `external_plugins`,
            `reward_timeout` (s), `reward_workers` (per node), and whatever flags the functions read.
        seed: of the run; random generators inside functions are seeded from it, per group.
        max_completion_length: in tokens; default of the length rewards.
        decode: token ids -> text, to see whether the prompt's template opened `<think>`; None means it
            did not.
        tokenizer_path: folder of the policy's tokenizer, for plugins that ask for one.
        log_path: file for what the workers print; None discards it.
        reward_models: scores the columns after the functions; None when `reward_model` is empty.
        num_workers: worker processes of this process; None means its share of `reward_workers`.

    Raises:
        ConfigError: for unknown, repeated or unusable functions, plugins and weights.
    """

    def __init__(
        self,
        args: Any,
        *,
        seed: int,
        max_completion_length: int,
        decode: Callable[[list[int]], str] | None = None,
        tokenizer_path: str | None = None,
        log_path: str | Path | None = None,
        reward_models: RewardModels | None = None,
        num_workers: int | None = None,
    ) -> None:
        plugins = [str(Path(path).expanduser().resolve()) for path in getattr(args, "external_plugins", [])]
        load_external_plugins(getattr(args, "external_plugins", []))
        flags = {**flags_of(args), "max_completion_length": max_completion_length}
        catalogue = read_catalogue(args, flags)
        self._catalogue: Catalogue = catalogue
        self._seed = seed
        self._decode = decode
        self._models = reward_models
        self._timeout_s = float(args.reward_timeout)
        self._records: OrderedDict[str, GroupRecord] = OrderedDict()
        self._records_lock = threading.Lock()
        self._health = RewardHealth(catalogue.names)
        self.names: list[str] = catalogue.names
        """Functions, then models by folder name: the columns of every `GroupScores`."""
        self.weights: list[float] = catalogue.weights
        """One weight per name."""
        spec = LoadSpec(
            functions=catalogue.functions,
            plugins=plugins,
            flags=flags,
            aliases=aliases_of(args),
            tokenizer=tokenizer_path,
            timeout_s=self._timeout_s,
            memory_bytes=memory_limit(),
        )
        workers = num_workers or worker_share(args.reward_workers)
        path = Path(log_path) if log_path is not None else None
        self._on_progress: Callable[[], None] = lambda: None
        self._pool = WorkerPool(spec, num_workers=workers, log_path=path) if catalogue.functions else None

    @property
    def needs_whole_batch(self) -> bool:
        """Whether a function has scope "batch": then score whole generation batches, not single groups."""
        return any(signature.scope == "batch" for signature in self._catalogue.signatures)

    @property
    def signatures(self) -> list[Signature]:
        """How the functions are called, in order."""
        return self._catalogue.signatures

    def watch(self, on_progress: Callable[[], None]) -> None:
        """From now on call this, from any thread, for each outcome of a function and each batch of a reward model."""
        self._on_progress = on_progress
        if self._models is not None:
            self._models.on_progress = on_progress

    def start(self) -> None:
        """Starts the workers in the background; returns at once."""
        if self._pool is not None:
            self._pool.start()

    def log_to(self, path: Path) -> None:
        """From now on what the workers print goes to `path`; the run's folder is known only after the start."""
        if self._pool is not None:
            self._pool.log_to(path)

    def close(self) -> None:
        """Ends the workers; no process is left. Repeatable."""
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> RewardPipeline:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def submit(self, group: RolloutGroup, progress: TrainerProgress) -> Future[GroupScores]:
        """Scores one group in the background.

        The columns of reward models stay None until `add_model_scores`. A "batch" function sees this group
        as its whole batch; use `submit_batch` where `needs_whole_batch`.

        Returns:
            A future; its `result()` raises a `SwiftError` when the functions cannot be called at all.
        """
        return self.submit_batch([group], progress)[0]

    def submit_batch(self, groups: Sequence[RolloutGroup], progress: TrainerProgress) -> list[Future[GroupScores]]:
        """Scores the groups of a generation batch in the background, one future each."""
        if self._catalogue.models and self._models is None:
            raise RuntimeError("the run names reward models, but this pipeline was built without them")
        batch = self._new_batch(groups)
        plans = self._plan(batch, progress)
        for place, _, _ in plans:
            for group in place:
                batch.missing[group] += 1
        for index, count in enumerate(batch.missing):
            if count == 0:
                self._complete(batch, index)
        for place, functions, payload in plans:
            self._call(batch, place, functions, payload, samples=None)
        return batch.futures

    def score(self, groups: Sequence[RolloutGroup], progress: TrainerProgress) -> list[GroupScores]:
        """Scores groups and waits, reward models included; call it on the main thread.

        Raises:
            SwiftError: when the functions cannot be called at all.
        """
        futures = self.submit_batch(groups, progress)
        return self.add_model_scores(groups, [future.result() for future in futures])

    def score_models(self, groups: Sequence[RolloutGroup]) -> list[list[list[float]]]:
        """Values of the reward models, [group][sample][model]; empty rows without models."""
        if self._models is None:
            return [[[] for _ in group.completions] for group in groups]
        return self._models.score(groups)

    def add_model_scores(self, groups: Sequence[RolloutGroup], scores: Sequence[GroupScores]) -> list[GroupScores]:
        """Fills the columns of the reward models in; without models the scores are returned as they are."""
        if self._models is None:
            return list(scores)
        first = len(self._catalogue.functions)
        for group_scores, rows in zip(scores, self.score_models(groups), strict=True):
            for sample, values in enumerate(rows):
                self._set_model_values(group_scores, sample, first, values)
            exclude_without_reward(group_scores)
        return list(scores)

    def _set_model_values(self, scores: GroupScores, sample: int, first: int, values: Sequence[float]) -> None:
        for offset, value in enumerate(values):
            if value == value and abs(value) != float("inf"):
                scores.values[sample][first + offset] = value
            else:
                scores.excluded[sample] = scores.excluded[sample] or f"not_finite: {self.names[first + offset]}"

    def drain_metrics(self, groups: Sequence[RolloutGroup] | None = None) -> dict[str, float]:
        """Metrics of the given groups (None: all scored since the last call), which are then forgotten.

        Keys: `rewards/<name>/{mean,std}`, `health/reward_failed/<name>`, `health/reward_timeout/<name>`
        (samples; also when 0), `time/reward/<name>` (s, summed over calls), `health/gold_unparsed` and
        `health/gold_missing` where a function counts them. Pass the groups of a step to keep groups that
        were scored ahead out of its metrics.
        """
        records = self._take_records(groups)
        scores = [record.scores for record in records if record.scores is not None]
        metrics = statistics(self.names, scores)
        for name in self._catalogue.functions:
            metrics[f"health/reward_failed/{name}"] = float(sum(r.failed.get(name, 0) for r in records))
            metrics[f"health/reward_timeout/{name}"] = float(sum(r.timed_out.get(name, 0) for r in records))
            metrics[f"time/reward/{name}"] = sum(record.seconds.get(name, 0.0) for record in records)
        for counter in sorted({name for record in records for name in record.counters}):
            metrics[f"health/{counter}"] = float(sum(r.counters.get(counter, 0) for r in records))
        if self._models is not None:
            metrics.update(self._models.drain_metrics())
        return metrics

    def end_batch(self, groups: Sequence[RolloutGroup] | None = None) -> None:
        """Judges a finished generation batch; call it once per batch, before `drain_metrics`.

        Args:
            groups: of the batch; None means everything scored since the last `drain_metrics`.

        Raises:
            RewardError: when a function failed on every sample of three batches in a row. Save a
                checkpoint before letting it travel.
        """
        with self._records_lock:
            ids = list(self._records) if groups is None else [group.group_id for group in groups]
            records = [self._records[key] for key in ids if key in self._records]
        self._health.end_batch(records)

    def diagnosis(self) -> list[str]:
        """One line per function about its last batches: constant value, share of None, counters of ground truths."""
        return self._health.diagnosis()

    def self_check(self, rows: Sequence[Prompt], *, max_steps: int = 0) -> None:
        """The start-up call: columns, ground truths and one real call of every function on the first rows.

        Args:
            rows: the first rows of the data set (up to 64 are read, the first few are scored).
            max_steps: shown to the functions in `trainer_state`.

        Raises:
            ConfigError: reserved or missing columns; all rows without a ground truth.
            RewardError: a function returned a wrong number of values, or values that are no numbers, or fails
                on every ground truth.
        """
        self.check_columns(rows)
        progress = TrainerProgress(global_step=0, max_steps=max_steps, epoch=0.0)
        first = self._by_name(selfcheck.first_groups(rows), progress)
        join_problems(selfcheck.broken_contracts(first), RewardError)
        if failing := selfcheck.always_failing(first):
            again = self._by_name(selfcheck.truth_groups(rows), progress, only=failing)
            join_problems(selfcheck.refused(again), RewardError)

    def check_columns(self, rows: Sequence[Prompt]) -> None:
        """The part of `self_check` that calls nothing: columns and ground truths of the first rows."""
        selfcheck.check_rows(self._catalogue, rows[: selfcheck.ROWS])

    def probe_each(self, groups: Sequence[RolloutGroup], progress: TrainerProgress) -> list[list[Outcome]]:
        """Calls every function on every group, each in a call of its own, without metrics or re-runs.

        Returns:
            [function][group]; a value that is no finite number is a failure.
        """
        return list(self._by_name(groups, progress).values())

    def _by_name(
        self, groups: Sequence[RolloutGroup], progress: TrainerProgress, only: Sequence[str] | None = None
    ) -> dict[str, list[Outcome]]:
        functions = [k for k, name in enumerate(self._catalogue.functions) if only is None or name in only]
        payloads = [self._payload([group], progress) for group in groups]
        futures = {
            self.names[function]: [
                self._probe_one(function, payload, self._group_seed(group))
                for group, payload in zip(groups, payloads, strict=True)
            ]
            for function in functions
        }
        return {name: [future.result().checked() for future in found] for name, found in futures.items()}

    def _probe_one(self, function: int, payload: Payload, seed: int) -> Future[Outcome]:
        assert self._pool is not None
        future: Future[Outcome] = Future()

        def on_outcome(_: int, outcome: Outcome) -> None:
            future.set_result(outcome)

        self._pool.submit(
            Call(
                functions=[function],
                payload=payload,
                samples=None,
                seed=seed,
                is_async=self._catalogue.signatures[function].is_async,
                callback=on_outcome,
                on_broken=future.set_exception,
            )
        )
        return future

    # ---- planning and calling ---------------------------------------------------------------------

    def _new_batch(self, groups: Sequence[RolloutGroup]) -> _Batch:
        width = len(self.names)
        return _Batch(
            groups=groups,
            futures=[Future() for _ in groups],
            values=[[[None] * width for _ in group.completions] for group in groups],
            reasons=[[{} for _ in group.completions] for group in groups],
            records=[GroupRecord(len(group.completions)) for group in groups],
            missing=[0] * len(groups),
        )

    def _plan(self, batch: _Batch, progress: TrainerProgress) -> list[tuple[list[int], list[int], Payload]]:
        """The calls of a batch: (groups, functions, payload); quick built-ins of a group share one call."""
        catalogue = self._catalogue
        by_scope = {scope: catalogue.of_scope(scope == "batch") for scope in ("group", "batch")}
        plans: list[tuple[list[int], list[int], Payload]] = []
        for index, group in enumerate(batch.groups):
            if not group.completions or not by_scope["group"]:
                continue
            payload = self._payload([group], progress)
            shared = [k for k in by_scope["group"] if catalogue.is_built_in[k]]
            calls = [shared] if shared else []
            calls += [[k] for k in by_scope["group"] if not catalogue.is_built_in[k]]
            plans += [([index], functions, payload) for functions in calls]
        everything = [index for index, group in enumerate(batch.groups) if group.completions]
        if by_scope["batch"] and everything:
            payload = self._payload([batch.groups[index] for index in everything], progress)
            plans += [(everything, [function], payload) for function in by_scope["batch"]]
        return plans

    def _payload(self, groups: Sequence[RolloutGroup], progress: TrainerProgress) -> Payload:
        keywords = group_keywords(groups, [self._opens_think(group.prompt) for group in groups])
        keywords["trainer_state"] = progress
        completions = [item.text for group in groups for item in group.completions]
        return {"completions": completions, "keywords": keywords}

    def _opens_think(self, prompt: Prompt) -> bool:
        if self._decode is None or not prompt.token_ids:
            return False
        return self._decode(list(prompt.token_ids[-_OPENING_TOKENS:])).rstrip().endswith(_THINK)

    def _group_seed(self, group: RolloutGroup) -> int:
        return call_seed(self._seed, group.prompt.prompt_id, group.group_id)

    def _call(
        self, batch: _Batch, place: list[int], functions: list[int], payload: Payload, samples: list[int] | None
    ) -> None:
        assert self._pool is not None
        left = set(functions)

        def on_outcome(function: int, outcome: Outcome) -> None:
            self._on_progress()
            left.discard(function)
            self._record(batch, place, function, samples, outcome)
            if outcome.kind == "ok":
                self._store(batch, place, function, samples, outcome.values)
            elif not self._retry_singly(batch, place, function, payload, samples, shared=len(functions) > 1):
                self._exclude(batch, place, function, samples, outcome)
            if not left:
                self._release(batch, place)

        self._pool.submit(
            Call(
                functions=functions,
                payload=payload,
                samples=samples,
                seed=self._group_seed(batch.groups[place[0]]),
                is_async=self._catalogue.signatures[functions[0]].is_async,
                callback=on_outcome,
                on_broken=lambda error: self._fail(batch, error),
            )
        )

    def _retry_singly(
        self, batch: _Batch, place: list[int], function: int, payload: Payload, samples: list[int] | None, shared: bool
    ) -> bool:
        """Queues the samples of a failed call one by one; False when that has been done, or cannot be.

        In a `shared` call another function may have failed, so its only sample is called again too.
        """
        count = len(batch.groups[place[0]].completions)
        if samples is not None or (count < 2 and not shared) or self._catalogue.signatures[function].scope != "sample":
            return False
        for sample in range(count):
            batch.missing[place[0]] += 1
            self._call(batch, place, [function], payload, samples=[sample])
        return True

    def _rows(self, batch: _Batch, place: list[int], samples: list[int] | None) -> list[tuple[int, int]]:
        """(group, sample) of each entry of a call's result."""
        if samples is not None:
            return [(place[0], sample) for sample in samples]
        return [(group, sample) for group in place for sample in range(len(batch.values[group]))]

    def _store(
        self,
        batch: _Batch,
        place: list[int],
        function: int,
        samples: list[int] | None,
        values: Sequence[float | None],
    ) -> None:
        for (group, sample), value in zip(self._rows(batch, place, samples), values, strict=True):
            if value is None or abs(value) < float("inf"):
                batch.values[group][sample][function] = value
            else:
                outcome = Outcome("exception", detail=f"returned {value}")
                self._exclude_one(batch, group, sample, function, "not_finite", outcome)

    def _exclude(
        self, batch: _Batch, place: list[int], function: int, samples: list[int] | None, outcome: Outcome
    ) -> None:
        for group, sample in self._rows(batch, place, samples):
            self._exclude_one(batch, group, sample, function, outcome.kind, outcome)

    def _exclude_one(self, batch: _Batch, group: int, sample: int, function: int, kind: str, outcome: Outcome) -> None:
        name, record = self.names[function], batch.records[group]
        batch.reasons[group][sample][function] = f"{kind}: {name}"
        record.failed[name] = record.failed.get(name, 0) + 1
        if kind == "timeout":
            record.timed_out[name] = record.timed_out.get(name, 0) + 1
        self._health.sample_failed(name, kind, outcome.detail, batch.groups[group], sample)

    def _record(
        self, batch: _Batch, place: list[int], function: int, samples: list[int] | None, outcome: Outcome
    ) -> None:
        record, name = batch.records[place[0]], self.names[function]
        record.seconds[name] = record.seconds.get(name, 0.0) + outcome.seconds
        if function != self._catalogue.counting_function:
            return
        for counter, count in outcome.counters.items():
            record.counters[counter] = record.counters.get(counter, 0) + count
            self._health.truth_problem(counter, batch.groups[place[0]])

    def _release(self, batch: _Batch, place: list[int]) -> None:
        for group in place:
            batch.missing[group] -= 1
            if batch.missing[group] == 0:
                self._complete(batch, group)

    def _complete(self, batch: _Batch, index: int) -> None:
        reasons = [row[min(row)] if row else None for row in batch.reasons[index]]
        scores = GroupScores(values=batch.values[index], excluded=reasons)
        if self._models is None:
            exclude_without_reward(scores)
        record = batch.records[index]
        record.scores = scores
        with self._records_lock:
            self._records[batch.groups[index].group_id] = record
            while len(self._records) > _KEPT_RECORDS:
                self._records.popitem(last=False)
        self._health.group_done(batch.groups[index], record)
        if not batch.futures[index].done():
            batch.futures[index].set_result(scores)

    def _fail(self, batch: _Batch, error: SwiftError) -> None:
        for future in batch.futures:
            if not future.done():
                future.set_exception(error)

    def _take_records(self, groups: Sequence[RolloutGroup] | None) -> list[GroupRecord]:
        with self._records_lock:
            keys = list(self._records) if groups is None else [group.group_id for group in groups]
            return [self._records.pop(key) for key in keys if key in self._records]
