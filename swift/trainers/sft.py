"""`swift sft` and `swift pt`: supervised tuning and pre-training with TRL's SFTTrainer.

Rows are encoded here (`sft_data`), put together (`sft_packing`) or streamed (`sft_stream`).
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from swift.errors import ConfigError
from swift.startup import collector_resting
from swift.trainers.sft_packing import PackedRows, Packing, require_packed
from swift.trainers.trl.method import Encoded, Method, causal_model

if TYPE_CHECKING:
    from swift.data.loading import Purpose, Rows
    from swift.models.template import Template

MOST = 2048
"""Length of packed rows where no flag gives it and the model has a longer context."""


def training_template(template: Template) -> str | None:
    """TRL's variant of the model's template, which keeps all turns and marks the assistant's; None without one."""
    if template.marked or not template.tokenizer.chat_template:
        return None
    from trl.chat_template_utils import get_training_chat_template

    try:
        return get_training_chat_template(template.tokenizer)
    except ValueError:  # one that TRL does not know
        return None


def encode(args: Any, template: Template, *, purpose: Purpose) -> Encoded:
    """Training rows, evaluation rows (None without any), and lines to print about both."""
    with collector_resting():
        import datasets  # noqa: F401  # what encoding needs

        from swift.data.loading import load_rows
        from swift.models.policy import context_length
        from swift.trainers.sft_data import ChatEncoder, encode_rows
        from swift.trainers.sft_stream import RowStream, open_stream

        template.training_template = training_template(template)
    length, packing = args.max_length or context_length(args), None
    if args.packing:
        packing = Packing(args.packing_strategy, args.packing_length or args.max_length or min(length or MOST, MOST))
        length = min(length or packing.length, packing.length)
    loss = "all" if purpose == "text" else args.loss_tokens
    cut = args.packing and args.packing_strategy != "bfd" and not (args.max_length and args.packing_length)
    encoder = ChatEncoder(template, None if cut else length, loss)
    cached = args.load_from_cache_file and not args.dry_run
    tokenised = functools.partial(encode_rows, encoder=encoder, num_proc=args.dataset_num_proc, cached=cached)
    if args.streaming:
        train, lines = open_stream(RowStream(args, encoder, purpose), packing)
    else:
        rows = load_rows(args, "train", purpose=purpose)
        train, report = tokenised(rows, packing=packing)
        lines = [*rows.report.lines(), *report.lines("train")]
    val = load_rows(args, "val", purpose=purpose)
    lines += val.report.lines()
    tables = {}
    for name, part in parts_of(val).items():
        tables[name], report = tokenised(part, split="val", packing=packing if cut else None)
        lines += report.lines(name)
    metric = args.metric_for_best_model.removeprefix("eval_")
    watched = args.load_best_model_at_end or args.early_stopping_patience
    if watched and len(tables) > 1 and not metric.startswith(tuple(f"{name}_" for name in tables)):
        names = " or ".join(f"{name}_loss" for name in tables)
        raise ConfigError(f"--metric_for_best_model: {metric}: there are several evaluation sets; use {names}")
    return train, tables if len(tables) > 1 else tables.get("val"), lines


def parts_of(rows: Rows) -> dict[str, list[dict[str, Any]]]:
    """The rows of each dataset, by the name that metrics have of it: "val" for a single one, nothing for none."""
    every = list(rows)
    if len(rows.sizes) < 2:
        return {"val": every} if every else {}
    parts: dict[str, list[dict[str, Any]]] = {}
    for text, size in rows.sizes:
        name = PurePath(text.partition("#")[0]).name.partition(".")[0].replace(":", "_")
        while name in parts:
            name += "_"
        parts[name], every = every[:size], every[size:]
    return parts


def _load_model(args: Any) -> Any:
    model = causal_model(args)
    if args.packing or args.padding_free:
        require_packed(model, args)
    return model


def _options(args: Any) -> dict[str, Any]:
    """What SFTConfig has beside the settings of every method."""
    return {
        "max_length": None,  # rows over it are left out already, never cut
        "dataset_kwargs": {"skip_prepare_dataset": True},
        # rows are packed already, all strategies with their boundaries
        "packing": args.packing,
        "padding_free": args.padding_free,
        "loss_type": args.loss_type,
        "activation_offloading": args.activation_offloading,
        "router_aux_loss_coef": args.router_aux_loss_coef,
    }


SFT = Method(
    trainer="trl:SFTTrainer",
    config="trl:SFTConfig",
    encode=functools.partial(encode, purpose="chat"),
    load_model=_load_model,
    options=_options,
    overrides=(PackedRows,),
    logged=("mean_token_accuracy",),
)

PT = dataclasses.replace(SFT, encode=functools.partial(encode, purpose="text"), plain=True)
