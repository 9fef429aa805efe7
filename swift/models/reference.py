"""The frozen models that the policy is compared with: the reference of the KL term, the teacher of a distillation.

An adapter policy is its own reference with the adapter switched off (or, when it started from an adapter, or its start
was taken out of the base, with that put back for the moment); a fully tuned policy needs a frozen copy of itself.
`--ref_model` always loads that model.

A reference that is moved towards the policy (`--sync_ref_model`, TR-DPO, arXiv:2404.09656) needs numbers of its own:
the frozen copy, or for LoRA a second copy of the adapter. A 16-bit number would round a small step away, so from its
first move on the reference is kept in float32 too, in the host's memory. What has moved is part of a checkpoint
(`state`, `load_state`).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from swift.errors import ConfigError, attributed_to
from swift.models.multimodal import loads_whole
from swift.models.policy import from_config, load_base, load_config
from swift.models.source import find_other, is_adapter, locate
from swift.models.tuners import merge_in

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from torch import nn

    from swift.models.arguments import ModelArguments, TunerArguments


class ReferenceModel:
    """Gives the module to run for reference log-probs; use `active` around every forward.

    Example:
        with reference.active() as module:  # no gradients, evaluation mode
            hidden = module(...)
    """

    def __init__(self) -> None:
        self._masters: dict[str, torch.Tensor] = {}

    @contextlib.contextmanager
    def active(self) -> Iterator[nn.Module]:
        """The reference as a module, without gradients and in evaluation mode, inside the block only."""
        raise NotImplementedError
        yield

    def prepare(self, accelerator: Accelerator) -> str | None:
        """Make it ready for passes, as soon as the policy is wrapped for training; collective.

        What is the policy itself is ready.

        Returns:
            why log-probs come from its logits, as `prepare_scoring`.
        """
        return None

    def weights(self) -> dict[str, torch.Tensor]:
        """What `blend` moves, by the names that the policy has for it; whole tensors, the same on every rank."""
        raise NotImplementedError

    def require_movable(self, policy: nn.Module) -> None:
        """Find out before the run whether `blend` will work.

        Raises:
            ConfigError: its numbers are those of another architecture.
        """
        from swift.models.sharded import whole_shape

        theirs = {name: whole_shape(parameter) for name, parameter in policy.named_parameters()}
        for name, tensor in self.weights().items():
            if theirs.get(name) != tuple(tensor.shape):
                raise ConfigError(
                    "--sync_ref_model: true: the reference has another architecture than the policy "
                    f"({name} differs); leave --ref_model out, or --sync_ref_model false"
                )

    def blend(self, policy: nn.Module, alpha: float) -> None:
        """Moves the reference towards the unwrapped policy: ref := alpha policy + (1 - alpha) ref.

        A collective where the policy is sharded; whole parameters exist one at a time. Sums are formed and kept in
        float32 at least. For LoRA the two factors of an update are mixed one by one, so for alpha below 1 the mixture
        is that of the adapters, not of the matrices they stand for.
        """
        import torch

        from swift.models.sharded import gathered

        parameters = dict(policy.named_parameters())
        with torch.no_grad():
            for name, mine in self.weights().items():
                exact = self._exact(name, mine)
                with gathered([parameters[name]]) as whole:
                    other = whole(parameters[name]).to(device=mine.device, dtype=exact.dtype)
                    exact.copy_(torch.lerp(exact.to(mine.device), other, alpha))
                mine.copy_(exact)

    def _exact(self, name: str, mine: torch.Tensor) -> torch.Tensor:
        """Where a weight of the reference adds up: itself, or its copy in float32, made at the first call."""
        import torch

        wide = torch.promote_types(mine.dtype, torch.float32)
        if wide == mine.dtype:
            return mine
        if name not in self._masters:
            self._masters[name] = mine.detach().to(device="cpu", dtype=wide, copy=True)
        return self._masters[name]

    def state(self) -> dict[str, torch.Tensor]:
        """A moved reference, on the CPU and exact; see `load_state`."""
        return {name: self._masters.get(name, tensor).detach().cpu() for name, tensor in self.weights().items()}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over what `state` gave, exact to the last bit."""
        import torch

        mine = self.weights()
        if mine.keys() != state.keys():
            raise ConfigError("--resume_from_checkpoint: the checkpoint's reference is that of another model")
        with torch.no_grad():
            for name, tensor in mine.items():
                self._exact(name, tensor).copy_(state[name])
                tensor.copy_(state[name])


