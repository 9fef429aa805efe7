"""What all routes share: who owns the server, what it serves, and how a request becomes completions."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from swift.errors import EngineDead, EngineError, SwiftError, SyncFailed
from swift.rollout.engines.base import Ack, Health
from swift.rollout.engines.expected_weights import ExpectedWeights
from swift.rollout.engines.pool import EnginePool, in_parallel
from swift.rollout.seeds import sample_seed
from swift.rollout.server import wire
from swift.rollout.server.front import Arrival, Front, Ticket
from swift.rollout.server.lease import Holder, Lease
from swift.rollout.server.limits import Limits, Refused
from swift.rollout.server.protocol import Sampling, check_sampling
from swift.rollout.server.transfer import Transfer
from swift.rollout.server.updates import Updates, load_whole
from swift.rollout.weight_sync.base import AdapterWeights, StreamDigest
from swift.types import Completion, Request, SamplingParams

if TYPE_CHECKING:
    from swift.models.template import Template

logger = logging.getLogger(__name__)
T = TypeVar("T")

FINGERPRINT_TOKENS = 16
"""Greedy tokens that tell whether the base weights are the same again."""
FINGERPRINT_TOLERANCE = {"float32": 1e-4}
"""Largest difference of their log-probs by type of the weights; other types round more."""
FINGERPRINT_ROUNDED = 5e-2
WATCH_S = 1.0
HEALTH_S = 1.0
"""How old an answer about the engines' health may be."""
HEALTH_LIMIT_S = 4.0
"""Bound on such an answer; clients wait 5 s for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the server was started with.

    model: name under which clients know it. folder: where it lies. stop_token_ids: end a completion unless a client
    says otherwise. defaults: sampling settings for what a request leaves out. weights_folder: below which paths may be
    named.
    sync_s: bound on one job. drain_s: how long a job waits for what runs.
    """

    model: str
    folder: Path
    dtype: str
    tensor_parallel_size: int
    data_parallel_size: int
    stop_token_ids: tuple[int, ...]
    defaults: dict[str, Any] = field(default_factory=dict)
    api_key: str | None = None
    weights_folder: Path | None = None
    limits: Limits = field(default_factory=Limits)
    sync_s: float = 600.0
    drain_s: float = 600.0


NUMBERS = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
    "min_tokens",
)  # fmt: skip
"""Fields of `SamplingParams` that clients give under the same name."""


