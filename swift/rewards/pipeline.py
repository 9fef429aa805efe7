"""Scores groups: every reward function on every group, in worker processes; a failure never becomes a score of 0.

If a function fails on a group, it is called again for each sample alone (unless its `scope` forbids it), and only the
samples that fail alone are excluded, with the reason. Reward models are not called here: they run in the trainer's
process (`swift.rewards.models`), and `add_model_scores` fills in their columns.

Every group ends exactly once: its future gets scores, or the error that broke the pool.
"""

from __future__ import annotations

import asyncio
import statistics
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift.data.image_store import images_in
from swift.devices import allowed_cores
from swift.errors import RewardError, join_problems
from swift.plugin import load_external_plugins
from swift.plugin.numbers import is_finite
from swift.rewards import selfcheck
from swift.rewards.catalogue import model_names, read_signatures, run_flags
from swift.rewards.contract import Signature, group_keywords, missing_columns
from swift.rewards.functions.accuracy import ground_truth
from swift.rewards.health import Failure, GroupRecord, RewardHealth
from swift.rewards.payload import Job, LoadSpec, Outcome, Payload, call_seed
from swift.rewards.selfcheck import made_up_group, start_up_texts
from swift.rewards.trl_convention import logged_means
from swift.rewards.workers import WorkerPool, memory_limit
from swift.types import GroupScores, Prompt, RolloutGroup, TrainerProgress

if TYPE_CHECKING:
    from swift.rewards.models import RewardModels

_THINK = "<think>"
_OPENING_TOKENS = 32
_KEPT_RECORDS = 8192
MAX_HUNG_CALLS = 16
WORKED_BEFORE_FACTOR = 4
"""Factor on `MAX_HUNG_CALLS` for a function that has returned a result before: a service it uses may be down for a
while."""


