"""`--optim muon`: torch's Muon for matrices, AdamW for everything else, with one learning rate.

Muon (Keller Jordan, 2024) orthogonalises the momentum of a matrix. Its update is scaled to the root mean square of
AdamW's, so that learning rate and weight decay mean the same (arXiv:2502.16982). Embeddings, the output layer, vectors,
and experts that are one tensor are AdamW's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import AdamW, Muon, Optimizer
from transformers import Trainer, TrainingArguments

from swift.errors import ConfigError
from swift.plugin.registry import optimizers

OPTIONS = {"momentum": float, "ns_steps": int}
"""Names that `--optim_args` may set."""


@optimizers.register("muon")
class MuonAndAdamW(Optimizer):
    """Two optimizers that share groups and state with this one."""

    def __init__(self, params: Any, *, lr: float, betas: tuple[float, float], eps: float, **options: Any) -> None:
        groups: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        for group in params:
            for matrices, found in groups.items():
                chosen = [one for one in group["params"] if _is_matrix(one) == matrices]
                found += [{**group, "params": chosen}] if chosen else []
        self._parts: list[Optimizer] = []
        if groups[True]:
            self._parts.append(Muon(groups[True], lr=lr, adjust_lr_fn="match_rms_adamw", **options))
        if groups[False]:
            self._parts.append(AdamW(groups[False], lr=lr, betas=betas, eps=eps))
        self._sizes = [len(part.param_groups) for part in self._parts]
        super().__init__([group for part in self._parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of both; a loaded state has other groups, so they are shared anew."""
        loss = closure() if closure is not None else None
        start = 0
        for part, size in zip(self._parts, self._sizes, strict=True):
            part.param_groups, part.state = self.param_groups[start : start + size], self.state
            part.step()
            start += size
        return loss

    @staticmethod
    def options(arguments: TrainingArguments) -> dict[str, Any]:
        """Those of transformers' AdamW, and of `--optim_args`."""
        options = dict(Trainer.get_optimizer_cls_and_kwargs(arguments)[1])
        chosen = {name: options[name] for name in ("lr", "betas", "eps")}
        for pair in filter(None, (arguments.optim_args or "").replace(" ", "").split(",")):
            name, _, value = pair.partition("=")
            try:
                chosen[name] = OPTIONS[name](value)
            except (KeyError, ValueError) as error:
                raise ConfigError(
                    f"--optim_args: {pair}: muon does not take it; write momentum=0.95,ns_steps=5"
                ) from error
        return chosen

    @staticmethod
    def attach(trainer: Trainer) -> None:
        """Mark embeddings and the output layer."""
        model: Any = trainer.model
        for layer in filter(None, (model.get_input_embeddings(), model.get_output_embeddings())):
            for parameter in layer.parameters():
                parameter.is_of_tokens = True


def _is_matrix(parameter: torch.Tensor) -> bool:
    return parameter.ndim == 2 and not getattr(parameter, "is_of_tokens", False)
