"""LMDeploy's PyTorch engine behind the engine contract; GPUs only.

Requests go to LMDeploy's engine below its text layer, as token ids. Each request is a coroutine on the event loop of
LMDeploy's thread; `generate` waits for its completion.

Log-probs are at temperature 1 ("raw"). `update_params` takes a bucket as CUDA IPC handles, one set per tensor-parallel
rank. It confirms nothing, and after a failure the model has a part of the bucket. So names and shapes are checked
before an update, and a fixed prompt is sampled after it (the probe): its log-probs must be finite, and change with the
weights. LoRA adapters are synced merged, because LMDeploy reads adapters at its start only.

Of prompts with images LMDeploy makes the tensors, from ids with one placeholder per image and with the trainer's
processor of images; it must come to the tokens of the trainer. The probe has an image, too. Completions have no
placeholder, but the raw log-probs leave a probability to it.

A call into LMDeploy that exceeds its time limit makes the engine dead; the thread of the call is abandoned. The
engine's owner watches its progress, as for every engine.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import math
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from swift.data.image_store import images_shown
from swift.data.images import open_image
from swift.errors import ConfigError, EngineDead, EngineError, RequestRefused, SwiftError, SyncFailed, first_line
from swift.models.tokenizer import read_tokenizer
from swift.models.vision import (
    has_images,
    image_processor,
    once_per_image,
    placeholder_ids,
    placeholder_of,
    resized,
)
from swift.rollout.engines import lmdeploy_api as api_
from swift.rollout.engines.base import ALL_TAGS, Capabilities, EngineCounters, SleepLevel, Tag
from swift.rollout.engines.events import START_S
from swift.rollout.engines.expected_weights import ExpectedWeights, merged_adapters, model_config
from swift.rollout.engines.lmdeploy_api import require
from swift.rollout.engines.process import on_thread, same_environment
from swift.rollout.engines.running import Running, SoFar, ends_with_stop
from swift.rollout.engines.spec import EngineSpec, visible_devices
from swift.rollout.engines.states import StatefulEngine
from swift.rollout.engines.stepped import MAX_TRIES
from swift.rollout.weights.base import WeightStream, torch_dtype
from swift.rollout.weights.digest import StreamDigest
from swift.types import Completion, FinishReason, Request, SamplingParams

CLOSE_S = 30.0
"""Timeout of the end of the engine, in seconds."""
LOOK_S = 0.5
"""Interval at which a request checks that the engine is usable, in seconds."""
PROBE, PROBE_TOKENS = list(range(8)), 16
"""Token ids of the probe, and how many are sampled."""
UNCHANGED_LIMIT = 3
"""Number of updates in a row with changed bytes and equal log-probs of the probe at which the sync has failed."""


@dataclass(slots=True)
class _Running(Running):
    """A request. prompt: as LMDeploy takes it. session: its own, None before the first try. serving: its completion."""

    prompt: dict[str, Any] = field(default_factory=dict)
    aborted: bool = False
    session: Any = None
    serving: Future[Completion] = field(default_factory=Future)

    def start_again(self) -> None:
        """Drop its tokens, for another try."""
        self.token_ids, self.logprobs, self.spans, self.session = [], [], [], None


def build(spec: EngineSpec) -> LMDeployEngine:
    """Build the engine; see `LMDeployEngine`."""
    return LMDeployEngine(spec)


class _TooLong(Exception):
    """A request has exceeded its time limit."""


class LMDeployEngine(StatefulEngine):
    """See the module's docstring."""

    name = "lmdeploy"

    def __init__(self, spec: EngineSpec) -> None:
        api_.check_spec(spec)
        self.spec = spec
        self.counters = EngineCounters()
        self._api = api_.load_api()
        self._pipeline: Any = None
        self._reset()
        self._tokenizer = read_tokenizer(spec.model, trust_remote_code=spec.trust_remote_code)
        config = model_config(spec)
        self.vocab_size = config.get_text_config().vocab_size
        self.placeholders = placeholder_ids(config) if spec.sees else []
        self._placeholder = placeholder_of(config) if spec.sees else -1
        self.expected = ExpectedWeights.of_model(spec.model, config)
        try:
            self._open()
        except BaseException:
            with contextlib.suppress(EngineDead):  # the first error counts
                self.close()
            raise

    def _reset(self) -> None:
        self._reset_states()
        self._running: dict[str, _Running] = {}
        self._making: dict[tuple[int, ...], asyncio.Task[dict[str, Any]]] = {}  # prompts with images
        self._probed: tuple[str, Any] = "", None  # weights and sample of the last probe
        self._unchanged_probes = 0  # in a row, after changed weights
        self._unconfirmed = ""  # digest of an update without a probe yet

    # --- start and end ----------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Start LMDeploy with the weights of the folder, then load them with the spec's adapters merged."""
        spec = self.spec
        start = functools.partial(
            self._api.Pipeline,
            spec.model,
            backend_config=api_.engine_config(self._api, spec),
            log_level="ERROR",
            trust_remote_code=spec.trust_remote_code,
        )
        try:
            # Ray's workers inherit the visible devices of its start
            with same_environment({"CUDA_VISIBLE_DEVICES": visible_devices(spec.devices)}):
                self._pipeline = _bounded(start, START_S + spec.limit_s, "start of the engine")
        except SwiftError:
            raise
        except (Exception, SystemExit) as error:  # LMDeploy's checks of the environment raise SystemExit
            raise EngineError(
                f"engine: lmdeploy: it failed to start ({type(error).__name__}: {first_line(error)})"
            ) from error
        self._probe = self._seen_probe() if spec.sees else {"input_ids": PROBE}
        limits = [self._engine.session_len, getattr(self._engine.engine, "max_session_len", None)]
        self.capabilities = Capabilities(
            name="lmdeploy",
            logprob_support="raw",
            shares_weights=False,
            max_model_len=min(int(limit) for limit in limits if limit),
            dtype=spec.dtype,
            devices=spec.devices,
            tensor_parallel_size=spec.tensor_parallel_size,
            sleep_levels=(0, 1, 2),
            guided=True,
            images=spec.sees,
            sampling_fields=api_.SAMPLING_FIELDS,
        )
        if spec.adapters:
            self.load_weights(merged_adapters(spec), 0)

    def _seen_probe(self) -> dict[str, Any]:
        """The probe, with a drawn image. Raises ConfigError: LMDeploy takes no images for this model."""
        drawn = Image.linear_gradient("L").resize((96, 64)).convert("RGB")
        try:
            encoder = self._engine.vl_encoder.model
            encoder.processor.image_processor = image_processor(Path(self.spec.model))
            return self._wait_for(self._with_tensors([*PROBE, self._placeholder, *PROBE], [drawn]), START_S, "images")
        except EngineDead:
            raise
        except Exception as error:  # LMDeploy fails in types of its own
            raise ConfigError(
                f"--use_lmdeploy: true: LMDeploy takes no images for {self.spec.model} "
                f"({type(error).__name__}: {first_line(error)}); use --use_vllm true, or --infer_backend transformers"
            ) from error

    @property
    def _engine(self) -> Any:
        return self._pipeline.async_engine

    def rebuild(self) -> None:
        self._check_alive()
        try:
            self._shut_down()
            self._open()
        except SwiftError as error:
            self._dead = f"it could not be made again ({error})"
            raise EngineDead(f"engine: lmdeploy: {self._dead}") from error

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._shut_down()

    def _shut_down(self) -> None:
        """End LMDeploy's engine with its thread and workers, and reset the state."""
        pipeline, self._pipeline = self._pipeline, None
        for running in self._running.values():
            running.serving.cancel()
        self._reset()
        if pipeline is not None:
            _bounded(pipeline.close, CLOSE_S, "close")

    # --- sampling ---------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Completion:
        self._check_usable()
        self.check_length(request)
        name = request.request_id
        if name in self._running:
            raise EngineError(f"request: {name}: is outstanding already; give each an id of its own")
        running = self._running[name] = _Running(request)
        try:
            running.prompt = await self._prompt(request)
            if self._running.get(name) is not running:  # made anew, or closed meanwhile
                return running.completion("abort")
            return await self._served(running)
        finally:
            if self._running.get(name) is running:
                del self._running[name]

    async def _served(self, running: _Running) -> Completion:
        """Let LMDeploy sample a request, and wait for it."""
        running.serving = self._spawn(self._serve(running))
        waited = asyncio.wrap_future(running.serving)
        try:
            while not (await asyncio.wait([waited], timeout=LOOK_S))[0]:
                self._check_valid()
        except asyncio.CancelledError:
            self.abort([running.request.request_id])
            await asyncio.wait([waited], timeout=CLOSE_S)
            raise
        return running.completion("abort") if waited.cancelled() else waited.result()

    async def _prompt(self, request: Request) -> dict[str, Any]:
        """A prompt as LMDeploy takes it; requests of equal prompts with images that wait at once share their tensors.

        Raises RequestRefused: it makes other tokens of images than the trainer.
        """
        if not has_images(request.prompt_ids):
            return {"input_ids": list(request.prompt_ids)}
        key = tuple(request.prompt_ids)
        if key not in self._making:
            self._making[key] = making = asyncio.ensure_future(self._shown(request))
            making.add_done_callback(lambda _: self._making.pop(key, None))
        try:
            return await asyncio.shield(self._making[key])
        except ValueError as error:
            name = request.request_id
            raise RequestRefused(name, f"request: {name}: {error}") from error

    async def _shown(self, request: Request) -> dict[str, Any]:
        """A prompt with images as LMDeploy takes it. Raises ValueError: it does not make what the trainer makes."""
        images = request.images or images_shown(request.prompt_ids)
        try:
            pixels = await asyncio.to_thread(
                lambda: [resized(open_image(shown.image), self.spec.max_pixels) for shown in images]
            )
            made = await self._with_tensors(once_per_image(request.prompt_ids, self._placeholder), pixels)
        except Exception as error:  # its processors fail in types of their own
            raise ValueError(f"LMDeploy refuses its images ({first_line(error)})") from error
        ids = [self._placeholder if token < 0 else token for token in request.prompt_ids]
        if made["input_ids"] != ids:
            raise ValueError(
                f"LMDeploy makes {len(made['input_ids'])} tokens of its prompt with images, the trainer {len(ids)}; "
                "give both the same --max_pixels, or use --infer_backend transformers"
            )
        return made

    async def _with_tensors(self, ids: list[int], images: list[Image.Image]) -> dict[str, Any]:
        """Ids with one placeholder per image -> what LMDeploy samples with."""
        parts = [{"type": "image_data", "image_data": {"data": image}} for image in images]
        message = {"role": "user", "content": [{"type": "text", "text": ids}, *parts]}
        made = await self._engine.prompt_processor.get_prompt_input([message], do_preprocess=False)
        return {"input_ids": list(made["input_ids"]), "multimodal": made["multimodal"]}

    def check_length(self, request: Request) -> None:
        """Also refuses a temperature above LMDeploy's maximum."""
        super().check_length(request)
        if request.sampling.temperature > api_.HIGHEST_TEMPERATURE:
            raise RequestRefused(
                request.request_id,
                f"--temperature: {request.sampling.temperature}: LMDeploy takes at most {api_.HIGHEST_TEMPERATURE}; "
                "use a lower one, or another engine",
            )

    async def _serve(self, running: _Running) -> Completion:
        """On LMDeploy's loop: sample a request, and once more if it exceeds its time limit."""
        for tries in range(MAX_TRIES):
            try:
                return running.completion(await self._sample(running))
            except _TooLong:
                self.counters.late += 1
                if tries < MAX_TRIES - 1:
                    running.start_again()
            except Exception as error:  # only this request fails
                if "ENGINE_STOP_ERROR" in str(error):
                    self._dead = f"LMDeploy's engine has stopped ({first_line(error)})"
                break
        return running.completion("error")

    async def _sample(self, running: _Running) -> FinishReason:
        """On LMDeploy's loop: one try of a request. Raises _TooLong."""
        engine, request = self._engine, running.request
        config = api_.generation_config(
            self._api, request.sampling, self.room(request), self.spec.eos_token_ids, self.placeholders
        )
        running.session = engine.session_mgr.get()
        reason: FinishReason | None = None
        loop, limit = asyncio.get_running_loop(), asyncio.timeout(None)
        try:
            async with limit, running.session.request_handle() as handle:
                if running.aborted:
                    return "abort"
                async with engine.safe_run(
                    handle,
                    session=running.session,
                    **running.prompt,
                    gen_config=config,
                    stream_output=True,
                ) as outputs:
                    async for output in outputs:
                        reason = self._take(running, output)
                        if limit.when() is None and running.token_ids and request.limit_s < math.inf:
                            limit.reschedule(loop.time() + request.limit_s)
                        if reason is not None and output.status == self._api.ResponseType.SUCCESS:
                            return reason  # LMDeploy does not check stop texts; the exit cancels the request
        except Exception as error:  # LMDeploy wraps errors and suppresses cancellations
            if limit.expired():
                raise _TooLong from None
            raise error.__cause__ or error from None
        finally:
            engine.session_mgr.remove(running.session)
        if limit.expired():
            raise _TooLong
        return reason or ("abort" if running.aborted else "error")

    def _take(self, running: _Running, output: Any) -> FinishReason | None:
        """Add an output to its request; returns the finish reason if the request ends with it."""
        status, types, request = output.status, self._api.ResponseType, running.request
        if status not in (types.SUCCESS, types.FINISH, types.CANCEL):
            raise EngineError(f"request: {request.request_id}: LMDeploy answers {status.name}")
        rows = output.logprobs or []
        if status != types.CANCEL and len(rows) < len(output.token_ids):
            raise EngineError(f"request: {request.request_id}: tokens came without log-probs")
        for token, row in zip(output.token_ids, rows, strict=False):
            if token not in row:
                raise EngineError(f"request: {request.request_id}: token {token} came without its log-prob")
            running.add([int(token)], [min(float(row[token]), 0.0)], self.version)
            self.counters.decode_rows += 1
            if ends_with_stop(running.token_ids, request.sampling.stop, self._tokenizer):
                return "stop"
        if status == types.FINISH:  # also with a full KV cache
            ends = {*self.spec.eos_token_ids, *request.sampling.stop_token_ids}
            return "stop" if running.token_ids and running.token_ids[-1] in ends else "length"
        return "abort" if status == types.CANCEL or running.aborted else None

    def so_far(self, request_id: str) -> SoFar:
        running = self._running.get(request_id)
        return ((), (), ()) if running is None else (list(running.token_ids), list(running.logprobs), [])

    def abort(self, request_ids: Collection[str] | None = None) -> None:
        for name, running in list(self._running.items()):
            if request_ids is None or name in request_ids:
                running.aborted = True
                if running.session is not None and self._pipeline is not None:
                    self._spawn(running.session.async_abort())

    # --- weights ----------------------------------------------------------------------------------------------

    def _load(self, stream: WeightStream) -> str:
        """Call `update_params` once per bucket."""
        self._check_fits(stream, self.expected.check(stream.manifest))
        dtype, digest = torch_dtype(self.spec.dtype), StreamDigest()
        for bucket in self._received(stream):
            bucket.add_to(digest)
            # the handles are valid while these tensors exist; they must outlive the call
            copies = [
                {name: placed(tensor, device, dtype) for name, tensor in bucket.tensors} for device in self.spec.devices
            ]
            handles = [self._api.serialize_state_dict(copy) for copy in copies]
            request = self._api.UpdateParamsRequest(
                serialized_named_tensors=handles if len(handles) > 1 else handles[0], finished=not stream.missing
            )
            _bounded(
                functools.partial(self._engine.engine.update_params, request),
                self.spec.limit_s,
                "update_params",
                SyncFailed,
            )
            del bucket, copies, handles, request  # before the next one is gathered
        if self._asleep:  # sampling needs the KV cache
            self._unconfirmed = digest.hexdigest()
        else:
            self._confirm(stream.version, digest.hexdigest())
        return digest.hexdigest()

    def _outstanding(self) -> int:
        return len(self._running)

    def reset_caches(self) -> None:
        """No effect: prefix caching is off, so no keys and values outlive their request."""
        self._check_alive()

    def _confirm(self, version: int, digest: str) -> None:
        """Sample the probe after an update with this digest. Raises SyncFailed: the weights did not arrive."""
        where = f"weights: version {version} for lmdeploy"
        sampling = SamplingParams(max_new_tokens=PROBE_TOKENS, temperature=1.0, seed=1)
        running = _Running(Request("probe", self._probe["input_ids"], sampling), prompt=self._probe)
        try:
            reason = self._wait_for(self._sample(running), self.spec.limit_s, "probe")
        except EngineDead:
            raise
        except Exception as error:
            raise SyncFailed(f"{where}: the probe after the update failed ({first_line(error)})") from error
        if reason not in ("stop", "length") or not running.logprobs:
            raise SyncFailed(f"{where}: the probe after the update ended with {reason!r}")
        sample = running.token_ids, running.logprobs
        (former_digest, former_sample), self._probed = self._probed, (digest, sample)
        unchanged = former_sample == sample and former_digest != digest
        self._unchanged_probes = self._unchanged_probes + 1 if unchanged else 0
        if self._unchanged_probes >= UNCHANGED_LIMIT:
            raise SyncFailed(
                f"{where}: {self._unchanged_probes} updates in a row with changed weights left all "
                f"{len(running.logprobs)} log-probs of the probe as they were, so they do not arrive"
            )

    # --- memory -----------------------------------------------------------------------------------------------

    def _fall_asleep(self, level: SleepLevel) -> tuple[int, list[str]]:
        before = self._free_bytes()
        self._wait_for(self._engine.sleep(level), self.spec.limit_s, f"sleep({level})")
        return self._free_bytes() - before, []

    def _free_bytes(self) -> int:
        return sum(int(torch.cuda.mem_get_info(index)[0]) for index in api_.device_indexes(self.spec))

    def _wake_up(self, tag: Tag) -> None:
        async def wake_up() -> None:  # on LMDeploy's loop, because it sets asyncio events
            self._engine.wakeup([tag])

        self._wait_for(wake_up(), self.spec.limit_s, f"wake({tag})")
        if tag in self._engine.sleeping_tags:
            raise EngineError(f"engine: lmdeploy: {tag} did not wake")

    def wake(self, tags: Sequence[Tag] = ALL_TAGS) -> bool:
        """See `InferenceEngine.wake`; also samples the probe for an update during sleep."""
        if not super().wake(tags):
            return False
        digest, self._unconfirmed = self._unconfirmed, ""
        if digest and not self._dropped:
            try:
                self._confirm(self.version, digest)
            except SyncFailed as error:
                self._invalidate(str(error))
                raise
        return True

    # --- LMDeploy's loop ----------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._pipeline.internal_thread.loop)

    def _wait_for(self, work: Coroutine[Any, Any, Any], seconds: float, what: str) -> Any:
        """Run a coroutine on LMDeploy's loop; the engine is dead if it takes longer."""
        try:
            return _result(self._spawn(work), seconds, what)
        except EngineDead:
            self._dead = self._dead or f"{what} did not end within {seconds:.0f} s"
            raise


def placed(tensor: Tensor, device: str, dtype: torch.dtype) -> Tensor:
    """A contiguous copy or view of the tensor on `device` in `dtype`; integers keep their dtype."""
    target = dtype if tensor.dtype.is_floating_point else tensor.dtype
    return tensor.detach().to(device=device, dtype=target).contiguous()


def _bounded(call: Callable[[], Any], seconds: float, what: str, error_type: type[SwiftError] = EngineDead) -> Any:
    """Call on a new thread and wait up to `seconds`; a call that takes longer is abandoned with its thread."""
    return _result(on_thread(call, f"lmdeploy {what}"), seconds, what, error_type)


def _result(future: Future[Any], seconds: float, what: str, error_type: type[SwiftError] = EngineDead) -> Any:
    """The result of a future; `error_type` after `seconds`."""
    if not concurrent.futures.wait([future], seconds).done:
        future.cancel()
        raise error_type(f"engine: lmdeploy: {what} did not end within {seconds:.0f} s")
    return future.result()


__all__ = ["LMDeployEngine", "build", "require"]
