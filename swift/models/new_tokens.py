"""`--new_special_tokens`: tokens that the tokenizer gets, and their rows in embedding and output layer.

Many models have more rows than tokens; otherwise both get further rows around the mean of theirs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift.errors import ConfigError, counted
from swift.models.source import locate

if TYPE_CHECKING:
    from torch import nn


def new_tokens(args: Any) -> list[str]:
    """The tokens, those of text files included. Raises ConfigError: a file cannot be read."""
    found: list[str] = []
    for given in getattr(args, "new_special_tokens", []):
        file = Path(given).expanduser()
        if file.suffix != ".txt":
            found.append(given)
        elif not file.is_file():
            raise ConfigError(f"--new_special_tokens: {given}: no such file; give a text file, or tokens")
        else:
            found += file.read_text(encoding="utf-8").split()
    return found


def add_rows(model: Any, args: Any) -> None:
    """Give a model rows for all tokens of its tokenizer, if there are new ones.

    Raises ConfigError: they would not be in the files of an adapter's base.
    """
    if not (tokens := new_tokens(args)):
        return
    from transformers import AutoTokenizer

    options = {"trust_remote_code": args.trust_remote_code, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(locate(args).tokenizer, **options)
    tokenizer.add_tokens(tokens, special_tokens=True)
    size, rows = len(tokenizer), model.get_input_embeddings().weight.shape[0]
    if size > rows and args.tuner_type != "full":
        raise ConfigError(
            f"--new_special_tokens: {counted(size, 'token')} with the new ones, and {rows} rows in the embedding of "
            "the base, which an adapter does not lengthen; use --tuner_type full"
        )
    if size > rows:
        model.resize_token_embeddings(size, pad_to_multiple_of=64, mean_resizing=model.device.type != "meta")


def require_trained_rows(model: nn.Module, args: Any) -> None:
    """Raises ConfigError: the rows of new tokens stay as they are."""
    from swift.models.attention.interface import transformers_model

    base, tokens = transformers_model(model), new_tokens(args)
    parts = {"embed_tokens": base.get_input_embeddings(), "lm_head": base.get_output_embeddings()}
    for name, part in parts.items():
        if tokens and part is not None and not any(one.requires_grad for one in part.parameters()):
            raise ConfigError(
                f"--new_special_tokens: {counted(len(tokens), 'token')}: {name} is not trained, nor are their rows; "
                "use --modules_to_save embed_tokens lm_head, or --tuner_type full"
            )
