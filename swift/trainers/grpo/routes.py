"""Routing replay: forward passes of the policy use experts that were chosen before (arXiv:2510.11370).

`rollout` (R3) replays what the rollout engine chose, in the pass over old log-probs too. `trainer` (R2) replays what
the trainer chose in its first pass over a sample, which is that of the old log-probs, in all later updates on it. Gate
weights come from the current router in either case. A prompt that is computed once for several completions has the
routes of one of them. The reference model, the parity check and evaluations choose for themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from swift.errors import ConfigError, NumericError
from swift.models.forward import TokenBatch
from swift.models.routing import NO_EXPERTS, UNKNOWN, Recording, Routing, routing_gap, routing_of
from swift.models.transfer import to_device
from swift.rollout.samples import TrainSample
from swift.trainers.grpo.metrics import StepMetrics

ReplayMode = Literal["off", "rollout", "trainer"]


def require_experts(model: nn.Module, mode: ReplayMode) -> None:
    """Raises ConfigError: the model, which may be without weights, has no experts that could be replayed."""
    if mode != "off" and not routing_of(model).layers:
        raise _refused(mode, NO_EXPERTS)


def replay_of(model: nn.Module, mode: ReplayMode, device: torch.device) -> RoutingReplay | None:
    """The replay of a loaded policy; None if it is off. Raises ConfigError: a trial with the model has failed."""
    if mode == "off":
        return None
    if (gap := routing_gap(model)) is not None:
        raise _refused(mode, gap)
    return RoutingReplay(routing_of(model), mode, device)


def _refused(mode: str, why: str) -> ConfigError:
    return ConfigError(f"--moe_router_replay: {mode}: the experts of --model cannot be replayed ({why}); use off")


@dataclass(eq=False)
class RoutingReplay:
    """Replays the routes of samples in forward passes of one policy.

    routing: of the policy. mode: rollout or trainer. keeps: whether samples without routes keep those of a pass; set
    for each global batch. is_paused: whether routers choose for themselves, see `paused`.
    """

    routing: Routing
    mode: ReplayMode
    device: torch.device
    keeps: bool = False
    is_paused: bool = False
    _differing: tuple[Tensor, Tensor] | None = field(default=None, init=False)

    @contextlib.contextmanager
    def around(self, samples: Sequence[TrainSample], tokens: TokenBatch, *, filler: bool) -> Iterator[None]:
        """Around a forward pass over a micro-batch; with gradients, until `end` the experts stay.

        Layers that are computed again in the backward pass then choose them once more.
        """
        missing = [sample for sample in samples if sample.routes is None and sample.num_trained]
        if self.mode == "rollout" and missing and not filler:
            raise NumericError(
                f"--moe_router_replay: rollout: {len(missing)} of {len(samples)} samples lack those of the engine; "
                "this is a bug"
            )
        routes_TLK = self._laid_out(samples, tokens)
        self.routing.replay(routes_TLK)
        try:
            with self.routing.recording() as recording:
                yield
        except BaseException:
            self.end()
            raise
        if not torch.is_grad_enabled():
            self.end()
        elif routes_TLK is not None:
            self._differing = torch.stack(list(recording.differing.values())), routes_TLK[:, 0, 0] != UNKNOWN
        if self.keeps and not filler:
            self._keep(samples, tokens, recording)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Around passes of another model, or of the policy without its adapter."""
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False

    def end(self) -> None:
        """Let routers choose again, after the backward pass."""
        self.routing.replay(None)
        self._differing = None

    def observe(self, report: StepMetrics) -> None:
        """Add the shares of tokens whose routers would have chosen other experts, if a training pass has replayed."""
        if self._differing is not None:
            differing_LT, known_T = self._differing
            num_tokens = known_T.sum()
            report.add("routing/tokens_differ_frac", differing_LT.any(0).sum(), num_tokens)
            report.add("routing/choices_differ_frac", differing_LT.sum(), num_tokens * len(differing_LT))

    def _laid_out(self, samples: Sequence[TrainSample], tokens: TokenBatch) -> Tensor | None:
        """The routes of the samples as the model takes their tokens, [T, L, K]; None if no sample has any."""
        found = [None if sample.routes is None else self._of_layers(sample.routes) for sample in samples]
        top_k = next((routes.shape[2] for routes in found if routes is not None), None)
        if top_k is None:
            return None
        shape = tokens.inputs["input_ids"].numel(), len(self.routing.layers), top_k
        laid_out = np.full(shape, UNKNOWN, dtype=np.int16)
        for routes, (prompt, own) in zip(found, tokens.spans, strict=True):
            if routes is not None:
                laid_out[prompt.start : prompt.stop] = routes[: prompt.length]
                laid_out[own.start : own.stop] = routes[prompt.length :]
        return to_device(laid_out, self.device)

    def _of_layers(self, routes: np.ndarray) -> np.ndarray:
        """Of the layers with experts; some engines return rows for all layers of the model."""
        layers = self.routing.layers
        if routes.shape[1] == len(layers):
            return routes
        if routes.shape[1] <= layers[-1]:
            raise NumericError(
                f"--moe_router_replay: {self.mode}: the engine has returned the experts of {routes.shape[1]} layers, "
                f"and the policy has {len(layers)} with experts, the last of them layer {layers[-1]}; use trainer"
            )
        return routes[:, layers]

    def _keep(self, samples: Sequence[TrainSample], tokens: TokenBatch, recording: Recording) -> None:
        if all(sample.routes is not None for sample in samples):
            return
        routes = self.routing.array(recording)
        for sample, (prompt, own) in zip(samples, tokens.spans, strict=True):
            if sample.routes is None:
                parts = routes[prompt.start : prompt.stop], routes[own.start : own.stop]
                sample.routes = np.concatenate(parts)
