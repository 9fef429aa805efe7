"""`--rollout_func`: a function of the user makes the completions of a round, with the engine.

    def my_rollout(prompts, rollout):
        answers = rollout.generate(rollout.repeated_prompt_ids)          # one per completion
        return {"completion_ids": [answer.token_ids for answer in answers],
                "logprobs": [answer.logprobs for answer in answers],
                "tries": [1] * len(answers)}                             # a column for reward functions

A call gets all prompts of the rank, each with the same number of completions. Tokens in, tokens out. The returned
values are checked (`swift.rollout.sources.function_output`).

The function runs on a background thread, the engine on the rollout loop. A call that exceeds its time limit is
abandoned: its completions end with "error", which excludes them from training, and it cannot sample any more. Several
abandoned calls in a row stop the run.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from swift.devices import own_device
from swift.errors import ConfigError, EngineError, SwiftError, Unsupported, suggest
from swift.rollout.engines.base import InferenceEngine
from swift.rollout.engines.process import on_thread
from swift.rollout.loop import idle
from swift.rollout.seeds import seed_of
from swift.rollout.sources.base import Source
from swift.rollout.sources.function_output import FLAG, OutputReader
from swift.types import Completion, Request, SamplingParams

GIVEN_UP_LIMIT = 3
"""Number of abandoned calls in a row that stops the run."""

RolloutFunc = Callable[[list[list[dict[str, Any]]], "Rollout"], Mapping[str, Any]]


def load_rollout_func(text: str) -> RolloutFunc:
    """The function of `--rollout_func`: a registered name, or `path.py:function`.

    Raises ConfigError with the nearest names: no such name, file or function.
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
            known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
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
    """Interface of a rollout function to the engine; one per call, with lists in the order of `prompts`.

    args: the settings of the run. tokenizer: the policy's, also named `processing_class`, as in TRL's trainer.
    sampling: the training distribution. version: policy version.
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
    _loop: asyncio.AbstractEventLoop
    _seeds: list[int]
    _number: int
    _limit_s: float
    _turn: int = 0
    _revoked: bool = False
    _busy: threading.Lock = field(default_factory=threading.Lock)
    _task: asyncio.Task[Any] | None = None  # on the rollout loop

    @property
    def processing_class(self) -> Any:
        return self.tokenizer

    @property
    def repeated_prompt_ids(self) -> list[list[int]]:
        """The ids of each prompt, once per completion."""
        return [list(ids) for ids in self.prompt_ids for _ in range(self.num_generations)]

    def generate(self, prompt_ids: Sequence[Sequence[int]], sampling: SamplingParams | None = None) -> list[Completion]:
        """Sample one continuation of each entry, in order; sets `text`.

        The seed of an entry depends on its index and on the number of earlier calls, so that runs are reproducible.
        With one entry per completion the first call returns the samples of a run without a rollout function.

        Args:
            prompt_ids: token ids to continue.
            sampling: other settings than those of the run; its seed is ignored.

        Raises:
            PromptTooLong: an entry leaves no room.
            EngineError: the call was abandoned, or the engine failed.
        """
        with self._busy:
            if self._revoked:
                raise EngineError(f"{FLAG}: this call was given up; it cannot sample any more")
            sampling = sampling or self.sampling
            requests = [
                Request(
                    f"call-{self._number}-{self._turn}/{place}",
                    list(ids),
                    replace(sampling, seed=self._seed(place)),
                    limit_s=self._limit_s,
                )
                for place, ids in enumerate(prompt_ids)
            ]
            self._turn += 1
            work = self._sample(requests)
            try:
                done = asyncio.run_coroutine_threadsafe(work, self._loop).result()
            except (concurrent.futures.CancelledError, RuntimeError) as error:
                if self._loop.is_closed():
                    work.close()
                elif isinstance(error, RuntimeError):  # an error of the engine
                    raise
                raise EngineError(f"{FLAG}: this call was given up while it sampled") from None
        for completion in done:
            completion.text = self.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        return done

    async def _sample(self, requests: Sequence[Request]) -> list[Completion]:
        if self._revoked:
            raise EngineError(f"{FLAG}: this call was given up; it cannot sample any more")
        self._task = asyncio.current_task()
        for request in requests:
            self._engine.check_length(request)
        try:
            async with asyncio.TaskGroup() as group:  # an error cancels the others
                tasks = [group.create_task(self._engine.generate(request)) for request in requests]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    def _seed(self, place: int) -> int:
        if self._turn == 0 and place < len(self._seeds):
            return self._seeds[place]
        return seed_of(self._seeds[place % len(self._seeds)], self._turn, place)

    def _revoke(self) -> None:
        """Cancel the requests of this call, and refuse further ones."""
        self._revoked = True
        if self._task is not None:
            self._task.cancel()

    async def _wait_ended(self) -> None:
        """Wait until the engine has no request of this call."""
        if self._task is not None:
            await asyncio.wait([self._task])


@dataclass(eq=False)
class FunctionSource(Source):
    """Completions made by a rollout function.

    engine: the engine. name: name of the function, for messages. args: the settings of the run. tokenizer, vocab_size:
    the policy's. end_token_ids: tokens that end a completion. limit_s: time limit of a call.
    """

    engine: InferenceEngine
    function: RolloutFunc
    name: str
    args: Any
    tokenizer: Any
    end_token_ids: tuple[int, ...]
    vocab_size: int
    limit_s: float
    _waiting: dict[str, tuple[Request, asyncio.Future[Completion]]] = field(default_factory=dict)
    _calling: asyncio.Task[None] | None = None
    _rollout: Rollout | None = None  # of the running call
    _calls: int = 0
    _given_up: int = 0
    _late: int = 0

    @property
    def late(self) -> int:
        return self._late + super().late

    def hold(self) -> None:
        """Raises Unsupported during a call, which cannot be paused."""
        if self._rollout is not None:
            raise Unsupported(f"{FLAG}: {self.name}: cannot be paused between two tokens; --in_flight_updates false")
        super().hold()

    def close(self) -> None:
        """Refuse further requests of a running call, whose tasks were cancelled with the loop."""
        if self._rollout is not None:
            self._rollout._revoked = True

    async def generate(self, request: Request) -> Completion:
        self.engine.check_length(request)
        if request.request_id in self._waiting:
            raise EngineError(f"request: {request.request_id}: is outstanding already; give each an id of its own")
        ended: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting[request.request_id] = request, ended
        if self._calling is None:
            self._calling = asyncio.get_running_loop().create_task(self._call_while_waiting())
        try:
            return await ended
        finally:
            self._waiting.pop(request.request_id, None)

    async def _call_while_waiting(self) -> None:
        """Call the function repeatedly, until no request is left."""
        called: set[str] = set()
        try:
            while True:
                await idle()  # until all requests have arrived
                called &= self._waiting.keys()
                waiting = [request for name, (request, _) in self._waiting.items() if name not in called]
                if not waiting:
                    return
                requests = _of_equal_size(waiting)
                called |= {request.request_id for request in requests}
                await self._call(requests)
        except Exception as error:
            for _, ended in self._waiting.values():
                if not ended.done():
                    ended.set_exception(error)
        finally:
            self._calling = None

    async def _call(self, requests: Sequence[Request]) -> None:
        """Call the function with the prompts of these requests, and set their completions."""
        groups = [list(group) for _, group in groupby(requests, _launch_of)]
        rollout = self._rollout = self._new_rollout(groups)
        self._calls += 1
        messages = [[dict(turn) for turn in group[0].prompt.messages] for group in groups if group[0].prompt]
        waiting = [self._waiting[request.request_id][1] for request in requests]
        all_aborted = asyncio.gather(*waiting, return_exceptions=True)
        called = asyncio.wrap_future(on_thread(lambda: self._run(messages, rollout), f"rollout {self.name}"))
        try:
            await asyncio.wait([called, all_aborted], timeout=self.limit_s, return_when=asyncio.FIRST_COMPLETED)
            if all_aborted.done():
                return
            completions = self._results(called, rollout, requests) if called.done() else self._expired(requests)
        finally:
            rollout._revoke()
            await rollout._wait_ended()
            called.add_done_callback(lambda call: call.cancelled() or call.exception())  # an abandoned call may raise
            self._rollout = None
        for completion, ended in zip(completions, waiting, strict=True):
            if not ended.done():
                ended.set_result(completion)

    def _new_rollout(self, groups: Sequence[Sequence[Request]]) -> Rollout:
        requests, engine = [request for group in groups for request in group], self.engine
        return Rollout(
            prompt_ids=[list(group[0].prompt_ids) for group in groups],
            columns=[dict(group[0].prompt.columns) for group in groups if group[0].prompt is not None],
            num_generations=len(groups[0]),
            sampling=requests[0].sampling,
            args=self.args,
            tokenizer=self.tokenizer,
            end_token_ids=tuple(sorted({*self.end_token_ids, *requests[0].sampling.stop_token_ids})),
            version=engine.version,
            max_model_len=engine.capabilities.max_model_len,
            _engine=self.engine,
            _loop=asyncio.get_running_loop(),
            _seeds=[request.sampling.seed for request in requests],
            _number=self._calls,
            _limit_s=requests[0].limit_s,
        )

    def _run(self, messages: list[list[dict[str, Any]]], rollout: Rollout) -> Any:
        """Call the function, on a background thread."""
        if (device := own_device()).type == "cuda":  # the current device is a setting of the thread
            torch.cuda.set_device(device)
        return self.function(messages, rollout)

    def _expired(self, requests: Sequence[Request]) -> list[Completion]:
        """Completions with "error" for an abandoned call. Raises EngineError after several of them in a row."""
        self._late += len(requests)
        self._given_up += 1
        if self._given_up >= GIVEN_UP_LIMIT:
            raise EngineError(
                f"{FLAG}: {self.name}: {self._given_up} calls in a row took longer than --rollout_timeout "
                f"{self.limit_s:g} s; make the function faster, or raise the limit"
            )
        return [Completion(request.request_id, [], [], "error") for request in requests]

    def _results(self, called: asyncio.Future[Any], rollout: Rollout, requests: Sequence[Request]) -> list[Completion]:
        """The completions of a call, checked."""
        if (error := called.exception()) is not None:
            raise self._with_place(error) from error
        self._given_up = 0
        reader = OutputReader(self.name, rollout, self.vocab_size, self.engine.room)
        return reader.completions(called.result(), requests)

    def _with_place(self, error: BaseException) -> SwiftError:
        """The error of the function, with file and line."""
        if isinstance(error, SwiftError):
            return error
        code = getattr(self.function, "__code__", None)
        file = code.co_filename if code is not None else ""
        places = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        where = f"{Path(file).name}:{places[-1].lineno}: " if places else ""
        raised = traceback.format_exception_only(error)[-1].strip()
        return EngineError(f"{FLAG}: {self.name}: {where}raised {raised}; correct the function")


def _launch_of(request: Request) -> str:
    return request.request_id.rpartition("/")[0]


def _of_equal_size(requests: Sequence[Request]) -> list[Request]:
    """The requests of all launches with as many completions as the first one, launch by launch."""
    groups: dict[str, list[Request]] = {}
    for request in requests:
        groups.setdefault(_launch_of(request), []).append(request)
    count = len(next(iter(groups.values())))
    return [request for group in groups.values() if len(group) == count for request in group]