class Service:
    """See the module's docstring.

    Args:
        engine: the engines, started.
        template: tokenizer and chat template of the model.
        settings: see `Settings`.

    Attributes:
        adapter: name of the one that is loaded, or "".
        adapter_is_policy: it came from the run that owns the server, whose policy is the model that is served.
    """

    def __init__(self, engine: EnginePool, template: Template, settings: Settings) -> None:
        self.engine = engine
        self.template = template
        self.settings = settings
        self.boot_id = secrets.token_hex(8)
        self.started_at = time.time()
        self.front = Front(engine, queue_limit=settings.limits.queue)
        self.lease = Lease()
        self.updates = Updates(self.front, weights_folder=settings.weights_folder, idle_s=settings.limits.upload_idle_s)
        self.adapter = ""
        self.adapter_is_policy = False
        self._label: tuple[int, str] | None = None
        self._look: asyncio.Task[tuple[bool, dict[str, Any]]] | None = None
        self._looked_at = 0.0
        self._jobs = 0
        self._look_of: tuple[int, str] | None = None
        self._token_texts: dict[int, str] = {}
        self._words = ThreadPoolExecutor(1, thread_name_prefix="texts")
        self._fixed_prompt = self.tokenize("A fingerprint of these weights:")
        self.probe = self._place_probe()
        self.fingerprint = self.front.do(self._fingerprint).result(settings.sync_s)
        expected, tied = checkpoint_names(settings.folder)
        self.transfer = Transfer(expected, tied, self._load_transferred)

    # --- what it is -------------------------------------------------------------------------------------------

    def info(self) -> dict[str, Any]:
        """GET /info."""
        holder, settings, load = self.lease.holder, self.settings, self.front.load
        capabilities = asdict(self.engine.capabilities)
        return {
            "protocol": wire.PROTOCOL,
            "boot_id": self.boot_id,
            "model": settings.model,
            "architecture": wire.architecture(settings.folder),
            "dtype": self.engine.capabilities.dtype,
            "max_model_len": self.engine.capabilities.max_model_len,
            "tp": settings.tensor_parallel_size,
            "dp": settings.data_parallel_size,
            "run_id": holder.run_id if holder is not None else None,
            "version": self.engine.version,
            "checksum": self.updates.digest or self.fingerprint.digest,
            "adapter": self.adapter or None,
            "capabilities": capabilities,
            "transports": ["http", "broadcast", *(["disk"] if settings.weights_folder else [])],
            "weights_folder": str(settings.weights_folder) if settings.weights_folder else None,
            "weights_probe": self.probe,
            "stop_token_ids": list(settings.stop_token_ids),
            "limits": asdict(settings.limits),
            "running": load[0],
            "running_of": self.front.running_of,
            "waiting": load[1],
            "paused": self.front.paused,
            "counters": wire.counters_to_json(self.engine.counters),
            "up_s": round(time.time() - self.started_at, 3),
        }

    def health(self) -> tuple[bool, dict[str, Any]]:
        """GET /health: whether all is well, and what to say. `alive` says whether it samples at all."""
        workers = self._workers()
        problem = f"weights: {self.transfer.failure}" if self.transfer.failure else ""
        void = self.engine.void
        samples = any(worker.alive for worker in workers) and not void and not problem
        answering = all(worker.alive for worker in workers)
        whole = len(workers) == self.settings.data_parallel_size
        details = [problem, void, *(worker.detail for worker in workers)]
        if answering and not whole:  # the pool knows why the others are gone
            details = [problem, self.engine.health().detail]
        return samples and answering and whole, {
            **self._health_head(samples and answering and whole, samples),
            "void": bool(problem or void),
            "detail": "; ".join(filter(None, details)),
        }

    def _health_head(self, good: bool, alive: bool) -> dict[str, Any]:
        return {
            "status": "ok" if good else "failing",
            "alive": alive,
            "version": self.engine.version,
            "boot_id": self.boot_id,
            "counters": wire.counters_to_json(self.engine.counters),
        }

    async def recent_health(self) -> tuple[bool, dict[str, Any]]:
        """`health` within `HEALTH_LIMIT_S`, by one look at a time, whoever asks.

        A look is good for `HEALTH_S`, unless a job or a broadcast has ended since.
        """
        old = self._look is not None and self._look.done() and time.monotonic() - self._looked_at > HEALTH_S
        present = (self._jobs, self.transfer.failure)
        if self._look is None or old or self._look_of != present:
            self._look_of = present
            self._look = asyncio.create_task(self._look_at_health())
        look = self._look
        if not look.done():
            await asyncio.wait([look], timeout=HEALTH_LIMIT_S)
        if look.done():
            return look.result()
        detail = f"engines: no answer within {HEALTH_LIMIT_S:g} s"
        return False, {**self._health_head(False, False), "void": bool(self.engine.void), "detail": detail}

    async def _look_at_health(self) -> tuple[bool, dict[str, Any]]:
        try:
            return await asyncio.to_thread(self.health)
        finally:
            self._looked_at = time.monotonic()

    def _workers(self) -> list[Health]:
        """How the engines are that are not dead for good."""
        try:
            engines = self.engine.engines
        except EngineDead:
            return []
        return [
            one if isinstance(one, Health) else Health(False, self.engine.version, str(one))
            for one in in_parallel([engine.health for engine in engines])
        ]

    @property
    def weight_version(self) -> str:
        """GET /weight_info: the number of the present weights, or what their trainer called them."""
        version = self.engine.version
        return self._label[1] if self._label is not None and self._label[0] == version else str(version)

    def call_version(self, version: int, label: str) -> None:
        """The trainer's own name for a version."""
        self._label = (version, label)

    def _place_probe(self) -> str | None:
        """A file by which a client sees whether its disk is this one."""
        folder = self.settings.weights_folder
        if folder is None:
            return None
        name = f".swift-rollout-{self.boot_id}"
        (folder / name).write_text(self.boot_id, encoding="utf-8")
        return name

    # --- jobs -------------------------------------------------------------------------------------------------

    async def job(self, work: Callable[[], T]) -> T:
        """Carry out `work` when nothing runs, in a bounded time.

        Raises:
            Refused: others' requests did not end in time; nothing was done (409).
        """
        try:
            return await self._bounded(self.front.do(work))
        finally:
            self._jobs += 1

    async def _bounded(self, future: Future[T]) -> T:
        settings = self.settings
        waited = asyncio.wrap_future(future)
        done, _ = await asyncio.wait([waited], timeout=settings.drain_s)
        if not done and future.cancel():
            running = ", ".join(f"{count} of {owner}" for owner, count in sorted(self.front.running_of.items()))
            raise Refused(
                409,
                "busy",
                f"engine: requests still run after {settings.drain_s:g} s ({running or 'none now'}) and "
                f"{self.front.load[1]} wait; abort them, or pause with keep",
            )
        if not done:
            done, _ = await asyncio.wait([waited], timeout=settings.sync_s)
        if not done:
            raise EngineError(f"engine: it did not finish within {settings.sync_s:g} s")
        return waited.result()

    # --- ownership --------------------------------------------------------------------------------------------

    def authorize(self, run_id: str | None) -> None:
        """A request that may change things; see `Lease.renew`."""
        self.lease.renew(run_id, time.monotonic())

    async def reset(self, run_id: str, name: str, *, rebuild: bool) -> dict[str, Any]:
        """POST /reset: this run owns the server, and finds it as it was started."""
        before = self.lease.holder.run_id if self.lease.holder is not None else None
        is_new = self.lease.take(run_id, name, time.monotonic())
        if is_new or rebuild:
            try:
                with self.lease.during_reset():
                    await self._give_to(before)
                    self.authorize(run_id)
            except BaseException:
                self.lease.release(run_id)  # whoever tries next begins anew
                raise
        return {"boot_id": self.boot_id, "new_run": is_new, **await asyncio.to_thread(self.state)}

    async def _give_to(self, before: str | None) -> None:
        """End what the run before has here, and restore the engines."""
        if before is not None:
            self.front.abort_owned(before)
        if self.front.paused:
            await asyncio.to_thread(self.front.resume)
        await self.job(self._restore)

    def _restore(self) -> None:
        """A job: base weights, no adapter, nothing computed; and proof of it."""
        self.updates.abort(None)
        self.updates.disconnect()
        self.transfer.disconnect()
        self.transfer.failure = ""
        self.engine.wake()
        if (
            self.updates.whole_came
            or self.engine.version != 0
            or not self.engine.health().alive
            or self.state()["asleep"]
        ):
            self.engine.rebuild()
            self.updates.whole_came = False
        elif self.engine.capabilities.lora:
            self.engine.drop_adapter()
        self.engine.reset_caches()
        self.updates.digest, self.adapter = "", ""
        self.updates.last = self._label = None
        now = self._fingerprint()
        problem = self.fingerprint.difference(now, self.engine.capabilities.dtype)
        if problem:
            raise SyncFailed(f"engine: base weights: {problem}; restart the server")

    def _fingerprint(self) -> Fingerprint:
        """A job: what the present weights answer to a fixed prompt."""
        prompt = self._fixed_prompt
        room = self.engine.capabilities.max_model_len - len(prompt)
        prompt = prompt if room > FINGERPRINT_TOKENS else prompt[:1]
        sampling = SamplingParams(max_new_tokens=FINGERPRINT_TOKENS, temperature=0.0)
        (completion,) = list(self.engine.generate([Request("fingerprint", prompt, sampling)]))
        return Fingerprint(tuple(completion.token_ids), tuple(completion.logprobs))

    # --- weights ----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a client has to know after anything that changed the engines."""
        asleep = list(dict.fromkeys(worker.detail for worker in self._workers() if worker.alive and worker.detail))
        return {"version": self.engine.version, "asleep": "; ".join(asleep)}

    def load_adapter(self, name: str, adapter: AdapterWeights, version: int | None, *, policy: bool) -> Ack:
        """A job: sample with this adapter from now on. policy: the run that owns the server sent it."""
        ack = self.engine.load_adapter(adapter, self.engine.version + 1 if version is None else version)
        self.adapter, self.updates.digest, self.adapter_is_policy = name, ack.digest, policy
        return ack

    def drop_adapter(self) -> None:
        """A job: sample with the base weights again."""
        self.engine.drop_adapter()
        self.adapter = self.updates.digest = ""

    def replaced(self) -> None:
        """All weights were replaced: the adapter went with the old ones, and so did what failed before."""
        self.adapter = self.transfer.failure = ""

    def bring(self, tensors: list[tuple[str, torch.Tensor]], version: int | None) -> Ack:
        """A job: replace all weights by these."""
        ack = load_whole(self.front, tensors, self.engine.version + 1 if version is None else version)
        self.adapter, self.updates.digest, self.transfer.failure = "", ack.digest, ""
        self.updates.whole_came = True
        return ack

    def _load_transferred(self, tensors: list[tuple[str, torch.Tensor]], version: int | None) -> Ack:
        """For `Transfer`, on a thread of its own."""
        future = self.front.do(lambda: self.bring(tensors, version))
        try:
            return future.result(self.settings.drain_s + self.settings.sync_s)
        finally:
            self._jobs += 1

    async def watch(self) -> EngineDead:
        """Give up what silent clients left, and replace engines that died while nobody asked.

        Returns:
            Why none is left that could be replaced; without end otherwise.
        """
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                _ = self.engine.engines
            except EngineDead as error:
                return error
            try:
                if self.updates.expired():
                    logger.warning("an update of weights fell silent and is given up")
                    await self.job(lambda: self.updates.abort(None) if self.updates.expired() else None)
                elif self.front.paused and (silent := self.lease.silent(time.monotonic())) is not None:
                    await self._resume_without(silent)
                elif not self.front.load[0] and any("its process" in one.detail for one in await self._looked()):
                    await self.job(self.engine.reset_caches)  # the first call to a dead process replaces it
            except (Refused, SwiftError) as error:
                logger.warning("%s", error)

    async def _resume_without(self, silent: Holder) -> None:
        """A run that fell silent while the server was paused loses it: the others wait for it to go on."""
        logger.warning("run %s (%s) fell silent while the engines were paused; they go on", silent.run_id, silent.name)
        self.lease.release(silent.run_id)
        self.front.abort_owned(silent.run_id)
        await asyncio.to_thread(self.front.resume)

    async def _looked(self) -> list[Health]:
        return await asyncio.to_thread(self._workers)

    # --- requests ---------------------------------------------------------------------------------------------

    async def texts(self, work: Callable[[], T]) -> T:
        """Work with tokenizer, template and long answers, off the event loop and one at a time.

        The loop has other clients to serve, and tokenizers are not made for several threads.
        """
        return await asyncio.get_running_loop().run_in_executor(self._words, work)

    def said(self, request: Request, completion: Completion, wanted: Sampling) -> tuple[str, str | None]:
        """The text of a completion for clients of OpenAI's API, and the stop text that ended it.

        Token ids and log-probs keep what ended them, as trainers need it; the text does so when it was asked for.
        """
        ids = completion.token_ids
        ended = completion.finish_reason == "stop" and not wanted.include_stop_str_in_output
        if ended and ids and ids[-1] in request.sampling.stop_token_ids:
            ids = ids[:-1]
        text = self.template.decode(ids, skip_special_tokens=wanted.skip_special_tokens)
        found = [(text.find(stop), stop) for stop in request.sampling.stop if ended and stop in text]
        if not found or len(ids) < len(completion.token_ids):
            return text, None
        place, stop = min(found)
        return text[:place], stop

    def token_text(self, token: int) -> str:
        """One token as text, which several tokens may share."""
        if token not in self._token_texts:
            self._token_texts[token] = self.template.decode([token], skip_special_tokens=False)
        return self._token_texts[token]

    def tokenize(self, text: str, *, special: bool = True) -> list[int]:
        """Text to ids, as the tokenizer does it."""
        return list(self.template.tokenizer(text, add_special_tokens=special)["input_ids"])

    def requests(self, prompts: Sequence[Sequence[int]], wanted: Sampling, *, max_tokens: int) -> list[Request]:
        """One request per sample, prompt by prompt.

        Args:
            prompts: token ids.
            wanted: what the client asked for.
            max_tokens: new tokens when it did not say.

        Raises:
            Refused: too many, or numbers out of range.
        """
        limits = self.settings.limits
        count = 1 if wanted.n is None else wanted.n
        check_count("prompts", len(prompts), limits.prompts)
        check_count("n", count, limits.samples_per_prompt)
        sampling = self._sampling(wanted, max_tokens)
        check_sampling(sampling)
        seed = secrets.randbits(62) if wanted.seed is None else wanted.seed
        group = secrets.token_hex(6)
        return [
            Request(f"{group}.{place}/{index}", prompt, _seeded(sampling, seed, place * count + index))
            for place, prompt in enumerate(prompts)
            for index in range(count)
        ]

    def _sampling(self, wanted: Sampling, max_tokens: int) -> SamplingParams:
        given = {name: getattr(wanted, name) for name in NUMBERS if getattr(wanted, name) is not None}
        given |= _guidance(wanted)
        stops = [wanted.stop] if isinstance(wanted.stop, str) else wanted.stop
        ends = () if wanted.ignore_eos else self.settings.stop_token_ids
        defaults = dict(self.settings.defaults)
        limit = defaults.pop("max_new_tokens", max_tokens)
        default_stop = tuple(defaults.pop("stop", ()))
        ends = (*ends, *defaults.pop("stop_token_ids", ()))
        return SamplingParams(
            **{
                "max_new_tokens": limit if wanted.max_tokens is None else wanted.max_tokens,
                "stop": default_stop if stops is None else tuple(stop for stop in stops if stop),
                "stop_token_ids": tuple(sorted({*ends, *(wanted.stop_token_ids or ())})),
                **defaults,
                **given,
                "seed": 0 if wanted.seed is None else wanted.seed,
            }
        )

    def open(self, requests: Sequence[Request], owner: str | None = None) -> Answers:
        """Queue requests; their answers come on the caller's event loop.

        Raises:
            Refused, SwiftError: see `Front.open`.
            SyncFailed: a broadcast failed after it was replied to.
        """
        self.transfer.check()
        return Answers(self.front, requests, owner)

    async def all_of(self, requests: Sequence[Request], gone: Callable[[], Any]) -> list[Completion]:
        """Every completion, in the order of the requests.

        Args:
            requests: to sample.
            gone: asks whether the client has hung up; then the rest is aborted.

        Raises:
            SwiftError: what an engine raised; the rest is aborted.
        """
        done: dict[str, Completion] = {}
        async with self.open(requests) as answers:
            while len(done) < len(requests):
                arrival = await answers.next(WATCH_S)
                if isinstance(arrival, Completion):
                    done[arrival.request_id] = arrival
                elif arrival is not None:
                    raise arrival[1]
                elif await gone():
                    raise Refused(499, "gone", "client: it has hung up")
        return [done[request.request_id] for request in requests]

    def close(self) -> None:
        """End engines and threads."""
        self.front.close()
        self._words.shutdown(wait=False, cancel_futures=True)
        self.transfer.close()
        self.updates.disconnect()
        if self.probe is not None and self.settings.weights_folder is not None:
            (self.settings.weights_folder / self.probe).unlink(missing_ok=True)


