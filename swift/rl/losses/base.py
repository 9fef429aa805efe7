"""Policy losses: an objective at each token, and one normaliser.

    loss of a global batch = sum over all tokens t of  m_t * share_i(t) / Z * f_t

`f_t` is the objective (with its stop-gradients). `share_i` depends on the sequence of the token alone and `Z` on the
global batch alone; both follow from data masks, so they are known before any forward. A loss is one small file that
registers one `Loss`; a user's plugin does the same:

    from swift.plugin import losses
    from swift.rl.losses import TOKEN_MEAN, Loss, Objective

    def objective(inputs, config):
        return Objective(-inputs.ratio_T * inputs.advantages_T)

    losses["reinforce"] = Loss("reinforce", "unclipped", objective, TOKEN_MEAN, settings=())

T packed tokens, S sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from swift.plugin.registry import losses
from swift.rl.declared import find, parameters_of

if TYPE_CHECKING:
    from torch import Tensor

    from swift.rl.global_batch import BatchCounts
    from swift.rl.segments import Segments

Level = Literal["token", "sequence", "sequence_token"]

CLIP_SETTINGS = ("epsilon", "epsilon_high", "delta", "importance_sampling_level")
"""Settings that several losses share; `Loss.settings` names those that one reads."""


@dataclass(frozen=True, slots=True)
class Loss:
    """One policy loss.

    name, paper: as logged. summary: for the help. objective: per token, from `TokenInputs` and the settings.
    normaliser: the weight of each.
    default_level: of its ratio.
    applies_sampler_weight: the objective uses `sampler_log_weight_S` itself, so its result is not weighted again.
    settings: which of `CLIP_SETTINGS` it reads; the others have no effect, which is noted, and `delta` is refused.
    parameters: a dataclass of settings of its own (`swift.flags.flag`), which `config.parameters` holds; None for none.
    problems: problems of values of the settings, one line each, beginning with the setting's name.
    bounds: how the ratio acts, in words.
    """

    name: str
    paper: str
    objective: Callable[[TokenInputs, LossConfig], Objective]
    normaliser: Normaliser
    default_level: Level = "token"
    applies_sampler_weight: bool = False
    settings: tuple[str, ...] = ("importance_sampling_level",)
    parameters: type | None = None
    problems: Callable[[Any], Iterator[str]] = lambda settings: iter(())
    bounds: Callable[[LossConfig], str] = lambda config: f"{config.level} ratio"
    summary: str = ""

    @property
    def unread(self) -> tuple[str, ...]:
        """Those of `CLIP_SETTINGS` that have no effect."""
        return tuple(name for name in CLIP_SETTINGS if name not in self.settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """The settings of a policy loss, as `swift.rl.arguments` describes them; a ValueError names what the loss refuses.

    importance_sampling_level: None takes the loss's own. epsilon_high: None means `epsilon`. beta: of the KL that is in
    the loss. parameters: the loss's own settings; None takes their defaults.
    """

    loss_type: str = "dapo"
    importance_sampling_level: Level | None = None
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    beta: float = 0.0
    rollout_kl_coef: float = 0.0
    kl_bias_correction: bool = False
    parameters: Any = None

    def __post_init__(self) -> None:
        loss = get_loss(self.loss_type)
        for problem in loss_problems(self):
            raise ValueError(problem)
        if self.parameters is None and loss.parameters is not None:
            object.__setattr__(self, "parameters", loss.parameters())

    @classmethod
    def read(cls, settings: Any, *, beta: float) -> LossConfig:
        """From the flat settings of a run, with the weight of the KL that is left for the loss."""
        same = [field.name for field in fields(cls) if field.name not in ("beta", "parameters")]
        values = {name: getattr(settings, name) for name in same}
        return cls(**values, beta=beta, parameters=parameters_of(get_loss(settings.loss_type), settings))

    @property
    def clip_high(self) -> float:
        """`epsilon_high`, or `epsilon` when it is None."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def level(self) -> Level:
        """Level of the ratio."""
        return self.importance_sampling_level or get_loss(self.loss_type).default_level


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """Inputs of an objective, for one micro-batch.

    policy_logprobs_T: current policy, with gradient.
    log_ratio_T: token log-ratio to the old policy, 0 where the mask is 0, with gradient.
    ratio_T: ratio of the configured level, with gradient.
    advantages_T: advantage at each token.
    segments: the sequences of the tokens, and the data mask.
    sampler_log_weight_S: log of the sampler correction, for objectives that apply it (vespo); None without correction.
    """

    policy_logprobs_T: Tensor
    log_ratio_T: Tensor
    ratio_T: Tensor
    advantages_T: Tensor
    segments: Segments
    sampler_log_weight_S: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Objective:
    """The per-token loss `f_T` and token-wise observations, averaged over trained tokens when logged."""

    loss_T: Tensor
    observations_T: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Normaliser:
    """The weight of a token: `share(T_i, N_nominal) / total(counts, max_completion_length)`.

    share: of a sequence with T_i > 0 trained tokens in a nominal micro-batch of N_nominal trained tokens.
    total: Z of the global batch; it is all that a late, exact count changes.
    """

    formula: str
    share: Callable[[int, int], float]
    total: Callable[[BatchCounts, int], float]


