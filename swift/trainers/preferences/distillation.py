"""Generalized knowledge distillation with TRL's GKDTrainer: the student learns a teacher's distribution of tokens.

Answers are those of the data, the student's own (`--lmbda`) or the teacher's (`--seq_kd`); arXiv:2306.13649.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from swift.errors import ConfigError
from swift.models.template import Template
from swift.trainers.preferences.rows import AnswerEncoder, encode_rows
from swift.trainers.trl.method import Method

if TYPE_CHECKING:
    from datasets import Dataset

    from swift.data.loading import Example


def encode(args: Any, template: Template) -> tuple[Dataset, Dataset | None, list[str]]:
    """Rows of prompt and final answer, as GKDTrainer's collator takes them, and lines to print about both.

    Raises:
        ConfigError: wrong data, or no usable row.
    """
    from swift.data.loading import load_rows
    from swift.models.policy import context_length

    encoder = AnswerEncoder(template, "verdict", args.max_length or context_length(args))
    tables: dict[str, Dataset] = {}
    lines: list[str] = []
    for split in ("train", "val"):
        rows = load_rows(args, split, purpose="chat")
        lines += rows.report.lines()
        if len(rows):
            examples = [_split(example) for example in rows.examples]
            table, more = encode_rows(examples, encoder, num_proc=args.dataset_num_proc, split=split)
            tables[split] = table.map(_joined, remove_columns=table.column_names)
            lines += more
    return tables["train"], tables.get("val"), lines


def _split(example: Example) -> Example:
    """A chat as its prompt and its final turn."""
    answer = {"completion": example.messages[-1:], "label": True, "tools": example.columns.get("tools")}
    return dataclasses.replace(example, messages=example.messages[:-1], columns=answer)


def _joined(row: dict[str, Any]) -> dict[str, Any]:
    prompt, answer = row["prompt_ids"], row["completion_ids"]
    mask = [0] * len(prompt) + [1] * len(answer)
    return {"input_ids": [*prompt, *answer], "completion_mask": mask, "prompt": ""}  # whose text nobody reads


def load_teacher(args: Any, model: Any) -> dict[str, Any]:
    """The teacher, frozen, on the model's device.

    Raises:
        ConfigError: it cannot be loaded, or has another vocabulary.
    """
    from swift.models.reference import load_other

    teacher: Any = load_other(args.teacher_model, args, next(model.parameters()).device, "--teacher_model")
    teacher.requires_grad_(False)
    theirs, ours = (one.config.get_text_config().vocab_size for one in (teacher, model))
    if theirs != ours:
        raise ConfigError(
            f"--teacher_model: {args.teacher_model}: a vocabulary of {theirs} tokens, and the model's has {ours}; "
            "give a teacher of the same family"
        )
    return {"teacher_model": teacher}


def _options(args: Any) -> dict[str, Any]:
    return {
        "max_length": None,  # rows over it are left out already
        "lmbda": args.lmbda,
        "beta": args.beta,
        "seq_kd": args.seq_kd,
        "temperature": args.temperature,
        "max_new_tokens": args.max_completion_length,
        "train_sampling_strategy": "random" if args.dataset_shuffle else "sequential",
    }


GKD = Method(
    trainer="trl.experimental.gkd:GKDTrainer",
    config="trl.experimental.gkd:GKDConfig",
    encode=encode,
    options=_options,
    parts=load_teacher,
)