class Answers:
    """Completions of one ticket on an event loop; leaving the context cancels what is left.

    Args:
        front: the queue.
        requests: to sample.
        owner: the run they belong to.
    """

    def __init__(self, front: Front, requests: Sequence[Request], owner: str | None) -> None:
        self._front = front
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Arrival] = asyncio.Queue()
        self.ticket: Ticket = front.open(requests, self._deliver, owner)

    def _deliver(self, arrival: Arrival) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queue.put_nowait, arrival)

    async def next(self, timeout_s: float) -> Arrival | None:
        """What came next; None when nothing did in time."""
        try:
            return await asyncio.wait_for(self._queue.get(), timeout_s)
        except TimeoutError:
            return None

    async def __aenter__(self) -> Answers:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.ticket.left:
            self._front.cancel(self.ticket)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Greedy tokens of a fixed prompt, and their log-probs."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    @property
    def digest(self) -> str:
        """A name for these weights while no update has given them another."""
        stream = StreamDigest()
        stream.add("fingerprint", torch.tensor(self.token_ids))
        return stream.hexdigest()

    def difference(self, other: Fingerprint, dtype: str) -> str:
        """How the weights differ, in words; "" when they do not. Only float32 must take the same path to its end."""
        exact = dtype in FINGERPRINT_TOLERANCE
        tolerance = FINGERPRINT_TOLERANCE.get(dtype, FINGERPRINT_ROUNDED)
        same = 0
        while same < min(len(self.token_ids), len(other.token_ids)) and self.token_ids[same] == other.token_ids[same]:
            same += 1
        if same == 0 or (exact and self.token_ids != other.token_ids):
            return f"they answer with other tokens from place {same} on"
        gap = max(abs(a - b) for a, b in zip(self.logprobs[:same], other.logprobs[:same], strict=True))
        return f"log-probs of the same tokens differ by {gap:.2g}" if gap > tolerance else ""


