"""The plan of a run without rollouts: supervised tuning, and methods that learn from given preferences."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

from swift.planning.report import Plan, buckets_of, described, trained_in

if TYPE_CHECKING:
    from swift.planning.devices import Device
    from swift.planning.trl_step import RowShape
    from swift.trainers.trl.method import Method

DEFAULT_TOKENS = 2048
"""Of a row, if nothing says."""

PAIRED = ("dpo", "ipo", "orpo", "simpo", "cpo", "rm")
"""Modes whose rows are two answers."""


def plan_trl(mode: str, method: Method, args: Any, policy: Any, device: Device, processes: int, asked: Any) -> Plan:
    """The plan of a run of a method of TRL, whose policy is on "meta"."""
    from swift.arguments.modes import command_of
    from swift.planning.cost import optimizer_of
    from swift.planning.sharded import world_of
    from swift.planning.trl_step import trace_trl
    from swift.trainers.parallel.sequence import data_ranks
    from swift.trainers.trl.run import parts_beside

    parts, shape = parts_beside(args, method, policy), shape_of(args, asked)
    cost = trace_trl(
        mode,
        method,
        args,
        policy,
        parts,
        shape,
        device,
        optimizer=functools.partial(optimizer_of, args),
        world=world_of(args, processes),
    )
    rows = shape.rows * data_ranks(args, processes) * args.gradient_accumulation_steps
    noun = "pair" if mode in PAIRED else "packed row" if shape.packed > 1 else "row"
    if noun == "pair":
        what = f"pairs of answers, each {shape.tokens:,} tokens with its prompt"
    else:
        what = f"rows of {shape.tokens:,} tokens"
    prompt = f", {shape.prompt_tokens:,} of them the prompt's" if mode != "pt" else ""
    packed = f", {shape.packed} in each packed row" if shape.packed > 1 else ""
    return Plan(
        title=f"plan: swift {command_of(mode)}: {described(args)}; {what}{prompt}{packed}",
        device=device,
        devices=processes,
        cost=cost,
        phases=trained_in(cost, buckets_of(args, cost, processes)),
        step_s={"passes": cost.training_s, "update": cost.update_s},
        steps=_steps(args, asked.num_rows, rows * shape.packed),
        rows=rows,
        noun=noun,
        tokens_per_step=rows * shape.packed * shape.tokens * (2 if noun == "pair" else 1),
        price_per_hour=asked.price_per_hour,
        heads=getattr(policy.config.get_text_config(), "num_attention_heads", 1),
    )


def shape_of(args: Any, asked: Any) -> RowShape:
    """The rows of a micro-batch."""
    from swift.planning.trl_step import RowShape

    tokens, packed = asked.row_tokens or args.max_length or DEFAULT_TOKENS, 1
    if getattr(args, "packing", False):
        length = args.packing_length or args.max_length or DEFAULT_TOKENS
        tokens = min(tokens, length)
        packed = length // tokens
    return RowShape(args.per_device_train_batch_size, min(asked.prompt_tokens, tokens // 2), tokens, packed)


def _steps(args: Any, num_rows: int | None, rows_per_step: int) -> int | None:
    """Optimizer steps of the run; None if they are not known."""
    if args.max_steps > 0:
        return int(args.max_steps)
    return math.ceil(math.ceil(num_rows / rows_per_step) * args.num_train_epochs) if num_rows else None
