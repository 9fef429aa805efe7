"""Tokens of a completion from the record of rollouts, with their texts where a tokenizer.json is at hand."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from swift.observability.rollout_record import FOLDER, read_step, recorded_steps, step_file
from swift.observability.run_dir import ARGS

PER_TOKEN = (
    "sampler_logprobs", "policy_logprobs", "old_logprobs", "ref_logprobs", "teacher_logprobs", "entropy",
    "token_advantages", "trained",
)  # fmt: skip
CHARACTER_TOKENS = 4
"""A character of UTF-8 has at most four bytes, so no more tokens make one."""
TOKENIZER = "tokenizer.json"


def tokens_of(
    folder: Path, steps: range, group_id: str, index: int, texts: Callable[[Sequence[int]], list[str] | None]
) -> dict[str, Any] | None:
    """What is on record of a completion; None if nothing is.

    steps: optimizer steps that train on the rollout batch of the completion. texts: of token ids.

    Returns:
        `steps`, one entry each: `step`, `versions`, and lists with a value per token, null where not recorded; `ids`,
        `texts` (None without a tokenizer).
    """
    passes: list[dict[str, Any]] = []
    ids: list[int] = []
    for step in recorded_steps(folder):
        found = _row(folder, step, group_id, index) if step in steps else None
        if found is not None:
            ids = found.pop("token_ids")
            passes.append({"step": step, **found})
    return {"steps": passes, "ids": ids, "texts": texts(ids)} if passes else None


def _row(folder: Path, step: int, group_id: str, index: int) -> dict[str, Any] | None:
    """The arrays of a completion in a step, as lists."""
    path = step_file(folder / FOLDER, step)
    if not path.exists():
        return None  # a live run has removed it meanwhile
    table = _table(path, path.stat().st_mtime_ns)
    places = zip(table["group_id"].to_pylist(), table["index"].to_pylist(), strict=True)
    row = next((row for row, place in enumerate(places) if place == (group_id, index)), None)
    if row is None:
        return None
    found: dict[str, Any] = {name: table[name][row].as_py() for name in ("token_ids", *PER_TOKEN)}
    flat = table["versions"][row].as_py() or []
    found["versions"] = [flat[start : start + 3] for start in range(0, len(flat), 3)]
    return found


@functools.lru_cache(maxsize=4)
def _table(path: Path, _: int) -> Any:
    return read_step(path.parent.parent, int(path.stem.partition("-")[2]))[0]


class TokenTexts:
    """Texts of a run's tokens. The tokenizer is looked for at the first call: no hub is asked, no code is run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, ids: Sequence[int]) -> list[str] | None:
        """The text of each token; None if there is no tokenizer."""
        return None if self._tokenizer is None else pieces(self._tokenizer, ids)

    @functools.cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        path = tokenizer_file(self.folder)
        return None if path is None else Tokenizer.from_file(str(path))


def tokenizer_file(folder: Path) -> Path | None:
    """tokenizer.json of the newest checkpoint, else of the model, if that is a folder or in the hub's cache."""
    saved = {int(path.name[11:]): path for path in folder.glob("checkpoint-*") if path.name[11:].isdecimal()}
    places = [saved[step] for step in sorted(saved, reverse=True)]
    settings = json.loads((folder / ARGS).read_text(encoding="utf-8")) if (folder / ARGS).exists() else {}
    model = settings.get("model")
    if model:
        places.append(Path(model).expanduser())
    for place in places:
        if (place / TOKENIZER).is_file():
            return place / TOKENIZER
    if not model or Path(model).exists():
        return None
    from huggingface_hub import try_to_load_from_cache

    cached = (
        try_to_load_from_cache(model, TOKENIZER, revision=settings.get("model_revision"))
        if model.count("/") == 1
        else None
    )
    return Path(cached) if isinstance(cached, str) else None


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text of each token. The tokens of one character are the character, then empty; bytes of none are U+FFFD."""

    def decode(*some: int) -> str:
        return str(tokenizer.decode(list(some), skip_special_tokens=False))

    found: list[str] = []
    before: tuple[int, ...] = ()  # the token before, since some decoders remove the space in front of a first word
    while len(found) < len(ids):
        start = len(found)
        known = len(decode(*before))
        for width in range(1, CHARACTER_TOKENS + 1):
            text = decode(*before, *ids[start : start + width])[known:]
            if "\ufffd" not in text:
                found += [text, *[""] * (width - 1)][: len(ids) - start]
                break
        else:
            found.append("\ufffd")
        last = (ids[len(found) - 1],)
        before = () if "\ufffd" in decode(*last) else last
    return found
