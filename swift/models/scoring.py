"""Log-probs of completion tokens from a model that makes no [N, V] matrix of logits on the way.

The decoder gives hidden states, and the output layer gives log-probs instead of logits (`swift.rl.linear_logprobs`).
Every call goes through the model as its caller holds it (DDP, DeepSpeed, FSDP2, PEFT): the causal language model below
takes one more argument, `score`, and hands it to its output layer, whose own hooks gather the weight where it is
sharded. Without that argument both are what they were.

    model(..., score=request)   wrappers pass it on
      decoder(...)              hidden states [rows, steps, H]
      select                    those that predict a completion token, [N, H]
      lm_head(..., score=...)   log-probs [N], entropies [N]

What models do between the output layer and the softmax (a cap, a factor) is known from their config by name, and
`prepare_scoring` tries it out. A model that comes to other log-probs than its logits do, or whose output layer is
not a plain linear one (LoRA on it, quantised), is scored from its logits.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from swift.errors import first_line
from swift.models.attention.choice import trial
from swift.models.attention.interface import is_packed, transformers_model
from swift.models.forward import TokenBatch, arrange, completion_logits
from swift.rl.linear_logprobs import Entropy, LogitMap, linear_logprobs
from swift.rl.logprobs import selected_logprobs

NOT_THE_DECODERS = ("labels", "logits_to_keep", "return_dict")
"""What wrappers hand to a causal language model and its decoder does not take."""


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """What a forward pass shall give instead of logits.

    predict_index: [N] positions of the input, rows joined, whose hidden states predict the targets. target_ids: [N].
    logit_map: the way from the output layer's product to the softmax; the model fills in its own part.
    """

    predict_index: Tensor
    target_ids: Tensor
    logit_map: LogitMap
    entropy: Entropy


def score_tokens(
    model: nn.Module, tokens: TokenBatch, *, temperature: float = 1.0, entropy: Entropy = "none"
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of each completion token, and the entropy of its distribution in nats.

    Args:
        model: the policy as it is trained, with its wrappers.
        tokens: as the model takes them (`arrange`).
        temperature: of the softmax.
        entropy: whether it is wanted, and whether with a gradient.

    Returns:
        log-probs [N] and entropies [N] (None unless wanted), sequence after sequence, in fp32.
    """
    if not scores_itself(model):
        logits_NV = completion_logits(model, tokens)
        logprobs_N, entropy_N = selected_logprobs(logits_NV, tokens.target_ids, temperature=temperature)
        return logprobs_N, entropy_N if entropy != "none" else None
    assert is_packed(model) == tokens.packed, "the model's attention would read it as something else"
    request = ScoreRequest(tokens.predict_index, tokens.target_ids, LogitMap(temperature=temperature), entropy)
    found = model(**tokens.inputs, use_cache=False, score=request)
    return found if isinstance(found, tuple) else (found, None)


def score_requests(model: nn.Module, inputs: dict[str, Any], requests: tuple[ScoreRequest, ...]) -> tuple[Tensor, ...]:
    """Log-probs [N] of several requests without entropy, from one forward pass of a packed model.

    Args:
        model: as `score_tokens`.
        inputs: token ids, positions and layout of a stream.
        requests: each with its own targets and temperature.
    """
    if scores_itself(model):
        return tuple(model(**inputs, use_cache=False, score=requests))
    keep = torch.cat([one.predict_index for one in requests])
    logits = model(**inputs, use_cache=False, logits_to_keep=keep).logits[0]
    parts = logits.split([one.target_ids.numel() for one in requests])
    return tuple(
        selected_logprobs(part, one.target_ids, temperature=one.logit_map.temperature)[0]
        for part, one in zip(parts, requests, strict=True)
    )


def scores_itself(model: nn.Module) -> bool:
    """Whether `prepare_scoring` has settled that this model needs no logits."""
    return isinstance(getattr(transformers_model(model), "_scoring", None), LogitMap)


def prepare_scoring(model: nn.Module) -> str | None:
    """Let `model` take score requests where its log-probs are then those of its logits, which is tried out.

    Args:
        model: not wrapped yet but by PEFT; its way of attention is settled (`choose_attention`).

    Returns:
        why it is scored from its logits, in a few words; None when it scores itself.
    """
    base = transformers_model(model)
    if scores_itself(model):
        return None
    obstacle = _obstacle(base)
    if obstacle is not None:
        return obstacle
    heads = _plain_heads(base.get_output_embeddings())
    for one in heads:
        one.forward = MethodType(_head_forward, one)  # type: ignore[method-assign]
    base.forward = MethodType(_scoring_forward(base), base)
    for candidate in _logit_maps(base.config.get_text_config()):
        base._scoring = candidate
        obstacle = _gap(model)
        if obstacle is None:
            return None
    del base._scoring, base.forward
    for one in heads:
        del one.forward
    return obstacle


