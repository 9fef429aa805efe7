"""The plan of a run without rollouts: supervised tuning, and methods that learn from given preferences."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

from swift.errors import ConfigError, counted
from swift.planning.report import PROMPT_TOKENS, Plan, buckets_of, described, shown_in, trained_in

if TYPE_CHECKING:
    from swift.planning.devices import Device
    from swift.planning.images import DrawnImages
    from swift.planning.trl_step import RowShape
    from swift.trainers.trl.method import Method

DEFAULT_TOKENS = 2048
"""Of a row, if nothing says."""


def plan_trl(
    mode: str,
    method: Method,
    args: Any,
    policy: Any,
    device: Device,
    processes: int,
    asked: Any,
    images: DrawnImages | None = None,
) -> Plan:
    """The plan of a run of a method of TRL, whose policy is on "meta"."""
    from swift.arguments.modes import command_of
    from swift.models.rope import context_of
    from swift.planning.cost import optimizer_of
    from swift.planning.sharded import world_of
    from swift.planning.trl_step import trace_trl
    from swift.trainers.parallel.sequence import data_ranks
    from swift.trainers.trl.run import parts_beside

    config = policy.config.get_text_config()
    vision = images.vision if images else None
    parts = parts_beside(args, method, policy, vision)
    shape = shape_of(mode, args, asked, context_of(config, args), images)
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
    noun = "packed row" if shape.packed > 1 else "document" if shape.anchors else "row"
    if (method.rows or noun).endswith("pair"):
        noun = "pair"
        what = f"pairs of answers, each {shape.tokens:,} tokens with its prompt"
    else:
        what = f"{noun if shape.anchors else 'row'}s of {shape.tokens:,} tokens"
    if shape.anchors:
        what += f" with {counted(len(shape.anchors), 'block')}"
    prompt = f", {shape.prompt_tokens:,} of them the prompt's" if shape.prompt_tokens and mode != "pt" else ""
    packed = f", {shape.packed} in each packed row" if shape.packed > 1 else ""
    return Plan(
        title=f"plan: swift {command_of(mode)}: {described(args)}; {what}{prompt}{packed}{shown_in(images)}",
        device=device,
        devices=processes,
        cost=cost,
        phases=trained_in(cost, buckets_of(args, cost, processes)),
        step_s={"passes": cost.training_s, "update": cost.update_s},
        steps=_steps(args, asked, shape, rows),
        rows=rows,
        noun=noun,
        tokens_per_step=rows * shape.packed * shape.tokens * (2 if noun == "pair" else 1),
        price_per_hour=asked.price_per_hour,
        heads=getattr(config, "num_attention_heads", 1),
    )


def shape_of(mode: str, args: Any, asked: Any, context: int | None, images: DrawnImages | None = None) -> RowShape:
    """The rows of a micro-batch; `context`: the longest sequence of the model.

    Raises ConfigError: the run would leave such rows out.
    """
    from swift.planning.images import prompt_of
    from swift.planning.trl_step import RowShape

    packing, longest = getattr(args, "packing", False), args.max_length or context
    default = min(longest or DEFAULT_TOKENS, DEFAULT_TOKENS)
    length = (args.packing_length or args.max_length or default) if packing else longest
    tokens = asked.row_tokens or args.max_length or default
    cut = mode == "ebft_strided" or (packing and args.packing_strategy != "bfd")
    if length is not None and tokens > length:
        if not cut:
            raise ConfigError(f"--row_tokens: {tokens}: rows of more than {length} tokens are left out by the run")
        tokens = length
    if mode == "ebft_strided":
        return _documents(args, tokens, asked.prompt_tokens or 0)
    shown = tuple(images.ids) if images else ()
    prompt = prompt_of(images, asked.prompt_tokens, min(PROMPT_TOKENS, max(0, tokens - len(shown)) // 2))
    if prompt >= tokens:
        raise ConfigError(
            f"--prompt_tokens: {prompt}: leaves nothing of the {tokens} tokens of a row; see --row_tokens"
        )
    counts_prompts = mode == "pt" or getattr(args, "loss_tokens", None) == "all"
    packed = length // tokens if packing and length else 1
    return RowShape(args.per_device_train_batch_size, prompt, tokens, packed, counts_prompts, shown)


def _documents(args: Any, tokens: int, prompt: int) -> RowShape:
    """Documents of strided EBFT, with as many blocks as fit.

    Raises ConfigError: none fits.
    """
    from swift.models.attention.strided import block_anchors
    from swift.planning.trl_step import RowShape

    length, first = args.ebft_generate_max_len, max(args.ebft_context_length, prompt)
    anchors = tuple(block_anchors(tokens, length=length, stride=args.ebft_stride, first=first))
    if not anchors:
        raise ConfigError(
            f"--row_tokens: {tokens}: no block of {length} tokens (--ebft_generate_max_len) fits behind "
            f"the first {first}"
        )
    return RowShape(args.per_device_train_batch_size, prompt, tokens, anchors=anchors)


def _steps(args: Any, asked: Any, shape: RowShape, batch: int) -> int | None:
    """Optimizer steps of the run, of so many rows each; None if they are not known."""
    if args.max_steps > 0:
        return int(args.max_steps)
    if not asked.num_rows:
        return None
    trained = asked.num_rows - int(asked.num_rows * args.split_dataset_ratio)
    rows = math.ceil(trained * (asked.row_tokens or shape.tokens) / (shape.packed * shape.tokens))
    passes = rows * args.gradient_accumulation_steps / batch  # of all processes
    per_epoch = math.ceil(
        (int(passes) if args.dataloader_drop_last else math.ceil(passes)) / args.gradient_accumulation_steps
    )
    return math.ceil(per_epoch * args.num_train_epochs)
