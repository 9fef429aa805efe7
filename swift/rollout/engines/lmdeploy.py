"""LMDeploy's two engines behind our contract; GPUs only.

Requests are handed to LMDeploy's engine below its text layer: ids in, ids out, so that nothing is detokenised and no
end token is added that was not asked for. Each is a coroutine on the event loop of LMDeploy's own thread:

    submit -> coroutine: session, handle, tokens as they come -> queue -> stream

Log-probs: the PyTorch engine returns those at temperature 1 ("raw"), TurboMind those of the distribution that it drew
from, out of at most 1024 candidates ("truncated"). LoRA: the PyTorch engine reads adapters at its start only, so every
publication of an adapter starts it again; merged weights do not.

Every wait has a bound. A call into LMDeploy that does not come back within it makes the engine dead: the thread that
waits for it is left alone, nothing else is.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swift.errors import ConfigError, EngineAsleep, EngineDead, EngineError, ResourceError, SwiftError, SyncFailed
from swift.rollout.engines import lmdeploy_settings as settings
from swift.rollout.engines.base import (
    ALL_TAGS,
    Ack,
    AdapterWeights,
    Capabilities,
    EngineCounters,
    Health,
    InferenceEngine,
    PauseMode,
    SleepLevel,
    SleepReport,
    Tag,
    TensorInfo,
    WeightUpdate,
)
from swift.rollout.engines.expected_weights import ExpectedWeights
from swift.rollout.engines.lmdeploy_api import load_api, require
from swift.rollout.engines.lmdeploy_weights import FolderWeights, LMDeployUpdate, Pulse, PytorchUpdate, TurbomindUpdate
from swift.rollout.engines.spec import EngineSpec
from swift.types import Completion, FinishReason, Request, SamplingParams

START_S, SYNC_S, SLEEP_S, CLOSE_S, HEALTH_S, STALL_S = 600.0, 300.0, 60.0, 30.0, 5.0, 300.0
"""Bounds of waits, in seconds; the last one is for streams without any new token."""

PROBE_TOKENS = 16
TAIL_TOKENS = 8
"""Tokens decoded beyond the length of a stop word."""


def build(spec: EngineSpec) -> LMDeployEngine:
    """Makes the engine; see `lmdeploy_settings` for what of the spec means what.

    Raises:
        ResourceError: the package, a GPU or a 16-bit type is missing, or the version cannot take weights.
        ConfigError: arguments or a model that LMDeploy refuses.
        EngineError: LMDeploy failed to start.
    """
    return LMDeployEngine(spec)


@dataclass(slots=True)
class _Running:
    """A request on its way. `session` is LMDeploy's, once it has one."""

    request: Request
    version: int
    ends: frozenset[int]
    room: int
    aborted: bool = False
    reason: FinishReason | None = None
    session: Any = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def completion(self, reason: FinishReason) -> Completion:
        """What it has, as it ends."""
        versions = [(self.version, 0, len(self.token_ids))] if self.token_ids else []
        return Completion(self.request.request_id, self.token_ids, self.logprobs, reason, versions=versions)


