"""Loading of a tokenizer, with `--template` applied and a pad token set."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift.errors import ConfigError, RefusedChat, attributed_to, counted, packages_for, suggest, unusable
from swift.models.instruct_templates import in_place
from swift.models.multimodal import loads_whole, no_tower
from swift.models.new_tokens import new_tokens
from swift.models.policy import load_config
from swift.models.source import find_other, has_tokenizer, locate
from swift.models.template import PlainText, Template, load_template
from swift.models.templates import markers, names, read_template, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from swift.models.arguments import CheckpointArguments

logger = logging.getLogger("swift.models")


def load_tokenizer(args: CheckpointArguments) -> PreTrainedTokenizerBase:
    """The tokenizer of `--model`, or of the LoRA checkpoint when it carries one; pads on the left.

    Raises:
        ConfigError: no tokenizer in the folder, a template that is neither known nor a file, a built-in
            template whose marker tokens the vocabulary lacks, or code that `--trust_remote_code` forbids.
    """
    source = locate(args)
    assert source.tokenizer is not None
    return _read(source.tokenizer, args)


def load_chat(args: CheckpointArguments, *, plain: bool = False, ends: bool = True, weights: bool = True) -> Template:
    """Tokenizer and template of `--model` in one step, with the end tokens of its generation_config.json.

    Args:
        args: the model settings.
        plain: for texts, which need no chat template.
        ends: whether texts need an end-of-text token, as documents do, which may have images.
        weights: whether there are files of weights, see `locate`.

    Raises:
        ConfigError: see `load_tokenizer`; also when the model has no embedding for some of its tokens.
    """
    source = locate(args, require_weights=weights)
    assert source.tokenizer is not None
    tokenizer = _read(source.tokenizer, args)
    name = f"--template {shown(args.template)}" if args.template else None
    kwargs = args.chat_template_kwargs
    config = load_config(source.base, args)
    processor, pixels = None, getattr(args, "max_pixels", None)
    if (plain and not ends) or not loads_whole(config, args):
        if pixels is not None:
            raise no_tower("max_pixels", pixels)
    else:
        from swift.models.vision import Vision, load_processor

        with packages_for(f"--model: {source.base}: its processor of images cannot be loaded"):
            processor = load_processor(source.base, config, tokenizer)
        if not args.template and getattr(processor, "chat_template", None):  # also of files that no tokenizer reads
            tokenizer.chat_template = processor.chat_template
    template = (
        PlainText(tokenizer, ends=ends)
        if plain
        else load_template(
            tokenizer, source.base, kwargs, name, _ids_of(tokenizer, getattr(args, "eot_tokens", []), "eot_tokens")
        )
    )
    if processor is not None:
        render = _rendering(tokenizer, processor) if plain else template.render
        template.vision = Vision(source.base, processor, config, render, max_pixels=pixels)
        template.vision.example()  # a processor that does not work is found now
    if not plain:  # a template may omit messages, a tokenizer may map all texts to the same ids
        with contextlib.suppress(RefusedChat):  # a template may need more than a question
            first, second = (template.encode_prompt([{"role": "user", "content": text}]) for text in ("a 1", "b 2"))
            if first == second:
                logger.warning(
                    "%s: two different prompts become the same tokens; training teaches nothing", template.name
                )
    _check_ids(source.base, template, config.get_text_config())
    return template


def _rendering(tokenizer: PreTrainedTokenizerBase, processor: Any) -> Callable[[Sequence[Any]], str]:
    """How documents show an image: as chats do, or the processor alone where there is no chat template."""
    from swift.models.vision import without_chat

    return Template(tokenizer).render if tokenizer.chat_template else without_chat(processor)


def _check_ids(folder: Path, template: Template, config: Any) -> None:
    """Refuses a tokenizer of another model. A token that was added, and that no chat contains, needs no embedding."""
    tokenizer, size = template.tokenizer, config.vocab_size
    added, jinja = tokenizer.get_added_vocab(), str(tokenizer.chat_template)
    needed = {tokenizer.pad_token_id, tokenizer.bos_token_id, *template.stop_token_ids}
    beyond = {
        token: number
        for token, number in tokenizer.get_vocab().items()
        if number >= size and (token not in added or number in needed or token in jinja)
    }
    if beyond:
        token, number = min(beyond.items(), key=lambda item: item[1])
        raise ConfigError(
            f"--model: {folder}: its tokenizer has ids up to {max(beyond.values())} ({token!r} is {number}), and its "
            f"embedding {size} rows; is the tokenizer that of another model?"
        )
    if template.stop_token_ids and (stop := template.stop_token_ids[-1]) >= size:
        raise ConfigError(
            f"--model: {folder}: config.json or generation_config.json: eos_token_id {stop}: beyond the vocab_size of "
            f"{size}; write {tokenizer.eos_token_id}"
        )
    if (config.pad_token_id or 0) >= size:
        raise ConfigError(
            f"--model: {folder}: config.json: pad_token_id {config.pad_token_id}: beyond the vocab_size of {size}; "
            f"write {tokenizer.pad_token_id}"
        )


def read_tokenizer(
    folder: str | Path,
    *,
    template: str | None = None,
    trust_remote_code: bool = False,
    special_tokens: Mapping[str, str] = {},
) -> PreTrainedTokenizerBase:
    """The tokenizer saved in `folder`; see `load_tokenizer`."""
    from transformers import AutoTokenizer

    if not has_tokenizer(Path(folder)):  # transformers would make an empty one for some architectures
        raise ConfigError(f"--model: {folder}: sought tokenizer.json there and found none; is the copy complete?")
    sought = "; sought tokenizer.json and tokenizer_config.json there"
    with unusable(f"--model: {folder}: its tokenizer cannot be loaded", sought):
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True, padding_side="left"
        )
        known = set(tokenizer("a 1", add_special_tokens=False)["input_ids"]) - {tokenizer.unk_token_id}
    if not known:  # without its vocabulary some classes still load
        raise ConfigError(
            f"--model: {folder}: its tokenizer knows no text; sought tokenizer.json, or the vocabulary of "
            f"{type(tokenizer).__name__}, there; is the copy complete?"
        )
    _take_special(tokenizer, special_tokens)
    if template:
        _override_template(tokenizer, template)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    if tokenizer.pad_token_id is None:
        raise ConfigError(f"--model: {folder}: its tokenizer has neither a pad, an eos nor an unk token")
    return tokenizer


def require_same_tokens(name: str, tokenizer: PreTrainedTokenizerBase, args: CheckpointArguments, *, flag: str) -> None:
    """Refuses a model beside the policy that does not know all tokens of the policy's tokenizer by the same ids.

    name: a folder or hub id, which `flag` gave.
    """
    with attributed_to(flag):
        source = find_other(name, flag=flag, use_hf=args.use_hf)
        theirs = read_tokenizer(source.base, trust_remote_code=args.trust_remote_code).get_vocab()
    others = [(number, token) for token, number in tokenizer.get_vocab().items() if theirs.get(token) != number]
    if others:
        number, token = min(others)
        there = theirs.get(token)
        raise ConfigError(
            f"{flag}: {name}: {counted(len(others), 'token')} of the policy's tokenizer are others there ({token!r} is "
            f"{number}, and there {'unknown' if there is None else there}); give a model with the same tokenizer"
        )


def _read(folder: str | Path, args: CheckpointArguments) -> PreTrainedTokenizerBase:
    """`read_tokenizer` with the settings."""
    tokenizer = read_tokenizer(
        folder,
        template=args.template,
        trust_remote_code=args.trust_remote_code,
        special_tokens=getattr(args, "special_tokens", {}),
    )
    tokenizer.add_tokens(new_tokens(args), special_tokens=True)
    return tokenizer


def _ids_of(tokenizer: PreTrainedTokenizerBase, tokens: Iterable[str], flag: str) -> list[int]:
    """The ids of tokens that a flag names; none is added, as the model would have no embedding for it."""
    vocabulary = tokenizer.get_vocab()
    if missing := [token for token in tokens if token not in vocabulary]:
        raise ConfigError(
            f"--{flag}: {missing[0]}: no token of {tokenizer.name_or_path}; add it to tokenizer and embedding of "
            "--model with transformers first"
        )
    return [vocabulary[token] for token in tokens]


def _take_special(tokenizer: PreTrainedTokenizerBase, special_tokens: Mapping[str, str]) -> None:
    """Gives tokens of the vocabulary the roles of `--special_tokens`."""
    roles = [role for role in tokenizer.SPECIAL_TOKENS_ATTRIBUTES if role != "additional_special_tokens"]
    if unknown := [role for role in special_tokens if role not in roles]:
        raise ConfigError(f"--special_tokens: {unknown[0]}: no role of a token; {suggest(unknown[0], roles)}")
    _ids_of(tokenizer, special_tokens.values(), "special_tokens")
    for role, token in special_tokens.items():
        setattr(tokenizer, role, token)


def _override_template(tokenizer: PreTrainedTokenizerBase, value: str) -> None:
    begins = tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    tokenizer.chat_template = in_place(read_template(value), begins=begins)
    if value not in names():
        return
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with unusable(f"--template: {shown(value)}: cannot be rendered with this tokenizer"):
        rendered = str(tokenizer.apply_chat_template(chat, tokenize=False))
    vocabulary = tokenizer.get_vocab()
    if missing := [token for token in markers(rendered) if token not in vocabulary]:
        raise ConfigError(
            f"--template: {value}: the tokenizer lacks the tokens {', '.join(missing)}; "
            "use --template plain, or a Jinja file made for this model"
        )
