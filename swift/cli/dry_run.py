"""`--dry_run true`: everything that can be wrong before weights are loaded, and the plan of the run, in words.

Reads the data set and the tokenizer, calls the reward functions on the ground truths and empty answers of the first
rows, and does the arithmetic. Of weights it reads names, shapes and types, and makes the models of the run without
their numbers, by the functions of the run. No file is written.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from swift.cli import launcher
from swift.cli.crew import crew_of
from swift.errors import counted, printable
from swift.rollout import placement

if TYPE_CHECKING:
    from swift.arguments import Resolved
    from swift.rewards.payload import Outcome
    from swift.rewards.pipeline import RewardPipeline
    from swift.types import Prompt

CALLED_ROWS = 4


def dry_run_rlhf(resolved: Resolved) -> int:
    """The dry run of `swift rlhf`; returns 0."""
    from swift.models.policy import check_policy
    from swift.models.rates import Rates
    from swift.models.tuners import expert_lines
    from swift.trainers.distributed import Collectives
    from swift.trainers.grpo.prepare import batch_line, prepare
    from swift.trainers.parallel.sequence import require_shareable, sharing_lines
    from swift.trainers.session import find_start, require_packages

    args: Any = resolved.args
    require_packages(args)
    placed = _place(resolved)
    world_size = launcher.world_size(os.environ)
    start = find_start(args, resolved.to_json(), world_size)
    sharing = sharing_lines(args, world_size)
    parts = prepare(args, Collectives(), start, placed, world_size=world_size)
    parts.lines += sharing
    if (policy := check_policy(args)) is not None:
        from swift.models.features import load_features
        from swift.models.router_loss import router_coefficient
        from swift.trainers.grpo.build import load_beside
        from swift.trainers.grpo.routes import require_experts

        parts.lines += [*expert_lines(policy, args), *Rates.of(args).lines(policy, args)]
        if parts.template.vision is not None:
            parts.template.vision.attach(policy)
        require_shareable(policy, args)
        router_coefficient(args.router_aux_loss_coef, policy)
        require_experts(policy, args.moe_router_replay)
        beside = load_beside(args, policy, len(parts.template.tokenizer))
        if parts.references is not None:
            load_features(args, policy, beside.get("ref_logprobs"))
    prompts = parts.first_prompts
    with parts.rewards as rewards:
        rewards.self_check(prompts, max_steps=parts.plan.max_steps)
        lines = [*parts.lines, _lengths(prompts), *_rewards(rewards, prompts)]
    where = [placement.describe(placed), *placed.notes, *start.notes, *_elastic(args)]
    show(resolved, [*resolved.preset_lines, *where, batch_line(args, parts.plan), *lines])
    return 0


def dry_run_trl(resolved: Resolved) -> int:
    """The dry run of a mode with a trainer of TRL or transformers; returns 0."""
    from swift.models.policy import check_policy
    from swift.models.rates import Rates
    from swift.models.tuners import expert_lines
    from swift.trainers.session import accumulation_of, find_start, require_packages
    from swift.trainers.trl.method import method_of, rows_of
    from swift.trainers.trl.run import parts_beside, plan_line

    args: Any = resolved.args
    require_packages(args)
    placed = _place(resolved)
    method, world_size = method_of(resolved.mode), launcher.world_size(os.environ)
    start = find_start(args, resolved.to_json(), world_size, divides=method.divides(args))
    where = [placement.describe(placed), *placed.notes, *start.notes, *_elastic(args)]
    template = method.template(args)
    train, _, lines = rows_of(args, method, template)
    plan = plan_line(args, train, world_size, accumulation_of(args, start, world_size))
    adapter = []
    if (model := check_policy(args, method.reward_head)) is not None:
        parts_beside(args, method, model, template.vision)
        adapter = [*expert_lines(model, args), *Rates.of(args).lines(model, args)]
    show(resolved, [*where, plan, *lines, *adapter])
    return 0


def dry_run_rollout(resolved: Resolved) -> int:
    """The dry run of `swift rollout`; returns 0."""
    from swift.rollout.server.run import bind, check

    plan = check(resolved.args, resolved.given)
    bind(resolved.args.host, resolved.args.port).close()
    show(resolved, plan.lines())
    return 0


def _elastic(args: Any) -> list[str]:
    """With which numbers of processes an elastic run goes on, in a line. Raises ConfigError: see `crew_of`."""
    crew = crew_of(args, launcher.plan_launch(os.environ))
    if crew is None:
        return []
    return [f"elastic: of {counted(crew.full, 'process')}, {' or '.join(map(str, crew.sizes))} can go on with the run"]


def _place(resolved: Resolved) -> placement.Placement:
    """The placement of engines and trainers."""
    from swift.trainers.engines import find_placement

    return find_placement(
        resolved.args,
        local_ranks=launcher.local_ranks(os.environ),
        prefetch_given="prefetch_depth" in resolved.given,
    )


def _lengths(prompts: Sequence[Prompt]) -> str:
    lengths = [len(prompt.token_ids) for prompt in prompts]
    return (
        f"prompts: {min(lengths)} to {max(lengths)} tokens, mean {statistics.fmean(lengths):.1f} "
        f"(first {counted(len(lengths), 'row')})"
    )


def _rewards(rewards: RewardPipeline, prompts: Sequence[Prompt]) -> list[str]:
    """What each reward gives for the ground truth and for the empty answer of the first rows."""
    from swift.rewards.selfcheck import made_up_group, start_up_texts
    from swift.types import TrainerProgress

    groups = [
        made_up_group(prompt, [text], f"dry-run-{index}-{number}")
        for index, prompt in enumerate(prompts[:CALLED_ROWS])
        for number, text in enumerate(start_up_texts(prompt))
    ]
    results = rewards.probe_each(groups, TrainerProgress(global_step=0, max_steps=0, epoch=0.0))
    lines = []
    for name, weight in zip(rewards.names, rewards.weights, strict=True):
        line = f"reward {name}: weight {weight:g}"
        if name in results:
            shown = [_shown(result) for result in results[name]]
            line += f"; ground truths of the first rows: {' '.join(shown[::2])}; empty answers: {' '.join(shown[1::2])}"
        else:
            line += "; a model, not loaded in a dry run"
        lines.append(line)
    return lines


def _shown(result: Outcome) -> str:
    """A value, `none` where the function does not apply, or what went wrong."""
    if result.kind != "ok":
        return f"{result.kind} ({result.detail})"
    return "none" if result.value is None else f"{result.value:g}"


def show(resolved: Resolved, lines: Sequence[str]) -> None:
    """What was given and what follows from it, with the origin, then the plan; JSON with `--json true`."""
    values = resolved.to_json()
    given = {name: origin for name, origin in resolved.provenance.items() if origin["source"] != "default"}
    derived = {name: origin for name, origin in resolved.provenance.items() if name not in given and origin["rule"]}
    if resolved.args.json:
        settings = {name: {"value": values[name], **origin} for name, origin in {**given, **derived}.items()}
        print(json.dumps({"settings": settings, "plan": list(lines)}, indent=2, ensure_ascii=False))
        return
    width = max(map(len, [*given, *derived]))

    def shown(name: str, whence: str | None) -> str:
        return f"  {name:<{width}} = {json.dumps(values[name], ensure_ascii=False)}  ({whence})".replace("\n", "\\n")

    text = ["given:"]
    for name, origin in given.items():
        whence = origin["rule"] if origin["source"] == "preset" else origin["given_as"]
        text.append(shown(name, f"{origin['source']}: {whence}"))
    text.append("derived:")
    text += [shown(name, origin["rule"]) for name, origin in derived.items()]
    print(printable("\n".join([*text, *lines])))
    print("dry run: all checks passed; no weights were loaded, no file was written")
