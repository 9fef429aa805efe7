"""Parameters below an adapter, such as fused experts, which share one in a layer: no engine takes it by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from swift.models.policy import class_of, load_config, quiet_loading
from swift.models.source import locate
from swift.models.tuners import adapter_config, adapter_errors

if TYPE_CHECKING:
    from swift.models.arguments import TunerArguments


def adapted_parameter(args: TunerArguments) -> str:
    """Name of the first parameter, no module, that the adapter of the settings changes, or ""; loads no weights.

    Raises:
        ConfigError: the adapter does not fit the model.
    """
    import torch
    import transformers
    from peft import PeftConfig, get_peft_model

    source = locate(args)
    config = load_config(source.base, args)
    with torch.device("meta"), quiet_loading():
        kind = getattr(transformers, class_of(config, args, None))
        model = kind.from_config(config, trust_remote_code=args.trust_remote_code)
    if (
        all(parameter.ndim < 3 for parameter in model.parameters())
        and not args.target_parameters
        and not source.adapters
    ):
        return ""
    with adapter_errors(source.adapters[0] if source.adapters else source.base):
        adapter: Any = adapter_config(model, args, "CAUSAL_LM")
        if source.adapters:
            adapter = PeftConfig.from_pretrained(str(source.adapters[0]))
        adapter.init_lora_weights = True
        policy = get_peft_model(model, adapter, low_cpu_mem_usage=True)
    return next(
        (
            f"{name.removeprefix('base_model.model.').replace('.base_layer', '')}.{layer.parameter_name}"
            for name, layer in policy.named_modules()
            if hasattr(layer, "parameter_name")
        ),
        "",
    )
