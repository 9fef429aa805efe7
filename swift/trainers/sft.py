"""`swift sft`: supervised tuning with TRL's SFTTrainer.

Rows are encoded here (`sft_data`): loss on assistant turns, rows over `max_length` left out and counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from swift.startup import collector_resting
from swift.trainers.trl.method import Method

if TYPE_CHECKING:
    from datasets import Dataset

    from swift.models.template import Template


def training_template(template: Template) -> str | None:
    """TRL's variant of the model's template, which keeps all turns and marks the assistant's; None without one."""
    if template.marked:
        return None
    from trl.chat_template_utils import get_training_chat_template

    try:
        return get_training_chat_template(template.tokenizer)
    except ValueError:  # one that TRL does not know
        return None


def encode(args: Any, template: Template) -> tuple[Dataset, Dataset | None, list[str]]:
    """Training rows, evaluation rows (None without any), and lines to print about both.

    Raises:
        ConfigError: wrong data, or no usable row.
    """
    with collector_resting():
        import datasets  # noqa: F401  # what encoding needs

        from swift.data.loading import load_rows
        from swift.models.policy import context_length
        from swift.trainers.sft_data import ChatEncoder, encode_rows

        template.training_template = training_template(template)
    encoder = ChatEncoder(template, args.max_length or context_length(args))
    tables: dict[str, Dataset | None] = {"train": None, "val": None}
    lines: list[str] = []
    for split in ("train", "val"):
        rows = load_rows(args, split)
        lines += rows.report.lines()
        if len(rows):
            tables[split], report = encode_rows(rows, encoder, num_proc=args.dataset_num_proc, split=split)
            lines += report.lines(split)
    assert tables["train"] is not None, "load_rows returns at least one training row"
    return tables["train"], tables["val"], lines


def _options(args: Any) -> dict[str, Any]:
    """What SFTConfig has beside the settings of every method."""
    return {
        "max_length": None,  # rows over it are left out already, never cut
        "dataset_kwargs": {"skip_prepare_dataset": True},
    }


SFT = Method(
    trainer="trl:SFTTrainer",
    config="trl:SFTConfig",
    encode=encode,
    options=_options,
    logged=("mean_token_accuracy",),
)
