"""Files of reward models: which models the settings name, whether they can score, and their weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift.errors import ConfigError, join_problems, suggest, unusable
from swift.models.source import ModelSource, head_of, read_json
from swift.plugin import rm_plugins
from swift.rewards.catalogue import model_names

if TYPE_CHECKING:
    import torch

    from swift.models.policy import Head

DEFAULT_PLUGIN = "default"


@dataclass(frozen=True)
class RewardModelSource:
    """A reward model: its name in metrics, its folder, an adapter on top or None; its plugin."""

    name: str
    folder: Path
    adapter: Path | None
    plugin: str = DEFAULT_PLUGIN


def find_reward_models(args: Any) -> list[RewardModelSource]:
    """Resolves and checks `reward_model` before models are loaded: reads configs, no weights."""
    from swift.models.source import adapter_folder, check_adapter, find_base, find_folder, is_adapter

    models = [str(model) for model in args.reward_model]
    revisions = args.reward_model_revision or [None] * len(models)
    adapters = args.reward_adapters or [None] * len(models)
    plugins = args.reward_model_plugin or [DEFAULT_PLUGIN] * len(models)
    found, problems = [], []
    for name, model, revision, adapter, plugin in zip(
        model_names(models), models, revisions, adapters, plugins, strict=True
    ):
        try:
            if is_adapter(Path(model)):
                adapter, model = model, str(find_base(None, [adapter_folder(model)], use_hf=args.use_hf))
            folder = find_folder(model, flag="--reward_model", use_hf=args.use_hf, revision=revision or None)
            top = adapter_folder(adapter) if adapter else None
            if top is not None:
                check_adapter(top, folder)
            if plugin not in rm_plugins:
                near = suggest(plugin, sorted(rm_plugins))
                raise ConfigError(f"--reward_model_plugin: {plugin}: no plugin has registered it; {near}")
            if plugin == DEFAULT_PLUGIN:
                _check_head(model, folder, top)
            found.append(RewardModelSource(name, folder, top, plugin))
        except ConfigError as error:
            problems += error.problems
    join_problems(problems)
    return found


def find_reward_model(source: ModelSource) -> RewardModelSource:
    """The model of `--model` and at most one of `--adapters`; see `find_reward_models`."""
    adapter = source.adapters[0] if source.adapters else None
    _check_head(str(source.base), source.base, adapter, "--model")
    return RewardModelSource(source.base.name, source.base, adapter)


def _check_head(model: str, folder: Path, adapter: Path | None, flag: str = "--reward_model") -> None:
    from swift.models.multimodal import refuse_towers

    config = read_json(folder / "config.json")
    refuse_towers(config, model, flag, sees=True)
    architecture = (config.get("architectures") or ["unknown"])[0]
    head, wanted = head_of(folder), 1
    if adapter is not None and read_json(adapter / "adapter_config.json").get("task_type") in ("SEQ_CLS", "TOKEN_CLS"):
        return  # the adapter contains the head; its shape is checked when it is loaded
    if head == "step":
        wanted = 2
    elif head is None:
        raise ConfigError(
            f"{flag}: {model}: {architecture} has no score head; give a sequence-classification model "
            "with one label, or --reward_model_plugin genrm, for which a causal model writes a score"
        )
    labels = len(config.get("id2label") or ()) or int(config.get("num_labels") or 2)  # as transformers reads a config
    if labels != wanted:
        raise ConfigError(
            f"{flag}: {model}: its head has {labels} labels; a reward model needs exactly {wanted} "
            f"(num_labels {wanted} in config.json)"
        )


def head_in(source: RewardModelSource) -> Head | None:
    """The head that its files have, or that an adapter brings."""
    return head_of(source.folder, *([source.adapter] if source.adapter else []))


def judges_steps(source: RewardModelSource) -> bool:
    """Whether a reward model was trained by `--rlhf_type prm`, in full or as an adapter."""
    return head_in(source) == "step"


def config_of_whole(folder: Path) -> Any:
    """The config of a model that sees images; None for another."""
    from transformers import AutoConfig

    from swift.models.multimodal import is_whole

    if not read_json(folder / "config.json").keys() & {"vision_config", "thinker_config"}:
        return None
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    return config if is_whole(config) else None


def load_weights(
    source: RewardModelSource,
    head: Head | None,
    num_labels: int,
    device: Any,
    dtype: torch.dtype,
    trust_remote_code: bool,
    quantised: Any,
) -> Any:
    """The model on its device, with its adapter, in evaluation mode.

    Raises:
        ConfigError: weights that cannot be read, or that lack a head.
    """
    import transformers

    from swift.models.policy import HEADS, quiet_loading
    from swift.models.quantisation import is_quantised_layer, prepare_quantised, quantisation_config
    from swift.models.reward_classes import ensure_reward_class
    from swift.models.tuners import adapter_errors, with_adapter

    labels = {"num_labels": num_labels} if num_labels else {}
    config = quantisation_config(quantised, dtype) if getattr(quantised, "quant_method", None) else None
    placed = {} if config is None else {"quantization_config": config, "device_map": {"": device}}
    ensure_reward_class(config_of_whole(source.folder))
    with quiet_loading(), unusable(f"--reward_model: {source.folder}: cannot be loaded"):
        model, info = getattr(transformers, HEADS[head][0]).from_pretrained(
            source.folder,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            **labels,
            **placed,
        )
    model.config.get_text_config().use_cache = False  # the key-value cache is not needed
    for layer in filter(is_quantised_layer, model.modules()):
        prepare_quantised(layer, dtype)
    missing = sorted(info["missing_keys"])
    if missing and source.adapter is None:
        raise ConfigError(
            f"--reward_model: {source.folder}: {len(missing)} weights are not in its files "
            f"({', '.join(missing[:3])}); a reward model needs a trained score head"
        )
    if source.adapter is not None:
        with adapter_errors(source.adapter):
            model = with_adapter(model, source.adapter)
            model = model.merge_and_unload(safe_merge=True) if config is None else model
    model = model if placed else model.to(device)
    return model.requires_grad_(False).eval()
