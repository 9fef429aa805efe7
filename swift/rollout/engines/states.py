"""The states of an engine that has weights and memory of its own, and what is allowed in each.

    awake -- sleep(1|2) --> asleep -- wake(weights) --> weights awake -- wake(kv_cache) --> awake
    valid -- update --> valid                                        (a failure half-way: invalid, until `rebuild`)
    alive -- a fatal failure --> dead, until `rebuild`               (close: for ever)

A backend says how it falls asleep and wakes up; the order, and the errors of everything out of order, are here.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from swift.errors import (
    EngineAsleep,
    EngineDead,
    EngineError,
    RequestRefused,
    SyncFailed,
    first_line,
    is_out_of_memory,
)
from swift.rollout.engines.base import ALL_TAGS, Health, InferenceEngine, SleepLevel, SleepReport, Tag
from swift.rollout.engines.expected_weights import few
from swift.rollout.weights.base import Ack, Bucket, WeightStream
from swift.rollout.weights.broadcast import Announcement, BroadcastReceiver
from swift.types import Request


class StatefulEngine(InferenceEngine):
    """An engine with these states; call `_reset_states` before anything else.

    Attributes:
        name: of the backend.
        keeps_base: only adapters are synced, so that level 2 of `sleep` must not drop the base weights.
        vocab_size: ids of a prompt are below it.
        placeholders: tokens that no prompt may have, as they stand for images; see `swift.models.vision`.
    """

    name: str
    keeps_base = False
    vocab_size: int
    placeholders: Sequence[int] = ()
    _closed = False
    _new: Any = ()  # requests that the next step begins

    def _reset_states(self) -> None:
        """The states of a new engine."""
        self.version = self._base_version = 0
        self._paused = False
        self._asleep: set[Tag] = set()
        self._dropped = False  # level 2 took the weights; an update brings them back
        self._invalid = ""  # why the weights cannot be used, until `rebuild`
        self._dead = ""  # why nothing works any more, until `rebuild`

    @property
    def invalid(self) -> str:  # type: ignore[override]
        return self._invalid

    @abstractmethod
    def _fall_asleep(self, level: SleepLevel) -> tuple[int, list[str]]:
        """Release memory of an idle, awake engine; bytes freed, and remarks."""

    @abstractmethod
    def _wake_up(self, tag: Tag) -> None:
        """Allocate one kind of memory again."""

    @abstractmethod
    def _outstanding(self) -> int:
        """The number of outstanding requests, after those that `abort` has named are ended."""

    @abstractmethod
    def _load(self, stream: WeightStream) -> str:
        """Replace the weights by these; returns the digest of what has arrived in the model.

        Raises SyncFailed before the first bucket: the manifest does not fit the model.
        """

    def update(self, stream: WeightStream) -> Ack:
        self._check_takes_weights()
        try:
            digest = self._load(stream)
            ack = Ack(stream.version, stream.count, stream.nbytes, digest)
            stream.check(ack, self.name)
            self._weights_arrived(stream.version)
        except BaseException as error:
            known = isinstance(error, SyncFailed | EngineDead)
            cause = first_line(error) if known else f"{type(error).__name__}: {first_line(error)}"
            if stream.count:
                self._invalidate(f"the update to version {stream.version} was given up half-way ({cause})")
            if known or not isinstance(error, Exception):
                raise
            where = f"weights: version {stream.version} for {self.name}"
            raise SyncFailed(f"{where}: {cause}; rebuild the engine") from error
        return ack

    def _check_fits(self, stream: WeightStream, problems: Sequence[str]) -> None:
        if problems:
            raise SyncFailed(f"weights: version {stream.version} for {self.name}: {few(problems)}")

    def _received(self, stream: WeightStream) -> Iterator[Bucket]:
        """The buckets; this process takes those out of a broadcast that are announced."""
        for bucket in stream:
            yield self._receiver.receive(bucket) if isinstance(bucket, Announcement) else bucket
            del bucket  # before the next one is gathered

    def leave_broadcast(self) -> None:
        self._receiver.close()

    @functools.cached_property
    def _receiver(self) -> BroadcastReceiver:
        """This process's end of broadcasts."""
        first = self.capabilities.devices[0]
        return BroadcastReceiver(torch.device("cpu" if first.startswith("cpu") else first))

    def _check_takes_weights(self) -> None:
        self._check_takes("new weights")

    def _weights_arrived(self, version: int) -> None:
        """All weights of an update are in."""
        self._dropped = False
        self.version = self._base_version = version

    def sleep(self, level: SleepLevel) -> SleepReport:
        self._check_valid()
        if level not in self.capabilities.sleep_levels:
            raise self._unsupported(f"sleep({level})")
        notes = []
        if level == 2 and self.keeps_base:
            level, notes = 1, ["base weights are kept: only adapters are synced"]
        if level == 0 or (self._asleep == set(ALL_TAGS) and (level == 1 or self._dropped)):
            return SleepReport()
        self._check_idle(f"sleep({level})", kept=False)
        if self._asleep:
            self._wake_for_sleep()
        freed, more = self._fall_asleep(level)
        self._asleep, self._dropped = set(ALL_TAGS), self._dropped or level == 2
        return SleepReport(max(0, freed), "; ".join([*more, *notes]))

    def _wake_for_sleep(self) -> None:
        """No backend goes from one level to the other; a KV cache that has no room stays asleep."""
        try:
            self.wake()
        except Exception as error:
            if "weights" in self._asleep or not is_out_of_memory(error):
                raise

    def wake(self, tags: Sequence[Tag] = ALL_TAGS) -> bool:
        """See `InferenceEngine.wake`; a tag that does not sleep, or does not exist, never reaches the backend.

        vLLM and LMDeploy would ignore the whole call.
        """
        self._check_alive()
        unknown = [tag for tag in tags if tag not in ALL_TAGS]
        if unknown:
            raise self._unsupported(f"wake({', '.join(unknown)}); valid: {', '.join(ALL_TAGS)}")
        if "kv_cache" in tags and "weights" in self._asleep and "weights" not in tags:
            raise EngineAsleep(f"engine: {self.name}: wake kv_cache: its weights are still asleep; wake them first")
        for tag in ALL_TAGS:
            if tag in tags and tag in self._asleep:
                self._wake_up(tag)
                self._asleep.discard(tag)
        return not self._asleep

    def check_length(self, request: Request) -> None:
        """Also refuses ids that are no tokens of the model."""
        super().check_length(request)
        name = request.request_id
        ids = [token for token in request.prompt_ids if token >= 0] if self.capabilities.images else request.prompt_ids
        if not 0 <= min(ids, default=-1) <= max(ids) < self.vocab_size:
            raise RequestRefused(
                name,
                f"request: {name}: its prompt has token ids outside of 0..{self.vocab_size - 1}; tokenize it with the "
                "model's tokenizer",
            )
        if not set(self.placeholders).isdisjoint(ids):
            raise RequestRefused(
                name, f"request: {name}: its prompt has a token that stands for an image; leave it out"
            )

    def health(self) -> Health:
        reason = "closed" if self._closed else self._dead or self._invalid
        if reason:
            return Health(False, reason)
        if self._asleep:
            return Health(True, f"asleep ({', '.join(sorted(self._asleep))})")
        return Health(True, "awake, but sleep(2) dropped its weights" if self._dropped else "")

    def _invalidate(self, reason: str) -> None:
        self._invalid = self._invalid or reason

    def _check_alive(self) -> None:
        if self._closed:
            raise EngineDead(f"engine: {self.name}: closed: it cannot be used any more")

    def _check_valid(self) -> None:
        self._check_alive()
        if self._dead:
            raise EngineDead(f"engine: {self.name}: {self._dead}; rebuild the engine")
        if self._invalid:
            raise SyncFailed(f"engine: {self.name}: {self._invalid}; rebuild the engine")

    def _check_usable(self) -> None:
        self._check_valid()
        if self._asleep:
            asleep = ", ".join(sorted(self._asleep))
            raise EngineAsleep(f"engine: {self.name}: asleep ({asleep}): it cannot sample; wake it")
        if self._dropped:
            raise EngineAsleep(f"engine: {self.name}: its weights were dropped by sleep(2); sync them before sampling")

    def _check_takes(self, what: str) -> None:
        self._check_valid()
        if "weights" in self._asleep:
            raise EngineAsleep(f"engine: {self.name}: asleep: it takes no {what}; wake its weights first")
        self._check_idle(what)

    def _check_idle(self, what: str, *, kept: bool = True) -> None:
        """Raises EngineError when requests are outstanding; `kept`: paused ones may be."""
        count, keeps = self._outstanding() + len(self._new), self.capabilities.in_flight_updates and kept
        if count and not (keeps and self._paused):
            raise EngineError(
                f"engine: {self.name}: {what} while {count} requests are outstanding; drain or abort them"
                + (", or pause" if keeps else "")
            )
