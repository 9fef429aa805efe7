"""An inference engine for tests: it samples from a hash instead of a model, and fails and dawdles as it is told.

A token depends on the request's seed, its position and the weights that the engine holds, so weights that arrive late
or not at all change what is sampled, and equal runs sample equal tokens however long anything took.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from contextlib import contextmanager

import torch

from swift.errors import EngineDead, SyncFailed
from swift.rollout.engines.base import Capabilities, EngineCounters
from swift.rollout.engines.stepped import SteppedEngine
from swift.rollout.weights.base import Ack, Bucket, TensorInfo
from swift.rollout.weights.digest import StreamDigest
from swift.types import Completion

VOCABULARY = 199


class ScriptedEngine(SteppedEngine):
    """Samples one token of every outstanding request per step.

    Args:
        step_s: seconds of a step; a callable is asked before every step.
        order: rearranges what ends in the same step.
        fail_after: raises `failure`, one time, when so many completions were delivered.
        lose, twice: ids that never come, or come twice. spoil: id -> reason with which it ends after two tokens.
        stuck: a step does nothing until `abort` ("abort") or `close` ("close") is called.
        update_failures: one entry per update, in order: None, or (stage, error) with stage begin, send or commit.
        shares_weights, tensor_parallel_size, lora: as in `Capabilities`.
    """

    def __init__(
        self,
        *,
        step_s=0.0,
        order=None,
        fail_after=None,
        failure=None,
        lose=(),
        twice=(),
        spoil=None,
        stuck=None,
        update_failures=(),
        rebuild_failure=None,
        shares_weights=False,
        tensor_parallel_size=1,
        max_model_len=4096,
        lora=False,
    ):
        super().__init__()
        self.capabilities = Capabilities(
            name="scripted",
            logprob_support="full",
            shares_weights=shares_weights,
            max_model_len=max_model_len,
            tensor_parallel_size=tensor_parallel_size,
            in_flight_updates=True,
            lora=lora,
        )
        self.counters = EngineCounters()
        self.version = 0
        self.step_s = step_s if callable(step_s) else lambda: step_s
        self.order = order or list
        self.fail_after = fail_after
        self.failure = failure or EngineDead("engine: scripted: it died, as it was told to")
        self.lose, self.twice, self.spoil = set(lose), set(twice), dict(spoil or {})
        self.stuck = stuck
        self.update_failures = deque(update_failures)
        self.rebuild_failure = rebuild_failure
        self.weights = b""
        self.events = []
        """What was asked of it: ("submit", id, version), ("update", version), ("rebuild",), ("pause",), ..."""
        self.overlaps = []
        """Calls that came while another thread was inside: there must be none."""
        self.delivered = 0
        self._outstanding = {}
        self._broke = None
        self._aborting = set()
        self._paused = False
        self._closed = False
        self._released = threading.Event()
        self._inside = None

    # --- sampling ---------------------------------------------------------------------------------------------

    def submit(self, request):
        with self._alone("submit"):
            if self._closed:
                raise self._dead()
            assert request.request_id not in self._outstanding, "asked for twice"
            self.events.append(("submit", request.request_id, self.version))
            self._outstanding[request.request_id] = _Row(request, self.room(request))

    def advance(self):
        if self._broke is not None:
            error, self._broke = self._broke, None
            raise error
        if (ended := self._ended_by_a_step()) is None:
            return None
        done = []
        try:
            done.extend(ended)
        except Exception as error:
            if not done:
                raise
            self._broke = error  # after what it has delivered
        return done

    def so_far(self, request_id):
        row = self._outstanding.get(request_id)
        return (row.tokens, [], []) if row else ((), (), ())

    def _ended_by_a_step(self):
        with self._alone("advance"):
            return None if self._paused or not self._outstanding else self._delivered(self._step())

    def _delivered(self, ended):
        for completion in ended:
            if self.fail_after is not None and self.delivered >= self.fail_after:
                self._outstanding.clear()
                self.fail_after = None
                raise self.failure
            self.delivered += 1
            yield completion

    def _step(self):
        if self.stuck is not None:
            assert self._released.wait(60), "nobody ended the stuck step"
        time.sleep(self.step_s())
        if self._closed:
            raise self._dead()
        ended = []
        for name, row in list(self._outstanding.items()):
            if name not in self._aborting:
                row.add(self.weights, self.version)
            reason = row.reason(self.spoil.get(name)) if name not in self._aborting else "abort"
            if reason is not None:
                del self._outstanding[name]
                self._aborting.discard(name)  # an id may come again
                ended += [row.completion(reason)] * (0 if name in self.lose else 2 if name in self.twice else 1)
        return self.order(ended)

    def abort_submitted(self, request_ids):
        self.events.append(("abort",))
        self._aborting |= set(self._outstanding) & set(self._outstanding if request_ids is None else request_ids)
        if self.stuck == "abort":
            self._released.set()

    def pause(self):
        self.events.append(("pause",))
        self._paused = True

    def resume(self):
        self.events.append(("resume",))
        self._paused = False

    # --- weights ----------------------------------------------------------------------------------------------

    def update(self, stream):
        stage, error = (self.update_failures.popleft() if self.update_failures else None) or ("", None)
        with self._alone("update"):
            assert self._paused or not self._outstanding, "new weights while requests are outstanding"
            if stage == "begin":
                raise error
            content, digest = hashlib.blake2b(digest_size=8), StreamDigest()
            try:
                for bucket in stream:
                    if stage == "send":
                        raise error
                    self.take(bucket)
                    for name, tensor in bucket.tensors:
                        content.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
                        digest.add(name, tensor)
                        del tensor
                    del bucket
                if stage == "commit":
                    raise error
                ack = Ack(stream.version, stream.count, stream.nbytes, digest.hexdigest())
                stream.check(ack, "scripted")
            except BaseException:
                self.events.append(("update aborted", stream.version))
                if stream.count:
                    self.weights = b"a part of them"
                raise
            self.weights, self.version = content.hexdigest().encode(), stream.version
            self.events.append(("update", self.version))
            return ack

    def take(self, bucket):
        """Called for each bucket of an update."""

    def rebuild(self):
        self.events.append(("rebuild",))
        if self.rebuild_failure is not None:
            raise self.rebuild_failure
        self.version, self.weights = 0, b""

    def close(self):
        self.events.append(("close",))
        self._closed = True
        self._released.set()

    def _dead(self):
        return EngineDead("engine: scripted: it is closed")

    @contextmanager
    def _alone(self, call):
        """Notes a call that comes while another thread is inside."""
        me = threading.get_ident()
        if self._inside not in (None, me):
            self.overlaps.append(call)
        before, self._inside = self._inside, me
        try:
            yield
        finally:
            self._inside = before


class _Row:
    """One request on its way; a sixth of them is several times as long as the others."""

    def __init__(self, request, room):
        self.request, self.tokens, self.spans = request, [], []
        long = request.sampling.seed % 6 == 0
        self.length = min(room, 1 + request.sampling.seed % 4 + (9 if long else 0))

    def add(self, weights, version):
        if not self.spans or self.spans[-1][0] != version:
            self.spans.append((version, len(self.tokens)))
        text = b"%d %d %s" % (self.request.sampling.seed, len(self.tokens), weights)
        self.tokens.append(hashlib.blake2b(text, digest_size=2).digest()[0] % VOCABULARY)

    def reason(self, spoiled):
        if spoiled is not None:
            return spoiled if len(self.tokens) >= 2 or len(self.tokens) >= self.length else None
        return "stop" if len(self.tokens) >= self.length else None

    def completion(self, reason):
        ends = [start for _, start in self.spans[1:]] + [len(self.tokens)]
        versions = [(version, start, end) for (version, start), end in zip(self.spans, ends, strict=False)]
        logprobs = [-1.0 - token / VOCABULARY for token in self.tokens]
        return Completion(self.request.request_id, list(self.tokens), logprobs, reason, versions=versions)


class CountingSource:
    """Weights in buckets of one tensor each; `made` collects how far every update's gathers were followed."""

    made: list[list[str]]

    def __init__(self, tensors, made=None):
        self.tensors = tensors
        self.walked = []
        if made is not None:
            made.append(self.walked)

    def manifest(self):
        return tuple(TensorInfo.of(name, tensor) for name, tensor in self.tensors.items())

    def buckets(self):
        for name, tensor in self.tensors.items():
            self.walked.append(name)
            yield Bucket([(name, tensor)])
        self.walked.append("end")


def weights_of(tensors):
    """What the scripted engine holds after an update: the state that its tokens depend on."""
    engine = ScriptedEngine()
    engine.load_weights(CountingSource(tensors), 1)
    return engine.weights


def lost(version=1):
    """An update that did not arrive."""
    return SyncFailed(f"weights: version {version}: lost on the way, as told")


def two_layers(value):
    """Weights whose every bit depends on `value`."""
    return {"layer.0": torch.full((3, 2), float(value)), "layer.1": torch.arange(4.0) * value}
