"""`--sequence_parallel_size`: neighbouring ranks compute the same rows together (`swift.models.attention`)."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from swift.errors import ConfigError, counted
from swift.trainers.parallel.sharding import check_replicas

if TYPE_CHECKING:
    from torch import nn

    from swift.models.attention.sequence_parallel import SequenceGroup


def sharing_lines(args: Any, world_size: int) -> list[str]:
    """A line of the plan where processes share micro-batches.

    Raises:
        ConfigError: see `data_ranks`.
    """
    size, groups = args.sequence_parallel_size, data_ranks(args, world_size)
    return [f"micro-batches: shared by {size} neighbouring processes; {counted(groups, 'group')}"] if size > 1 else []


def data_ranks(args: Any, world_size: int) -> int:
    """The groups of ranks that have rows of their own.

    Raises:
        ConfigError: the ranks do not make whole groups, or copies of a model (`check_replicas`).
    """
    check_replicas(args, world_size)
    size: int = args.sequence_parallel_size
    if world_size % size:
        divisors = [number for number in range(1, world_size + 1) if world_size % number == 0]
        raise ConfigError(
            f"--sequence_parallel_size: {size}: does not divide the {counted(world_size, 'process')} of this run; "
            f"valid: {', '.join(map(str, divisors))}, or set NPROC_PER_NODE and NNODES"
        )
    return world_size // size


def require_shareable(model: nn.Module, args: Any, flag: str = "model") -> None:
    """Install packed attention where ranks share rows; `flag` names the model.

    Raises:
        ConfigError: tokens of a part of a stream cannot be computed alone, or a rank would have no head.
    """
    size: int = args.sequence_parallel_size
    if size == 1:
        return
    from swift.models.attention.choice import choose_attention
    from swift.models.attention.interface import decoder_of, transformers_model
    from swift.models.attention.sequence_parallel import uncut_inputs
    from swift.models.vision import vision_of

    for name in ("neftune_noise_alpha", "torch_compile"):
        if value := getattr(args, name, None):
            raise ConfigError(
                f"--sequence_parallel_size: {size}: does not go with --{name} {str(value).lower()}; drop one"
            )
    named = f"--sequence_parallel_size: {size}: the model of --{flag}"
    heads = getattr(transformers_model(model).config.get_text_config(), "num_attention_heads", None)
    if heads is not None and heads < size:
        raise ConfigError(f"{named} has {counted(heads, 'head')}, and each rank needs one; use at most {heads}")
    obstacle, decoder = choose_attention(model), decoder_of(model)
    if decoder is not transformers_model(model).base_model and (more := uncut_inputs(decoder)):
        obstacle = f"its language model takes {', '.join(more)} beside embeddings"
    if (vision := vision_of(model)) is not None and vision.see_themselves:
        obstacle = "tokens of an image see each other"
    if obstacle is not None:
        raise ConfigError(
            f"{named} cannot be computed in parts ({obstacle}); use --sequence_parallel_size 1, with --deepspeed or "
            "--fsdp if memory is short"
        )


class SharedRows:
    """Mixin before a trainer of TRL: the ranks of a group get the same batches and compute them together.

    Losses are those of one rank: each rank has the whole loss of its batch, so means of gradients over all ranks are
    those over batches.
    """

    args: Any
    accelerator: Any

    def __init__(self, *, sequence_group: SequenceGroup, model: Any, **arguments: Any) -> None:
        from swift.models.attention.interface import transformers_model
        from swift.models.attention.sequence_parallel import spread_rows

        self.sequence_group = sequence_group
        for shared in (model, arguments.get("ref_model")):
            if shared is not None:
                spread_rows(transformers_model(shared).base_model, sequence_group)
        super().__init__(model=model, **arguments)  # type: ignore[call-arg]

    def get_tp_size(self) -> int:
        """How many ranks have the same batch, which is what Trainer and TRL ask it for."""
        return self.sequence_group.size

    def create_accelerator_and_postprocess(self) -> None:
        """Trainer's; data loaders give the ranks of a group the same batches, whose metrics count once."""
        from accelerate.utils import recursively_apply
        from torch.distributed.device_mesh import init_device_mesh

        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        accelerator, size = self.accelerator, self.sequence_group.size
        groups = accelerator.num_processes // size
        # to accelerate, ranks along "tp" are those with the same batches
        mesh = init_device_mesh(accelerator.device.type, (groups, size), mesh_dim_names=("dp_replicate", "tp"))
        accelerator._prepare_device_mesh = lambda: mesh
        gather, gather_for_metrics = accelerator.gather, accelerator.gather_for_metrics

        def of_groups(tensor: Any) -> Any:
            return tensor.unflatten(0, (groups, size, -1))[:, 0].flatten(0, 1)

        def gather_once(*values: Any, **named: Any) -> Any:
            accelerator.gather = lambda data: recursively_apply(of_groups, gather(data))
            try:
                return gather_for_metrics(*values, **named)
            finally:
                accelerator.gather = gather

        accelerator.gather_for_metrics = gather_once
        self.gather_function = functools.partial(gather_once, use_gather_object=self.args.eval_use_gather_object)
