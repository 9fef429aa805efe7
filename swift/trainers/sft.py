"""`swift sft` and `swift pt`: supervised tuning and pre-training with TRL's SFTTrainer.

Rows are encoded (`sft_data`), packed (`sft_packing`) or streamed (`row_stream`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from typing import TYPE_CHECKING, Any

from swift.errors import ConfigError, RefusedChat
from swift.models.instruct_templates import shows_input
from swift.startup import collector_resting
from swift.trainers.answers import AnswerEncoder, AnswersRows
from swift.trainers.arguments import MEASURED
from swift.trainers.loss_weights import WeightedTokens, named
from swift.trainers.sft_packing import PackedRows, Packing, keeps_apart, packed_length
from swift.trainers.trl.method import Encoded, Method, load_texts
from swift.types import SamplingParams

if TYPE_CHECKING:
    from swift.data.loading import Purpose
    from swift.models.template import Template


def training_template(template: Template) -> str | None:
    """TRL's variant of the model's template, which keeps all turns and marks the assistant's; None without one."""
    if template.marked or not template.tokenizer.chat_template:
        return None
    from trl.chat_template_utils import get_training_chat_template

    try:
        return get_training_chat_template(template.tokenizer)
    except ValueError:  # TRL has no variant of this template
        return None


def encode(args: Any, template: Template, *, purpose: Purpose) -> Encoded:
    """Training rows, evaluation rows (None without any), and lines to print about both."""
    with collector_resting():
        import datasets  # noqa: F401  # which encoding needs

        from swift.models.policy import context_length
        from swift.trainers.sft_data import ChatEncoder
        from swift.trainers.splits import encode_splits

        template.training_template = training_template(template)
    if purpose == "chat":
        check_rows(args, template)
    length, packing = args.max_length or context_length(args), None
    if args.packing:
        packing = Packing(args.packing_strategy, packed_length(args, length))
        length = min(length or packing.length, packing.length)
    loss, notes = ("all", []) if purpose == "text" else loss_of(args, template)
    cut = args.packing and args.packing_strategy != "bfd" and not (args.max_length and args.packing_length)
    encoder = ChatEncoder(template, None if cut else length, loss, args.truncation_strategy, args.min_length or 0)
    answers = AnswerEncoder(**vars(encoder)) if getattr(args, "predict_with_generate", False) else None
    train, val, lines = encode_splits(args, encoder, purpose, held_out=answers, packing=packing, packs_val=cut)
    return train, val, [*notes, *lines]


def check_rows(args: Any, template: Template) -> None:
    """Refuses rows of which the chat template would not write a part (ConfigError)."""
    if args.dataset_transform == "alpaca" and not shows_input(str(template.tokenizer.chat_template)):
        raise ConfigError(
            f"--dataset_transform: alpaca: {template.name} does not write the input of a row; use --template alpaca, "
            "or leave it out to append the input to the instruction"
        )
    if args.agent_template:
        check_tool_format(args.agent_template, template)


def check_tool_format(name: str, template: Template) -> None:
    """Refuses a format of tools that the chat template does not write (ConfigError)."""
    call = {"type": "function", "function": {"name": "probe", "arguments": {}}}
    tool = {"type": "function", "function": {"name": "probe", "description": "", "parameters": {"type": "object"}}}
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    text = ""
    with contextlib.suppress(RefusedChat):  # it has no tools at all
        text = template.render(chat, tools=[tool])
    if name != "hermes" or "<tools>" not in text or not HERMES.search(text):
        raise ConfigError(
            f"--agent_template: {name}: {template.name} writes tools in another format, or not at all; leave it out to "
            "train on its own, or give --template one that does"
        )


HERMES = re.compile(r'<tool_call>\s*\{"name": "probe"')
"""A call in the format of Hermes, which is that of Qwen2.5 and Qwen3."""


def loss_of(args: Any, template: Template) -> tuple[str, list[str]]:
    """The tokens that the loss counts, and a line to print if empty thoughts are excluded by default.

    A template that can disable thinking puts empty thoughts before answers without one. As in ms-swift, these are not
    trained on, unless TRL's flags select the tokens.
    """
    loss: str = args.loss_tokens
    jinja = str(template.tokenizer.get_chat_template())
    switches = "enable_thinking" in jinja and "</think>" in jinja
    decided = args.disable_ignore_empty_think or {args.assistant_only_loss, args.completion_only_loss} != {None}
    if not switches or decided or loss == "all" or "ignore_empty_think" in loss:
        return loss, []
    line = "loss: without empty thoughts, as in ms-swift; --disable_ignore_empty_think true counts them"
    return "ignore_empty_think" if loss == "default" else f"{loss}+ignore_empty_think", [line]


def _parts(args: Any, model: Any) -> dict[str, Any]:
    parts: dict[str, Any] = {"weighs": True} if named(getattr(args, "loss_tokens", "")) else {}
    if getattr(args, "predict_with_generate", False):
        parts["sampling"] = SamplingParams(max_new_tokens=args.max_new_tokens, temperature=0)
    if args.packing or args.padding_free:
        parts["apart"] = keeps_apart(model, args)
    return parts


def _options(args: Any) -> dict[str, Any]:
    """The arguments of SFTConfig beside the settings of every method."""
    return {
        "max_length": None,  # rows over it are left out already, never cut
        "dataset_kwargs": {"skip_prepare_dataset": True},
        # rows are packed already, all strategies with their boundaries
        "packing": args.packing,
        "padding_free": args.padding_free,
        "loss_type": args.loss_type,
        "router_aux_loss_coef": args.router_aux_loss_coef,
    }


SFT = Method(
    trainer="trl:SFTTrainer",
    config="trl:SFTConfig",
    encode=functools.partial(encode, purpose="chat"),
    collator="trl.trainer.sft_trainer:DataCollatorForLanguageModeling",
    model_dropout=True,
    fuses_head=True,
    options=_options,
    parts=_parts,
    parting=lambda args: "rows",
    overrides=(PackedRows, WeightedTokens, AnswersRows),
    logged=("mean_token_accuracy", "aux_loss"),
    measured=("entropy", "num_tokens", *MEASURED),
    shown=(("rouge-l", "ROUGE-L"),),
)


PT = dataclasses.replace(SFT, encode=functools.partial(encode, purpose="text"), template=load_texts)
