"""The frozen model that the KL term compares the policy with.

What it costs depends on the tuner: a LoRA policy is its own reference with the adapter switched off (or,
when it started from an adapter, with the starting adapter put back for the moment); a fully tuned policy
needs a frozen copy of itself. `--ref_model` always loads that model.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from swift.errors import ConfigError
from swift.models.policy import fold_adapter, load_base
from swift.models.source import adapter_folder, find_base, find_folder, is_adapter, locate

if TYPE_CHECKING:
    import torch
    from torch import nn

    from swift.models.arguments import ModelArguments


class ReferenceModel:
    """Gives the module to run for reference log-probs; use `active` around every forward.

    Example:
        with reference.active() as module:  # no gradients, evaluation mode
            hidden = module(...)
    """

    @contextlib.contextmanager
    def active(self) -> Iterator[nn.Module]:
        """The reference as a module, without gradients and in evaluation mode, inside the block only."""
        raise NotImplementedError
        yield

    def blend(self, policy: nn.Module, alpha: float) -> None:
        """Moves the reference towards the policy: ref := alpha policy + (1 - alpha) ref.

        Raises:
            ConfigError: the reference shares its weights with the policy (LoRA), so it cannot move alone.
        """
        raise ConfigError("--sync_ref_model: true: a LoRA policy is its own reference; use --tuner_type full")


class FrozenReference(ReferenceModel):
    """A module of its own, never trained."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module.requires_grad_(False).eval()

    @contextlib.contextmanager
    def active(self) -> Iterator[nn.Module]:
        """See `ReferenceModel.active`."""
        import torch

        with torch.no_grad():
            yield self.module

    def blend(self, policy: nn.Module, alpha: float) -> None:
        """See `ReferenceModel.blend`; `policy` is the unwrapped module with the same parameter names."""
        import torch

        ours = dict(self.module.named_parameters())
        theirs = dict(policy.named_parameters())
        if ours.keys() != theirs.keys():
            raise ConfigError("--sync_ref_model: true: the reference has another architecture than the policy")
        with torch.no_grad():
            for name, parameter in ours.items():
                parameter.lerp_(theirs[name].detach().to(parameter), alpha)


class AdapterOffReference(ReferenceModel):
    """A LoRA policy without its adapter: the base model, at no memory."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy

    @contextlib.contextmanager
    def active(self) -> Iterator[nn.Module]:
        """See `ReferenceModel.active`."""
        import torch

        with torch.no_grad(), _evaluating(self.policy), self.policy.disable_adapter():
            yield self.policy


class StartAdapterReference(ReferenceModel):
    """A LoRA policy with the adapter it started from: the base model and one frozen copy of the adapter.

    The trained tensors are exchanged, not overwritten, so a graph recorded before the block stays valid; where they are
    spread over ranks their values are exchanged, and no graph may be alive.
    Take it before a checkpoint's weights are loaded: it remembers what the policy holds now.
    """

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self.start: dict[str, torch.Tensor] = {
            name: parameter.detach().clone() for name, parameter in policy.named_parameters() if parameter.requires_grad
        }

    @contextlib.contextmanager
    def active(self) -> Iterator[nn.Module]:
        """See `ReferenceModel.active`."""
        import torch

        from swift.models.sharded import exchanged

        parameters = dict(self.policy.named_parameters())
        with exchanged(parameters, self.start), torch.no_grad(), _evaluating(self.policy):
            yield self.policy


def load_reference(
    args: ModelArguments, policy: nn.Module, *, device: torch.device | str | None = None
) -> ReferenceModel:
    """The KL reference of a policy that was just loaded and not yet trained or resumed.

    `--ref_model` loads that model. Otherwise the reference is the policy's own start: the base model or the
    starting adapter for LoRA, a frozen copy for full tuning. With beta 0 nobody should call this.

    Args:
        args: the settings the policy was loaded with.
        policy: what `load_policy` returned, not wrapped.
        device: for a separate model; None means the policy's.

    Raises:
        ConfigError, ResourceError: as `load_policy`, about `--ref_model`.
    """
    device = device if device is not None else next(policy.parameters()).device
    if args.ref_model and args.ref_model != args.model:
        return FrozenReference(_load_other(args, device))
    if args.tuner_type == "full":
        return FrozenReference(copy.deepcopy(policy).to(device))
    return StartAdapterReference(policy) if locate(args).adapters else AdapterOffReference(policy)


def _load_other(args: ModelArguments, device: Any) -> nn.Module:
    from pathlib import Path

    name = args.ref_model
    assert name is not None
    if is_adapter(Path(name)):
        folder = adapter_folder(name)
        return fold_adapter(load_base(find_base(None, [folder], use_hf=args.use_hf), args, device=device), folder)
    return load_base(find_folder(name, flag="--ref_model", use_hf=args.use_hf), args, device=device)


@contextlib.contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    was_training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(was_training)
