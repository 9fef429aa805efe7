"""Conversion of the output of a rollout function to completions, with checks of every value.

Tokens in, tokens out: ids and log-probs are those of the engine, prompt ids those of the request. The first invalid
entry stops the run; the message contains its position.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swift.errors import EngineError
from swift.types import Completion, FinishReason, Request

if TYPE_CHECKING:
    from swift.rollout.sources.function import Rollout

FLAG = "--rollout_func"
RESERVED = frozenset(
    {
        "completions", "messages", "prompt_id", "group_id", "request_id", "finish_reason", "is_truncated",
        "response_token_ids", "trainer_state", "environment_reward", "turn_rewards", "rollout_infos", "prompts",
        "prompt_opens_think", "completion_ids",
    }
)  # fmt: skip
"""Names of swift's own arguments of reward functions; columns may not have them."""
RESULTS = ("prompt_ids", "completion_ids", "logprobs", "logprob_token_ids", "finish_reasons", "env_mask")
"""Entries of the output that are not columns."""
SEQUENCES = ("prompt_ids", "completion_ids", "logprobs", "logprob_token_ids", "env_mask")
"""Entries with a list for each completion."""


@dataclass(frozen=True, slots=True)
class OutputReader:
    """Converts the output of one call.

    name: name of the function. rollout: its argument. vocab_size: size of the policy's vocabulary. room: returns the
    maximum number of sampled tokens of a request.
    """

    name: str
    rollout: Rollout
    vocab_size: int
    room: Callable[[Request], int]

    def completions(self, output: Any, requests: Sequence[Request]) -> list[Completion]:
        """The completions of an output. Raises EngineError: the first invalid entry."""
        if not isinstance(output, Mapping):
            raise self._wrong(f"returned {type(output).__name__}; return a dict with completion_ids and logprobs")
        if output.get("completion_ids") is None:
            raise self._wrong("returned no completion_ids; return a dict with both")
        if output.get("logprobs") is None:
            raise self._wrong(
                "returned no logprobs (the log-prob of each token under the sampler; rollout.generate gives them); "
                "return a dict with both"
            )
        count = len(requests)
        lists = {name: self._list(output, name, count) for name in RESULTS}
        columns = {name: self._column(name, value, count) for name, value in output.items() if name not in RESULTS}
        completions = []
        for place, request in enumerate(requests):
            entry = {name: values[place] for name, values in lists.items()}
            for name in (key for key in SEQUENCES if entry[key] is not None and not _is_row(entry[key])):
                raise self._wrong(f"{name}[{place}] is {type(entry[name]).__name__}; return a list or an array")
            ids = self._ids(entry["completion_ids"], place, self.rollout.max_model_len - len(request.prompt_ids))
            mask = self._mask(entry["env_mask"], ids, place, self.room(request))
            logprobs = self._logprobs(entry["logprobs"], entry["logprob_token_ids"], ids, mask, place)
            prompt = entry["prompt_ids"]
            if prompt is not None and _integers(prompt) != list(request.prompt_ids):
                raise self._wrong(
                    f"prompt_ids[{place}] are not the ids of its prompt, and training uses those; take "
                    "rollout.prompt_ids, or change the prompt with --system, --template or --chat_template_kwargs"
                )
            completions.append(
                Completion(
                    request_id=request.request_id,
                    token_ids=ids,
                    logprobs=logprobs,
                    finish_reason=self._reason(entry["finish_reasons"], ids, place, sum(mask) >= self.room(request)),
                    versions=[(self.rollout.version, 0, len(ids))],
                    columns={name: values[place] for name, values in columns.items()},
                    mask=mask if 0 in mask else [],
                )
            )
        return completions

    def _list(self, output: Mapping[str, Any], name: str, count: int) -> list[Any]:
        """An entry as one value per completion; None for each if it is missing."""
        values = output.get(name)
        if values is None:
            return [None] * count
        if not isinstance(values, list | tuple):
            raise self._wrong(f"{name} is {type(values).__name__}; return a list with one entry per completion")
        if len(values) != count:
            raise self._wrong(
                f"{name} has {len(values)} entries where {count} are wanted ({len(self.rollout.prompt_ids)} prompts x "
                f"{self.rollout.num_generations} completions, prompt by prompt)"
            )
        return list(values)

    def _column(self, name: str, values: Any, count: int) -> list[Any]:
        """A column: a list has one value per completion, other values apply to all."""
        if name in RESERVED:
            raise self._wrong(f"the column {name!r} has a name that swift gives to reward functions; rename it")
        if isinstance(values, list) and len(values) != count:
            raise self._wrong(f"the column {name!r} has {len(values)} entries where {count} are wanted")
        try:
            return list(json.loads(json.dumps(values if isinstance(values, list) else [values] * count)))
        except (TypeError, ValueError) as error:
            raise self._wrong(f"the column {name!r} cannot be encoded as JSON ({error}); convert it") from error

    def _ids(self, given: Any, place: int, room: int) -> list[int]:
        try:
            ids = [_integer(token) for token in given]
        except (TypeError, ValueError, RuntimeError) as error:
            raise self._wrong(f"completion_ids[{place}] is no list of token ids ({error})") from error
        wrong = next((token for token in ids if not 0 <= token < self.vocab_size), None)
        if wrong is not None:
            raise self._wrong(
                f"completion_ids[{place}] has {wrong}, no token of the model (0 to {self.vocab_size - 1})"
            )
        if not 0 < len(ids) <= room:
            raise self._wrong(f"completion_ids[{place}] has {len(ids)} tokens; valid: 1 to {room}")
        return ids

    def _mask(self, given: Any, ids: Sequence[int], place: int, room: int) -> list[int]:
        """1 for each token sampled by the policy, 0 for those of the environment."""
        mask = [1] * len(ids) if given is None else _integers(given)
        if len(mask) != len(ids) or not {1} <= set(mask) <= {0, 1}:
            raise self._wrong(
                f"env_mask[{place}] has to be 1 or 0 for each of {len(ids)} tokens, and 1 for what the policy sampled"
            )
        if sum(mask) > room:
            raise self._wrong(f"completion_ids[{place}] has {sum(mask)} tokens; valid: 1 to {room}")
        return mask

    def _logprobs(self, given: Any, token_ids: Any, ids: Sequence[int], mask: Sequence[int], place: int) -> list[float]:
        if given is None or len(given) != len(ids):
            found = "none" if given is None else str(len(given))
            raise self._wrong(f"logprobs[{place}] has {found} for {len(ids)} tokens; return one per token")
        values = []
        for position, (token, entry) in enumerate(zip(ids, given, strict=True)):
            if not mask[position]:
                values.append(0.0)
                continue
            where = f"logprobs[{place}][{position}]"
            if isinstance(entry, list | tuple):  # several candidates, as in TRL
                named = token_ids is not None and position < len(token_ids) and _is_row(token_ids[position])
                names = list(token_ids[position]) if named else [token] * (len(entry) == 1)
                if token not in names[: len(entry)]:
                    raise self._wrong(f"{where} has no entry for the sampled token; give its log-prob alone")
                entry = entry[names.index(token)]
            value = float(entry) if hasattr(entry, "__float__") and entry == entry and abs(entry) < 1e30 else math.nan
            if not (math.isfinite(value) and value <= 1e-4):
                raise self._wrong(f"{where} is {entry}; a log-prob is a finite number, at most 0")
            values.append(min(value, 0.0))
        return values

    def _reason(self, given: Any, ids: Sequence[int], place: int, full: bool) -> FinishReason:
        """The given finish reason; by default "length" at the maximum length without an end token, else "stop"."""
        if given is None:
            return "length" if full and ids[-1] not in self.rollout.end_token_ids else "stop"
        if given not in ("stop", "length"):
            raise self._wrong(f"finish_reasons[{place}] is {given!r}; valid: stop, length")
        return given  # type: ignore[no-any-return]

    def _wrong(self, problem: str) -> EngineError:
        """The error of an invalid output."""
        return EngineError(f"{FLAG}: {self.name}: {problem}")


def _is_row(values: Any) -> bool:
    """Whether values are a list, tuple, or array or tensor of one dimension or more."""
    return (
        hasattr(values, "__getitem__")
        and getattr(values, "shape", None) != ()
        and not isinstance(values, str | bytes | Mapping)
    )


def _integers(values: Any) -> list[int]:
    """Values as integers; [] if a value is not a number."""
    try:
        return [int(value) if int(value) == value else -1 for value in values]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return []


def _integer(value: Any) -> int:
    if isinstance(value, bool | float | str):
        raise TypeError(f"{value!r}")
    return int(value)
