"""Colocation: trainer and engine take turns on the memory of one device.

    train            generate                                             train
    ------------ 1 2 3 ----- 4 ----- 5 ---------- 6 ---------- 7 ----- 8 ------------
    trainer      offloaded                                              back
    engine           weights | synced | KV cache | sampling | asleep

    1  the optimizer's state, then the model move to the host          --offload_optimizer, --offload_model
    2  garbage and the device's cache are released                     --gc_collect_after_offload, or for lack of memory
    3  the engine's weights wake                                       --sleep_level >= 1
    4  weight sync, from the host copies if the model moved            when due; always after level 2
    5  the KV cache wakes; now the engine is complete
    6  the body of the context runs: it samples
    7  the engine sleeps                                               --sleep_level >= 1
    8  model, then optimizer state return to the device; random states are restored

The flags do not change training: every tensor has the same bits, and every random generator the same state, as without
them. Inside the context the generators are seeded from the seed of the run and the step.

After a failure the trainer is restored before the error is raised, so that a checkpoint can be saved. An error on one
rank is raised on all of them. A sharded policy (ZeRO-3, FSDP2) is gathered on its device, so its model is offloaded
after step 4 instead of in step 1. On a CPU nothing moves: the host is the device. If the engine samples with the
trainer's own weights, the model is not offloaded either.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import set_seed

from swift.errors import ConfigError, EngineDead, ResourceError, SwiftError, end_process, is_out_of_memory
from swift.models.sharded import is_sharded, reading_from
from swift.observability.memory import (
    MIB,
    MemoryFigures,
    collect_garbage,
    freed_between,
    measure,
    memory_line,
    too_little,
)
from swift.rollout.engines.process import same_randomness
from swift.rollout.seeds import sample_seed
from swift.trainers.memory.offload import Offloader, model_tensors, optimizer_tensors

if TYPE_CHECKING:
    from swift.observability.metrics import MetricStore
    from swift.rollout.engines.base import InferenceEngine, SleepLevel
    from swift.rollout.weights.sync import WeightSync
    from swift.trainers.distributed import Collectives

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Turn:
    """One turn of the engine. freed, expected: bytes of the trainer. short: whether expected memory was not freed."""

    step: int
    trainer_stays: bool
    freed: int = 0
    expected: int = 0
    short: bool = False
    figures: list[MemoryFigures] = field(default_factory=list)


class ColocateCycle:
    """The `GenerationPhase` of an engine in the trainer's process; see the module's docstring.

    limit_s: longest time of sleep or wake, in seconds (`--engine_timeout`); then the process ends, because a thread
    that hangs cannot be interrupted. log: writes memory lines and notes. metrics: for `memory/...` and
    `health/memory_not_freed`. warn: shows a warning. copies_on_host: move tensors even if host and device are the same
    memory, for tests. notes: offload flags without effect, one line each.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        weight_sync: WeightSync,
        *,
        sleep_level: SleepLevel,
        offload_model: bool,
        offload_optimizer: bool,
        gc_collect_after_offload: bool,
        limit_s: float,
        log: Callable[[str], None],
        metrics: MetricStore,
        ranks: Collectives,
        device: torch.device,
        warn: Callable[[str], None] | None = None,
        copies_on_host: bool = False,
    ) -> None:
        can = engine.capabilities
        if sleep_level and sleep_level not in can.sleep_levels:
            raise ConfigError(
                f"--sleep_level: {sleep_level}: the {can.name} engine of this run cannot sleep so; valid: "
                + ", ".join(map(str, sorted({0, *can.sleep_levels})))
            )
        self.engine, self.weight_sync = engine, weight_sync
        self.sleep_level: SleepLevel = sleep_level
        self.limit_s = limit_s
        self.device, self.ranks, self.metrics = device, ranks, metrics
        moves = device.type != "cpu" or copies_on_host
        flags = {"model": offload_model, "optimizer": offload_optimizer}
        self.notes = _notes(can.name, [name for name, on in flags.items() if on], moves, can.shares_weights)
        self._offload_model = offload_model and moves and not can.shares_weights
        self._offload_optimizer = offload_optimizer and moves
        self._collects = gc_collect_after_offload
        self._log, self._warn = log, warn or logger.warning
        self._model = self._optimizer = Offloader(tuple, device)
        self._sharded: Callable[[], bool] = lambda: False
        self._asleep = False
        self._lost = False
        self._needs: Mapping[str, int] = {}
        """Bytes of the engine when it was last awake."""
        self._logged: set[str] = set()

    def attach(
        self,
        model: nn.Module,
        optimizer_of: Callable[[], torch.optim.Optimizer | None],
        *,
        beside: Sequence[nn.Module] = (),
    ) -> None:
        """Set the models and the optimizer that are offloaded: the unwrapped policy, and its optimizer once it exists.

        `beside` are frozen models that are used in training only, such as a KL reference.
        """

        def of_models() -> Iterator[torch.Tensor]:
            for offloaded in (model, *beside):
                yield from model_tensors(offloaded)

        self._model = Offloader(of_models, self.device)
        self._optimizer = Offloader(lambda: optimizer_tensors(optimizer_of()), self.device, keep=of_models)
        self._sharded = lambda: is_sharded(model)

    @contextlib.contextmanager
    def __call__(self, step: int, *, current: bool = False, trainer_stays: bool = False) -> Iterator[None]:
        """Collective context in which the engine may sample; see `GenerationPhase`. They do not nest.

        Raises:
            EngineError: the engine failed; on every rank. The trainer is restored.
            ResourceError: out of memory, for the engine or the trainer.
        """
        turn = _Turn(step, trainer_stays)
        with same_randomness():
            try:
                self._begin(turn, current)
                set_seed(sample_seed(torch.initial_seed(), f"rank {self.ranks.rank}", step, int(current)) % 2**32)
                yield
            except BaseException:
                self._end(turn, failed=True)
                raise
            self._end(turn, failed=False)

    def sleep(self) -> None:
        """Put an engine that is awake to sleep until its first turn; collective."""
        if self.sleep_level and not self._asleep:
            with self._memory_step():
                self._sleep(None)

    def doze(self) -> None:
        """Let an engine that is awake sleep until `rouse`, with its weights on the host; collective."""
        if self.sleep_level and not self._asleep and 1 in self.engine.capabilities.sleep_levels:
            with self._memory_step():
                self._sleep(None, 1)

    def rouse(self) -> None:
        """Wake an engine that dozes, outside of a turn; collective."""
        if self._asleep:
            with self._memory_step():
                self._wake("weights")
                self._wake("kv_cache")
            self._asleep = False

    def _begin(self, turn: _Turn, current: bool) -> None:
        """Steps 1 to 5."""
        self.ranks.barrier()
        self._record(turn, "before", 0)
        models = [self._model] if self._offload_model and not turn.trainer_stays else []
        first = [self._optimizer] if self._offload_optimizer and not turn.trainer_stays else []
        late = self._sharded()
        with self._memory_step():
            self._offload(turn, first if late else [*first, *models])
            self._wake("weights")
        with reading_from(self._model.copies()):
            self.weight_sync.update(turn.step, current=current, lost=self._lost)
        self._lost = False
        with self._memory_step():
            if late:
                self._offload(turn, models)
            self._wake("kv_cache")
        self._asleep = False
        turn.short = self._not_freed("trainer", turn.freed, turn.expected)
        self._record(turn, "generate", turn.freed)

    def _end(self, turn: _Turn, *, failed: bool) -> None:
        """Steps 7 and 8; after a failure without a collective, because other ranks may be at another point."""
        freed = 0
        with self.metrics.timer("memory") if failed else self._memory_step():
            try:
                freed = self._sleep_or_close(turn) if failed else self._sleep(turn)
            finally:
                self._restore_trainer()
        self._record(turn, "after", freed)
        if not failed:
            self._report(turn, freed)

    @contextlib.contextmanager
    def _memory_step(self) -> Iterator[None]:
        with self.ranks.together(), self.metrics.timer("memory"):
            yield

    # --- the trainer's memory -----------------------------------------------------------------------------------

    def _offload(self, turn: _Turn, owners: Sequence[Offloader]) -> None:
        """Steps 1 and 2."""
        before = measure(self.device)
        for owner in owners:
            turn.expected += owner.resident_bytes()
            owner.leave()
        if self._collects:
            collect_garbage(self.device)
        turn.freed += freed_between(before, measure(self.device))

    def _restore_trainer(self) -> None:
        """Step 8; if memory does not suffice, torch's cache is released and the step is tried again."""
        for owner in (self._model, self._optimizer):
            try:
                owner.come_back()
            except ResourceError:
                collect_garbage(self.device)
                owner.come_back()

    # --- the engine's memory ------------------------------------------------------------------------------------

    def _wake(self, tag: str) -> None:
        """Steps 3 and 5; after step 5 the engine must be complete."""
        if not self.sleep_level:
            return
        name = self.engine.capabilities.name
        needed = self._needs.get("weights" if tag == "weights" else "kv", 0)
        if self.device.type != "cpu" and measure(self.device).free < needed:
            collect_garbage(self.device)  # an engine that fails half awake cannot try again
        try:
            with _bounded(f"engine: {name}: wake({tag})", self.limit_s):
                complete = self.engine.wake(["weights"] if tag == "weights" else ["kv_cache"])
        except SwiftError:
            raise
        except Exception as error:
            if not is_out_of_memory(error):
                raise EngineDead(f"engine: {name}: wake({tag}) failed ({type(error).__name__}: {error})") from error
            raise ResourceError(self._no_room(tag)) from error
        if tag == "kv_cache" and not complete:
            raise EngineDead(f"engine: {name}: not fully awake after its weights and its KV cache were woken")

    def _no_room(self, tag: str) -> str:
        figures = measure(self.device)
        cached = ((figures.reserved or 0) - (figures.alloc or 0)) // MIB
        return (
            f"engine: {self.engine.capabilities.name}: {figures.free // MIB} MiB of {self.device} are free, which is "
            f"too little to wake its {'weights' if tag == 'weights' else 'KV cache'}; torch keeps {cached} MiB for "
            "later (--gc_collect_after_offload true); else --offload_model true, --offload_optimizer true, or lower "
            "--vllm_gpu_memory_utilization"
        )

    def _sleep(self, turn: _Turn | None, level: SleepLevel | None = None) -> int:
        """Step 7; returns the bytes freed. Requests of a failed round are aborted first."""
        level = level or self.sleep_level
        if not level:
            return 0
        name = self.engine.capabilities.name
        held = self._needs = self.engine.memory()
        with _bounded(f"engine: {name}: sleep({level})", self.limit_s):
            self.engine.empty()
            report = self.engine.sleep(level)
        self._asleep = True
        self._lost = self._lost or level == 2
        note = f"engine: {name}: {report.note}"
        if report.note and note not in self._logged:
            self._logged.add(note)
            self._log(note)
        # on a CPU, pages that were never written take no memory, so the freed bytes cannot be predicted
        short = self._not_freed("engine", report.freed_bytes, sum(held.values()) if self.device.type != "cpu" else 0)
        if turn is not None:
            turn.short |= short
        return report.freed_bytes

    def _sleep_or_close(self, turn: _Turn) -> int:
        """Step 7 after a failure. An engine that cannot sleep is closed, so that the first error is raised."""
        name = f"engine: {self.engine.capabilities.name}"
        try:
            return self._sleep(turn)
        except Exception as error:
            self._log(f"{name}: closed, as it cannot sleep after a failure ({error})")
        before = measure(self.device)
        try:
            with _bounded(f"{name}: close", self.limit_s):
                self.engine.close()
        except Exception as error:
            self._log(f"{name}: not closed after a failure ({error})")
        collect_garbage(self.device)
        return freed_between(before, measure(self.device))

    # --- figures ------------------------------------------------------------------------------------------------

    def _record(self, turn: _Turn, phase: str, freed: int) -> None:
        """One line of the log."""
        figures = measure(self.device)
        turn.figures.append(figures)
        try:
            engine = self.engine.memory()
        except SwiftError:
            engine = {}  # the engine has failed, and its own error is being raised
        held = {
            "trainer": self._model.resident_bytes(),
            "optim": self._optimizer.resident_bytes(),
            "engine_w": engine.get("weights"),
            "engine_kv": engine.get("kv"),
        }
        self._log(memory_line(turn.step, phase, figures, held, freed))

    def _not_freed(self, who: str, freed: int, expected: int) -> bool:
        """Whether expected memory was not freed; warns once."""
        if not too_little(freed, expected):
            return False
        if who not in self._logged:
            self._logged.add(who)
            remedy = "" if self._collects or who == "engine" else "; --gc_collect_after_offload true releases the cache"
            self._warn(
                f"memory: {self.device}: only {freed // MIB} of {expected // MIB} MiB of the {who} were freed{remedy}; "
                "see docs/memory.md"
            )
        return True

    def _report(self, turn: _Turn, engine_freed: int) -> None:
        """Metrics of a turn: this rank's `memory/...`, in MiB, and whether any rank has memory that was not freed."""
        if self.ranks.any(turn.short):
            self.metrics.add("health/memory_not_freed", 1.0)
        figures = turn.figures
        values = {
            "memory/rss_mib_max": max(figure.rss for figure in figures),
            "memory/free_mib_min": min(figure.free for figure in figures),
            "memory/trainer_freed_mib": turn.freed,
            "memory/engine_freed_mib": engine_freed,
        }
        if figures[0].alloc is not None:
            values["memory/alloc_mib_max"] = max(figure.alloc or 0 for figure in figures)
            values["memory/reserved_mib_max"] = max(figure.reserved or 0 for figure in figures)
        self.metrics.add_many({name: value / MIB for name, value in values.items()})


@contextlib.contextmanager
def _bounded(what: str, limit_s: float) -> Iterator[None]:
    """End the process if the body takes longer."""
    error = EngineDead(f"{what}: no end after {limit_s:.0f} s; the engine hangs, or --engine_timeout is too short")
    timer = threading.Timer(limit_s, partial(end_process, error))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _notes(engine: str, given: Sequence[str], moves: bool, shares_weights: bool) -> list[str]:
    """Notes on offload flags (`model`, `optimizer`) without effect."""
    if given and not moves:
        flags = ", ".join(f"--offload_{name}" for name in given)
        return [f"{flags}: true: moves nothing on a CPU, where host and device are the same memory"]
    if "model" in given and shares_weights:
        return [
            f"--offload_model: true: the model stays, because the {engine} engine samples with the trainer's own "
            "weights; --use_vllm true has its own"
        ]
    return []
