"""Supervised rows as token ids and labels: the loss covers what the assistant says, unless settings say otherwise.

A chat is used whole or not at all. Left out and counted are rows that the chat template refuses, rows without an
assistant turn, and rows longer than `max_length` tokens: cutting one would teach the model to stop in mid-sentence.
A document (`swift.data.texts`) has no template: its text, and the end-of-text token.

Tokenised rows are kept in the cache of `datasets`, under a digest of the rows, the tokenizer, the template and the
settings. The first process that needs them tokenises, the others wait for it and map the file into memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift.errors import ConfigError, ResourceError, counted, first_line
from swift.models.template import RefusedChat

if TYPE_CHECKING:
    from datasets import Dataset

    from swift.models.template import Template
    from swift.trainers.sft_packing import Packing

IGNORED = -100
"""The label of a token that takes no part in the loss."""

ENCODING = 1
"""Version of this file as far as token ids and labels depend on it."""

TOO_LONG, NO_ANSWER = "longer than max_length", "no assistant turn to learn from"


@dataclass
class EncodingReport:
    """What became of the rows: `num_kept` trained on, `dropped` counted by reason; `num_packed` if they were packed."""

    num_kept: int = 0
    num_tokens: int = 0
    num_trained_tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    num_packed: int | None = None

    def lines(self, split: str) -> list[str]:
        """The report in words, one line, and one more when rows were dropped."""
        rows, tokens = counted(self.num_kept, "row"), counted(self.num_tokens, "token")
        lines = [f"{split}: {rows}, {tokens}, {self.num_trained_tokens} of them trained on"]
        if self.num_packed is not None:
            lines[0] += f"; packed into {counted(self.num_packed, 'row')}"
        if self.dropped:
            reasons = ", ".join(f"{count} ({reason})" for reason, count in self.dropped.most_common())
            lines.append(f"{split}: left out {counted(sum(self.dropped.values()), 'row')}: {reasons}")
        return lines


@dataclass(frozen=True)
class ChatEncoder:
    """Turns one chat or document into a training example; picklable, so that worker processes can run it.

    loss: what the loss counts, as `--loss_scale` says.
    """

    template: Template
    max_length: int | None
    loss: str = "default"

    def __call__(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        """`input_ids` and `labels` of equal length, or empty lists and the reason in `problem`.

        A ConfigError: the template cannot tell assistant turns apart in any row; see `Template`.
        """
        try:
            if len(messages) == 1 and messages[0]["role"] == "assistant":
                ids = self._document(messages[0]["content"])
                mask = [1] * len(ids)
            else:
                ids, mask = self._chat(messages, tools)
        except RefusedChat as error:
            return _left_out(str(error))
        if self.max_length is not None and len(ids) > self.max_length:
            return _left_out(TOO_LONG)
        labels = [token if trained else IGNORED for token, trained in zip(ids, mask, strict=True)]
        return {"input_ids": ids, "labels": labels, "num_tokens": len(ids), "num_trained": sum(mask), "problem": ""}

    def from_json(self, row: dict[str, str]) -> dict[str, Any]:
        """The same for a table row whose column `chat` is JSON text (Arrow needs one type per column)."""
        return self(*json.loads(row["chat"]))

    @property
    def identity(self) -> str:
        """All that decides what a row becomes, beside the row."""
        return identity_of(self.template, self.max_length, self.loss)

    def _document(self, text: str) -> list[int]:
        ids = list(self.template.tokenizer(text)["input_ids"])
        end = self.template.tokenizer.eos_token_id
        return ids if ids[-1:] == [end] else [*ids, end]

    def _chat(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None
    ) -> tuple[list[int], list[int]]:
        if "last_round" in self.loss:
            last = max((index for index, turn in enumerate(messages) if turn["role"] == "user"), default=-1)
            messages = [
                {"loss": index > last, **turn} if turn["role"] == "assistant" else turn
                for index, turn in enumerate(messages)
            ]
        everything = self.loss == "all"
        if not any(turn["role"] == "assistant" and turn.get("loss", True) for turn in messages) and not everything:
            raise RefusedChat(NO_ANSWER)
        return self.template.encode_chat(
            messages, tools, everything=everything, empty_thoughts="ignore_empty_think" not in self.loss
        )


def identity_of(template: Template, *settings: Any) -> str:
    """All that decides what an encoder with these settings makes of a row."""
    import tokenizers
    import transformers

    tokenizer = template.tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items())
    texts = [tokenizer.chat_template, template.training_template, template.kwargs, template.stop_token_ids]
    libraries = [transformers.__version__, tokenizers.__version__, ENCODING]
    return json.dumps([type(tokenizer).__name__, vocabulary, texts, *settings, libraries])


def encode_rows(
    rows: Iterable[Mapping[str, Any]],
    encoder: ChatEncoder,
    *,
    num_proc: int = 1,
    split: str = "train",
    cached: bool = False,
    packing: Packing | None = None,
) -> tuple[Dataset, EncodingReport]:
    """The rows as a datasets table with the columns input_ids and labels, in order; packed ones with seq_lengths.

    rows: with `messages`, assistant turns included, and `tools` where there are some. num_proc: processes that
    tokenise. split: the rows' name in errors. cached: whether the result is kept in the cache of `datasets`, and used
    again.
    """
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    chats = [json.dumps([row["messages"], row.get("tools")]) for row in rows]
    with cache_of(chats, encoder.identity) if cached else contextlib.nullcontext() as file:
        encoded = Dataset.from_dict({"chat": chats}).map(
            encoder.from_json,
            remove_columns=["chat"],
            num_proc=num_proc if num_proc > 1 else None,
            **kept_in(file),
        )
        problems = list(encoded["problem"])
        kept = encoded.select([index for index, problem in enumerate(problems) if not problem])
        report = EncodingReport(
            num_kept=len(kept),
            num_tokens=sum(encoded["num_tokens"]),
            num_trained_tokens=sum(encoded["num_trained"]),
            dropped=Counter(problem for problem in problems if problem),
        )
        if not report.num_kept:
            flag = "--dataset" if split == "train" else "--val_dataset"
            raise ConfigError(f"{flag}: no usable row for supervised training; {_why(report, encoder)}")
        table = kept.select_columns(["input_ids", "labels"])
        if packing is not None:
            place = file.with_name(f"{file.stem}-{packing.strategy}-{packing.length}.arrow") if file else None
            table = packing(table, kept_in(place))
            report.num_packed = len(table)
    return table, report


@contextlib.contextmanager
def cache_of(rows: Sequence[str], identity: str) -> Iterator[Path]:
    """The file of these rows as an encoder of this identity makes them, for one process at a time."""
    from datasets import config
    from filelock import FileLock

    digest = hashlib.blake2b("\n".join([identity, *rows]).encode(), digest_size=16).hexdigest()
    file = Path(config.HF_DATASETS_CACHE) / "swift" / f"{digest}.arrow"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{file}.lock"):
            yield file
    except OSError as error:
        raise ResourceError(
            f"HF_DATASETS_CACHE: {file.parent}: tokenised rows cannot be kept there: {first_line(error)}; set "
            "HF_DATASETS_CACHE to another folder, or use --load_from_cache_file false"
        ) from error


def kept_in(file: Path | None) -> dict[str, Any]:
    """What `Dataset.map` is told so that its result is read from `file`, or written into it."""
    if file is None:
        return {}
    return {"cache_file_name": str(file), "new_fingerprint": file.stem, "load_from_cache_file": True}


def _left_out(problem: str) -> dict[str, Any]:
    return {"input_ids": [], "labels": [], "num_tokens": 0, "num_trained": 0, "problem": problem}


def _why(report: EncodingReport, encoder: ChatEncoder) -> str:
    if not report.dropped:
        return "the data set is empty"
    (reason, count), *_ = report.dropped.most_common(1)
    limit = f" (--max_length {encoder.max_length})" if reason == TOO_LONG else ""
    return f"all were left out, {count} of them: {reason}{limit}"
