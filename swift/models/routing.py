"""Routes of a mixture of experts: the experts that its layers choose for each token, recorded and replayed.

A layer with experts computes router scores [tokens, E], takes their top-k, and weighs the experts by what it makes of
the values. While such a layer computes, a `TorchFunctionMode` sees that one call of `torch.topk`. It notes the indices,
or puts replayed ones in their place with the values gathered from the same scores: the layer's own arithmetic makes the
gate weights of them, so the router has its gradient (routing replay, R2 and R3, arXiv:2510.11370). No module of
transformers is changed. `routing_gap` tries whether a model chooses its experts in this way.

    routes     [tokens, layers, top-k], expert ids, of the layers with experts in their order
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from swift.errors import first_line
from swift.models.attention.choice import trial
from swift.models.attention.interface import transformers_model
from swift.models.forward import arrange, completion_logits
from swift.models.sharded import whole_shape

# T tokens of a forward pass in its order, L layers with experts, K experts of a token, E experts of a layer

UNKNOWN = -1
"""Expert id of tokens whose route is not known; the router chooses then."""
TOP_K = (torch.topk, torch.Tensor.topk)


def routing_of(model: nn.Module) -> Routing:
    """The one recorder of the routes of a model, possibly under PEFT or DDP."""
    base = transformers_model(model)
    if not hasattr(base, "_routing"):
        base._routing = Routing(base)
    found: Routing = base._routing
    return found


class Recording:
    """What the layers chose in one forward pass.

    chosen: [T, K] of each layer that computed. differing: bool [T] of each, whether the router itself would have chosen
    other experts for a token with a known route. calls: number of top-k calls of each layer that began.
    """

    def __init__(self) -> None:
        self.chosen: dict[int, Tensor] = {}
        self.differing: dict[int, Tensor] = {}
        self.calls: dict[int, int] = {}

    def routes(self) -> Tensor:
        """[T, L, K] on the device of the model."""
        return torch.stack([self.chosen[number] for number in sorted(self.chosen)], 1)


class Routing:
    """Records and replays the routes of one model.

    Attributes:
        layers: number, in the decoder, of each layer with experts. num_experts: E of each of them.
    """

    def __init__(self, base: Any) -> None:
        self.layers: list[int] = []
        self.num_experts: list[int] = []
        self._replayed: Tensor | None = None
        self._recording: Recording | None = None
        self._modes: list[_Choices] = []
        names = [name for name, _ in base.named_modules() if name.rpartition(".")[2] == "experts"]
        for name in names:
            block, found = base.get_submodule(name.rpartition(".")[0]), re.search(r"(?:^|\.)(\d+)\.", name)
            number = _num_experts(base.get_submodule(name))
            if found is None or number is None:
                continue
            place = len(self.layers)
            self.layers.append(int(found[1]))
            self.num_experts.append(number)
            block.register_forward_pre_hook(partial(self._begin, place))
            block.register_forward_hook(self._end, always_call=True)

    def replay(self, routes_TLK: Tensor | None) -> None:
        """Choose these experts in forward passes from now on, and when layers are computed again; None: no more.

        routes_TLK: of every token of a pass, padding included; UNKNOWN where there is none.
        """
        self._replayed = routes_TLK

    @contextlib.contextmanager
    def recording(self) -> Iterator[Recording]:
        """Note what the layers choose in the block, which has one forward pass."""
        self._recording = Recording()
        try:
            yield self._recording
        finally:
            self._recording = None

    def array(self, recording: Recording) -> np.ndarray:
        """The routes of a pass on the host, uint8, or uint16 with more than 256 experts."""
        if max(self.num_experts) <= 256:
            return recording.routes().to(torch.uint8).cpu().numpy()
        return recording.routes().to(torch.int16).cpu().numpy().view(np.uint16)

    def _begin(self, place: int, *_: Any) -> None:
        if self._recording is None and self._replayed is None:
            return
        if self._recording is not None:
            self._recording.calls.setdefault(place, 0)
        mode = _Choices(self, place)
        mode.__enter__()
        self._modes.append(mode)

    def _end(self, *_: Any) -> None:
        if self._modes:
            self._modes.pop().__exit__(None, None, None)

    def choose(self, place: int, scores_TE: Tensor, own: Any) -> Any:
        """The result of a layer's top-k: its own, or that of the replayed experts."""
        indices_TK, recording = own.indices, self._recording
        if self._replayed is not None:
            wanted_TK = self._replayed[:, place].to(indices_TK.dtype)
            known_T = wanted_TK[:, 0] != UNKNOWN
            chosen_TK = torch.where(known_T[:, None], wanted_TK, indices_TK)
            if recording is not None:
                same_T = (wanted_TK[:, :, None] == indices_TK[:, None]).any(-1).all(-1)
                recording.differing[place] = known_T & ~same_T
            indices_TK = chosen_TK
            own = torch.return_types.topk((scores_TE.gather(1, indices_TK), indices_TK))
        if recording is not None:
            recording.chosen[place] = indices_TK.detach()
            recording.calls[place] += 1
        return own


class _Choices(TorchFunctionMode):
    """Active while one layer with experts computes."""

    def __init__(self, routing: Routing, place: int) -> None:
        super().__init__()
        self.routing, self.place = routing, place

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in TOP_K:
            return result
        scores = args[0] if args else kwargs["input"]
        if scores.dim() != 2 or scores.shape[1] != self.routing.num_experts[self.place]:
            return result  # such as of groups of experts
        return self.routing.choose(self.place, scores, result)


def _num_experts(experts: nn.Module) -> int | None:
    """E of fused experts, which are parameters of three dimensions, or of a list of modules."""
    if isinstance(experts, nn.ModuleList):
        return len(experts)
    shapes = [whole_shape(parameter) for parameter in experts.parameters()]
    return next((shape[0] for shape in shapes if len(shape) == 3), None)


def routing_gap(model: nn.Module) -> str | None:
    """Why the routes of `model` cannot be replayed, in a few words; a trial with its weights. None if they can.

    Its own routes have to give its own logits, and the experts next to them others.
    """
    routing = routing_of(model)
    if not routing.layers:
        return NO_EXPERTS
    try:
        with trial(model) as (sequences, device):
            tokens = arrange(model, sequences[:3], device=device)
            with routing.recording() as recording:
                own_NV = completion_logits(model, tokens)
            if any(number != 1 for number in recording.calls.values()):
                return "not all of its layers choose experts by one top-k"
            routes = _whole(recording, routing)
            sizes = torch.tensor(routing.num_experts, device=device)[:, None]
            gaps = []
            for chosen in (routes, torch.where(routes == UNKNOWN, UNKNOWN, (routes + 1) % sizes)):
                routing.replay(chosen)
                gaps.append(float((completion_logits(model, tokens) - own_NV).abs().mean() / own_NV.std()))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # as in `swift.models.attention.choice`
        return f"replay fails ({type(error).__name__}: {first_line(error)[:120]})"
    finally:
        routing.replay(None)
    same, other = gaps
    return None if same <= 1e-3 < other else "replayed experts are not those that it computes with"


NO_EXPERTS = "it is no mixture of experts"


def _whole(recording: Recording, routing: Routing) -> Tensor:
    """[T, L, K] of a pass through the first layers only."""
    chosen: Sequence[Tensor] = list(recording.chosen.values())
    routes = torch.full((len(chosen[0]), len(routing.layers), chosen[0].shape[1]), UNKNOWN, device=chosen[0].device)
    for place, one in recording.chosen.items():
        routes[:, place] = one
    return routes