class LMDeployEngine(InferenceEngine):
    """See the module's docstring.

    Args:
        spec: the engine.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.kind = settings.kind_of(spec)
        self.counters = EngineCounters()
        self.version = 0
        self._api = load_api()
        self._lock = threading.Lock()
        self._running: dict[str, _Running] = {}
        self._ready: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        self._moved = time.monotonic()  # when the last token came
        self._paused = False
        self._asleep: set[Tag] = set()
        self._level: SleepLevel = 0
        self._dropped = False  # level 2 took the weights; an update brings them back
        self._void = ""  # why the weights cannot be used, until `rebuild` or a whole update
        self._dead = ""  # why nothing works any more, until `rebuild`
        self._closed = False
        self._update: LMDeployUpdate | None = None
        self._replaced = False  # base weights are no longer those of the folder
        self._base_version = 0
        self._pulse = Pulse(self._probe)
        self._unconfirmed: tuple[str, int] | None = None
        self._adapter_name: str | None = None
        self._adapter_folder: Path | None = None
        self._pipeline: Any = None
        self._tokenizer: Any = None
        self._expected = _expected_weights(spec)
        try:
            self._open(adapter=spec.adapters[0] if spec.adapters else None)
        except BaseException:
            with contextlib.suppress(EngineDead):  # the first error counts
                self.close()
            raise

    # --- start and end ----------------------------------------------------------------------------------------

    def _open(self, adapter: str | Path | None) -> None:
        """Start LMDeploy's engine with the weights of the folder and, with the PyTorch engine, an adapter."""
        name = f"policy-v{self.version}" if adapter is not None else None
        adapters = {name: str(adapter)} if name is not None else {}
        config = settings.engine_config(self._api, self.spec, self.kind, adapters=adapters)
        indexes = settings.device_indexes(self.spec)

        def start() -> Any:
            hidden = settings.visible_devices(indexes) if self.kind == "pytorch" else contextlib.nullcontext()
            with hidden:  # Ray gives its workers what is visible when it starts
                return self._api.Pipeline(
                    self.spec.model,
                    backend_config=config,
                    log_level="ERROR",
                    trust_remote_code=self.spec.trust_remote_code,
                )

        try:
            self._pipeline = _bounded(start, START_S, "start of the engine")
        except SwiftError:
            raise
        except (Exception, SystemExit) as error:  # its checks of the environment exit
            raise EngineError(
                f"engine: lmdeploy: its {self.kind} engine failed to start ({type(error).__name__}: "
                f"{_first_line(error)})"
            ) from error
        self._adapter_name = name
        self._check_kind()
        self.capabilities = self._find_capabilities()
        if self.kind == "turbomind" and self._engine.backend_config.empty_init:
            self._fill()

    @property
    def _engine(self) -> Any:
        """LMDeploy's AsyncEngine."""
        return self._pipeline.async_engine

    def _check_kind(self) -> None:
        """LMDeploy silently takes its PyTorch engine for models that TurboMind lacks; and 0.18.0 lost a receiver."""
        if self._engine.backend != self.kind:
            raise ConfigError(
                f"engine_kwargs: engine {self.kind!r}: LMDeploy runs this model with its {self._engine.backend} engine "
                "only; leave it out"
            )
        receives = self.kind == "pytorch" or hasattr(self._engine.engine, "_update_params_que")
        if not receives and self._engine.backend_config.empty_init:
            raise ResourceError(
                f"lmdeploy: {self._api.version}: its TurboMind has update_params but nothing behind it, so it cannot "
                "take weights; leave engine_kwargs.engine out for the PyTorch engine, or add "
                "engine_kwargs.empty_init false to sample from the folder's weights alone"
            )

    def _find_capabilities(self) -> Capabilities:
        limits = [self._engine.session_len, getattr(self._engine.engine, "max_session_len", None)]
        lora = self.kind == "pytorch" and self.spec.lora
        return Capabilities(
            name="lmdeploy",
            logprob_support="raw" if self.kind == "pytorch" else "truncated",
            seeded=True,
            shares_weights=False,
            max_model_len=min(int(limit) for limit in limits if limit),
            dtype=self.spec.dtype,
            devices=self.spec.devices,
            tensor_parallel_size=self.spec.tensor_parallel_size,
            lora=lora,
            max_lora_rank=self.spec.max_lora_rank if lora else 0,
            sleep_levels=(0, 1, 2),
            kv_release=True,
            transports=("cuda_ipc",) if self.kind == "pytorch" else ("in_process",),
            guided=True,
            sampling_fields=settings.SAMPLING_FIELDS,
            extra={"lmdeploy": self._api.version, "engine": self.kind},
        )

    def _fill(self) -> None:
        """Bring the folder's weights into an engine that was made empty."""
        self.load_weights(FolderWeights(self.spec.model, list(self._expected.shapes)), self.version)
        self._replaced = False
        self._engine.sleeping_tags.clear()  # its last update made the engine and its cache
        self._engine.is_sleeping = False

    def rebuild(self) -> None:
        """See `InferenceEngine.rebuild`."""
        self._require_open()
        try:
            self._shut()
            self.version = 0
            self._open(adapter=self.spec.adapters[0] if self.spec.adapters else None)
        except SwiftError as error:
            self._dead = f"it could not be made again ({error})"
            raise EngineDead(f"engine: lmdeploy: {self._dead}") from error

    def close(self) -> None:
        """See `InferenceEngine.close`."""
        if self._closed:
            return
        self._closed = True
        self._shut()
        if self._adapter_folder is not None:
            shutil.rmtree(self._adapter_folder, ignore_errors=True)

    def _shut(self) -> None:
        """End LMDeploy's engine, its thread and its workers; what was loaded is gone."""
        pipeline, self._pipeline = self._pipeline, None
        with self._lock:
            for one in self._running.values():
                self._ready.put(one.completion("abort"))
            self._running.clear()
        self._update, self._unconfirmed = None, None
        self._asleep, self._level, self._paused = set(), 0, False
        self._dropped, self._replaced, self._void, self._dead = False, False, "", ""
        self._base_version = 0
        self._pulse = Pulse(self._probe)
        if pipeline is not None:
            _bounded(pipeline.close, CLOSE_S, "close")

    # --- sampling ---------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """See `InferenceEngine.submit`."""
        self._require_usable()
        self.check_length(request)
        if request.sampling.temperature > settings.HIGHEST_TEMPERATURE:
            raise EngineError(
                f"--temperature: {request.sampling.temperature}: LMDeploy takes at most "
                f"{settings.HIGHEST_TEMPERATURE}; use a lower one, or another engine"
            )
        running = self._prepared(request)
        with self._lock:
            if request.request_id in self._running:
                raise EngineError(f"request: {request.request_id}: submitted twice; ids must differ while in flight")
            if not self._running:
                self._moved = time.monotonic()
            self._running[request.request_id] = running
        if not self._paused:
            self._launch(running)

    def _prepared(self, request: Request) -> _Running:
        ends = frozenset((*self.spec.eos_token_ids, *request.sampling.stop_token_ids))
        return _Running(request, self.version, ends, self.room(request))

    def _launch(self, running: _Running) -> None:
        self._spawn(self._serve(running))

    async def _serve(self, running: _Running) -> None:
        """From LMDeploy's handle to a completion in the queue; whatever happens, exactly one."""
        try:
            reason = await self._sample(running)
        except asyncio.CancelledError:
            reason = "abort"
        except Exception as error:  # one request's failure is that request's end
            reason = "error"
            running.logprobs = running.logprobs[: len(running.token_ids)]
            if "ENGINE_STOP_ERROR" in str(error):
                self._dead = f"LMDeploy's engine has stopped ({_first_line(error)})"
        with self._lock:
            if self._running.get(running.request.request_id) is running:
                self._ready.put(running.completion(reason))  # first, so that `stream` never finds neither
                del self._running[running.request.request_id]
                self._moved = time.monotonic()

    async def _sample(self, running: _Running) -> FinishReason:
        """Tokens of one request, as they come."""
        engine, request = self._engine, running.request
        config = settings.generation_config(
            self._api, request.sampling, room=running.room, end_token_ids=self.spec.eos_token_ids
        )
        running.session = engine.session_mgr.get()
        reason: FinishReason | None = None
        try:
            async with running.session.request_handle() as handle:
                if running.aborted:
                    return "abort"
                async with engine.safe_run(
                    handle,
                    session=running.session,
                    input_ids=list(request.prompt_ids),
                    gen_config=config,
                    adapter_name=self._adapter_name,
                    stream_output=True,
                ) as outputs:
                    async for output in outputs:
                        reason = self._take(running, output)
                        if reason is not None and output.status == self._api.ResponseType.SUCCESS:
                            return reason  # a stop word, of which LMDeploy knows nothing: leaving cancels the request
        finally:
            engine.session_mgr.remove(running.session)
        return reason or ("abort" if running.aborted else "error")

    def _take(self, running: _Running, output: Any) -> FinishReason | None:
        """Add what came; the reason when that ends the request."""
        status, types = output.status, self._api.ResponseType
        if status not in (types.SUCCESS, types.FINISH, types.CANCEL):
            raise EngineError(f"request: {running.request.request_id}: LMDeploy answers {status.name}")
        rows = output.logprobs or []
        for token, row in zip(output.token_ids, rows, strict=False):
            if running.reason is not None:
                break
            if token not in row:
                raise EngineError(f"request: {running.request.request_id}: token {token} came without its log-prob")
            running.token_ids.append(int(token))
            running.logprobs.append(min(float(row[token]), 0.0))
            self._moved = time.monotonic()
            if self._hits_stop_word(running):
                return "stop"
            if token in running.ends:
                running.reason = "stop"
            elif len(running.token_ids) >= running.room:
                running.reason = "length"
        if running.reason is not None:
            return running.reason if status != types.SUCCESS else None
        if status == types.CANCEL or running.aborted:
            return "abort"
        if len(rows) < len(output.token_ids):
            raise EngineError(f"request: {running.request.request_id}: tokens came without log-probs")
        # finished by itself before the limit: the KV cache is full, which is a limit too
        return "length" if status == types.FINISH else None

    def _hits_stop_word(self, running: _Running) -> bool:
        words = running.request.sampling.stop
        if not words:
            return False
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(
                self.spec.model, trust_remote_code=self.spec.trust_remote_code
            )
        tail = running.token_ids[-(max(len(word) for word in words) + TAIL_TOKENS) :]
        text = self._tokenizer.decode(tail, skip_special_tokens=False)
        return any(word in text for word in words)

    def stream(self) -> Iterator[Completion]:
        """See `InferenceEngine.stream`."""
        while True:
            self._between()
            started = time.monotonic()
            idle = self._idle()
            try:
                done = self._ready.get(timeout=0.0 if idle else self._patience(0.5))
            except queue.Empty:
                if idle:
                    return
                self._require_progress()
                continue
            finally:
                self.counters.generate_s += time.monotonic() - started
            self.counters.decode_rows += len(done.token_ids)
            yield done

    def _idle(self) -> bool:
        """Whether nothing more will come by itself."""
        return not self._running or self._paused

    def _require_progress(self) -> None:
        if self._dead:
            raise EngineDead(f"engine: lmdeploy: {self._dead}")
        waited = time.monotonic() - self._moved
        if waited > STALL_S:
            self._dead = f"no token for {waited:.0f} s with {len(self._running)} requests outstanding"
            raise EngineDead(f"engine: lmdeploy: {self._dead}")

    def abort(self, request_ids: Collection[str] | None = None) -> None:
        """See `InferenceEngine.abort`."""
        with self._lock:
            wanted = (
                list(self._running) if request_ids is None else [one for one in request_ids if one in self._running]
            )
            chosen = [self._running[one] for one in wanted]
            waiting = [one for one in chosen if one.session is None and self._paused]
            for one in waiting:
                del self._running[one.request.request_id]
        for one in chosen:
            one.aborted = True
            if one in waiting:
                self._ready.put(one.completion("abort"))
            elif one.session is not None and self._pipeline is not None:
                self._spawn(one.session.async_abort())

    def pause(self, mode: PauseMode = "wait") -> None:
        """See `InferenceEngine.pause`."""
        self._require_open()
        if mode == "keep":
            raise self._unsupported("pause(keep)")
        if mode == "abort":
            self.abort()
        while self._running and not self._paused:
            self._require_progress()
            time.sleep(0.01)
        self._paused = True

    def resume(self) -> None:
        """See `InferenceEngine.resume`."""
        self._require_open()
        if self._paused:
            self._paused = False
            self._moved = time.monotonic()
            for running in list(self._running.values()):
                running.version = self.version
                self._launch(running)

    # --- weights ----------------------------------------------------------------------------------------------

    def begin_update(self, manifest: Sequence[TensorInfo], version: int) -> WeightUpdate:
        """See `InferenceEngine.begin_update`."""
        self._require_open()
        self._require_quiet("an update")
        if "weights" in self._asleep:
            raise EngineAsleep("engine: lmdeploy: its weights sleep; wake them before an update")
        if self.kind == "turbomind" and not hasattr(self._engine.engine, "_update_params_que"):
            raise self._unsupported("updates: it was made with empty_init false")
        if self._update is not None:
            raise SyncFailed(f"weights: version {version} for lmdeploy: another update is under way; abort it first")
        if problems := self._expected.check(manifest):
            more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
            raise SyncFailed(f"weights: version {version} for lmdeploy: {'; '.join(problems[:3])}{more}")
        options: dict[str, Any] = {
            "api": self._api,
            "dtype": self.spec.dtype,
            "receive": self._receive,
            "confirm": lambda digest: self._confirm(digest, version),
            "ended": self._update_ended,
        }
        self._update = (
            PytorchUpdate(manifest, version, devices=self.spec.devices, **options)
            if self.kind == "pytorch"
            else TurbomindUpdate(manifest, version, device=self.spec.devices[0], **options)
        )
        return self._update

    def _receive(self, request: Any) -> None:
        self._void = "an update is under way"
        _bounded(lambda: self._engine.engine.update_params(request), SYNC_S, "update_params", SyncFailed)

    def _confirm(self, digest: str, version: int) -> str:
        """All tensors were handed over: sample with them, now or as soon as the KV cache is awake."""
        self._void = ""
        self._dropped = False
        if self._asleep:
            self._unconfirmed = digest, version
            return "confirmed by a probe at the next wake"
        return self._pulse.check(digest, version)

    def _update_ended(self, version: int, why: str) -> None:
        self._update = None
        if why:
            self._void = f"{why}; the model may be half updated"
            return
        self.version = self._base_version = version
        self._replaced = True
        self._adapter_name = None

    def load_adapter(self, adapter: AdapterWeights, version: int) -> Ack:
        """See `InferenceEngine.load_adapter`; starts LMDeploy's engine again, which reads adapters then only.

        Its KV cache is awake afterwards.
        """
        if not self.capabilities.lora:
            raise self._unsupported("LoRA adapters")
        self._require_open()
        self._require_quiet("an adapter")
        if "weights" in self._asleep:
            raise EngineAsleep("engine: lmdeploy: its weights sleep; wake them before an adapter is loaded")
        if self._replaced:
            raise SyncFailed(
                f"weights: version {version} for lmdeploy: the base weights were replaced, and loading an adapter "
                "reads them from the folder again; rebuild the engine, or send merged weights"
            )
        started = time.monotonic()
        folder = self._store(adapter, version)
        self._shut()
        self.version = version
        try:
            self._open(adapter=folder)
        except SwiftError as error:
            self._void = f"an adapter could not be loaded ({error})"
            raise SyncFailed(f"weights: version {version} for lmdeploy: {self._void}") from error
        note = self._pulse.check(adapter.digest(), version)
        return Ack(
            version=version,
            tensors=len(adapter.tensors),
            nbytes=sum(one.numel() * one.element_size() for one in adapter.tensors.values()),
            digest=adapter.digest(),
            seconds=time.monotonic() - started,
            rounded=any(str(one.dtype).removeprefix("torch.") != self.spec.dtype for one in adapter.tensors.values()),
            note=note or "LMDeploy was started again to read the adapter",
        )

    def _store(self, adapter: AdapterWeights, version: int) -> Path:
        """The adapter as peft saves it, in a folder of its own; the one before it stays."""
        from safetensors.torch import save_file

        if self._adapter_folder is None:
            self._adapter_folder = Path(tempfile.mkdtemp(prefix="swift-lmdeploy-"))
        kept = sorted(self._adapter_folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        for old in kept[:-1]:
            shutil.rmtree(old, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=f"policy-v{version}-", dir=self._adapter_folder))
        save_file({name: one.cpu().contiguous() for name, one in adapter.tensors.items()}, folder / _ADAPTER_FILE)
        (folder / "adapter_config.json").write_text(json.dumps(adapter.config), encoding="utf-8")
        return folder

    def drop_adapter(self) -> None:
        """See `InferenceEngine.drop_adapter`."""
        if not self.capabilities.lora:
            raise self._unsupported("LoRA adapters")
        self._require_quiet("dropping an adapter")
        self._adapter_name = None
        self.version = self._base_version

    def reset_caches(self) -> None:
        """See `InferenceEngine.reset_caches`: nothing of a prompt outlives its request, as prefix caching is off."""
        self._require_open()

    def _probe(self) -> tuple[list[int], list[float]]:
        """Sample a fixed request at once, outside of the queue."""
        sampling = SamplingParams(max_new_tokens=PROBE_TOKENS, temperature=1.0, seed=1)
        running = _Running(Request("probe", list(range(8)), sampling), self.version, frozenset(), PROBE_TOKENS)
        try:
            reason = self._wait_for(self._sample(running), SYNC_S, "probe")
        except EngineDead:
            raise
        except Exception as error:
            raise SyncFailed(f"weights: lmdeploy: the probe after an update failed ({_first_line(error)})") from error
        if reason not in ("stop", "length"):
            raise SyncFailed(f"weights: lmdeploy: the probe after an update ended with {reason!r}")
        return running.token_ids, running.logprobs

    # --- memory -----------------------------------------------------------------------------------------------

    def sleep(self, level: SleepLevel) -> SleepReport:
        """See `InferenceEngine.sleep`."""
        self._require_open()
        if level == 0:
            return SleepReport()
        if level not in self.capabilities.sleep_levels:
            raise self._unsupported(f"sleep({level})")
        self._require_quiet("sleep")
        if self._asleep == set(ALL_TAGS) and level <= self._level:
            return SleepReport(note="asleep already")
        if self._asleep:
            self.wake()
        before = _free_bytes(settings.device_indexes(self.spec))
        self._wait_for(self._engine.sleep(level), SLEEP_S, f"sleep({level})")
        self._asleep, self._level = set(ALL_TAGS), level
        self._dropped = self._dropped or level == 2
        return SleepReport(freed_bytes=max(0, _free_bytes(settings.device_indexes(self.spec)) - before))

    def wake(self, tags: Sequence[Tag] = ALL_TAGS) -> bool:
        """See `InferenceEngine.wake`."""
        self._require_open()
        for tag in tags:
            if tag not in ALL_TAGS:
                raise self._unsupported(f"wake({tag})")
        if "kv_cache" in tags and "weights" in self._asleep and "weights" not in tags:
            raise EngineAsleep("engine: lmdeploy: its weights sleep; wake them before the KV cache")
        for tag in ALL_TAGS:  # weights first
            # a tag that does not sleep makes LMDeploy ignore the whole call
            if tag in tags and tag in self._asleep:
                self._on_loop(lambda one=tag: self._engine.wakeup([one]), SLEEP_S)  # type: ignore[misc]
                if tag in self._engine.sleeping_tags:
                    raise EngineError(f"engine: lmdeploy: {tag} did not wake")
                self._asleep.discard(tag)
        if self._asleep:
            return False
        self._level = 0
        if self._unconfirmed is not None and not self._dropped:
            (digest, version), self._unconfirmed = self._unconfirmed, None
            try:
                self._pulse.check(digest, version)
            except SyncFailed as error:
                self._void = str(error)
                raise
        return True

    # --- watching ---------------------------------------------------------------------------------------------

    def health(self) -> Health:
        """See `InferenceEngine.health`."""
        if self._closed or self._pipeline is None:
            return Health(False, self.version, "closed")
        if self._dead or self._void:
            return Health(False, self.version, self._dead or self._void)
        try:
            found = self._wait_for(self._engine.health_probe(STALL_S), HEALTH_S, "health", fatal=False)
        except (EngineDead, RuntimeError) as error:
            return Health(False, self.version, _first_line(error))
        if found["status"] == "unhealthy":
            return Health(False, self.version, str(found["message"]))
        if self._asleep:
            return Health(True, self.version, f"asleep ({', '.join(sorted(self._asleep))})")
        return Health(True, self.version, "awake, but sleep(2) dropped its weights" if self._dropped else "")

    def info(self) -> dict[str, Any]:
        """See `InferenceEngine.info`."""
        return {
            "engine": "lmdeploy",
            "kind": self.kind,
            "engine_version": self._api.version,
            "version": self.version,
            "dtype": self.spec.dtype,
            "devices": list(self.spec.devices),
        }

    # --- LMDeploy's loop --------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._pipeline.internal_thread.loop)

    def _wait_for(self, work: Coroutine[Any, Any, Any], seconds: float, what: str, *, fatal: bool = True) -> Any:
        """Run a coroutine on LMDeploy's loop, at most this long; `fatal`: the engine is dead if it takes longer."""
        future = self._spawn(work)
        try:
            return future.result(seconds)
        except concurrent.futures.TimeoutError as error:
            future.cancel()
            late = f"{what} did not end within {seconds:.0f} s"
            self._dead = late if fatal else self._dead
            raise EngineDead(f"engine: lmdeploy: {late}") from error

    def _on_loop(self, call: Callable[[], Any], seconds: float) -> Any:
        """Call a function on the loop's own thread: LMDeploy sets asyncio events in some of them."""

        async def run() -> Any:
            return call()

        return self._wait_for(run(), seconds, "a call")

    def _require_open(self) -> None:
        if self._closed:
            raise EngineDead("engine: lmdeploy: it is closed")

    def _require_quiet(self, what: str) -> None:
        if self._dead:
            raise EngineDead(f"engine: lmdeploy: {self._dead}")
        if self._running:
            raise EngineError(
                f"engine: lmdeploy: {len(self._running)} requests are outstanding; take them from `stream`, or abort "
                f"them, before {what}"
            )

    def _require_usable(self) -> None:
        self._require_open()
        if self._dead:
            raise EngineDead(f"engine: lmdeploy: {self._dead}")
        if self._void:
            raise SyncFailed(f"engine: lmdeploy: {self._void}; rebuild it")
        if self._asleep:
            raise EngineAsleep(f"engine: lmdeploy: {', '.join(sorted(self._asleep))} asleep; wake it before sampling")
        if self._dropped:
            raise EngineAsleep("engine: lmdeploy: sleep(2) dropped its weights; publish them before sampling")


