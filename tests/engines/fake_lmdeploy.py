"""A stand-in for LMDeploy 0.18.0 at its process boundary: what the adapter uses, with that version's signatures.

Names, fields, defaults, traps and the shape of every answer are copied from 0.18.0's sources; behind them is no model
but a function of the weights it was sent, so that new weights show. Calls are recorded in order in `Recorder.calls`.

Traps that are kept: GenerationConfig's `top_k` 50 and `do_sample` False; `wakeup` ignores a call with a tag that does
not sleep; nothing answers to `update_params`; a failed update leaves half of it behind; only Ray's executor has
`update_params` in the PyTorch engine; inside of `safe_run` a cancellation is swallowed, and errors lose their words.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import importlib.machinery
import itertools
import json
import sys
import threading
import types
from dataclasses import dataclass, field
from pathlib import Path

import torch

VOCABULARY = 64


class ResponseType(enum.Enum):
    SUCCESS = enum.auto()
    FINISH = enum.auto()
    ENGINE_STOP_ERROR = enum.auto()
    CANCEL = enum.auto()


@dataclass
class EngineOutput:
    status: ResponseType
    token_ids: list
    logprobs: list = None


@dataclass
class GenerationConfig:
    n: int = 1
    max_new_tokens: int = 512
    do_sample: bool = False
    top_p: float = 1.0
    top_k: int = 50
    min_p: float = 0.0
    temperature: float = 0.8
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    random_seed: int = None
    stop_words: list = None
    stop_token_ids: list = None
    bad_token_ids: list = None
    min_new_tokens: int = None
    skip_special_tokens: bool = True
    logprobs: int = None
    response_format: dict = None
    include_stop_str_in_output: bool = False
    repetition_ngram_size: int = 0
    repetition_ngram_threshold: int = 0

    def __post_init__(self):
        assert type(self.n) is int and self.n > 0
        assert 0 <= self.top_p <= 1
        assert self.top_k >= 0, "top_k can not be a negative integer"
        assert 0 <= self.temperature <= 2
        assert 0 <= self.min_p <= 1


@dataclass
class PytorchEngineConfig:
    dtype: str = "auto"
    tp: int = 1
    session_len: int = None
    max_batch_size: int = None
    cache_max_entry_count: float = 0.8
    block_size: int = 64
    enable_prefix_caching: bool = False
    device_type: str = "cuda"
    eager_mode: bool = False
    distributed_executor_backend: str = None
    enable_metrics: bool = True
    logprobs_mode: str = None

    def __post_init__(self):
        assert self.dtype in ["auto", "float16", "bfloat16"]
        assert 0 < self.cache_max_entry_count < 1, "invalid cache_max_entry_count"


@dataclass
class UpdateParamsRequest:
    serialized_named_tensors: object
    finished: bool = False


@dataclass
class Recorder:
    """What was called, in order, and how the stand-in is to behave."""

    calls: list = field(default_factory=list)
    handles: dict = field(default_factory=dict)
    environment: list = field(default_factory=list)
    version: str = "0.18.0"
    ignores_updates: bool = False
    fail_update_at: int | None = None
    start_error: BaseException | None = None
    blind: bool = False
    gate: threading.Event | None = None
    step_s: float = 0.0
    hang_close: threading.Event | None = None
    pipelines: list = field(default_factory=list)

    def add(self, name, **what):
        self.calls.append((name, what))

    def names(self):
        return [name for name, _ in self.calls]

    def of(self, name):
        return [what for found, what in self.calls if found == name]


RECORDER = Recorder()


def serialize_state_dict(state_dict: dict) -> str:
    key = f"ipc-{len(RECORDER.handles)}"
    RECORDER.handles[key] = dict(state_dict)
    return key


class _Backend:
    """`lmdeploy.pytorch.engine.Engine`, as far as it is used."""

    def __init__(self, model_path, config):
        self.engine_config = config
        self.max_session_len = (config.session_len or 1024) + 7
        self.weights = _read(model_path)
        self.updates = 0

    def update_params(self, request):
        if self.engine_config.distributed_executor_backend != "ray":
            raise NotImplementedError("Not Implemented.")
        sent = request.serialized_named_tensors
        parts = sent if isinstance(sent, list) else [sent]
        tensors = [RECORDER.handles[one] for one in parts]
        RECORDER.add(
            "update_params", names=list(tensors[0]), finished=request.finished, ranks=len(parts),
            dtypes={str(one.dtype) for one in tensors[0].values()},
        )  # fmt: skip
        if RECORDER.fail_update_at == self.updates:
            raise RuntimeError("CUDA error: planted")
        self.updates += 1
        if not RECORDER.ignores_updates:
            self.weights |= {name: one.clone() for name, one in tensors[0].items()}


def _read(folder):
    from safetensors.torch import load_file

    found = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        found |= load_file(file)
    return {name: one.to(torch.bfloat16) for name, one in found.items()}


class _Handle:
    """`EngineInstance`."""

    def __init__(self, owner):
        self.owner, self.cancelled = owner, set()

    async def async_cancel(self, session_id):
        RECORDER.add("async_cancel", session=session_id)
        self.cancelled.add(session_id)

    async def async_stream_infer(
        self, session_id, input_ids, gen_config=None, multimodal=None, adapter_name=None, stream_output=False, **kwargs
    ):
        RECORDER.add(
            "infer", ids=list(input_ids), config=gen_config, adapter=adapter_name, stream=stream_output,
            multimodal=multimodal,
        )  # fmt: skip
        ids, step, self.sees = list(input_ids), 0, multimodal is not None
        generator = torch.Generator().manual_seed(gen_config.random_seed % 2**63)
        try:
            while True:
                if RECORDER.gate is not None:
                    while not RECORDER.gate.is_set():
                        await asyncio.sleep(0.002)
                        if session_id in self.cancelled:
                            break
                await asyncio.sleep(RECORDER.step_s)
                if session_id in self.cancelled:
                    yield EngineOutput(ResponseType.CANCEL, [])
                    return
                token, row = self._draw(ids, gen_config, generator)
                ids.append(token)
                step += 1
                stopped = token in (gen_config.stop_token_ids or []) and not gen_config.ignore_eos
                done = stopped or step >= gen_config.max_new_tokens
                yield EngineOutput(ResponseType.FINISH if done else ResponseType.SUCCESS, [token], [row])
                if done:
                    return
        except GeneratorExit:
            RECORDER.add("left", session=session_id)
            raise

    def _draw(self, ids, config, generator):
        weights = self.owner.weights.items()
        total = sum(float(one.double().sum()) for name, one in weights if self.sees or "visual" not in name)
        seed = hash((round(total, 6), tuple(ids[-4:]))) % 2**31
        logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed))
        tempered = logits / config.temperature
        if config.top_k:
            tempered = tempered.masked_fill(tempered < tempered.topk(config.top_k).values[-1], -torch.inf)
        drawn = tempered.log_softmax(-1)
        token = int(torch.multinomial(drawn.exp(), 1, generator=generator))
        if self.owner.engine_config.logprobs_mode != "raw_logprobs":
            return token, {}
        return token, {token: float(logits.log_softmax(-1)[token]), (token + 1) % VOCABULARY: -1.0}


class SafeRunException(Exception):
    pass


class RequestError(RuntimeError):
    pass


class _Session:
    def __init__(self, session_id, manager):
        self.session_id, self.manager, self._handle = session_id, manager, None

    @contextlib.asynccontextmanager
    async def request_handle(self):
        self._handle = await self.manager.pool.get()
        try:
            yield self._handle
        except SafeRunException:
            pass
        except (asyncio.CancelledError, GeneratorExit):
            await self._handle.async_cancel(self.session_id)
        finally:
            self.manager.pool.put_nowait(self._handle)
            self._handle = None

    async def async_abort(self):
        if self._handle is not None:
            await self._handle.async_cancel(self.session_id)


class _SessionManager:
    def __init__(self, engine, size):
        self.sessions, self.count = {}, itertools.count()
        self.pool = asyncio.Queue()
        for _ in range(size):
            self.pool.put_nowait(_Handle(engine))

    def get(self, **kwargs):
        session = _Session(next(self.count), self)
        self.sessions[session.session_id] = session
        return session

    def remove(self, session):
        self.sessions.pop(session.session_id, None)


class MultimodalProcessor:
    """Of `VLAsyncEngine`, for ids with images: `preprocess` and `to_pytorch_with_input_ids` of Qwen2-VL."""

    def __init__(self, model_path):
        from transformers import AutoConfig, AutoTokenizer

        from swift.models.vision import load_processor

        config = AutoConfig.from_pretrained(model_path)
        self.image_token_id = config.image_token_id
        processor = load_processor(Path(model_path), config, AutoTokenizer.from_pretrained(model_path))
        self.image_processor = processor.image_processor
        self.made = 0

    async def get_prompt_input(self, prompt, do_preprocess, **kwargs):
        assert not do_preprocess
        self.made += 1
        text, *items = prompt[0]["content"]
        assert text["type"] == "text"
        assert all(item["type"] == "image_data" for item in items)
        preps = []
        for item in items:
            made = self.image_processor(images=[item["image_data"]["data"]], return_tensors="pt")
            tokens = int(made["image_grid_thw"].prod()) // self.image_processor.merge_size**2
            preps.append({**made, "image_tokens": tokens, "image_token_id": self.image_token_id})
        found = text["text"].count(self.image_token_id)
        assert found == len(preps), f"the number of image token id is not equal: {found} vs {len(preps)}"
        ids, rest = [], iter(preps)
        for token in text["text"]:
            if token != self.image_token_id:
                ids.append(token)
                continue
            prep = next(rest)
            prep["offset"] = len(ids)
            ids += [token] * prep["image_tokens"]
        return {"prompt": None, "input_ids": ids, "multimodal": preps}


class AsyncEngine:
    def __init__(self, model_path, config):
        if "vision_config" in json.loads((Path(model_path) / "config.json").read_text()) and not RECORDER.blind:
            self.prompt_processor = MultimodalProcessor(model_path)
            self.vl_encoder = types.SimpleNamespace(model=types.SimpleNamespace(processor=self.prompt_processor))
        self.session_len = config.session_len or 1024
        self.engine = _Backend(model_path, config)
        self.sleeping_tags = set()
        self.session_mgr = _SessionManager(self.engine, config.max_batch_size)

    @contextlib.asynccontextmanager
    async def safe_run(self, handle, session, **kwargs):
        generator = handle.async_stream_infer(session.session_id, **kwargs)
        try:
            yield generator
        except (asyncio.CancelledError, GeneratorExit) as error:
            await asyncio.shield(handle.async_cancel(session.session_id))
            raise SafeRunException(f"Safe run exception for session {session.session_id}") from error
        except Exception as error:
            await asyncio.shield(handle.async_cancel(session.session_id))
            raise RequestError("An internal server error occurred.") from error
        finally:
            await generator.aclose()

    async def sleep(self, level: int = 1):
        RECORDER.add("sleep", level=level)
        self.sleeping_tags = {"weights", "kv_cache"}
        if level == 2:
            self.engine.weights = {}

    def wakeup(self, tags: list[str] | None = None):
        RECORDER.add("wakeup", tags=tags, thread=threading.current_thread().name)
        tags = tags or list(self.sleeping_tags)
        if any(tag not in self.sleeping_tags for tag in tags):
            return
        self.sleeping_tags = self.sleeping_tags - set(tags)

    def close(self):
        RECORDER.add("engine.close")


class _EventLoopThread:
    def __init__(self):
        started = threading.Event()
        self.loop = asyncio.new_event_loop()

        def run():
            asyncio.set_event_loop(self.loop)
            self.loop.call_soon(started.set)
            self.loop.run_forever()

        self.thread = threading.Thread(target=run, name="lmdeploy loop", daemon=True)
        self.thread.start()
        started.wait(10)

    def close(self):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)


class Pipeline:
    def __init__(self, model_path, backend_config=None, log_level="WARNING", trust_remote_code=False, **kwargs):
        import os

        RECORDER.add("Pipeline", model=model_path, config=backend_config, remote_code=trust_remote_code)
        RECORDER.environment.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
        if RECORDER.start_error is not None:
            raise RECORDER.start_error
        self.internal_thread = _EventLoopThread()
        self.async_engine = AsyncEngine(model_path, backend_config)
        RECORDER.pipelines.append(self)

    def close(self):
        RECORDER.add("close")
        if RECORDER.hang_close is not None:
            RECORDER.hang_close.wait(30)
        self.internal_thread.close()
        self.async_engine.close()


def install(monkeypatch, **options):
    """Put the stand-in in LMDeploy's place, on a machine that seems to have GPUs; returns the recorder."""
    global RECORDER
    RECORDER = Recorder(**options)
    contents = {
        "lmdeploy": {
            "Pipeline": Pipeline,
            "PytorchEngineConfig": PytorchEngineConfig,
            "GenerationConfig": GenerationConfig,
        },
        "lmdeploy.version": {"__version__": RECORDER.version},
        "lmdeploy.messages": {"ResponseType": ResponseType, "EngineOutput": EngineOutput},
        "lmdeploy.utils": {"serialize_state_dict": serialize_state_dict},
        "lmdeploy.serve": {},
        "lmdeploy.serve.openai": {},
        "lmdeploy.serve.openai.protocol": {"UpdateParamsRequest": UpdateParamsRequest},
    }
    for name, names in contents.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__path__ = []
        module.__dict__.update(names)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index=0: (1 << 30, 2 << 30))
    return RECORDER
