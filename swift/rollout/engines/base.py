"""The contract of an inference engine, whatever library it wraps and whatever process it lives in.

Ids pass unchanged: an engine gets token ids and returns token ids, the ending token included, with the log-prob
of each token under the distribution it was drawn from. Each request comes back exactly once, in any order, also
after an abort or a restart. A prompt that leaves no room raises `PromptTooLong` before anything is sampled;
`max_new_tokens` is clipped to the room left.

The life of an engine:

    submit* -> stream ...            sampling; `generate` is both
    begin_update -> send* -> commit  new weights, acknowledged; nothing may be in flight, unless it is paused
    sleep(level) ... wake(tags)      memory released while someone else uses the device
    close                            processes, ports and memory are gone afterwards

What is loaded is in one of three states, and the errors say which: asleep (`EngineAsleep`), void after a failed update
(`SyncFailed` until `rebuild` or a whole update), gone (`EngineDead`). In none of them is anything sampled.

One thread at a time calls an engine; only `abort`, `pause`, `health` and `close` may come from another, `pause` also in
the middle of a `stream`, which it ends. No call waits without a bound. What an engine can do it says in its
`Capabilities`; callers never ask for its name.
`tests/engines/test_conformance_*.py` holds every backend to this text.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Literal

from swift.errors import EngineDead, EngineError, PromptTooLong, RequestRefused, Unsupported, suggest
from swift.rollout.engines.running import SoFar
from swift.rollout.weights.base import Ack, AdapterWeights, Live, TensorInfo, WeightSource, WeightUpdate
from swift.types import Completion, Request, SamplingParams

LogprobSupport = Literal["full", "truncated", "raw"]
SleepLevel = Literal[0, 1, 2]
Tag = Literal["weights", "kv_cache"]
ALL_TAGS: tuple[Tag, ...] = ("weights", "kv_cache")


@dataclass(slots=True)
class EngineCounters:
    """What an engine did since it was made: proof that prompts are shared and finished rows leave.

    `restarts` counts processes that died and were replaced.
    """

    prefill_tokens: int = 0
    decode_rows: int = 0
    decode_steps: int = 0
    restarts: int = 0

    def __add__(self, other: EngineCounters) -> EngineCounters:
        return EngineCounters(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: EngineCounters) -> EngineCounters:
        return EngineCounters(*(mine - theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do; callers ask instead of testing for its name.

    name: of the backend, for people. logprob_support: "full" is log-softmax(logits / T) over the vocabulary,
    "truncated" renormalises after top-k, top-p, min-p and penalties (equal to "full" when none is on), "raw" is at
    temperature 1. shares_weights: reads the trainer's own parameters, so that a weight sync copies nothing.
    sleep_levels: those that release memory. in_flight_updates: it can be paused between two tokens. guided: holds
    completions to a regular expression. sampling_fields: what of `SamplingParams.unusual` it takes.
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


@dataclass(frozen=True, slots=True)
class Health:
    """alive: it answers, and can sample once it is awake. detail: why it cannot sample now, "" when it can."""

    alive: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class SleepReport:
    """What falling asleep gave back. freed_bytes: measured. note: one line for the log, or ""."""

    freed_bytes: int = 0
    note: str = ""


class InferenceEngine(ABC):
    """What the rollout pipeline needs of an engine; optional parts raise `Unsupported` here.

    Attributes:
        version: policy version it samples with; 0 are the weights it was built with.
        late: requests that it aborted itself because they took too long, once for each try.
        void: why its weights belong to no version, as far as it knows; "" when they do.
        in_process: `advance` works, and does not merely wait for other processes.
    """

    capabilities: Capabilities
    counters: EngineCounters
    version: int = 0
    late: int = 0
    void: str = ""
    in_process: bool = True

    # --- sampling ---------------------------------------------------------------------------------------------

    @abstractmethod
    def submit(self, request: Request) -> None:
        """Queue one sample.

        Raises:
            PromptTooLong: the prompt leaves no room for one token; the engine stays usable.
            EngineAsleep: between `sleep` and a full `wake`, and after level 2 until weights were sent.
            SyncFailed: its weights are void.
            EngineDead: it cannot be used any more.
            RequestRefused: an empty prompt, or one with ids that are no tokens; the engine stays usable.
            Unsupported: a distribution that it does not have; the engine stays usable.
            EngineError: an id that is outstanding already; the engine stays usable.
        """

    def together(self) -> contextlib.AbstractContextManager[Any]:
        """What is submitted inside begins together."""
        return contextlib.nullcontext()

    @abstractmethod
    def stream(self) -> Iterator[Completion]:
        """Completions as they finish, until nothing submitted is outstanding; ends at once when nothing is.

        What is submitted meanwhile joins in. On a paused engine it ends once what has finished is delivered; the rest
        comes out of the stream after `resume`.
        """

    def advance(self) -> list[Completion] | None:
        """The completions that end with the next step, or with the next news of other processes.

        None when nothing is outstanding, or it is paused. Raises as `stream`.
        """
        for completion in self.stream():
            return [completion]
        return None

    def generate(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """Sample every request; completions are yielded as they finish.

        A caller that leaves early aborts the rest, which is not delivered to anybody; so does a request that is refused
        before sampling has begun.

        Raises PromptTooLong: before anything is sampled.
        """
        for request in requests:
            self.check_length(request)
        submitted: list[str] = []
        try:
            for request in requests:
                self.submit(request)
                submitted.append(request.request_id)
        except BaseException:
            with contextlib.suppress(EngineError):  # the first error is the one to show
                self._give_up(submitted)
            raise
        try:
            yield from self.stream()
        except GeneratorExit:
            with contextlib.suppress(EngineDead):  # then nothing is left of them anyway
                self._give_up(None)
            raise

    def _give_up(self, request_ids: Collection[str] | None) -> None:
        """Abort requests that nobody waits for any more."""
        self.abort(request_ids)
        for _ in self.stream():
            pass

    def so_far(self, request_id: str) -> SoFar:
        """Tokens of an outstanding request so far; nothing where that is not known."""
        return (), (), ()

    def drain_metrics(self) -> dict[str, float]:
        """What there is to log of the sampling since the last call, beside `counters`; by name as logged."""
        return {}

    def recover(self) -> Collection[str]:
        """After `stream` raised: let go of the requests lost by it; ids that another `stream` will still deliver."""
        self._give_up(None)
        return ()

    def check_length(self, request: Request) -> None:
        """Raises PromptTooLong when the prompt leaves no room for one token, RequestRefused when it is empty.

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
        """Raises Unsupported when the distribution asked for is one that this engine does not have."""
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
        """Most new tokens of a request: its own limit, or what the prompt leaves."""
        return min(request.sampling.max_new_tokens, self.capabilities.max_model_len - len(request.prompt_ids))

    @abstractmethod
    def abort(self, request_ids: Collection[str] | None = None) -> None:
        """End requests (all with None); each still comes out of `stream`, with its tokens so far and "abort".

        Ids that are not outstanding are ignored. One that had not begun has no tokens.
        """

    def pause(self) -> None:
        """Stop sampling between two tokens; what is outstanding goes on after `resume`, and what is submitted waits."""
        raise self._unsupported("pause")

    def resume(self) -> None:
        """Go on after `pause`."""
        raise self._unsupported("resume")

    # --- weights ----------------------------------------------------------------------------------------------

    @abstractmethod
    def begin_update(self, manifest: Sequence[TensorInfo], version: int) -> WeightUpdate:
        """Start to replace all weights; `commit` of the update also resets caches, drops adapters and sets `version`.

        Paused requests go on with the new weights after the tokens they have.

        Raises:
            SyncFailed: names or shapes do not fit the engine's model; its weights stay as they were.
            EngineAsleep: its weights are not awake.
            EngineError: requests are outstanding and not paused.
            Unsupported: it shares the trainer's weights, so that there is nothing to copy.
        """

    def load_weights(self, source: WeightSource, version: int) -> Ack:
        """Replace all weights.

        Raises SyncFailed: they did not arrive whole; the engine must be rebuilt.
        """
        update = self.begin_update(source.manifest(), version)
        try:
            for bucket in source.buckets():
                update.send(bucket)
            return update.commit()
        except BaseException:
            update.abort()
            raise

    def share(self, live: Live) -> str:
        """Let the trainer's parameters be the engine's own memory from now on; both hold the same bits now.

        For an engine that never samples while the trainer changes its weights. Otherwise weight syncs go on as before.
        Returns why that is not possible, "" when it is done.
        """
        return f"the {self.capabilities.name} engine cannot read memory of the trainer"

    def take_shared(self, live: Live, version: int) -> Ack | None:
        """Sample with the shared memory as it is now, as `version`: caches are reset, nothing is copied.

        live is {} when the trainer's weights are not plain parameters (any more). Returns None when the weights have to
        be sent: nothing is shared, or the trainer has other memory by now. Raises as `begin_update`.
        """
        return None

    def separate(self) -> None:  # noqa: B027 - nothing to do where nothing is shared
        """End what `share` began: the trainer's parameters get memory of their own, with the same bits."""

    def rebuild(self) -> None:
        """Make the engine anew after `SyncFailed`: it samples with the weights it was built with (version 0).

        Raises EngineDead: it cannot be made again.
        """
        raise self._unsupported("rebuild")

    def load_adapter(self, adapter: AdapterWeights, version: int) -> Ack:
        """Sample with this LoRA adapter on the base weights from now on; the former one stays loaded as spare."""
        raise self._unsupported("LoRA adapters")

    def drop_adapter(self) -> None:
        """Sample with the base weights again."""
        raise self._unsupported("LoRA adapters")

    def reset_caches(self) -> None:
        """Forget computed prompts. Part of every update already."""
        raise self._unsupported("reset_caches")

    # --- memory -----------------------------------------------------------------------------------------------

    def sleep(self, level: SleepLevel) -> SleepReport:
        """Release memory: 0 nothing, 1 keeps the weights on the host, 2 drops them (sync before sampling again).

        Asleep already: goes deeper, or does nothing. An engine that is made for adapters (`EngineSpec.lora`) keeps its
        base weights at level 2 and says so, because nobody would send them again.

        Raises:
            EngineError: requests are outstanding.
            Unsupported: a level above 0 that is not among `sleep_levels`.
        """
        if level == 0:
            return SleepReport()
        raise self._unsupported(f"sleep({level})")

    def wake(self, tags: Sequence[Tag] = ALL_TAGS) -> bool:
        """Take memory back; returns whether everything is awake now. Idempotent.

        Raises:
            EngineAsleep: "kv_cache" alone while the weights sleep: they come first.
            Unsupported: a tag that is not in `ALL_TAGS`.
        """
        raise self._unsupported("wake")

    def memory(self) -> dict[str, int]:
        """Bytes of `weights` and `kv` (the cache) that it holds on the device now; what it cannot say is left out."""
        return {}

    # --- watching ---------------------------------------------------------------------------------------------

    def health(self) -> Health:
        """Whether it answers, within seconds."""
        return Health(True)

    @property
    def engines(self) -> Sequence[Any]:
        """The engines it consists of, without those that are dead for good; each has a `health`.

        Raises EngineDead: none is left.
        """
        return [self]

    @abstractmethod
    def close(self) -> None:
        """Release what the engine holds, its processes included; idempotent."""

    def _unsupported(self, what: str) -> Unsupported:
        return Unsupported(f"engine: {self.capabilities.name}: cannot do {what}")
