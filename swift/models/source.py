"""Location of a model's files: a local folder, a hub's cache, or the base of a LoRA checkpoint.

`locate` resolves names to folders before anything heavy is loaded. A name that exists on disk, or that looks like a
path, is never looked up on a hub. Only safetensors weights are used: pickled `.bin` files can run code when they are
read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from swift.data.files import is_lfs_pointer
from swift.errors import ConfigError, ResourceError, first_line, nearest, parse_json
from swift.models.adapter_config import check_config
from swift.models.labels import Labels, labels_in

if TYPE_CHECKING:
    from swift.models.arguments import CheckpointArguments

MAX_LAYERS = 10_000
"""More layers than any model has; configs of transformers have a list of them."""

HUB_ATTEMPT_S = 20
"""Seconds a hub may stay silent before the download counts as failed."""


@dataclass(frozen=True)
class ModelSource:
    """The folders a policy is made of.

    `base` holds config, weights and usually the tokenizer; `adapters` are LoRA folders to put on top, in
    order; `tokenizer` is the folder whose tokenizer is used (that of a LoRA checkpoint when it has one).
    """

    base: Path
    adapters: list[Path] = field(default_factory=list)
    tokenizer: Path | None = None


def locate(args: CheckpointArguments, *, require_weights: bool = True) -> ModelSource:
    """Resolves `--model` and `--adapters` to folders; downloads from a hub when needed, weights only if required.

    A `--model` that is itself a LoRA checkpoint (adapter_config.json, no config.json) becomes the first
    adapter and its base is read from the checkpoint. A missing `--model` is allowed when `--adapters`
    names its base.

    Raises:
        ConfigError: a folder lacks its files, or a hub does not have the name.
        ResourceError: the hub's client package is not installed.
    """
    adapters = [adapter_folder(path) for path in args.adapters]
    model = args.model
    if model and is_adapter(Path(model)):
        adapters.insert(0, adapter_folder(model))
        model = None
    base = find_base(model, adapters, use_hf=args.use_hf, revision=args.model_revision, require_weights=require_weights)
    for folder in adapters:
        check_adapter(folder, base)
    with_tokenizer = [folder for folder in adapters if has_tokenizer(folder)]
    return ModelSource(base, adapters, with_tokenizer[-1] if with_tokenizer else base)


def served_name(args: CheckpointArguments) -> str:
    """Name of the model for clients of a server: `--model`, else the base of `--adapters`."""
    return args.model or str(locate(args).base)


def find_base(
    model: str | None,
    adapters: list[Path],
    *,
    use_hf: bool = False,
    revision: str | None = None,
    require_weights: bool = True,
) -> Path:
    """The base model's folder, from `model` when given, else from what the first adapter was trained on."""
    place: Any = {"use_hf": use_hf, "revision": revision, "require_weights": require_weights}
    if model:
        return find_folder(model, flag="--model", **place)
    if not adapters:
        raise ConfigError("--model: none: no model is named; give a folder or a hub id")
    recorded = recorded_base(adapters[0])
    if not recorded:
        raise ConfigError(f"--model: none: {adapters[0]} does not record its base model; name it with --model")
    return find_folder(recorded, flag=f"base model of {adapters[0]}", **place)


def find_other(name: str, *, flag: str, use_hf: bool = False, require_weights: bool = True) -> ModelSource:
    """A model beside the policy, such as a reference, or an adapter with its base; `flag` gave the name."""
    if is_adapter(Path(name)):
        folder = adapter_folder(name)
        base = find_base(None, [folder], use_hf=use_hf, require_weights=require_weights)
        check_adapter(folder, base)
        return ModelSource(base, [folder])
    return ModelSource(find_folder(name, flag=flag, use_hf=use_hf, require_weights=require_weights))