TOKEN_MEAN = Normaliser("sum m f / N", lambda length, nominal: 1.0, lambda counts, limit: counts.num_tokens)
"""Every trained token of the global batch weighs the same."""

SEQUENCE_MEAN = Normaliser(
    "(1/B) sum_i sum_t m f / T_i",
    lambda length, nominal: 1.0 / length,
    lambda counts, limit: counts.num_trained_sequences,
)
"""Every sequence with a trained token weighs the same."""


def get_loss(name: str) -> Loss:
    """The loss of that name; a ValueError if there is none."""
    return find(losses, name, "loss_type")


def loss_problems(settings: Any) -> Iterator[str]:
    """Problems of the settings of the chosen loss, one line each; a `LossConfig` or those of a run."""
    loss = get_loss(settings.loss_type)
    if settings.delta is not None and "delta" not in loss.settings:
        yield f"delta: {settings.delta:g}: loss_type {loss.name} has no clip that it could bound; drop it"
    yield from loss.problems(settings)


def describe(config: LossConfig) -> str:
    """One line: the loss with its paper, its normaliser, and the bounds of the ratio as they act.

    Example: "cispo (arXiv:2506.13585): sum m f / N; token ratio, capped at 5".
    """
    loss = get_loss(config.loss_type)
    kl = f"; {config.beta:g} KL" + ", bias-corrected" * config.kl_bias_correction if config.beta > 0 else ""
    return f"{loss.name} ({loss.paper}): {loss.normaliser.formula}; {loss.bounds(config)}{kl}"


def sequence_weights(
    loss: Loss,
    counts: BatchCounts,
    trained_tokens: Sequence[int],
    *,
    nominal_tokens: Sequence[int] | None = None,
    max_completion_length: int | None = None,
) -> list[float]:
    """`share_i / Z` of some sequences of the global batch; 0 for a sequence without trained tokens.

    Args:
        loss: the loss.
        counts: of the whole global batch, all ranks.
        trained_tokens: T_i of the sequences asked for.
        nominal_tokens: trained tokens of the nominal micro-batch of each (bnpo); None means T_i.
        max_completion_length: longest completion in tokens (dr_grpo); None where the loss needs none.

    Raises:
        ValueError: Z is 0, so that there is nothing to train on and no update may be made.
    """
    total = loss.normaliser.total(counts, max_completion_length or 0)
    if not total > 0:
        raise ValueError(f"loss_type {loss.name}: the normaliser is {total} for {counts}")
    nominal = trained_tokens if nominal_tokens is None else nominal_tokens
    return [
        loss.normaliser.share(length, batch) / total if length > 0 else 0.0
        for length, batch in zip(trained_tokens, nominal, strict=True)
    ]