# --- what the model runs ---------------------------------------------------------------------------------------------


def _scoring_forward(base: Any) -> Any:
    """A causal language model's forward; with `score`, what each request gives: log-probs [N], and entropies."""

    def forward(
        self: Any, *args: Any, score: ScoreRequest | tuple[ScoreRequest, ...] | None = None, **kwargs: Any
    ) -> Any:
        if score is None:
            return type(self).forward(self, *args, **kwargs)
        given = {name: value for name, value in kwargs.items() if name not in NOT_THE_DECODERS}
        hidden = self.base_model(*args, **given).last_hidden_state
        own: LogitMap = self._scoring

        def answer(request: ScoreRequest) -> Any:
            request = replace(request, logit_map=replace(own, temperature=request.logit_map.temperature))
            hidden_NH = hidden.flatten(0, 1).index_select(0, request.predict_index)
            return self.get_output_embeddings()(hidden_NH, score=request)

        return tuple(map(answer, score)) if isinstance(score, tuple) else answer(score)

    forward.__signature__ = inspect.signature(type(base).forward)  # type: ignore[attr-defined]  # transformers looks
    return forward


def _head_forward(self: Any, hidden: Tensor, score: ScoreRequest | None = None) -> Any:
    """A linear layer's forward; with `score`, what the request asks for."""
    if score is None:
        return type(self).forward(self, hidden)
    weight, bias, device = self.weight, self.bias, hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    hidden_NH, weight_VH = hidden.to(dtype), weight.to(dtype)
    with torch.autocast(device, enabled=False):
        logprobs_N, entropy_N = linear_logprobs(
            hidden_NH,
            weight_VH,
            score.target_ids,
            bias_V=None if bias is None else bias.to(dtype),
            logit_map=score.logit_map,
            entropy=score.entropy,
        )
    return logprobs_N if entropy_N is None else (logprobs_N, entropy_N)


# --- preparation -----------------------------------------------------------------------------------------------------


def _obstacle(base: Any) -> str | None:
    """Why score requests cannot be tried at all."""
    if "forward" in vars(base):
        return "another library has replaced its forward pass"
    if base.base_model is base:
        return "its decoder has no name"
    head = base.get_output_embeddings()
    if head is None:
        return "it names no output layer"
    if not _plain_heads(head):
        return f"its output layer is a {type(head).__name__} ({type(head).__module__.partition('.')[0]})"
    return None


def _plain_heads(head: Any) -> list[nn.Module]:
    """The linear layers that may be called as the head; none where there is anything else.

    PEFT's `modules_to_save` keeps the head that it started with beside those that are trained.
    """
    if hasattr(head, "modules_to_save") and hasattr(head, "original_module"):
        found = [head.original_module, *head.modules_to_save.values()]
    else:
        found = [head]
    plain = all(type(one) is nn.Linear and "forward" not in vars(one) for one in found)
    return found if plain else []


def _logit_maps(config: Any) -> list[LogitMap]:
    """What a model may do with its logits, by the names in its config, likeliest first."""
    factors = []
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        factors += [float(value)] if (value := getattr(config, name, None)) else []
    if value := getattr(config, "logits_scaling", None):  # Granite divides by it, HyperCLOVA X multiplies
        factors += [1.0 / float(value), float(value)]
    softcap = getattr(config, "final_logit_softcapping", None) or None
    return [LogitMap(factor, softcap) for factor in dict.fromkeys([*factors, 1.0])]


def _gap(model: nn.Module) -> str | None:
    """Compare the log-probs and entropies of a few tokens with those of the logits."""
    try:
        with trial(model) as (sequences, device):
            tokens = arrange(model, sequences, device=device)
            logits = completion_logits(model, tokens)
            theirs = selected_logprobs(logits, tokens.target_ids, temperature=0.8)
            mine = score_tokens(model, tokens, temperature=0.8, entropy="value")
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        return f"its decoder cannot be called alone: {first_line(error)}"
    # two roundings of the largest logit, where the model caps and scales in its own type
    tolerance = max(2 * torch.finfo(next(model.parameters()).dtype).eps * float(logits.abs().max()), 1e-4)
    gaps = [(one - other).abs().mean() for one, other in zip(mine, theirs, strict=True) if one is not None]
    gap = float(torch.stack(gaps).max())  # NaN where any is
    return None if gap <= tolerance else "its log-probs differ from its logits'"