def find_folder(
    name: str,
    *,
    flag: str = "--model",
    use_hf: bool = False,
    revision: str | None = None,
    require_weights: bool = True,
) -> Path:
    """A folder with config.json and safetensors weights for a local path or a hub id.

    Args:
        name: folder or `organisation/name`.
        flag: name of the setting in errors.
        use_hf: Hugging Face instead of ModelScope.
        revision: branch, tag or commit on the hub; local folders ignore it.
        require_weights: False when only config and tokenizer are wanted.

    Raises:
        ConfigError, ResourceError: see `locate`.
    """
    path = Path(name).expanduser()
    if path.exists():
        folder = path.resolve()
    elif looks_like_path(name):
        raise ConfigError(f"{flag}: {name}: no such folder; {_beside(path)}")
    else:
        files = WANTED_FILES if require_weights else OTHER_FILES
        folder = _download(name, files, flag=flag, use_hf=use_hf, revision=revision)
    if not folder.is_dir():
        raise ConfigError(f"{flag}: {folder}: a file, not a model folder; give the folder that holds config.json")
    if not (folder / "config.json").is_file():
        nested = [str(path.parent) for path in sorted(folder.glob("*/config.json"))[:3]]
        hint = f"nearest: {', '.join(nested)}" if nested else "a model folder needs config.json and *.safetensors"
        raise ConfigError(f"{flag}: {folder}: sought config.json there and found none; {hint}")
    if require_weights and not any(folder.glob("*.safetensors")):
        _refuse_weights(folder, flag)
    _refuse_pointers(folder, flag, WANTED_FILES if require_weights else OTHER_FILES)
    config = read_json(folder / "config.json")  # of a broken one, libraries report a wrong tokenizer
    for part in (config, config.get("text_config")):
        layers = part.get("num_hidden_layers") if isinstance(part, dict) else None
        if isinstance(layers, int) and layers > MAX_LAYERS:
            raise ConfigError(f"{folder}/config.json: num_hidden_layers {layers}: above {MAX_LAYERS}; correct it")
    return folder


def _refuse_pointers(folder: Path, flag: str, patterns: Sequence[str]) -> None:
    files = {file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}
    if pointers := sorted(file.name for file in files if is_lfs_pointer(file)):
        raise ConfigError(
            f"{flag}: {folder}: {', '.join(pointers[:3])}: Git LFS pointers, not the files; run `git lfs pull` there"
        )


def _refuse_weights(folder: Path, flag: str) -> NoReturn:
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickled:
        raise ConfigError(
            f"{flag}: {folder}: only pickled weights ({', '.join(pickled[:3])}), which can run code "
            "when read; convert them to safetensors with save_pretrained"
        )
    raise ConfigError(f"{flag}: {folder}: sought *.safetensors there and found none; is the download complete?")


def is_adapter(folder: Path) -> bool:
    """Whether `folder` is a LoRA checkpoint and not a whole model."""
    return (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file()


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model: those that its index names, for folders sometimes hold the weights twice."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        return sorted({folder / name for name in read_json(index)["weight_map"].values()})
    return [single] if single.exists() else sorted(folder.glob("*.safetensors"))


def labels_of(base: Path, *adapters: Path) -> Labels | None:
    """The labels of a classifier; None for other models. The last folder that says so decides."""
    for folder in (*reversed(adapters), base):
        files = (folder / "config.json", folder / "args.json")
        found = labels_in(folder, *(read_json(file) if file.is_file() else {} for file in files))
        if found is not None:
            return found
    return None


def head_of(base: Path, *adapters: Path) -> Literal["answer", "step", "label"] | None:
    """The head of scores of a model: of an answer, of its steps, or a classifier's; None for a language model.

    The last adapter that brings one decides, else the base.
    """
    architecture = (read_json(base / "config.json").get("architectures") or [""])[0]
    tasks = [read_json(adapter / "adapter_config.json").get("task_type") for adapter in reversed(adapters)]
    for task in (*tasks, architecture):
        if task == "TOKEN_CLS" or "ForTokenClassification" in str(task):
            return "step"
        if task == "SEQ_CLS" or re.search("ForSequenceClassification|RewardModel", str(task)):
            return "answer" if labels_of(base, *adapters) is None else "label"
    return None


def has_tokenizer(folder: Path) -> bool:
    """Whether a tokenizer was saved in `folder`."""
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    return any((folder / name).is_file() for name in names)


def adapter_folder(path: str | Path) -> Path:
    """The folder of a LoRA adapter, checked.

    Raises:
        ConfigError: no such folder, no adapter_config.json, or no safetensors weights.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"--adapters: {path}: no such folder; {_beside(folder)}")
    if not (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"--adapters: {path}: sought adapter_config.json there and found none; "
            "give a checkpoint folder of a LoRA run"
        )
    if not (folder / "adapter_model.safetensors").is_file():
        raise ConfigError(f"--adapters: {path}: sought adapter_model.safetensors there and found none")
    _refuse_pointers(folder, "--adapters", WANTED_FILES)
    return folder.resolve()


def check_adapter(folder: Path, base: Path) -> None:
    """Raises ConfigError: an adapter has settings that no adapter on this base needs."""
    check_config(folder, read_json(folder / "adapter_config.json"), weight_files(base))


def recorded_base(adapter: Path) -> str | None:
    """The base model that a LoRA checkpoint records: in args.json (ours), or else in adapter_config.json."""
    for name, key in (("args.json", "model"), ("adapter_config.json", "base_model_name_or_path")):
        file = adapter / name
        if file.is_file():
            recorded = read_json(file).get(key)
            if recorded and Path(recorded).resolve() != adapter:
                return str(recorded)
    return None


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; ConfigError naming file and line when it is not one."""
    try:
        value = parse_json(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file}:{error.lineno}: not valid JSON: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not a UTF-8 text; is the copy complete?") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: a JSON object was expected, not {type(value).__name__}")
    return value


