"""`swift export` and `swift merge-lora`: merge a LoRA adapter into its base model and save the result.

The output is an ordinary model folder: config, safetensors, generation config, tokenizer with chat template.
A folder that holds anything is refused, and the result appears under its name only when it is complete.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift.errors import ConfigError, ResourceError
from swift.models.source import ModelSource, head_of, locate

if TYPE_CHECKING:
    from swift.arguments import Resolved
    from swift.models.arguments import CheckpointArguments

SIDE_FILES = ("generation_config.json", "*.py")
"""Files of the base model that belong to the merged one and that no `save_pretrained` writes in full."""


def merge_adapter(args: CheckpointArguments, output: str | Path) -> Path:
    """Writes `--model` with all `--adapters` merged in, in order, to the new folder `output`.

    Merging computes in float32 and rounds once, to `torch_dtype`, or to the types of the base's files when it is None.
    The base is never loaded; see `swift.models.shard_merge`.

    Returns:
        `output` as an absolute path.

    Raises:
        ConfigError: no adapter, an unfit one, or an `output` that exists and is not empty.
        ResourceError: the folder cannot be written.
    """
    from safetensors import SafetensorError

    from swift.models.multimodal import loads_whole, refuse_part
    from swift.models.policy import load_config, pick_dtype
    from swift.models.shard_merge import MergedModel
    from swift.models.tokenizer import load_tokenizer
    from swift.models.vision import copy_files

    source = locate(args)
    if not source.adapters:
        raise ConfigError("--adapters: none: there is nothing to merge; give the checkpoint folder of a LoRA run")
    config = load_config(source.base, args)
    refuse_part(config, source.base, args)
    output = new_folder(output)
    tokenizer = load_tokenizer(args)
    model = MergedModel(source, args, pick_dtype(args.torch_dtype) if args.torch_dtype else None)
    partial = output.with_name(f".{output.name}.partial-{os.getpid()}")
    try:
        partial.mkdir()
        model.write(partial)
        if head_of(source.base, *source.adapters):  # it reads the last token that is no padding
            model.config.pad_token_id = tokenizer.pad_token_id
        model.config.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        _copy_side_files(source, partial)
        if loads_whole(config, args):
            copy_files(source.base, partial)
        share(partial)
        if output.exists():
            output.rmdir()  # empty, as checked
        partial.rename(output)
    except (OSError, SafetensorError) as error:
        raise ResourceError(f"--output_dir: {output}: cannot be written ({error})") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # gone already after the rename
    return output


def new_folder(path: str | Path) -> Path:
    """`path` as an absolute path that does not exist or is an empty folder; its parent is created.

    Raises:
        ConfigError: it holds something, or is a file.
    """
    folder = Path(path).expanduser().resolve()
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise ConfigError(f"--output_dir: {folder}: exists and is not empty; name a new folder")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(f"--output_dir: {folder}: cannot be created ({error})") from error
    return folder


def share(folder: Path) -> None:
    """Give the files of a new folder the permissions that it has by the umask; safetensors writes mode 0600."""
    mode = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)


def run(resolved: Resolved) -> int:
    """The modes export and merge-lora; returns the exit code and prints where the model lies."""
    args: Any = resolved.args
    source = locate(args)
    output = args.output_dir or _default_output(source)
    print(f"merged model: {merge_adapter(args, output)}")
    return 0


def _default_output(source: ModelSource) -> Path:
    name = source.adapters[-1] if source.adapters else source.base
    return name.with_name(f"{name.name}-merged")


def _copy_side_files(source: ModelSource, output: Path) -> None:
    for pattern in SIDE_FILES:
        for file in source.base.glob(pattern):
            shutil.copy2(file, output / file.name)
