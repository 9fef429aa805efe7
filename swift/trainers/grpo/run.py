"""`swift rlhf --rlhf_type grpo`: puts the parts together, trains, and says how it ended.

The order is that of cost: what can be wrong in the settings, the data and the rewards is found before weights are
loaded, and weights are loaded before the run's folder is made, so a start that fails leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import os
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from swift.devices import own_device
from swift.startup import collector_resting

if TYPE_CHECKING:
    from swift.arguments import Resolved
    from swift.trainers.grpo.prepare import Parts
    from swift.trainers.session import SignalTrap


def run(resolved: Resolved) -> int:
    """The mode; returns the exit code.

    Raises:
        ConfigError, ResourceError: settings, data, rewards, model or checkpoint cannot be used.
        RewardError: reward functions broke their contract.
        NumericError: rollout engine and trainer disagree, or gradients stay non-finite.
        Interrupted: a signal came; the checkpoint is saved.
    """
    from swift.trainers.session import SignalTrap, find_start, join_processes, leave_processes, require_packages

    args: Any = resolved.args
    require_packages(args)
    with SignalTrap() as trap:
        with collector_resting():
            from swift.trainers.engines import bind_trainer, find_placement
            from swift.trainers.grpo.prepare import prepare

            placement = find_placement(args, prefetch_given="prefetch_depth" in resolved.given)
            collectives = join_processes(args.ddp_timeout, always=bool(args.deepspeed or args.fsdp))
            start = find_start(args, resolved.to_json(), collectives.world_size)
            parts = prepare(args, collectives, start, placement)
        try:
            if collectives.is_main:
                parts.rewards.start()
                parts.rewards.self_check(parts.first_prompts, max_steps=parts.plan.max_steps)
                parts.rewards.load_models(args, own_device())
            trap.check("rlhf", collectives, start)
            bind_trainer(placement, int(os.environ.get("LOCAL_RANK", "0")))
            with parts.heartbeat, _environments(parts, trap):
                _load_and_train(resolved, parts, trap)
        finally:
            parts.rewards.close()
    leave_processes(collectives)
    return 0


def _environments(parts: Parts, trap: SignalTrap) -> AbstractContextManager[None]:
    """Servers that make or score completions, ready inside."""
    if parts.args.rollout_source != "nemo_gym":
        return contextlib.nullcontext()
    from swift.rollout.nemo_gym.start import serving

    def check() -> None:
        if trap.caught is not None:
            raise trap.stopped("rlhf", parts.start)

    servers = parts.placement.servers
    return serving(parts.play, parts.args, parts.collectives, policy_servers=servers, interrupted=check)


def _load_and_train(resolved: Resolved, parts: Parts, trap: SignalTrap) -> None:
    """Load the model, start the engines, open the run's folder, and train."""
    with collector_resting():
        from swift.models.tuners import expert_lines
        from swift.trainers.engines import build_engines
        from swift.trainers.grpo.build import load_models

        model, reference = load_models(parts.args, len(parts.template.tokenizer))
        parts.lines += expert_lines(model, parts.args)
        setup = build_engines(parts, model)
    with contextlib.closing(setup):
        from swift.data.loading import write_examples
        from swift.trainers.grpo.attempt import Attempt
        from swift.trainers.session import open_run

        trap.check("rlhf", parts.collectives, parts.start)
        with open_run(resolved, parts.collectives, parts.start) as opened, setup.logs_in(opened.log.path.parent):
            if parts.collectives.is_main:
                parts.rewards.log_to(opened.log.path.with_name("rewards.log"))
                if (child := getattr(parts.play, "child", None)) is not None:
                    child.log_to(opened.log.path.with_name("nemo_gym.log"))
                if parts.eval_prompts is not None and parts.args.split_dataset_ratio > 0:
                    write_examples(parts.eval_prompts.examples, opened.folder / "val_dataset.jsonl")
            with collector_resting():
                attempt = Attempt(resolved, parts, opened, model, reference, setup, trap)
            opened.steps = lambda: attempt.trainer.state.global_step
            attempt.run()
