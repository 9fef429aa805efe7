"""Parameters below an adapter, such as fused experts, which share one in a layer: no engine takes it by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from swift.models.policy import load_config, quiet_loading
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
    from peft import PeftConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    source = locate(args)
    with torch.device("meta"), quiet_loading():
        model = AutoModelForCausalLM.from_config(
            load_config(source.base, args), trust_remote_code=args.trust_remote_code
        )
    if (
        all(parameter.ndim < 3 for parameter in model.parameters())
        and not args.target_parameters
        and not source.adapters
    ):
        return ""
    with adapter_errors(source.adapters[0] if source.adapters else source.base):
        config: Any = adapter_config(model, args, "CAUSAL_LM")
        if source.adapters:
            config = PeftConfig.from_pretrained(str(source.adapters[0]))
        config.init_lora_weights = True
        policy = get_peft_model(model, config, low_cpu_mem_usage=True)
    return next(
        (
            f"{name.removeprefix('base_model.model.').replace('.base_layer', '')}.{layer.parameter_name}"
            for name, layer in policy.named_modules()
            if hasattr(layer, "parameter_name")
        ),
        "",
    )