class FrozenReference(ReferenceModel):
    """A module of its own, never trained. Each rank has a part of it where the policy is sharded, unless it moves.

    alone: it is sharded by itself: on the device, or on the host ("offload"); "" if as the policy.
    """

    def __init__(self, module: nn.Module, *, moves: bool = False, alone: Literal["", "device", "offload"] = "") -> None:
        super().__init__()
        self.module = module.requires_grad_(False).eval()
        self.moves, self.alone = moves, alone

    def prepare(self, accelerator: Accelerator) -> str | None:
        """See `ReferenceModel.prepare`."""
        from swift.models.attention.choice import choose_attention, choose_streams
        from swift.models.scoring import prepare_scoring
        from swift.models.sharded import is_sharding, shard_alone, shard_frozen

        with_policy = is_sharding(accelerator) and not self.moves
        cut = with_policy or (bool(self.alone) and accelerator.num_processes > 1)
        if not cut:
            self.module.to(accelerator.device)
        (choose_attention if cut else choose_streams)(self.module)  # passes of a cut model are collectives
        obstacle = prepare_scoring(self.module)
        if with_policy:
            shard_frozen(self.module, accelerator)
        elif cut:
            shard_alone(self.module, accelerator.device, offload=self.alone == "offload")
        return obstacle

    @contextlib.contextmanager
    def active(self) -> Iterator[nn.Module]:
        """See `ReferenceModel.active`."""
        import torch

        with torch.no_grad():
            yield self.module

    def weights(self) -> dict[str, torch.Tensor]:
        """See `ReferenceModel.weights`."""
        return {name: parameter.data for name, parameter in self.module.named_parameters()}


