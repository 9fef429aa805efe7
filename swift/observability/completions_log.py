"""completions.jsonl: one row per completion, all of them, written in the background.

The trainer's thread builds the rows and hands them over; one writer thread encodes and appends them. Only so many
batches of rows wait, so a disk that is slower than training slows training instead of filling memory. `flush` (before a
checkpoint) and `close` (at exit) wait until all rows are on the disk. A later call raises what failed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift.observability.jsonl import JsonlWriter

if TYPE_CHECKING:
    from swift.rollout.round_result import ScoredRound
    from swift.types import Image

QUEUE_BATCHES = 64
"""Batches of rows that may wait for the writer."""


def completion_rows(
    scored: ScoredRound,
    *,
    attempt: int,
    reward_names: Sequence[str],
    images_in: Callable[[Sequence[Mapping[str, Any]]], Sequence[Image]] = lambda messages: (),
) -> list[dict[str, Any]]:
    """The rows of a scored round, in the order of its groups and of the completions in each.

    A row's prompt is the conversation as text, the environment's if that wrote one: the role above each content.

    Args:
        scored: the round.
        attempt: the number of this start of the run.
        reward_names: K names, functions first, then models.
        images_in: the images of a prompt's messages; where those lie is told in the rows.
    """
    of_completions = zip(scored.rewards, scored.advantages, scored.excluded, scored.used, strict=True)
    rows: list[dict[str, Any]] = []
    for group in scored.groups:
        assert group.scores is not None
        scores = zip(group.completions, group.scores.values, group.scores.excluded, strict=True)
        places = [place_of(image) for image in images_in(group.prompt.messages) if image.path or image.row]
        for index, (completion, values, fault) in enumerate(scores):
            reward, advantage, excluded, used = next(of_completions)
            episode = completion.episode
            own = episode.prompt_ids if episode is not None else []
            messages = episode.messages[: episode.start] if episode is not None and own else group.prompt.messages
            rows.append(
                {
                    "attempt": attempt,
                    "step": scored.step,
                    "split": scored.split,
                    "weight_version": completion.versions[0][0] if completion.versions else scored.version,
                    "prompt_id": group.prompt.prompt_id,
                    "group_id": group.group_id,
                    "index": index,
                    "prompt": "\n".join(f"[{turn['role']}]\n{shown(turn.get('content'))}" for turn in messages),
                    "completion": completion.text,
                    "turns": None if episode is None else episode.turns,
                    "prompt_tokens": len(own if own else group.prompt.token_ids),
                    "completion_tokens": len(completion.token_ids),
                    "finish_reason": completion.finish_reason,
                    "rewards": dict(zip(reward_names, values, strict=True)),
                    "reward": reward,
                    "advantage": advantage,
                    "used": used and not (fault or excluded),
                    "excluded": fault or excluded,
                    "columns": {**group.prompt.columns, **completion.columns, **completion.logged},
                    **({"images": places} if places else {}),
                }
            )
    return rows


def place_of(image: Image) -> dict[str, str]:
    """Where an image is read again: its file, or else the `file:line` of its row."""
    return {"digest": image.digest, **({"path": image.path} if image.path else {"row": str(image.row)})}


def shown(content: str | Sequence[Mapping[str, str]] | None) -> str:
    """A turn's content as text, images by their digest."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part["text"] if part["type"] == "text" else f"<image {part['image']}>" for part in content)


def sample_line(row: Mapping[str, Any]) -> str:
    """A completion and its prompt in one line, for the console."""
    prompt, completion = (repr(shortened(row[name], most)) for name, most in (("prompt", 60), ("completion", 160)))
    values = [*row["rewards"].values(), row["reward"]]
    *parts, reward = ("none" if value is None else f"{value:.3f}" for value in values)
    functions = ", ".join(f"{name} {part}" for name, part in zip(row["rewards"], parts, strict=True))
    of = f" ({functions})" if len(parts) > 1 else ""
    scored = f", reward {reward}{of}" if parts else ""
    return f"sample of step {row['step']}: {prompt} -> {completion}{scored}"


def shortened(text: str, most: int) -> str:
    """A text whose middle is left out where it is longer."""
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


class CompletionsLog:
    """Appends rows to `path`, created with the first one, without making the caller wait for the disk.

    A batch that fails, as by a full disk (ResourceError), is raised by a later call; later batches are still written.
    """

    def __init__(self, path: Path, *, queue_batches: int = QUEUE_BATCHES) -> None:
        self._writer = JsonlWriter(path)
        self._queue_batches = queue_batches
        self._pending: deque[Future[None]] = deque()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="completions-log")

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Hand rows over; they must not be changed afterwards."""
        self._wait(self._queue_batches)
        if rows:
            self._pending.append(self._pool.submit(self._writer.write, *rows))

    def flush(self) -> None:
        """Wait until every row is on the disk."""
        self._wait(0)
        self._writer.sync()

    def close(self) -> None:
        """Flush, end the thread and close the file; repeatable."""
        try:
            self._wait(0)
        finally:
            self._pool.shutdown()
            self._writer.close()

    def _wait(self, most: int) -> None:
        """Until at most so many batches wait."""
        while self._pending and (len(self._pending) > most or self._pending[0].done()):
            self._pending.popleft().result()