class RewardPipeline:
    """The reward functions and models of a run.

    Args:
        args: the settings of `RewardArguments`, and the flags that the functions read.
        seed: seed of the run; random generators inside functions are seeded from it, per group.
        max_completion_length: in tokens; default of the length rewards.
        decode: token ids -> text, to check whether the prompt's template opened `<think>`; None means it did not.
        tokenizer_path: folder of the policy's tokenizer, for plugins that take one.
        reward_models: score the columns after the functions, once `load_models`; None when `reward_model` is empty.

    Raises:
        ConfigError: for unknown, repeated or unusable functions and plugins.
    """

    def __init__(
        self,
        args: Any,
        *,
        seed: int,
        max_completion_length: int,
        decode: Callable[[list[int]], str] | None = None,
        tokenizer_path: str | None = None,
        reward_models: RewardModels | None = None,
    ) -> None:
        load_external_plugins(args.external_plugins)
        flags = {**run_flags(args), "max_completion_length": max_completion_length}
        self.signatures: list[Signature] = read_signatures(args, flags)
        """How the functions are called, in order."""
        self._functions = [signature.name for signature in self.signatures]
        self.names: list[str] = self._functions + model_names(args.reward_model)
        """Functions, then models by folder name: the columns of every `GroupScores`."""
        self.weights: list[float] = [float(weight) for weight in args.reward_weights or [1.0] * len(self.names)]
        """One weight per name."""
        self._batch_functions = [k for k, signature in enumerate(self.signatures) if signature.scope == "batch"]
        self._group_functions = [k for k, signature in enumerate(self.signatures) if signature.scope != "batch"]
        self.needs_whole_batch = bool(self._batch_functions)
        """Whether a function has scope "batch": then score whole generation batches, not single groups."""
        self._seed = seed
        self._decode = decode
        self._models = reward_models
        self._records: dict[str, GroupRecord] = {}
        self._records_lock = threading.Lock()
        self._health = RewardHealth(self.names)
        self._hung: list[list[str]] = [[] for _ in self._functions]  # groups of time-outs since the last result
        self._worked: set[int] = set()  # functions with a result for a completion of the run
        self._on_progress: Callable[[], None] = lambda: None
        spec = LoadSpec(
            functions=self._functions,
            plugins=[str(Path(path).expanduser().resolve()) for path in args.external_plugins],
            flags=flags,
            tokenizer=tokenizer_path,
            timeout_s=float(args.reward_timeout),
            memory_bytes=memory_limit(),
        )
        self._pool = WorkerPool(spec, num_workers=args.reward_workers or min(8, len(allowed_cores())))

    def watch(self, on_progress: Callable[[], None]) -> None:
        """Sets a callback for each outcome of a function and each batch of a reward model; any thread may call it."""
        self._on_progress = on_progress
        if self._models is not None:
            self._models.on_progress = on_progress

    def load_models(self, args: Any, device: Any) -> None:
        """Loads the weights of the reward models, if there are any, onto a torch device."""
        if self._models is not None:
            self._models.load(args, device)

    def start(self) -> None:
        """Starts the workers in the background; returns at once."""
        self._pool.start()

    def log_to(self, path: Path) -> None:
        """Redirects the output of the workers to `path`; the run's folder is created only after the start."""
        self._pool.log = str(path)

    def close(self) -> None:
        """Stops all worker processes. Repeatable."""
        self._pool.close()

    def __enter__(self) -> RewardPipeline:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def submit(self, groups: Sequence[RolloutGroup], progress: TrainerProgress) -> list[Future[GroupScores]]:
        """Scores groups in the background, one future each; all groups of a rollout batch if `needs_whole_batch`.

        The columns of reward models stay None until `add_model_scores`. A future raises a `SwiftError` when the
        functions cannot be called at all.
        """
        if len(self.names) > len(self._functions) and self._models is None:
            raise RuntimeError("the run names reward models, but this pipeline was built without them")
        records = []
        for group in groups:
            values: list[list[float | None]] = [[None] * len(self.names) for _ in group.completions]
            records.append(GroupRecord(GroupScores(values, [None] * len(values))))
        batch_calls: list[Future[None]] = []
        if self.needs_whole_batch and any(group.completions for group in groups):
            payload = self._payload(groups, progress)
            batch_calls = [self._pool.submit(self._apply([k], records, payload)) for k in self._batch_functions]
        return [
            self._pool.submit(self._score(group, record, self._payload([group], progress), batch_calls))
            for group, record in zip(groups, records, strict=True)
        ]

    def score(self, groups: Sequence[RolloutGroup], progress: TrainerProgress) -> list[GroupScores]:
        """Scores groups and waits for the result, reward models included; for the main thread."""
        futures = self.submit(groups, progress)
        return self.add_model_scores(groups, [future.result() for future in futures])

    def add_model_scores(self, groups: Sequence[RolloutGroup], scores: Sequence[GroupScores]) -> list[GroupScores]:
        """Fills in the columns of the reward models; without models the scores are returned unchanged."""
        if self._models is None:
            return list(scores)
        first = len(self._functions)
        for group_scores, rows in zip(scores, self._models.score(groups), strict=True):
            for sample, values in enumerate(rows):
                for column, value in enumerate(values, start=first):
                    if value is None:
                        continue
                    if is_finite(value):
                        group_scores.values[sample][column] = value
                    elif group_scores.excluded[sample] is None:
                        group_scores.excluded[sample] = f"not_finite: {self.names[column]}"
            _exclude_without_reward(group_scores)
        return list(scores)

    def drain_metrics(self, groups: Sequence[RolloutGroup] | None = None) -> dict[str, float]:
        """Metrics of the given groups (None: all scored since the last call), whose records are then dropped.

        Keys: `rewards/<name>/{mean,std}` (over samples with a value; std with n - 1, 0 for one sample; no key without
        a value), `health/reward_failed/<name>`, `health/reward_timeout/<name>` (samples; also when 0),
        `time/reward/<name>` (s, summed over calls), `health/gold_unparsed` and `health/gold_missing` where a function
        counts them, and what functions log themselves. Pass the groups of a step to keep groups that were scored ahead
        out of its metrics.
        """
        records = self._find_records(groups, drop=True)
        logged = [record.metrics for record in records if record.metrics]
        metrics = logged_means(logged) if logged else {}
        for column, name in enumerate(self.names):
            rows = [row for record in records for row in record.scores.values]
            values = [value for row in rows if (value := row[column]) is not None]
            if values:
                metrics[f"rewards/{name}/mean"] = statistics.fmean(values)
                metrics[f"rewards/{name}/std"] = statistics.stdev(values) if len(values) > 1 else 0.0
        for name in self._functions:
            kinds = [failure.kind for record in records for failure in record.failures if failure.name == name]
            metrics[f"health/reward_failed/{name}"] = float(len(kinds))
            metrics[f"health/reward_timeout/{name}"] = float(kinds.count("timeout"))
            metrics[f"time/reward/{name}"] = sum(record.seconds[name] for record in records)
        for counter in sorted({name for record in records for name in record.counters}):
            metrics[f"health/{counter}"] = float(sum(record.counters[counter] for record in records))
        if self._models is not None:
            metrics.update(self._models.drain_metrics())
        return metrics

    def end_batch(self, groups: Sequence[RolloutGroup] | None = None) -> None:
        """Checks a generation batch (None: all scored since the last `drain_metrics`), once, before `drain_metrics`.

        Raises:
            RewardError: a function failed on every sample of three batches in a row.
        """
        self._health.end_batch(self._find_records(groups))

    def diagnosis(self) -> list[str]:
        """One line per function about its last batches: constant value, share of None, counters of ground truths."""
        return self._health.diagnosis()

    def self_check(self, rows: Sequence[Prompt], *, max_steps: int = 0) -> None:
        """Start-up check: columns, ground truths and a real call of every function on the first of `rows`.

        max_steps: for `trainer_state`.

        Raises:
            ConfigError: a column or every ground truth is missing, or the chat template of a reward model refuses all
                of the rows.
            RewardError: a function breaks its contract, or fails on every ground truth.
        """
        self.check_columns(rows)
        groups = [
            made_up_group(row, start_up_texts(row), f"self-check-{index}")
            for index, row in enumerate(rows[: selfcheck.PROBED_ROWS])
        ]
        join_problems(self._models.refusals(groups) if self._models is not None else [])
        progress = TrainerProgress(global_step=0, max_steps=max_steps, epoch=0.0)
        if failing := selfcheck.always_failing(self.probe_each(groups, progress)):
            again = self.probe_each(selfcheck.truth_groups(rows), progress, only=failing)
            join_problems(selfcheck.failing_on_truths(again), RewardError)

    def check_columns(self, rows: Sequence[Prompt]) -> None:
        """The part of `self_check` that calls nothing: columns and ground truths of the first rows."""
        rows = rows[: selfcheck.CHECKED_ROWS]
        if not rows:
            return
        columns = sorted({name for row in rows for name in row.columns})
        columns += ["images"] if any(images_in(row.messages) for row in rows) else []
        problems = [line for signature in self.signatures for line in missing_columns(signature, columns)]
        needs_truth = any(signature.counts_ground_truths for signature in self.signatures)
        if not problems and needs_truth and not any(ground_truth(row.columns.get("solution")) for row in rows):
            problems.append(
                f"--dataset: the column 'solution' is empty in all of the first {len(rows)} rows, so accuracy is "
                f"always 0; columns seen: {', '.join(columns)}; rename the right one with "
                f'--columns \'{{"<your column>":"solution"}}\''
            )
        join_problems(problems)

    def probe_each(
        self, groups: Sequence[RolloutGroup], progress: TrainerProgress, *, only: Sequence[str] | None = None
    ) -> dict[str, list[Outcome]]:
        """Calls every function (or those in `only`) on every group, alone, without metrics or re-runs.

        Name -> outcomes, one per group; a value that is no finite number is a failure.
        """
        wanted = [k for k, name in enumerate(self._functions) if only is None or name in only]
        payloads = [self._payload([group], progress) for group in groups]
        futures = {
            self.names[function]: [self._pool.submit(self._call([function], payload)) for payload in payloads]
            for function in wanted
        }
        return {name: [future.result()[0].checked() for future in found] for name, found in futures.items()}

    # ---- on the thread of the pool ----------------------------------------------------------------

    async def _score(
        self, group: RolloutGroup, record: GroupRecord, payload: Payload, batch_calls: Sequence[Future[None]]
    ) -> GroupScores:
        """All functions on one group; `batch_calls` are those of functions with scope "batch"."""
        if group.completions:
            functions = self._group_functions
            built_in = [k for k in functions if self.signatures[k].is_built_in]  # they are fast and share one task
            tasks = [[k] for k in functions if k not in built_in] + ([built_in] if built_in else [])
            await asyncio.gather(*(self._apply(task, [record], payload) for task in tasks))
        await asyncio.gather(*map(asyncio.wrap_future, batch_calls))
        scores = record.scores
        for sample, columns in record.columns.items():
            group.completions[sample].logged |= columns
        record.failures.sort(key=lambda failure: self.names.index(failure.name))
        for failure in reversed(record.failures):  # the first function that failed is the reason
            scores.excluded[failure.sample] = f"{failure.kind}: {failure.name}"
        if self._models is None:
            _exclude_without_reward(scores)
        with self._records_lock:
            self._records[group.group_id] = record
            if len(self._records) > _KEPT_RECORDS:
                del self._records[next(iter(self._records))]
        self._health.group_done(group, record)
        return scores

    async def _apply(self, functions: list[int], records: Sequence[GroupRecord], payload: Payload) -> None:
        """One call of `functions` on whole groups, and the re-runs of those that fail."""
        rows = [(record, sample) for record in records for sample in range(len(record.scores.values))]

        async def call_alone(function: int, index: int) -> None:
            [outcome] = await self._call([function], payload, [index], records[0])
            self._store(function, rows[index : index + 1], outcome)

        failed = []
        outcomes = await self._call(functions, payload, record=records[0])
        for function, outcome in zip(functions, outcomes, strict=True):
            alone = len(rows) == len(functions) == 1  # in a shared call another function may have failed
            if outcome.kind == "ok" or alone or self.signatures[function].scope != "sample":
                self._store(function, rows, outcome)
            else:
                failed.append(function)
        await asyncio.gather(*(call_alone(function, index) for function in failed for index in range(len(rows))))

    async def _call(
        self,
        functions: list[int],
        payload: Payload,
        samples: list[int] | None = None,
        record: GroupRecord | None = None,
    ) -> list[Outcome]:
        """The outcomes of synchronous functions in one task, or of one awaited function.

        samples: None means all of the payload. record: gets durations and counters; None for a probe.
        """
        keywords = payload["keywords"]
        seed = call_seed(self._seed, keywords["prompt_id"][0], keywords["group_id"][0])
        jobs = [Job(function, payload, samples, seed) for function in functions]
        if self.signatures[functions[0]].is_async:
            outcomes = [await self._pool.call_awaited(job) for job in jobs]
        else:
            outcomes = await self._pool.call(jobs)
        self._on_progress()
        for function, outcome in zip(functions, outcomes, strict=True):
            if outcome.kind != "timeout" or self.signatures[function].is_async:  # awaited calls time out together
                self._hung[function].clear()
            else:
                self._bound_hangs(function, keywords["group_id"][(samples or [0])[0]])
            if record is None:
                continue
            if outcome.kind == "ok":
                self._worked.add(function)
            record.seconds[self.names[function]] += outcome.seconds
            counting = (k for k, signature in enumerate(self.signatures) if signature.counts_ground_truths)
            if function == next(counting, None):  # others count the same rows again
                record.counters.update(outcome.counters)
        return outcomes

    def _bound_hangs(self, function: int, group_id: str) -> None:
        """Ends the run if all calls of a function hang, before three batches of time-outs have passed.

        The limit counts time-outs in several groups without a result in between.
        """
        hung = self._hung[function]
        hung.append(group_id)
        limit = MAX_HUNG_CALLS if function not in self._worked else WORKED_BEFORE_FACTOR * MAX_HUNG_CALLS
        if len(hung) >= limit and len(set(hung)) > 1:
            raise RewardError(
                f"--reward_funcs: {self.names[function]}: {len(hung)} calls in a row, and none in between, took longer "
                f"than {self._pool.timeout_s:g} s; correct the function ({self.signatures[function].where}), or raise "
                "--reward_timeout"
            )

    def _store(self, function: int, rows: Sequence[tuple[GroupRecord, int]], outcome: Outcome) -> None:
        """Stores the values of samples, or the reason why they have none."""
        name = self.names[function]
        if outcome.kind != "ok":
            for record, sample in rows:
                record.failures.append(Failure(sample, name, outcome.kind, outcome.detail))
            return
        for metric, values in outcome.metrics.items():
            rows[0][0].metrics[metric] += values
        for number, ((record, sample), value) in enumerate(zip(rows, outcome.values, strict=True)):
            record.columns[sample] |= {column: values[number] for column, values in outcome.columns.items()}
            if value is None or is_finite(value):
                record.scores.values[sample][function] = value
            else:
                detail = f"returned {value} ({self.signatures[function].where})"
                record.failures.append(Failure(sample, name, "not_finite", detail))

    def _payload(self, groups: Sequence[RolloutGroup], progress: TrainerProgress) -> Payload:
        opens_think = []
        for group in groups:
            opening = [token for token in group.prompt.token_ids[-_OPENING_TOKENS:] if token >= 0]  # not of images
            found = self._decode is not None and opening and self._decode(opening).rstrip().endswith(_THINK)
            opens_think.append(bool(found))
        with_turns = any(signature.is_trl for signature in self.signatures)
        keywords = group_keywords(groups, opens_think, with_turns=with_turns)
        keywords["trainer_state"] = progress
        completions = [completion.text for group in groups for completion in group.completions]
        return {"completions": completions, "keywords": keywords}

    def _find_records(self, groups: Sequence[RolloutGroup] | None, *, drop: bool = False) -> list[GroupRecord]:
        with self._records_lock:
            keys = list(self._records) if groups is None else [group.group_id for group in groups]
            found = [self._records[key] for key in keys if key in self._records]
            for key in keys if drop else ():
                self._records.pop(key, None)
        return found


def _exclude_without_reward(scores: GroupScores) -> None:
    """Marks the samples to which no function applied; other exclusions keep their reason."""
    for index, row in enumerate(scores.values):
        if row and scores.excluded[index] is None and all(value is None for value in row):
            scores.excluded[index] = "no_reward"