class AdapterOffReference(ReferenceModel):
    """A LoRA policy without its adapter: the base model, at no memory."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.policy = policy

    @contextlib.contextmanager
    def active(self) -> Iterator[nn.Module]:
        """See `ReferenceModel.active`."""
        import torch

        trained = [parameter for parameter in self.policy.parameters() if parameter.requires_grad]
        with torch.no_grad(), _evaluating(self.policy), self.policy.disable_adapter():
            for parameter in trained:  # PEFT freezes them here; FSDP2 asks what is trained in its first pass
                parameter.requires_grad_(True)
            yield self.policy


class StartAdapterReference(ReferenceModel):
    """A LoRA policy with the adapter it started from: the base model and a copy of the adapter of its own.

    The trained tensors are exchanged, not overwritten, so a graph recorded before the block stays valid; where they are
    sharded their values are exchanged, and no graph may be alive.
    Take it before a checkpoint's weights are loaded: it remembers what the policy holds now.
    """

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.policy = policy
        self.start: dict[str, torch.Tensor] = {
            name: parameter.detach().clone() for name, parameter in policy.named_parameters() if parameter.requires_grad
        }

    @contextlib.contextmanager
    def active(self) -> Iterator[nn.Module]:
        """See `ReferenceModel.active`."""
        import torch

        from swift.models.sharded import exchanged

        with exchanged(self.policy, self.start), torch.no_grad(), _evaluating(self.policy):
            yield self.policy

    def weights(self) -> dict[str, torch.Tensor]:
        """See `ReferenceModel.weights`."""
        return self.start


def load_reference(
    args: ModelArguments, policy: nn.Module, *, moves: bool = False, weights: bool = True
) -> ReferenceModel:
    """The KL reference of a policy that was just loaded and not yet trained or resumed.

    Args:
        args: the settings the policy was loaded with.
        policy: what `load_policy` returned, not wrapped.
        moves: it will be moved towards the policy, so it needs numbers of its own.
        weights: see `load_other`.

    Raises:
        ConfigError, ResourceError: as `load_policy`, about `--ref_model`; it is to move and cannot.
    """
    import torch

    device, policy_device = _device_beside(policy, args), next(policy.parameters()).device
    reference: ReferenceModel
    if args.ref_model and args.ref_model != args.model:
        module: Any = load_other(args.ref_model, args, device, beside=policy, weights=weights)
        if moves and hasattr(module.config, "quantization_config"):
            raise ConfigError(f"--sync_ref_model: true: --ref_model {args.ref_model} is quantised; drop one of the two")
        reference = FrozenReference(module, moves=moves)
    elif args.tuner_type == "full":
        # of weights on the host that shards alone will leave, one copy is enough
        share = policy_device.type == "cpu" and torch.accelerator.is_available()
        reference = FrozenReference(_copied(policy, device or "cpu", share=share), moves=moves)
    elif moves or locate(args, require_weights=False).adapters or args.changes_base or args.init_weights == "false":
        reference = StartAdapterReference(policy)
    else:
        reference = AdapterOffReference(policy)
    if moves:
        reference.require_movable(policy)
    return reference


def load_teacher(args: ModelArguments, policy: nn.Module, *, weights: bool = True) -> ReferenceModel:
    """The teacher of a policy that was just loaded: the model that `--teacher_model` names, in the policy's precision.

    If an adapter is trained on that very model, the teacher is the policy with its adapter switched off. `weights`: see
    `load_other`.

    Raises:
        ConfigError, ResourceError: as `load_policy`, about `--teacher_model`.
    """
    name = args.teacher_model
    assert name is not None, "no teacher"
    if name == args.model and args.tuner_type != "full" and not args.changes_base and not is_adapter(Path(name)):
        return AdapterOffReference(policy)
    way = args.teacher_deepspeed or ""
    alone: Literal["", "device", "offload"] = ""
    if way.startswith("zero3") and not args.shards_weights:
        alone = "offload" if way.endswith("offload") else "device"
    device = None if alone and weights else _device_beside(policy, args)
    module = load_other(name, args, device, "--teacher_model", beside=policy, weights=weights)
    return FrozenReference(module, alone=alone)


def _device_beside(policy: nn.Module, args: ModelArguments) -> torch.device | None:
    """Where a model beside the policy is loaded; None: on the host, which shards alone leave."""
    device = next(policy.parameters()).device
    return None if args.sharded_by and device.type != "meta" else device


def load_other(
    name: str,
    args: TunerArguments,
    device: Any,
    flag: str = "--ref_model",
    *,
    beside: nn.Module | None = None,
    weights: bool = True,
) -> nn.Module:
    """A model beside the policy, with its adapter merged in if `name` is one; `flag` gave the name.

    beside: the policy, if the two get the same prompts. weights: whether there are files of weights; without, the model
    is made from its config alone, on the device "meta".
    """
    from swift.models.attention.interface import transformers_model

    with attributed_to(flag):
        source = find_other(name, flag=flag, use_hf=args.use_hf, require_weights=weights)
        config = load_config(source.base, args)
        sees = loads_whole(config, args)
        if beside is not None and sees != loads_whole(transformers_model(beside).config, args):
            raise ConfigError(
                f"{flag}: {name}: of this model and the policy, one sees images and one does not; give one of its kind"
            )
        if not weights:
            return cast("nn.Module", from_config(config, args))
        model = load_base(source.base, args, device=device)
        return merge_in(model, source.adapters[0]) if source.adapters else model


def _copied(module: nn.Module, device: torch.device | str, *, share: bool = False) -> nn.Module:
    """A copy with its tensors there, which are never two times on the device of `module`; ties stay.

    share: the numbers of parameters that are there already are those of `module`.
    """
    from torch import nn

    tensors: dict[int, Any] = {id(tensor): tensor.detach().to(device, copy=True) for tensor in module.buffers()}
    for tensor in module.parameters():
        tensors[id(tensor)] = nn.Parameter(tensor.detach().to(device, copy=not share), requires_grad=False)
    return copy.deepcopy(module, tensors)


@contextlib.contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    was_training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(was_training)
