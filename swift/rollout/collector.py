"""Creates and completes rounds: `prepare -> sample -> finish`, with equal results on every rank.

Sampling (`swift.rollout.runner`) uses the engine and the reward workers only, so it may run on a background thread.
`prepare` and `finish` are collective and must be called on the main thread. Rank 0 scores. Completions that an engine
has aborted are excluded from training and from the statistics of their group, with the reason.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from swift.errors import EngineError, SwiftError
from swift.rollout.dynamic_sampling import GroupFilter, Selection
from swift.rollout.engines.base import InferenceEngine
from swift.rollout.exclusions import reasons_of
from swift.rollout.mailbox import Mailbox
from swift.rollout.round import EngineShare, OtherRankFailed, Round
from swift.rollout.round_result import RoundResult, is_scored, set_scores
from swift.rollout.scheduler import Launch, LaunchLog
from swift.rollout.seeds import sample_seed
from swift.rollout.sources.base import Source
from swift.types import Completion, Prompt, Request, RolloutGroup, SamplingParams

if TYPE_CHECKING:
    from swift.rewards.pipeline import RewardPipeline
    from swift.trainers.distributed import Collectives


@dataclass(slots=True)
class RolloutCollector:
    """Samples and scores groups.

    source: source of completions on this rank, or None. sampling: the training distribution; each sample gets its own
    seed. decode: converts token ids to the text for reward functions. share: part of a round that the engine samples.
    around: context of sampling, entered by every rank, also without requests (needed for a sharded policy).
    progress: called for each completion.
    mailbox: messages between ranks during sampling; required for dynamic sampling on several ranks.
    max_new_tokens: length limit by prompt; None: that of `sampling`.
    limit_s: time limit of a request in seconds; see `Request.limit_s`.
    current: the last round that was prepared.
    """

    source: Source | None
    sampling: SamplingParams
    seed: int
    decode: Callable[[Sequence[int]], str]
    scorer: RewardPipeline
    collectives: Collectives
    share: EngineShare | None = None
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    progress: Callable[[], None] = lambda: None
    mailbox: Mailbox | None = None
    max_new_tokens: Callable[[Prompt], int] | None = None
    limit_s: float = math.inf
    current: Round | None = None
    _num_late: int = 0  # as reported so far

    @property
    def engine(self) -> InferenceEngine | None:
        """The engine of this rank."""
        return self.source.engine if self.source is not None else None

    def prepare(self, log: LaunchLog, **settings: Any) -> Round:
        """A round of the launches in `log`; with a group filter, of those that it draws. settings: those of `Round`."""
        current = self.current = Round(self, log, **settings)
        if current.group_filter is None:
            current.begin()
        return current

    def request(self, launch: Launch, sample: int, namespace: str) -> Request:
        seed = sample_seed(self.seed, namespace + launch.prompt.prompt_id, launch.launch, sample)
        sampling = replace(self.sampling, seed=seed)
        if self.max_new_tokens is not None:
            sampling = replace(sampling, max_new_tokens=self.max_new_tokens(launch.prompt))
        name = f"{launch.group_id}/{sample}"
        return Request(name, launch.prompt.token_ids, sampling, launch.prompt, self.limit_s)

    # --- the end of a round -------------------------------------------------------------------------------------

    def finish(
        self,
        current: Round,
        *,
        timer: Callable[[str], Any],
        meanwhile: Callable[[list[RolloutGroup]], None] | None = None,
    ) -> RoundResult:
        """Gather a round on every rank and wait for its scores; collective. An error of any rank is raised on all.

        Args:
            current: the round.
            timer: context manager factory for the phases "generate" and "reward".
            meanwhile: called on every rank with the groups of a fixed round, if their scores are not ready yet.
        """
        fixed = current.group_filter is None
        with timer("generate"):
            late = self._exchange(current)
        # timing decides when `meanwhile` runs, never its result
        if fixed and meanwhile is not None and self._agree(lambda: self._still_scoring(current)):
            meanwhile([current.groups[launch.index] for launch in current.log.launches])
        with timer("reward"):
            end = self._agree(lambda: self._end(current))
        if not fixed and self.mailbox is not None:
            self.mailbox.sweep()
        if late:
            end["metrics"]["health/rollout_timeouts"] = float(late)
        if not fixed:
            current.catch_up(end["launches"])
        kept = {}
        for index, (completions, scores) in end["kept"].items():
            group = kept[index] = current.groups.get(index) or current.group(index, completions)
            group.scores = scores
        carried = current.log.carried
        return RoundResult(
            groups=[*carried, *(kept[index] for index in end["trained"])],
            carried=[kept[index] for index in end["carried"]],
            dropped=[current.groups[index] for index in end["dropped"] if index in current.groups],
            failed=[current.group(index, []).prompt for index in end["failed"]],
            carried_in=len(carried),
            metrics=end["metrics"],
            **end["counts"],
        )

    def _exchange(self, current: Round) -> int:
        """Raise the first failure of any rank on all ranks; gather all completions of a fixed round on every rank.

        Returns the number of requests that exceeded their time limit since the last round.
        """
        num_late = self.source.late if self.source is not None else 0
        failure, late, parts = current.failure, num_late - self._num_late, current.parts
        self._num_late = num_late
        if self.collectives.active:
            sends = current.group_filter is None and self.share is not None and self.share.reports
            reports = self.collectives.all_gather((portable(failure), late, parts if sends else {}))
            failure, late, parts = _merged(reports)
        if failure is not None:
            if failure is not current.failure:
                failure.__cause__ = current.failure  # keeps this rank's traceback
            raise failure
        if current.group_filter is None:
            current.complete_groups(parts)
        return late

    def _still_scoring(self, current: Round) -> bool:
        """Submit all groups of a round, and whether reward workers still have any of them; rank 0 only."""
        self._submit(current)
        return not current.all_scored

    def _submit(self, current: Round) -> None:
        """Submit the groups that were not submitted during sampling to the reward workers; rank 0 only."""
        waiting = [launch.index for launch in current.log.launches if launch.index not in current.futures]
        if waiting:
            futures = self.scorer.submit([current.groups[index] for index in waiting], current.progress)
            current.futures.update(zip(waiting, futures, strict=True))

    def _end(self, current: Round) -> dict[str, Any]:
        """Wait for the scores of a round; returns the data that other ranks need; rank 0 only."""
        group_filter = current.group_filter
        if group_filter is None:
            self._submit(current)
            results = [current.futures[launch.index].result() for launch in current.log.launches]
        groups = [current.groups[index] for index in sorted(current.groups)]
        if group_filter is None:
            for group, scores in zip(groups, self.scorer.add_model_scores(groups, results), strict=True):
                set_scores(group, scores)
            selection = Selection(trained=tuple(sorted(current.groups)))
        else:
            selection = group_filter.selection()
        if groups or group_filter is None:
            self.scorer.end_batch(groups)
        metrics = self.scorer.drain_metrics(groups) | (self.source.drain_metrics() if self.source is not None else {})
        if group_filter is not None:
            metrics |= _sampling_metrics(current, group_filter, selection)
        trained = sorted({*selection.trained, *selection.filled})
        scored = sum(is_scored(current.groups[index]) for index in selection.dropped)
        return {
            "launches": len(current.log.launches),
            # completions of a fixed round are on every rank already
            "kept": {
                index: ([] if group_filter is None else current.groups[index].completions, current.groups[index].scores)
                for index in [*trained, *selection.carried]
            },
            "trained": trained,
            "carried": list(selection.carried),
            "dropped": list(selection.dropped),
            "failed": [index for index in selection.dropped if current.failed(current.groups[index])],
            "metrics": metrics,
            "counts": {
                "launched": group_filter.launched if group_filter is not None else 0,
                "informative": group_filter.informative if group_filter is not None else 0,
                "num_dropped": scored,
                "num_excluded": len(selection.dropped) - scored,
                "num_samples": sum(len(group.completions) for group in groups if group.scores is not None),
                "reasons": dict(reasons_of(groups)),
            },
        }

    def _agree(self, work: Callable[[], Any]) -> Any:
        """Call `work` on rank 0; its result is returned, or its error raised, on every rank."""
        if not self.collectives.active:
            return work()
        outcome, failure = None, None
        if self.collectives.rank == 0:
            try:
                outcome = work()
            except Exception as error:  # sent to the other ranks, then raised on all
                failure = error
        outcome, received = self.collectives.broadcast((outcome, portable(failure)))
        if received is not None:
            raise failure or received
        return outcome


def _merged(reports: Sequence[tuple[Exception | None, int, Any]]) -> tuple[Exception | None, int, Any]:
    """The failure to raise, preferably one with its own reason; the number of late requests; all completions."""
    failures = [failure for failure, _, _ in reports if failure is not None]
    own = [error for error in failures if not isinstance(error, OtherRankFailed)]
    parts: dict[int, dict[int, Completion]] = {}
    for _, _, part in reports:
        for index, done in part.items():
            parts.setdefault(index, {}).update(done)
    return next(iter([*own, *failures]), None), sum(late for _, late, _ in reports), parts


def _sampling_metrics(current: Round, group_filter: GroupFilter, selection: Selection) -> dict[str, float]:
    dropped = (completion for index in selection.dropped for completion in current.groups[index].completions)
    return {
        "dynamic_sample/launched": float(group_filter.launched),
        "dynamic_sample/informative": float(group_filter.informative),
        "dynamic_sample/zero_variance": float(group_filter.launched - group_filter.informative),
        "dynamic_sample/filled": float(len(selection.filled)),
        "dynamic_sample/budget_exhausted": float(group_filter.budget_exhausted),
        "dynamic_sample/carried_in": float(len(current.log.carried)),
        "dynamic_sample/carried_out": float(len(selection.carried)),
        "dynamic_sample/dropped_tokens": float(sum(len(completion.token_ids) for completion in dropped)),
    }


def portable(error: Exception | None) -> Exception | None:
    """An error that can be sent to other processes: a SwiftError as it is, any other one as an EngineError."""
    if error is None or isinstance(error, SwiftError):
        return error
    return EngineError(f"{type(error).__name__}: {error}")


def launches_of(prompts: Iterable[Prompt]) -> list[Launch]:
    """Launches for evaluation: each prompt once; equal prompts differ in their launch count."""
    earlier: Counter[str] = Counter()
    launches = []
    for index, prompt in enumerate(prompts):
        launches.append(Launch(index, earlier[prompt.prompt_id], prompt))
        earlier[prompt.prompt_id] += 1
    return launches
