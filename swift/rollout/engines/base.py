"""The contract of an inference engine, for every library and process.

Ids pass unchanged: an engine gets token ids and returns token ids, the ending token included, with the log-prob
of each token under the distribution it was drawn from. Each request gets exactly one completion, in any order, also
after an abort or a restart. A prompt that leaves no room raises `PromptTooLong` before anything is sampled;
`max_new_tokens` is clipped to the room left.

Order of calls:

    await generate(request)          one sample; a caller that is cancelled aborts it
    update(stream)                   new weights, acknowledged; nothing may be in flight, unless it is paused
    sleep(level) ... wake(tags)      memory released while the trainer uses the device
    close                            processes, ports and memory are released

Weights are in one of three states, each with its error: asleep (`EngineAsleep`), invalid after a failed update
(`SyncFailed` until `rebuild`), lost (`EngineDead`). Each of them prevents sampling.

Threads: `generate`, `hold`, `rest`, `release`, `free` and `so_far` run on one event loop (`swift.rollout.loop`).
`abort`, `pause`, `health`, `close`, `check_length` and `counters` may be used by any thread at any time. Every other
call comes from one thread while nothing is in flight. Every wait has a limit. Callers test `Capabilities`, not names.
`tests/engines/test_conformance_*.py` tests every backend against this contract.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Literal

from swift.errors import EngineError, PromptTooLong, RequestRefused, Unsupported, suggest
from swift.rollout.engines.running import SoFar
from swift.rollout.loop import RolloutLoop
from swift.rollout.weights.base import Ack, AdapterWeights, PolicyParameters, WeightSource, WeightStream
from swift.types import Completion, Request, SamplingParams

LogprobSupport = Literal["full", "truncated", "raw"]
SleepLevel = Literal[0, 1, 2]
Tag = Literal["weights", "kv_cache"]
ALL_TAGS: tuple[Tag, ...] = ("weights", "kv_cache")


@dataclass(slots=True)
class EngineCounters:
    """Counters since construction.

    `late` counts tries that exceeded the time limit of a request, `restarts` processes that ended and were replaced.
    """

    prefill_tokens: int = 0
    decode_rows: int = 0
    decode_steps: int = 0
    restarts: int = 0
    late: int = 0

    def __add__(self, other: EngineCounters) -> EngineCounters:
        return EngineCounters(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: EngineCounters) -> EngineCounters:
        return EngineCounters(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The features of a backend; callers test these, never its name.

    name: name of the backend, for messages. logprob_support: "full" is log-softmax(logits / T) over the vocabulary,
    "truncated" renormalises after top-k, top-p, min-p and penalties (equal to "full" when none is on), "raw" is at
    temperature 1. shares_weights: reads the trainer's own parameters, so that a weight sync copies nothing.
    sleep_levels: those that release memory. in_flight_updates: it can be paused between two tokens. guided: constrains
    completions to a regular expression. sampling_fields: supported fields of `SamplingParams.unusual`. seeds_are_slow:
    a step is slower if each sample has a seed. images: prompts may have them (`swift.models.vision`). routes:
    completions have the experts of their tokens.
    """

    name: str
    logprob_support: LogprobSupport
    shares_weights: bool
    max_model_len: int
    dtype: str = "float32"
    devices: tuple[str, ...] = ("cpu",)
    tensor_parallel_size: int = 1
    lora: bool = False
    sleep_levels: tuple[SleepLevel, ...] = (0,)
    in_flight_updates: bool = False
    guided: bool = False
    sampling_fields: tuple[str, ...] = ()
    quantization: str = ""
    seeds_are_slow: bool = False
    images: bool = False
    routes: bool = False


@dataclass(frozen=True, slots=True)
class Health:
    """alive: it responds, and can sample if it is awake. detail: reason why it cannot sample now, or ""."""

    alive: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class SleepReport:
    """The result of `sleep`. freed_bytes: released device memory, measured. note: one line for the log, or ""."""

    freed_bytes: int = 0
    note: str = ""


