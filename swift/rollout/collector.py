"""Makes rounds and ends them: `prepare -> sample -> finish`, the same result on every rank.

Sampling (`swift.rollout.runner`) touches the engine and the reward workers only, so it may run on another thread than
the trainer's; `prepare` and `finish` are collective and belong to the main thread. Rank 0 scores. Completions that an
engine gave up are excluded from training and from the statistics of their group, with the reason.
"""

from __future__ import annotations

import contextlib
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
from swift.rollout.source import Source
from swift.types import Completion, Prompt, Request, RolloutGroup, SamplingParams

if TYPE_CHECKING:
    from swift.rewards.pipeline import RewardPipeline
    from swift.trainers.distributed import Collectives


@dataclass(slots=True)
class RolloutCollector:
    """Samples and scores groups.

    source: what this rank asks for completions, or None. sampling: the training distribution; the seed of each sample
    is filled in. decode: token ids to the text that rewards see. share: what of a round the engine samples.
    around: entered by every rank around sampling, also by one without requests (a sharded policy needs it).
    progress: called for each completion.
    mailbox: messages between the ranks while they sample; needed for dynamic sampling on several.
    max_new_tokens: length limit by prompt; None is that of `sampling`.
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
    _late_told: int = 0

    @property
    def engine(self) -> InferenceEngine | None:
        """What samples on this rank."""
        return self.source.inner.engine if self.source is not None else None

    def prepare(self, log: LaunchLog, **settings: Any) -> Round:
        """A round of the launches in `log`, or with a filter of those that it draws; `settings` of `Round`."""
        current = Round(self, log, **settings)
        if current.group_filter is None:
            current.begin()
        return current

    def request(self, launch: Launch, sample: int, namespace: str) -> Request:
        seed = sample_seed(self.seed, namespace + launch.prompt.prompt_id, launch.launch, sample)
        sampling = replace(self.sampling, seed=seed)
        if self.max_new_tokens is not None:
            sampling = replace(sampling, max_new_tokens=self.max_new_tokens(launch.prompt))
        return Request(f"{launch.group_id}/{sample}", launch.prompt.token_ids, sampling, launch.prompt)

    # --- the end of a round -------------------------------------------------------------------------------------

    def _new_late(self) -> int:
        """Requests of this rank that were aborted for their time since the last call."""
        late = self.source.late if self.source is not None else 0
        new, self._late_told = late - self._late_told, late
        return new

    def finish(
        self,
        current: Round,
        *,
        timer: Callable[[str], Any],
        meanwhile: Callable[[list[RolloutGroup]], None] | None = None,
    ) -> RoundResult:
        """Bring a round to every rank and wait for its scores; collective; what failed on any rank is raised on all.

        Args:
            current: the round.
            timer: context manager factory for the phases "generate" and "reward".
            meanwhile: called on every rank with the groups of a fixed round, if reward functions still work on them.
        """
        fixed = current.group_filter is None
        with timer("generate"):
            late = self._exchange(current)
        # the answer of the moment decides when something is done, never what
        if fixed and meanwhile is not None and self._agree(lambda: self._still_scoring(current)):
            meanwhile([current.groups[launch.index] for launch in current.log.launches])
        with timer("reward"):
            end = self._agree(lambda: self._end(current))
        if not fixed and self.mailbox is not None:
            self.mailbox.sweep()
        if late:
            end["metrics"]["health/rollout_timeouts"] = float(late)
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
        """Raise the first failure of any rank on all, and give every rank all completions of a fixed round.

        Returns how many requests were late.
        """
        failure, late, parts = current.failure, self._new_late(), current.parts
        if self.collectives.active:
            sends = current.group_filter is None and self.share is not None and self.share.reports
            reports = self.collectives.all_gather((portable(failure), late, parts if sends else {}))
            failure, late, parts = _merged(reports)
        if failure is not None:
            if failure is not current.failure:
                failure.__cause__ = current.failure  # the traceback of this rank's own
            raise failure
        if current.group_filter is None:
            current.complete_groups(parts)
        return late

    def _still_scoring(self, current: Round) -> bool:
        """Whether reward workers have anything of a round left, now that they were given all; rank 0 only."""
        self._submit(current)
        return not current.all_scored

    def _submit(self, current: Round) -> None:
        """Give the reward workers what they did not get while it was sampled; rank 0 only."""
        groups = [current.groups[launch.index] for launch in current.log.launches]
        waiting = [group for group in groups if group.launch_index not in current.futures]
        if waiting and self.scorer.needs_whole_batch:
            submitted = self.scorer.submit_batch(groups, current.progress)
            current.futures.update(zip([group.launch_index for group in groups], submitted, strict=True))
            return
        for group in waiting:
            current.futures[group.launch_index] = self.scorer.submit(group, current.progress)

    def _end(self, current: Round) -> dict[str, Any]:
        """What the other ranks need to know of a round; rank 0 only."""
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
            # every rank has the completions of a fixed round
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
        """Rank 0 works, every rank gets the result; a failure of rank 0 ends every rank with the same error."""
        outcome, failure = None, None
        if self.collectives.rank == 0:
            try:
                outcome = work()
            except Exception as error:  # travels to the other ranks, then is raised on all
                failure = error
        outcome, told = self.collectives.broadcast((outcome, portable(failure)))
        if told is not None:
            raise failure or told
        return outcome


def _merged(reports: Sequence[tuple[Exception | None, int, Any]]) -> tuple[Exception | None, int, Any]:
    """The failure that counts, one with a reason of its own if there is any; late requests; completions of all."""
    failures = [failure for failure, _, _ in reports if failure is not None]
    own = [error for error in failures if not isinstance(error, OtherRankFailed)]
    parts: dict[int, dict[int, Completion]] = {}
    for _, _, part in reports:
        for index, done in part.items():
            parts.setdefault(index, {}).update(done)
    return next(iter([*own, *failures]), None), sum(late for _, late, _ in reports), parts


def _sampling_metrics(current: Round, group_filter: GroupFilter, selection: Selection) -> dict[str, float]:
    dropped = (one for index in selection.dropped for one in current.groups[index].completions)
    return {
        "dynamic_sample/launched": float(group_filter.launched),
        "dynamic_sample/informative": float(group_filter.informative),
        "dynamic_sample/zero_variance": float(group_filter.launched - group_filter.informative),
        "dynamic_sample/filled": float(len(selection.filled)),
        "dynamic_sample/budget_exhausted": float(group_filter.budget_exhausted),
        "dynamic_sample/carried_in": float(len(current.log.carried)),
        "dynamic_sample/carried_out": float(len(selection.carried)),
        "dynamic_sample/dropped_tokens": float(sum(len(one.token_ids) for one in dropped)),
    }


def portable(error: Exception | None) -> Exception | None:
    """An error of ours itself, which can travel to other processes; for any other one that says the same."""
    if error is None or isinstance(error, SwiftError):
        return error
    return EngineError(f"{type(error).__name__}: {error}")


def launches_of(prompts: Iterable[Prompt]) -> list[Launch]:
    """Launches for evaluation: each prompt once, equal prompts told apart by their launch count."""
    earlier: Counter[str] = Counter()
    launches = []
    for index, prompt in enumerate(prompts):
        launches.append(Launch(index, earlier[prompt.prompt_id], prompt))
        earlier[prompt.prompt_id] += 1
    return launches
