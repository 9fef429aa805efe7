"""`--rollout_func`: a function of the user makes the completions of a round, with the engine as its tool.

    def my_rollout(prompts, rollout):
        answers = rollout.generate(rollout.repeated_prompt_ids)          # one per completion wanted
        return {"completion_ids": [one.token_ids for one in answers],
                "logprobs": [one.logprobs for one in answers],
                "tries": [1] * len(answers)}                             # a column for reward functions

`RolloutFunctionEngine` stands around the engine of a rank, so that sharing, time limits and failures are those of any
engine. A call gets whole what the rank was asked for: prompts, each with the same number of completions. Tokens in,
tokens out. What a function returns is checked before it counts (`swift.rollout.rollout_output`).

The function runs on a thread of its own. A call that takes longer than its limit is given up: its completions end with
"error", which leaves them out of training, and its tool is taken away. A function that never comes back ends the run.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from swift.devices import own_device
from swift.errors import ConfigError, EngineDead, EngineError, SwiftError, Unsupported, suggest
from swift.rollout.engines.around import EngineAround
from swift.rollout.engines.base import Capabilities, InferenceEngine, TensorInfo, WeightUpdate
from swift.rollout.rollout_output import FLAG, OutputReader
from swift.rollout.seeds import seed_of
from swift.types import Completion, Request, SamplingParams

LOOK_S = 1.0
"""How often a waiting stream looks at the clock."""
LEAVE_S = 60.0
"""How long the engine may take to come back from a call that was given up."""
GIVEN_UP_LIMIT = 3
"""So many calls in a row that were given up end the run."""

RolloutFunc = Callable[[list[list[dict[str, Any]]], "Rollout"], Mapping[str, Any]]


def load_rollout_func(text: str) -> RolloutFunc:
    """The function of `--rollout_func`: a registered name, or `path.py:function`.

    Raises ConfigError: no such name, file or function; the nearest are named.
    """
    from swift.plugin import load_external_plugins, rollout_funcs

    file, colon, name = text.rpartition(":")
    if colon and file.endswith(".py"):
        try:
            (module,) = load_external_plugins([file])
        except ConfigError as error:
            raise ConfigError(
                *(problem.replace("--external_plugins", FLAG, 1) for problem in error.problems)
            ) from error
        found = getattr(module, name, None)
        if found is None:
            known = [one for one, value in vars(module).items() if callable(value) and not one.startswith("_")]
            raise ConfigError(f"{FLAG}: {text}: {file} has no function {name!r}; {suggest(name, known)}")
    elif text in rollout_funcs:
        found = rollout_funcs[text]
    else:
        names = sorted(rollout_funcs)
        fix = suggest(text, names) if names else "none is registered; give the file with --external_plugins"
        raise ConfigError(f"{FLAG}: {text}: no such rollout function; {fix}, or write path.py:function")
    if not callable(found):
        raise ConfigError(f"{FLAG}: {text}: is {type(found).__name__}, not a function (prompts, rollout)")
    return found  # type: ignore[no-any-return]


@dataclass(slots=True, eq=False)
class Rollout:
    """What a rollout function works with; one per call, its lists per prompt, in the order of `prompts`.

    args: the settings of the run. tokenizer: the policy's, also as `processing_class`, as TRL's trainer calls it.
    sampling: the distribution asked for. version: of the policy.
    """

    prompt_ids: list[list[int]]
    columns: list[dict[str, Any]]
    num_generations: int
    sampling: SamplingParams
    args: Any
    tokenizer: Any
    end_token_ids: tuple[int, ...]
    version: int
    max_model_len: int
    _engine: InferenceEngine
    _seeds: list[int]
    _number: int
    _turn: int = 0
    _revoked: bool = False
    _busy: threading.Lock = field(default_factory=threading.Lock)

    @property
    def processing_class(self) -> Any:
        return self.tokenizer

    @property
    def repeated_prompt_ids(self) -> list[list[int]]:
        """The ids of each prompt, once per completion that is wanted of it."""
        return [list(ids) for ids in self.prompt_ids for _ in range(self.num_generations)]

    def generate(self, prompt_ids: Sequence[Sequence[int]], sampling: SamplingParams | None = None) -> list[Completion]:
        """Sample one continuation of each entry, in order; `text` is filled in.

        Each entry has a seed that depends on the completion it stands for and on how often this was called, so a run
        can be repeated. With as many entries as completions are wanted the first call samples what a run without a
        rollout function would.

        Args:
            prompt_ids: what the engine is to continue.
            sampling: other settings than those of the run; its seed is ignored.

        Raises:
            PromptTooLong: an entry leaves no room.
            EngineError: the call has been given up, or the engine failed.
        """
        with self._busy:
            if self._revoked:
                raise EngineError(f"{FLAG}: this call was given up; its engine is used by others now")
            wanted = sampling or self.sampling
            requests = [
                Request(f"call-{self._number}-{self._turn}/{place}", list(ids), replace(wanted, seed=self._seed(place)))
                for place, ids in enumerate(prompt_ids)
            ]
            self._turn += 1
            done = {one.request_id: one for one in self._engine.generate(requests)}
        for completion in done.values():
            completion.text = self.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        return [done[request.request_id] for request in requests]

    def _seed(self, place: int) -> int:
        if self._turn == 0 and place < len(self._seeds):
            return self._seeds[place]
        return seed_of(self._seeds[place % len(self._seeds)], self._turn, place)

    def _revoke(self) -> None:
        """Take the engine away: what runs in it ends, and nothing more begins."""
        self._revoked = True
        self._engine.abort()

    def _left(self, timeout_s: float) -> bool:
        """Whether the call is out of the engine, after a wait."""
        if not self._busy.acquire(timeout=timeout_s):
            return False
        self._busy.release()
        return True


@dataclass(slots=True, eq=False)
class _Call:
    """A function at work. requests: prompt by prompt."""

    requests: list[Request]
    rollout: Rollout
    started: float
    future: Future[Any] = field(default_factory=Future)

    @property
    def names(self) -> set[str]:
        return {one.request_id for one in self.requests}


class RolloutFunctionEngine(EngineAround):
    """An engine whose completions a function makes; weights, sleep and end of `engine` are its owner's business.

    name: of the function, for messages. args: the settings of the run. tokenizer, vocab_size: the policy's.
    end_token_ids: tokens that end a completion. limit_s: bound on one call.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        function: RolloutFunc,
        *,
        name: str,
        args: Any,
        tokenizer: Any,
        end_token_ids: Sequence[int],
        vocab_size: int,
        limit_s: float,
    ) -> None:
        self.engine, self.function, self.name = engine, function, name
        self.args, self.tokenizer, self.end_token_ids = args, tokenizer, tuple(end_token_ids)
        self.vocab_size, self.limit_s = vocab_size, limit_s
        self._lock = threading.Lock()
        self._waiting: dict[str, Request] = {}
        self._aborted: set[str] = set()
        self._ready: deque[Completion] = deque()
        self._call: _Call | None = None
        self._stale: Rollout | None = None  # of a call that was given up
        self._given_up = 0
        self._calls = 0
        self._late = 0

    # --- what it is: mostly the engine ------------------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        """Weights may not change while a function runs."""
        return replace(self.engine.capabilities, in_flight_updates=False)

    @property
    def late(self) -> int:  # type: ignore[override]
        """Completions that were given up because they took too long."""
        return self._late + self.engine.late

    def begin_update(self, manifest: Sequence[TensorInfo], version: int) -> WeightUpdate:
        """Between calls only."""
        if self._call is not None:
            raise EngineError(f"{FLAG}: {self.name}: a call is under way; wait for it before new weights")
        return super().begin_update(manifest, version)

    def close(self) -> None:
        """Give up what runs; the engine is closed by its owner."""
        call, self._call = self._call, None
        if call is not None and not call.future.done():
            call.rollout._revoke()

    # --- sampling ---------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """The request must know its row."""
        self.check_length(request)
        assert request.prompt is not None, "the collector sends requests with their rows"
        with self._lock:
            self._refuse_again(request, self._waiting)
            self._refuse_again(request, self._call.names if self._call else ())
            self._waiting[request.request_id] = request

    def stream(self) -> Iterator[Completion]:
        while True:
            self._between()
            self._drop_aborted()
            while self._ready:
                yield self._ready.popleft()
            if self._call is None:
                if self._paused or not self._waiting:
                    return
                self._start()
            self._look()

    def abort(self, request_ids: Collection[str] | None = None) -> None:
        """A call all of whose requests are named is given up."""
        with self._lock:
            call = self._call
            running = call.names if call is not None else set()
            outstanding = running | set(self._waiting)
            self._aborted |= outstanding if request_ids is None else outstanding & set(request_ids)
        if call is not None and running <= self._aborted:
            call.rollout._revoke()

    def pause(self) -> None:
        """A call cannot be kept."""
        if self._call is not None:
            raise Unsupported(f"{FLAG}: {self.name}: cannot be paused between two tokens; --in_flight_updates false")
        super().pause()

    def _drop_aborted(self) -> None:
        """Requests that were aborted before their call began, or with all of it."""
        with self._lock:
            named = [name for name in self._waiting if name in self._aborted]
            for name in named:
                del self._waiting[name]
            self._aborted -= set(named)
            call = self._call
            if call is not None and call.names <= self._aborted:
                named += [one.request_id for one in call.requests]
                self._leave(call)
        self._ready.extend(Completion(name, [], [], "abort") for name in named)

    def _leave(self, call: _Call) -> None:
        """Holding the lock: go on without a call."""
        self._aborted -= call.names
        self._call, self._stale = None, None if call.future.done() else call.rollout

    def _start(self) -> None:
        """Call the function with the prompts that wait for the same number of completions."""
        if self._stale is not None:
            if not self._stale._left(LEAVE_S):
                raise EngineDead(f"{FLAG}: {self.name}: a call that was given up does not leave the engine")
            self._stale = None
        groups: dict[str, list[Request]] = {}
        for request in self._waiting.values():
            groups.setdefault(request.request_id.rpartition("/")[0], []).append(request)
        count = len(next(iter(groups.values())))
        chosen = [group for group in groups.values() if len(group) == count]
        requests = [request for group in chosen for request in group]
        rollout = Rollout(
            prompt_ids=[list(group[0].prompt_ids) for group in chosen],
            columns=[dict(group[0].prompt.columns) for group in chosen if group[0].prompt is not None],
            num_generations=count,
            sampling=requests[0].sampling,
            args=self.args,
            tokenizer=self.tokenizer,
            end_token_ids=tuple(sorted({*self.end_token_ids, *requests[0].sampling.stop_token_ids})),
            version=self.engine.version,
            max_model_len=self.engine.capabilities.max_model_len,
            _engine=self.engine,
            _seeds=[request.sampling.seed for request in requests],
            _number=self._calls,
        )
        messages = [[dict(turn) for turn in group[0].prompt.messages] for group in chosen if group[0].prompt]
        call = _Call(requests, rollout, time.monotonic())
        with self._lock:
            for request in requests:
                del self._waiting[request.request_id]
            self._call = call
            self._calls += 1
        threading.Thread(target=self._run, args=(call, messages), name=f"rollout {self.name}", daemon=True).start()

    def _run(self, call: _Call, messages: list[list[dict[str, Any]]]) -> None:
        try:
            if (device := own_device()).type == "cuda":  # each thread has its own
                torch.cuda.set_device(device)
            call.future.set_result(self.function(messages, call.rollout))
        except BaseException as error:  # raised in the thread that streams
            call.future.set_exception(error)

    def _look(self) -> None:
        """Wait a moment for the call; take what it returns, or give it up when its time is over."""
        call = self._call
        if call is None:
            return
        left = call.started + self.limit_s - time.monotonic()
        wait([call.future], max(0.0, min(left, self._patience(LOOK_S))))
        if call.future.done():
            self._finish(call)
        elif left <= 0:
            self._expire(call)

    def _expire(self, call: _Call) -> None:
        self._late += len(call.requests)
        self._given_up += 1
        call.rollout._revoke()
        with self._lock:
            self._leave(call)
        self._ready.extend(Completion(one.request_id, [], [], "error") for one in call.requests)
        if self._given_up >= GIVEN_UP_LIMIT:
            raise EngineError(
                f"{FLAG}: {self.name}: {self._given_up} calls in a row took longer than --rollout_timeout "
                f"{self.limit_s:g} s; make the function faster, or raise the limit"
            )

    def _finish(self, call: _Call) -> None:
        """Check what a call returned; its completions are ready."""
        with self._lock:
            aborted = call.names & self._aborted
            self._leave(call)
        made: list[Completion] = []
        if len(aborted) < len(call.requests):  # else whatever came back is that of a call without its engine
            error = call.future.exception()
            if error is not None:
                raise self._explained(error) from error
            self._given_up = 0
            reader = OutputReader(self.name, call.rollout, self.vocab_size, self.engine.room)
            made = reader.completions(call.future.result(), call.requests)
        self._ready.extend(one for one in made if one.request_id not in aborted)
        self._ready.extend(Completion(name, [], [], "abort") for name in sorted(aborted))

    def _explained(self, error: BaseException) -> SwiftError:
        """What went wrong in the function, with its place there."""
        if isinstance(error, SwiftError):
            return error
        code = getattr(self.function, "__code__", None)
        file = code.co_filename if code is not None else ""
        places = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        where = f"{Path(file).name}:{places[-1].lineno}: " if places else ""
        said = traceback.format_exception_only(error)[-1].strip()
        return EngineError(f"{FLAG}: {self.name}: {where}raised {said}; correct the function")