_ADAPTER_FILE = "adapter_model.safetensors"


def _expected_weights(spec: EngineSpec) -> ExpectedWeights:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(spec.model, trust_remote_code=spec.trust_remote_code).get_text_config()
    tied = bool(getattr(config, "tie_word_embeddings", False))
    return ExpectedWeights.of_checkpoint(spec.model, model_class=None, tied=tied)


def _bounded(call: Callable[[], Any], seconds: float, what: str, error_type: type[SwiftError] = EngineDead) -> Any:
    """A call on a thread of its own, waited for at most this long; a call that hangs is left behind.

    Raises:
        SwiftError: `error_type`, when it took too long; else what the call raised.
    """
    box: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            box.put((call(), None))
        except BaseException as error:
            box.put((None, error))

    threading.Thread(target=run, name=f"lmdeploy {what}", daemon=True).start()
    try:
        value, error = box.get(timeout=seconds)
    except queue.Empty:
        raise error_type(f"engine: lmdeploy: {what} did not end within {seconds:.0f} s") from None
    if error is not None:
        raise error
    return value


def _free_bytes(indexes: Sequence[int]) -> int:
    import torch

    return sum(int(torch.cuda.mem_get_info(index)[0]) for index in indexes)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


__all__ = ["LMDeployEngine", "build", "require"]