def check_count(name: str, seen: int, limit: int) -> None:
    """Raises Refused unless 1 <= seen <= limit."""
    if seen < 1:
        raise Refused(422, "limit", f"{name}: {seen}: at least 1")
    if seen > limit:
        raise Refused(422, "limit", f"{name}: {seen}: over the limit of {limit}; send several requests", limit=limit)


def checkpoint_names(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Tensors of a checkpoint, and those that its model ties to others (other name -> name)."""
    if not any(folder.glob("*.safetensors")):
        return [], {}
    import transformers

    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    tied = config.get("tie_word_embeddings", (config.get("text_config") or {}).get("tie_word_embeddings", False))
    model_class = getattr(transformers, (config.get("architectures") or [""])[0], None)
    expected = ExpectedWeights.of_checkpoint(folder, model_class=model_class, tied=bool(tied))
    names = [name for name in expected.shapes if name != expected.tied]
    return names, {expected.tied: expected.embedding} if expected.tied else {}


def _seeded(sampling: SamplingParams, seed: int, index: int) -> SamplingParams:
    return replace(sampling, seed=seed if index == 0 else sample_seed(seed, "request", 0, index))


def _guidance(wanted: Sampling) -> dict[str, Any]:
    """Fields of `SamplingParams` for the regular expression that a client gave in one of its spellings.

    Raises:
        Refused: two spellings with different expressions.
    """
    own = {name: value for name, value in (wanted.structured_outputs or {}).items() if value is not None}
    spelled = {
        "structured_outputs": own.get("regex"),
        "structured_outputs_regex": wanted.structured_outputs_regex,
        "guided_regex": wanted.guided_regex,
    }
    given = {name: regex for name, regex in spelled.items() if regex is not None}
    if len(set(given.values())) > 1:
        raise Refused(422, "field", f"{', '.join(given)}: different expressions for one completion; give one")
    if given:
        return {"regex": next(iter(given.values()))}
    return {"extra": {"structured_outputs": own}} if own else {}
