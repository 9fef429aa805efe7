"""The training processes of an elastic run on one node: fewer after a loss, all of them again later.

    lost      The run continues with the remaining processes, or with the most of them that can share its batches.
    returned  After a new checkpoint the run is stopped, which saves, and started with all processes.
    trial     A start with all processes that ends before it has made a checkpoint is followed by one with as many as
              before. Each such failure in a row doubles the number of checkpoints until the next trial.

A process that is lost takes its accelerator with it: the next start leaves that device out, a trial has it again.
Between two losses in a row without a checkpoint the number shrinks, so a run that cannot go on ends. No processes,
files or clocks here: `swift.cli.launcher` owns them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from swift.elastic import BATCH_PROCESSES, Progress
from swift.errors import ConfigError, counted

if TYPE_CHECKING:
    from swift.cli.launcher import LaunchPlan


@dataclass(slots=True)
class Crew:
    """The processes of the next start.

    full: of the launch. can_share: whether so many can share the batches of the run. devices: names of the visible
    accelerators, those of the processes first; none on a CPU.
    """

    full: int
    can_share: Callable[[int], bool]
    devices: Sequence[str] = ()
    count: int = field(init=False)
    wait: int = 1
    """Checkpoints until all processes are tried."""
    _present: list[int] = field(init=False)  # which of the processes are there; more than `count`, if not all can share
    _before_trial: tuple[int, list[int]] | None = None

    def __post_init__(self) -> None:
        self.count, self._present = self.full, list(range(self.full))

    @property
    def sizes(self) -> list[int]:
        """The numbers of processes below all of them with which the run can go on, ascending."""
        return [number for number in range(1, self.full) if self.can_share(number)]

    def environment(self) -> dict[str, str]:
        """The variables of the next start beside those of every launch."""
        own = {BATCH_PROCESSES: str(self.full)}
        if self.devices and len(self._present) < self.full:
            order = [*self._present[: self.count], *range(self.full, len(self.devices))]  # engines have the last ones
            own["CUDA_VISIBLE_DEVICES"] = ",".join(self.devices[number] for number in order)
        return own

    def is_due(self, progress: Progress) -> bool:
        """Whether a start that has come so far is to be stopped for one with all processes."""
        return self.count < self.full and progress.made >= self.wait and not progress.ends

    def take_back(self) -> None:
        """The next start has all processes."""
        self._before_trial = self.count, self._present
        self.count, self._present = self.full, list(range(self.full))

    def survives(self, lost: Collection[int], progress: Progress) -> bool:
        """Whether the run goes on after a start that failed and has lost these local ranks, perhaps none."""
        if self._before_trial is not None and not progress.made:
            (self.count, self._present), self._before_trial = self._before_trial, None
            self.wait *= 2
            return True
        if not lost:
            return False
        if self.count == self.full and progress.made:
            self.wait = 1
        self._before_trial = None
        self._present = [number for rank, number in enumerate(self._present) if rank not in lost]
        self.count = next((number for number in range(len(self._present), 0, -1) if self.can_share(number)), 0)
        return self.count > 0


def can_share(args: Any, full: int, number: int) -> bool:
    """Whether `number` processes can share the batches of a run of `full`.

    In grpo completions are dealt one by one, so any number can. Rows of other methods are dealt in micro-batches of
    `--per_device_train_batch_size`, of which each process has as many.
    """
    copies = args.fsdp_replicas if args.fsdp else 1
    colocated = getattr(args, "vllm_mode", None) == "colocate"
    whole_groups = number % args.sequence_parallel_size == 0
    whole_copies = copies == 1 or (number % copies == 0 and number > copies)
    whole_engines = not colocated or number % args.vllm_tensor_parallel_size == 0
    dealt = not hasattr(args, "num_generations")
    even = not dealt or full * args.gradient_accumulation_steps % number == 0
    return whole_groups and whole_copies and whole_engines and even


def crew_of(args: Any, plan: LaunchPlan | None, devices: Sequence[str] = ()) -> Crew | None:
    """The processes of a launch with `--elastic true`; None without, or where another launcher starts them.

    Raises ConfigError: no process can leave this launch.
    """
    if plan is None or not args.elastic:
        return None
    if plan.num_nodes > 1:
        raise ConfigError(
            f"--elastic: true: NNODES={plan.num_nodes}: the launcher of a node does not know of the processes of "
            f"others; start torchrun --nnodes 1:{plan.num_nodes} on each (docs/distributed_training.md), or use "
            "--elastic false"
        )
    devices_given = [name for name in getattr(args, "vllm_device", None) or [] if name != "auto"]
    if devices and devices_given:
        raise ConfigError(
            f"--elastic: true: --vllm_device {' '.join(devices_given)}: other devices have these numbers once a "
            "process is lost; use --vllm_device auto, or --elastic false"
        )
    crew = Crew(plan.local_ranks, lambda number: can_share(args, plan.local_ranks, number), devices)
    if not crew.sizes:
        raise ConfigError(
            f"--elastic: true: fewer than {counted(plan.local_ranks, 'process')} cannot share the batches of this run "
            "(--sequence_parallel_size, --fsdp_replicas, --vllm_tensor_parallel_size, --gradient_accumulation_steps); "
            "start more, or use --elastic false"
        )
    return crew
