"""Learning rates that differ from `--learning_rate`: of vision tower and aligner, and of LoRA's matrices B (LoRA+)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from torch import nn
from torch.optim import Optimizer

from swift.errors import ConfigError, counted
from swift.models.attention.interface import transformers_model
from swift.models.multimodal import Part, loads_whole, no_tower, parts_of_parameters

PARTS: dict[Part, str] = {"vit": "vit_lr", "aligner": "aligner_lr"}
"""Parts of a model that sees -> the settings of their learning rates."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Learning rates of parts, and how many times its part's rate a matrix B of LoRA has (LoRA+, arXiv:2402.12354).

    Matrices B of embeddings have the rate of their part, as in the paper.
    """

    parts: Mapping[Part, float] = field(default_factory=dict)
    ratio_of_b: float = 1.0

    @classmethod
    def of(cls, args: Any) -> Rates:
        """Those of the settings."""
        rates = {part: getattr(args, name) for part, name in PARTS.items()}
        return cls({part: rate for part, rate in rates.items() if rate is not None}, args.loraplus_lr_ratio or 1.0)

    def give(self, optimizer: Optimizer, policy: nn.Module) -> None:
        """Split the groups of an optimizer that has not stepped yet; parameters with the usual rate come first."""
        if self == Rates():
            return
        named = dict(policy.named_parameters())
        is_b = {parameter: ".lora_B." in name for name, parameter in named.items()}
        model = transformers_model(policy)
        part_of: dict[nn.Parameter, Part] = {}
        if self.parts:
            named = dict(model.named_parameters())
            part_of = {named[name]: part for name, part in parts_of_parameters(model).items() if part in self.parts}
        rates: dict[Part, float] = {"llm": optimizer.defaults["lr"], **self.parts}
        whole = list(optimizer.param_groups)
        optimizer.param_groups.clear()
        for (part, rate), ratio, group in product(rates.items(), dict.fromkeys((1.0, self.ratio_of_b)), whole):
            of_both = [
                one
                for one in group["params"]
                if part_of.get(one, "llm") == part and (self.ratio_of_b if is_b[one] else 1.0) == ratio
            ]
            if of_both:
                optimizer.add_param_group({**group, "params": of_both, "lr": rate * ratio})

    def lines(self, policy: Any, args: Any) -> list[str]:
        """The rates with the number of parameters of each, as lines of the plan; none if all have one.

        Raises:
            ConfigError: a language model with a rate for a tower, or nothing is trained in a part with its own rate.
        """
        found = []
        if self.ratio_of_b != 1.0:
            found.append(f"learning rate of LoRA's matrices B: {self.ratio_of_b:g} times that of A")
        if not self.parts:
            return found
        if not loads_whole(policy.config, args):
            name = PARTS[next(iter(self.parts))]
            raise no_tower(name, getattr(args, name))
        model = transformers_model(policy)
        sizes: dict[Part, int] = {"llm": 0, "head": 0, "vit": 0, "aligner": 0}
        trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
        for name, part in parts_of_parameters(model).items():
            sizes[part] += trained[name].numel() if name in trained else 0
        for part, rate in self.parts.items():
            if not sizes[part]:
                raise ConfigError(
                    f"--{PARTS[part]}: {rate:g}: nothing is trained there; use --freeze_{part} false, or leave it out"
                )
        groups = [
            f"{part} {self.parts.get(part, args.learning_rate):g} ({counted(size, 'parameter')})"
            for part, size in sizes.items()
            if size
        ]
        return [f"learning rates: {', '.join(groups)}", *found]
