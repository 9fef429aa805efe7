"""`swift rlhf --rlhf_type grpo`: what a run consists of, in the order in which it is made.

The order is that of cost: what can be wrong in the settings, the data and the rewards is found before weights are
loaded, and weights are loaded before the run's folder is made, so a start that fails leaves nothing behind. What is
made is closed in reverse order, also after an error; the process group only after success.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

from swift.devices import own_device
from swift.startup import collector_resting
from swift.trainers.hub import check_hub, push

if TYPE_CHECKING:
    from swift.arguments import Resolved
    from swift.trainers.grpo.prepare import Parts
    from swift.trainers.session import OpenRun


def run(resolved: Resolved) -> int:
    """Train with GRPO; returns the exit code.

    Raises:
        ConfigError, ResourceError: settings, data, rewards, model or checkpoint cannot be used.
        RewardError: reward functions broke their contract.
        NumericError: rollout engine and trainer disagree, or gradients stay non-finite.
        Interrupted: a signal came; the checkpoint is saved.
    """
    from swift.trainers.session import (
        SignalTrap,
        continue_elastic,
        find_start,
        join_processes,
        leave_processes,
        require_packages,
    )

    args: Any = resolved.args
    require_packages(args)
    with SignalTrap() as trap, contextlib.ExitStack() as cleanup:
        with collector_resting():
            from swift.trainers.engines import bind_trainer, build_engines, find_placement
            from swift.trainers.grpo.prepare import prepare
            from swift.trainers.parallel.sequence import sharing_lines

            placement = find_placement(args, prefetch_given="prefetch_depth" in resolved.given)
            collectives = join_processes(args)
            continue_elastic(args, collectives)
            start = find_start(args, resolved.to_json(), collectives.world_size)
            with collectives.together():
                if collectives.is_main:
                    check_hub(args)
            lines = sharing_lines(args, collectives.world_size)
            parts = prepare(args, collectives, start, placement)  # template, data, rewards, batch sizes
            parts.lines += lines
        rewards = parts.rewards
        cleanup.callback(rewards.close)
        if collectives.is_main:
            rewards.start()  # the processes that score
            rewards.self_check(parts.first_prompts, max_steps=parts.plan.max_steps)
            rewards.load_models(args, own_device())
        if (teacher := parts.teacher) is not None:
            cleanup.callback(teacher.close)
            with collectives.together():
                if teacher.everywhere or collectives.is_main:
                    prompts = [prompt.token_ids for prompt in parts.first_prompts[:8]]
                    parts.lines.append(teacher.check(parts.template, prompts))
        trap.check("rlhf", collectives, start)
        if placement.engines:
            bind_trainer(placement, int(os.environ.get("LOCAL_RANK", "0")))
        cleanup.enter_context(parts.heartbeat)
        if args.rollout_source == "nemo_gym":
            from swift.rollout.sources.nemo_gym.start import serving

            def check() -> None:
                if trap.caught is not None:
                    raise trap.stopped("rlhf", start)

            servers = serving(parts.play, args, collectives, policy_servers=placement.servers, interrupted=check)
            cleanup.enter_context(servers)
        with collector_resting():
            from swift.models.rates import Rates
            from swift.models.tuners import expert_lines
            from swift.trainers.grpo.build import load_models

            model, beside = load_models(args, parts.template)
            parts.lines += [*expert_lines(model, args), *Rates.of(args).lines(model, args)]
            setup = cleanup.enter_context(contextlib.closing(build_engines(parts, model)))
        from swift.trainers.grpo.attempt import Attempt
        from swift.trainers.session import open_run

        trap.check("rlhf", collectives, start)
        opened = cleanup.enter_context(open_run(resolved, collectives, start))  # the run's folder and its logs
        cleanup.enter_context(setup.logs_in(opened.log.path.parent))
        if collectives.is_main:
            _open_other_files(parts, opened)
        with collector_resting():
            attempt = Attempt(resolved, parts, opened, model, beside, setup, trap)  # the trainer and its pipeline
        opened.steps = lambda: attempt.trainer.state.global_step
        attempt.run()  # parity check, training, summary
    leave_processes(collectives)  # other ranks do not wait for an upload
    if collectives.is_main:
        for line in push(args, opened.folder, attempt.trainer):
            print(line, flush=True)
    return 0


def _open_other_files(parts: Parts, opened: OpenRun) -> None:
    """Logs of other processes, and the evaluation rows that were split off."""
    from swift.data.loading import write_examples

    parts.rewards.log_to(opened.log.path.with_name("rewards.log"))
    if (child := getattr(parts.play, "child", None)) is not None:
        child.log_to(opened.log.path.with_name("nemo_gym.log"))
    if parts.eval_prompts is not None and parts.args.split_dataset_ratio > 0:
        write_examples(parts.eval_prompts.examples, opened.folder / "val_dataset.jsonl")