def looks_like_path(name: str) -> bool:
    """Whether a name can only be a local path: absolute, dotted, or not `organisation/name`."""
    return name.startswith(("/", "./", "../", "~", ".\\")) or name.count("/") != 1 or name.endswith("/")


def _beside(path: Path) -> str:
    parent = path.parent
    if not parent.is_dir():
        return f"{parent} does not exist either"
    near = nearest(path.name, [child.name for child in parent.iterdir() if child.is_dir()])
    return f"nearest: {', '.join(str(parent / name) for name in near)}" if near else "check the path"


def _download(name: str, files: list[str], *, flag: str, use_hf: bool, revision: str | None) -> Path:
    hub = "Hugging Face" if use_hf else "ModelScope"
    try:
        return _from_hugging_face(name, files, revision) if use_hf else _from_modelscope(name, files, revision)
    except ImportError as error:
        package = "huggingface_hub" if use_hf else "modelscope"
        other = "drop --use_hf" if use_hf else "use --use_hf true"
        raise ResourceError(
            f"{flag}: {name}: {hub} needs the package {package}, which cannot be imported ({error}); "
            f"pip install {package}, {other}, or give a local folder"
        ) from error
    except Exception as error:  # the hubs' clients raise anything from HTTP errors to bare Exception
        reason = first_line(error)
        at = f" at revision {revision}" if revision else ""
        raise ConfigError(
            f"{flag}: {name}: no folder of that name here, and {hub} did not give it{at} ({reason}); "
            f"check the name and the network{'' if use_hf else ', try --use_hf true'}, or give a local folder"
        ) from error


WEIGHTS = "*.safetensors"
OTHER_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.py", "*.tiktoken", "spk_dict.pt"]
WANTED_FILES = [WEIGHTS, *OTHER_FILES]


def _from_hugging_face(name: str, files: list[str], revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    wanted: Any = {"revision": revision, "allow_patterns": files, "etag_timeout": HUB_ATTEMPT_S}
    try:  # a complete cached copy needs no network
        cached = Path(snapshot_download(name, local_files_only=True, **wanted))
        if WEIGHTS not in files or any(cached.glob(WEIGHTS)):
            return cached
    except LocalEntryNotFoundError:
        pass  # not cached: the download below is the answer
    return Path(snapshot_download(name, **wanted))


def _from_modelscope(name: str, files: list[str], revision: str | None) -> Path:
    from modelscope import snapshot_download

    return Path(snapshot_download(name, revision=revision, allow_patterns=files))
