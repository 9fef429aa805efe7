"""`swift rlhf --rlhf_type grpo`: puts the parts together, trains, and says how it ended.

The order is that of cost: what can be wrong in the settings, the data and the rewards is found before weights are
loaded, and weights are loaded before the run's folder is made, so a start that fails leaves nothing behind.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift.startup import collector_resting

if TYPE_CHECKING:
    from swift.arguments import Resolved
    from swift.trainers.engines import EngineSetup
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
    from swift.trainers.session import SignalTrap, find_start, join_processes, require_packages

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
            trap.check("rlhf", collectives, start)
            bind_trainer(placement, int(os.environ.get("LOCAL_RANK", "0")))
            with parts.heartbeat:
                _load_and_train(resolved, parts, trap)
        finally:
            parts.rewards.close()
    return 0


def _load_and_train(resolved: Resolved, parts: Parts, trap: SignalTrap) -> None:
    """Load the model, start the engines, train, and end the engines whatever happens."""
    with collector_resting():
        from swift.trainers.grpo.build import build_engines, load_models

        model, reference = load_models(parts.args)
        setup = build_engines(parts, model)
    try:
        trap.check("rlhf", parts.collectives, parts.start)
        _train(resolved, parts, trap, model, reference, setup)
    finally:
        setup.close()


def _train(resolved: Resolved, parts: Parts, trap: SignalTrap, model: Any, reference: Any, setup: EngineSetup) -> None:
    """Open the run's folder, train, and record how it ended."""
    from swift.observability.run_dir import RunDirectory, rank_log_file
    from swift.trainers.checkpoint import clean_staging
    from swift.trainers.grpo.attempt import Attempt
    from swift.trainers.session import Outcome

    args, collectives, start = parts.args, parts.collectives, parts.start
    home = RunDirectory(args.output_dir, add_version=args.add_version, resume_run=start.run_dir)
    opened: tuple[str, int] | None = None
    if collectives.is_main:
        home.open(
            argv=sys.argv,
            settings=resolved.to_json(),
            config_file=Path(resolved.config) if resolved.config else None,
            changed=start.changed,
            start_step=start.step,
        )
        clean_staging(home.path)
        parts.rewards.log_to(rank_log_file(home.path, home.attempt, 0).with_name("rewards.log"))
        if parts.eval_prompts is not None and args.split_dataset_ratio > 0:
            parts.eval_prompts.write_jsonl(home.path / "val_dataset.jsonl")
        opened = str(home.path), home.attempt
    folder, number = collectives.broadcast(opened)
    logs = rank_log_file(Path(folder), number, 0).parent
    setup.keep_logs(logs)
    outcome, attempt = Outcome(), None
    try:
        with collector_resting():
            attempt = Attempt(resolved, parts, Path(folder), number, model, reference, setup, trap)
        attempt.run()
    except BaseException as error:
        outcome = Outcome.of(error)
        raise
    finally:
        setup.close()
        setup.store_logs(logs)
        if collectives.is_main:
            end_step = max(start.step, attempt.trainer.state.global_step if attempt is not None else 0)
            home.finish(end_step=end_step, exit_code=outcome.exit_code, reason=outcome.reason)
