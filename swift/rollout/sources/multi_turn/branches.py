"""Schedulers with a `run` of their own, which ask for answers to chats, in any order, and return samples.

    output = await scheduler.run(request, config)              a sample
             await self.infer_engine.infer_async(request)      an answer to a chat

A chat continues the longest earlier one of its run that it begins with: the tokens of that one are its prompt. So a run
may follow one line, or branch from each of its answers. A scheduler with an `async_infer` of its own makes all samples
of a group in one call.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from swift.errors import RewardError
from swift.infer_engine.protocol import ChatCompletionResponse, RequestConfig, RolloutOutput
from swift.models.template import Message
from swift.plugin.multi_turn import MultiTurnScheduler, RolloutInferRequest
from swift.rollout.sources.multi_turn.source import Play
from swift.rollout.sources.multi_turn.trajectory import Trajectory
from swift.rollout.sources.multi_turn.views import choice_of, request_of


@dataclass
class Tree:
    """The chats of a run: a trajectory for each answer. root: before the first answer."""

    root: Trajectory
    answered: list[Trajectory] = field(default_factory=list)
    children: dict[int, int] = field(default_factory=dict)

    async def answer(self, messages: Sequence[Message]) -> Trajectory:
        """A new trajectory with these messages and an answer; see `Trajectory.answer`."""
        parents = [one for one in self.answered if list(messages[: len(one.messages)]) == one.messages]
        parent = max(parents, key=lambda one: len(one.messages), default=self.root)
        number = self.children[id(parent)] = self.children.get(id(parent), -1) + 1
        child = parent.branch(number)
        if parent is not self.root:
            child.replace_chat(messages)
        elif list(messages) != child.messages:
            child.begin(messages)
        await child.answer()
        self.answered.append(child)
        return child


_tree: ContextVar[Tree] = ContextVar("tree")
"""The tree of the present run."""


class BranchEngine:
    """The `infer_engine` of a scheduler. name: of the scheduler, for messages. tokenizer: the policy's."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        self.name, self.tokenizer = name, tokenizer

    async def infer_async(
        self, infer_request: RolloutInferRequest, request_config: RequestConfig | None = None, **kwargs: Any
    ) -> ChatCompletionResponse:
        """The policy's answer to a chat, with the settings of the run.

        Raises RewardError: the configuration has others.
        """
        for setting, value in vars(request_config or RequestConfig()).items():
            if value != getattr(RequestConfig(), setting, value):
                raise RewardError(
                    f"--multi_turn_scheduler: {self.name}: request_config.{setting}: {value}: answers are sampled with "
                    "the settings of the run; leave it out"
                )
        done = await _tree.get().answer(infer_request.messages)
        return ChatCompletionResponse([choice_of(done)], id=infer_request.uuid)


def of_run(scheduler: MultiTurnScheduler, name: str) -> Play:
    """A trajectory with a scheduler that has a `run`."""

    async def play(trajectory: Trajectory) -> None:
        tree = Tree(trajectory)
        _tree.set(tree)
        output = await scheduler.run(request_of(trajectory), RequestConfig())  # type: ignore[attr-defined]
        outputs = output if isinstance(output, list) else [output]
        if len(outputs) != 1:
            raise RewardError(
                f"--multi_turn_scheduler: {name}: run returned {len(outputs)} samples for one request; a sample cannot "
                "be split"
            )
        _take(trajectory, tree, outputs[0], name)

    return play


@dataclass
class GroupRun:
    """The run of a group. asked, waiting: numbers of its samples so far, and at present."""

    task: asyncio.Task[list[RolloutOutput]]
    tree: Tree
    asked: int = 0
    waiting: int = 0


KEPT_RUNS = 64
"""Maximum number of groups of which samples may still be asked for; a later one begins a new run."""


def of_groups(scheduler: MultiTurnScheduler, name: str, num_generations: int) -> Play:
    """A trajectory with a scheduler whose `async_infer` makes all samples of a group.

    The first sample of a group that is asked for begins the run; each gets the output that has its id.
    """
    runs: dict[str, GroupRun] = {}

    async def play(trajectory: Trajectory) -> None:
        own = trajectory.request.request_id
        group = own.rpartition("/")[0]
        run = runs[group] = runs.get(group) or begin(trajectory, group)
        run.asked, run.waiting = run.asked + 1, run.waiting + 1
        try:
            outputs = {output.response.id: output for output in await asyncio.shield(run.task)}
        finally:
            run.waiting -= 1
            if run.asked == num_generations or not (run.waiting or run.task.done()):
                runs.pop(group, None)
            if not run.waiting:
                run.task.cancel()
            while len(runs) > KEPT_RUNS:
                del runs[next(iter(runs))]
        if own not in outputs:
            raise RewardError(
                f"--multi_turn_scheduler: {name}: async_infer returned {len(outputs)} samples, none of them {own}; it "
                f"must return one for each of the {num_generations} requests"
            )
        _take(trajectory, run.tree, outputs[own], name)

    def begin(trajectory: Trajectory, group: str) -> GroupRun:
        row, tree = request_of(trajectory), Tree(trajectory.branch(0))
        requests = [
            RolloutInferRequest([*row.messages], row.data_dict, f"{group}/{index}") for index in range(num_generations)
        ]
        _tree.set(tree)
        return GroupRun(asyncio.ensure_future(scheduler.async_infer(requests, RequestConfig())), tree)

    return play


def _take(trajectory: Trajectory, tree: Tree, output: RolloutOutput, name: str) -> None:
    """Makes a trajectory that of an output, whose mask may leave out sampled tokens."""
    found = next((one for one in tree.answered if one.messages == list(output.messages)), None)
    if found is None:
        raise RewardError(
            f"--multi_turn_scheduler: {name}: run returned messages that do not end with an answer of infer_engine"
        )
    trajectory.take(found.branch(0))
    trajectory.columns |= output.rollout_infos
    rows = output.response_loss_mask
    mask = list(itertools.chain(*rows)) if rows and isinstance(rows[0], Sequence) else rows
    places = [place for place, sampled in enumerate(trajectory.mask) if sampled]
    if not all(mask) and len(mask) != len(places):
        raise RewardError(
            f"--multi_turn_scheduler: {name}: run returned a response_loss_mask of {len(mask)} values for "
            f"{len(places)} sampled tokens; leave it out, or define step, which may add tokens"
        )
    trajectory.leave_out(place for place, trained in zip(places, mask, strict=False) if not trained)
