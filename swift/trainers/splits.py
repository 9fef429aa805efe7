"""Training and evaluation rows of a method: a table or a stream, and a table of each evaluation set."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from swift.errors import ConfigError
from swift.trainers.row_stream import RowStream, open_stream
from swift.trainers.rows import Encoder, encode_table

if TYPE_CHECKING:
    from swift.data.loading import Example, Purpose, Rows
    from swift.trainers.sft_packing import Packing
    from swift.trainers.trl.method import Encoded


def encode_splits(
    args: Any,
    encoder: Encoder,
    purpose: Purpose,
    *,
    held_out: Encoder | None = None,
    packing: Packing | None = None,
    packs_val: bool = False,
) -> Encoded:
    """Training rows, evaluation rows (by dataset if there are several, None without any), and lines to print.

    held_out: encodes evaluation rows, if not `encoder`. packs_val: whether those are packed, too.

    Raises:
        ConfigError: wrong data, or no usable row.
    """
    from swift.data.loading import load_rows

    sees = encoder.template.vision is not None
    options = {
        "num_proc": args.dataset_num_proc,
        "cached": getattr(args, "load_from_cache_file", False) and not args.dry_run,
        "strict": args.strict,
    }
    if getattr(args, "streaming", False):
        train, lines = open_stream(RowStream(args, encoder, purpose), packing, args.max_epochs)
    else:
        rows = load_rows(args, "train", purpose=purpose, images=sees)
        train, report = encode_table(rows.examples, encoder, packing=packing, **options)
        lines = [*rows.report.lines(), *report.lines("train")]
    val = load_rows(args, "val", purpose=purpose, images=sees)
    lines += val.report.lines()
    tables = {}
    for name, part in parts_of(val).items():
        packed = packing if packs_val else None
        tables[name], report = encode_table(part, held_out or encoder, split="val", packing=packed, **options)
        lines += report.lines(name)
    metric = args.metric_for_best_model
    watched = args.load_best_model_at_end or getattr(args, "early_stopping_patience", None)
    if watched and len(tables) > 1 and not is_of_one(metric, tables):
        names = " or ".join(f"{name}_loss" for name in tables)
        raise ConfigError(f"--metric_for_best_model: {metric}: there are several evaluation sets; use {names}")
    return train, tables if len(tables) > 1 else tables.get("val"), lines


def is_of_one(metric: str, names: Iterable[str]) -> bool:
    """Whether a metric belongs to one of several evaluation sets, by its prefix."""
    return metric.removeprefix("eval_").startswith(tuple(f"{name}_" for name in names))


def parts_of(rows: Rows) -> dict[str, list[Example]]:
    """The rows of each dataset by its name in metrics: "val" for a single one; empty without rows."""
    examples = rows.examples
    if len(rows.sizes) < 2:
        return {"val": examples} if examples else {}
    parts: dict[str, list[Example]] = {}
    for text, size in rows.sizes:
        name = PurePath(text.partition("#")[0]).name.partition(".")[0].replace(":", "_")
        while name in parts:
            name += "_"
        parts[name], examples = examples[:size], examples[size:]
    return parts