class InferenceEngine(ABC):
    """The interface of an engine for rollouts; optional methods raise `Unsupported` here.

    Attributes:
        version: policy version that it samples with; 0 means its initial weights.
        invalid: reason why the weights match no version, or "".
        before_step, after_step: callbacks of engines that decode on the loop. before_step is called when the loop is
            idle, and waits for requests of environments on other threads.
    """

    capabilities: Capabilities
    counters: EngineCounters
    version: int = 0
    invalid: str = ""
    before_step: Callable[[], None] | None = None
    after_step: Callable[[], None] | None = None

    # --- sampling ---------------------------------------------------------------------------------------------

    @abstractmethod
    async def generate(self, request: Request) -> Completion:
        """One sample.

        A request that takes longer than its limit is aborted; it is sampled once more with the same seed if it is
        `exact`, then it ends with "error". A cancelled caller gets CancelledError after the engine has removed the
        request.

        Raises:
            PromptTooLong: the prompt leaves no room for one token.
            RequestRefused: an empty prompt, or ids that are no tokens.
            Unsupported: a distribution that it does not have.
            EngineAsleep: between `sleep` and a full `wake`, and after level 2 until weights were sent.
            SyncFailed: its weights are invalid.
            EngineDead: it cannot be used any more.
            EngineError: an id that is outstanding already, or the engine failed.
        """

    def sample(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """Sample requests on a new event loop, if none runs in this thread; yields completions as they finish.

        A caller that leaves early aborts the rest. Raises as `generate`; PromptTooLong before anything is sampled.
        """
        for request in requests:
            self.check_length(request)
        loop, tasks = RolloutLoop(), []
        done: asyncio.Queue[asyncio.Task[Completion]] = asyncio.Queue()

        async def begin() -> None:
            for request in requests:
                tasks.append(asyncio.create_task(self.generate(request)))
                tasks[-1].add_done_callback(done.put_nowait)

        async def leave() -> None:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.free()

        try:
            loop.run(begin())
            for _ in requests:
                yield loop.run(done.get()).result()
        finally:
            with contextlib.suppress(EngineError):  # the first error is raised
                loop.run(leave())
            loop.close(0.0)

    def hold(self) -> None:
        """Begin no request until `release`; called before a pause."""
        raise self._unsupported("hold")

    async def rest(self) -> None:  # noqa: B027 - most are at rest after `pause`
        """Wait until the decode loop of a held engine has stopped."""

    def release(self) -> None:  # noqa: B027 - see `hold`
        """Continue after `hold`."""

    async def free(self) -> None:  # noqa: B027 - most need no wait
        """Wait until requests of cancelled callers are removed. Raises an error that no caller received."""

    def empty(self) -> None:  # noqa: B027 - others abort requests of cancelled callers
        """Abort the remaining requests of an engine of this process, while no loop runs. Never raises."""

    def so_far(self, request_id: str) -> SoFar:
        """Tokens of an outstanding request so far; empty if unknown."""
        return (), (), ()

    def drain_metrics(self) -> dict[str, float]:
        """Metrics of the sampling since the last call, beside `counters`, by the name in the log."""
        return {}

    def check_length(self, request: Request) -> None:
        """Raises PromptTooLong if the prompt leaves no room for one token, RequestRefused if it is empty.

        Also raises Unsupported for a distribution that it cannot sample from; see `check_sampling`.
        """
        self.check_sampling(request.sampling)
        limit = self.capabilities.max_model_len
        if not len(request.prompt_ids):
            raise RequestRefused(
                request.request_id, f"request: {request.request_id}: its prompt has no tokens; give at least one"
            )
        if len(request.prompt_ids) >= limit:
            raise PromptTooLong(len(request.prompt_ids), limit)

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Raises Unsupported if the engine cannot sample from the requested distribution."""
        can = self.capabilities
        if sampling.regex is not None and not can.guided:
            raise Unsupported(
                f"--vllm_guided_decoding_regex: {sampling.regex}: the engine {can.name} cannot hold completions to a "
                "regular expression here; --infer_backend vllm, or pip install xgrammar for the transformers engine"
            )
        for name in sampling.unusual():
            if name not in can.sampling_fields:
                has = suggest(name, can.sampling_fields) if can.sampling_fields else "it has no such settings"
                raise Unsupported(f"--generation_kwargs: {name}: the engine {can.name} does not have it; {has}")

    def room(self, request: Request) -> int:
        """Maximum number of new tokens of a request: its own limit, or the room that the prompt leaves."""
        return min(request.sampling.max_new_tokens, self.capabilities.max_model_len - len(request.prompt_ids))

    @abstractmethod
    def abort(self, request_ids: Collection[str] | None = None) -> None:
        """End requests (all with None); each is still a completion, with its tokens so far and "abort".

        Ids that are not outstanding are ignored. A request that has not begun has no tokens.
        """

    def pause(self) -> None:
        """Stop sampling between two tokens, once it is held; outstanding requests continue after `resume`."""
        raise self._unsupported("pause")

    def resume(self) -> None:
        """Continue after `pause`."""
        raise self._unsupported("resume")

    # --- weights ----------------------------------------------------------------------------------------------

    @abstractmethod
    def update(self, stream: WeightStream) -> Ack:
        """Replace all weights; also resets caches, drops adapters and sets `version`.

        Paused requests continue with the new weights after their tokens so far. The calling thread gathers the buckets.

        Raises:
            SyncFailed: names or shapes do not fit the engine's model, and its weights are unchanged; or the transfer
                was incomplete, and the engine must be rebuilt.
            EngineAsleep: its weights are not awake.
            EngineError: requests are outstanding and not paused.
            Unsupported: it shares the trainer's weights, so that there is nothing to copy.
        """

    def load_weights(self, source: WeightSource, version: int) -> Ack:
        """Replace all weights by those of a source. Raises as `update`."""
        return self.update(WeightStream.of(source, version))

    @property
    def receivers(self) -> int:
        """Number of its processes that take part in a broadcast."""
        return 1

    def leave_broadcast(self) -> None:  # noqa: B027 - most have no group
        """Leave the process group of broadcasts; the next broadcast makes another group."""

    def share(self, parameters: PolicyParameters) -> str:
        """Sample from the memory of the trainer's parameters from now on; both hold the same bits now.

        For an engine that never samples while the trainer changes its weights. Otherwise weight syncs copy as before.
        Returns the reason if that is not possible, else "".
        """
        return f"the {self.capabilities.name} engine cannot read memory of the trainer"

    def take_shared(self, parameters: PolicyParameters, version: int) -> Ack | None:
        """Sample with the shared memory as it is now, as `version`: caches are reset, nothing is copied.

        parameters is {} if the trainer's weights are not plain parameters (any more). Returns None if the weights have
        to be sent: nothing is shared, or the trainer's parameters have moved to other memory. Raises as `update`.
        """
        return None

    def separate(self) -> None:  # noqa: B027 - most share no memory
        """End what `share` began: the trainer's parameters get memory of their own, with the same bits."""

    def rebuild(self) -> None:
        """Rebuild the engine after `SyncFailed`: it samples with its initial weights (version 0).

        Raises EngineDead: it cannot be rebuilt.
        """
        raise self._unsupported("rebuild")

    def load_adapter(self, adapter: AdapterWeights, version: int) -> Ack:
        """Sample with this LoRA adapter on the base weights from now on, in place of the former one."""
        raise self._unsupported("LoRA adapters")

    def drop_adapter(self) -> None:
        """Sample with the base weights again."""
        raise self._unsupported("LoRA adapters")

    def reset_caches(self) -> None:
        """Drop the prefix cache. Every update does so too."""
        raise self._unsupported("reset_caches")

    # --- memory -----------------------------------------------------------------------------------------------

    def sleep(self, level: SleepLevel) -> SleepReport:
        """Release memory: 0 nothing, 1 keeps the weights on the host, 2 drops them (sync before sampling again).

        If it is asleep already, only a higher level has an effect. An engine for adapters (`EngineSpec.lora`) keeps its
        base weights at level 2 and reports it in the note, because a sync would not send them again.

        Raises:
            EngineError: requests are outstanding.
            Unsupported: a level above 0 that is not among `sleep_levels`.
        """
        if level == 0:
            return SleepReport()
        raise self._unsupported(f"sleep({level})")

    def wake(self, tags: Sequence[Tag] = ALL_TAGS) -> bool:
        """Allocate the memory again; returns whether everything is awake now. Idempotent.

        Raises:
            EngineAsleep: "kv_cache" alone while the weights are asleep; wake these first.
            Unsupported: a tag that is not in `ALL_TAGS`.
        """
        raise self._unsupported("wake")

    def memory(self) -> dict[str, int]:
        """Bytes of `weights` and `kv` (the cache) that it holds on the device now; unknown ones are left out."""
        return {}

    # --- watching ---------------------------------------------------------------------------------------------

    def health(self) -> Health:
        """The present health; returns within seconds."""
        return Health(True)

    @property
    def engines(self) -> Sequence[Any]:
        """The engines that it consists of, without dead ones; each has a `health`.

        Raises EngineDead: all are dead.
        """
        return [self]

    @abstractmethod
    def close(self) -> None:
        """Release all resources of the engine, with its processes; idempotent."""

    def _unsupported(self, what: str) -> Unsupported:
        return Unsupported(f"engine: {self.capabilities.name}: cannot do {what}")
