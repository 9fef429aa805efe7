"""completions.jsonl: one row per completion, all of them, written in the background.

The trainer's thread builds the rows and hands them over; one writer thread encodes and appends them. The queue is
bounded, so a disk that is slower than training slows training instead of filling memory. `flush` (before a
checkpoint) and `close` (at exit) wait until all rows are on the disk. What goes wrong in the writer is raised by
the next call, whichever it is.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from swift.observability.jsonl import JsonlWriter
from swift.types import Prompt, RolloutGroup

QUEUE_BATCHES = 64
"""Batches of rows that may wait for the writer."""

Split = Literal["train", "eval"]


def prompt_text(prompt: Prompt) -> str:
    """The conversation as text, for readers: each message's role on a line of its own, then its content."""
    return "\n".join(f"[{message['role']}]\n{message.get('content') or ''}" for message in prompt.messages)


def completion_rows(
    groups: Sequence[RolloutGroup],
    *,
    attempt: int,
    step: int,
    split: str,
    weight_version: int,
    reward_names: Sequence[str],
    rewards: Sequence[float | None],
    advantages: Sequence[float | None],
    used: Sequence[bool] | None = None,
    excluded: Sequence[str | None] | None = None,
    show_prompt: Callable[[Prompt], str] = prompt_text,
) -> list[dict[str, Any]]:
    """The rows of scored groups, in the order of the groups and of the completions in each.

    Args:
        groups: with scores.
        attempt: the number of this start of the run.
        step: the optimizer step that the rows belong to.
        split: "train" or "eval".
        weight_version: of completions that do not say which weights sampled them.
        reward_names: K names, functions first, then models.
        rewards: weighted totals, one per completion of all groups; None when excluded.
        advantages: as trained on; None when excluded.
        used: false for completions that were redrawn; None means all that are not excluded.
        excluded: reasons beyond the faults of reward functions, such as "overlong"; None means there are none.
        show_prompt: the prompt as text; called once per group.
    """
    completions = [completion for group in groups for completion in group.completions]
    faults = [reason for group in groups for reason in (group.scores.excluded if group.scores else [])]
    reasons = faults if excluded is None else [a or b for a, b in zip(faults, excluded, strict=True)]
    flags = used if used is not None else [True] * len(completions)
    lengths = {len(completions), len(reasons), len(flags), len(rewards), len(advantages)}
    if len(lengths) != 1:
        raise ValueError(f"completions, scores, used, rewards and advantages differ in number: {sorted(lengths)}")
    rows: list[dict[str, Any]] = []
    for group in groups:
        assert group.scores is not None
        shown = show_prompt(group.prompt)
        for index, (completion, values) in enumerate(zip(group.completions, group.scores.values, strict=True)):
            number = len(rows)
            rows.append(
                {
                    "attempt": attempt,
                    "step": step,
                    "split": split,
                    "weight_version": completion.versions[0][0] if completion.versions else weight_version,
                    "prompt_id": group.prompt.prompt_id,
                    "group_id": group.group_id,
                    "index": index,
                    "prompt": shown,
                    "completion": completion.text,
                    "prompt_tokens": len(group.prompt.token_ids),
                    "completion_tokens": len(completion.token_ids),
                    "finish_reason": completion.finish_reason,
                    "rewards": dict(zip(reward_names, values, strict=True)),
                    "reward": rewards[number],
                    "advantage": advantages[number],
                    "used": bool(flags[number]) and reasons[number] is None,
                    "excluded": reasons[number],
                    "columns": {**group.prompt.columns, **completion.columns},
                }
            )
    return rows


class CompletionsLog:
    """Appends rows without making the caller wait for the disk.

    Args:
        path: completions.jsonl; created with the first row.
        queue_batches: batches that may wait; a further `write` blocks until one is written.
    """

    def __init__(self, path: Path, *, queue_batches: int = QUEUE_BATCHES) -> None:
        self._writer = JsonlWriter(path)
        self._queue: queue.Queue[list[Mapping[str, Any]] | None] = queue.Queue(queue_batches)
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Hand rows over; they must not be changed afterwards.

        Raises:
            ResourceError: when the disk was full at an earlier batch; likewise any other failure of the writer.
        """
        self._raise_failure()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="completions-log", daemon=True)
            self._thread.start()
        if rows:
            self._queue.put(list(rows))

    def flush(self) -> None:
        """Wait until every row is on the disk.

        Raises:
            ResourceError: as `write`.
        """
        self._queue.join()
        self._raise_failure()
        self._writer.sync()

    def close(self) -> None:
        """Flush, end the thread and close the file; a later `write` starts them again.

        Raises:
            ResourceError: as `write`.
        """
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
        self._writer.close()
        self._raise_failure()

    def _run(self) -> None:
        """The writer thread: after a failure it goes on emptying the queue, so that nobody waits for it."""
        while True:
            rows = self._queue.get()
            try:
                if rows is None:
                    return
                if self._error is None:
                    self._writer.write(*rows)
            except BaseException as error:  # handed to the caller by the next call
                self._error = error
            finally:
                self._queue.task_done()

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise self._error
