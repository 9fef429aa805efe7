"""Log-probs of completion tokens without an [N, V] matrix of logits.

The decoder gives hidden states, and the output layer gives log-probs instead of logits (`swift.rl.linear_logprobs`).
Every call goes through the model with its wrappers (DDP, DeepSpeed, FSDP2, PEFT): the causal language model below
takes one more argument, `score`, and passes it to its output layer, whose own hooks gather the weight where it is
sharded. Without that argument, both forward passes are unchanged.

    model(..., score=request)   wrappers pass it on
      decoder(...)              hidden states [rows, steps, H]
      select                    those that predict a completion token, [N, H]
      lm_head(..., score=...)   log-probs [N], entropies [N]

What a model does between the output layer and the softmax (a cap, a factor) is read from its config, and
`prepare_scoring` verifies it. A model whose log-probs then differ from those of its logits, or whose output layer is
not a plain linear one (LoRA on it, quantised), is scored from its logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from swift.errors import first_line
from swift.models.attention.choice import trial
from swift.models.attention.forked import takes_streams
from swift.models.attention.interface import transformers_model
from swift.models.autocast import autocast_dtype, autocasting
from swift.models.forward import TokenBatch, arrange, completion_logits, completion_output
from swift.models.router_loss import balancing_loss
from swift.models.transfer import to_device
from swift.models.vision import lowest, placeholder_ids, possible
from swift.rl.linear_distillation import Head
from swift.rl.linear_logprobs import Entropy, LogitMap, linear_logprobs
from swift.rl.logprobs import selected_logprobs

HeadWork: TypeAlias = Callable[[Head, Tensor], tuple[Tensor, ...] | Head]
"""What is computed of the hidden states that predict tokens, the output layer, and the ids of these tokens, [N]."""

HEAD_ARGUMENTS = ("labels", "logits_to_keep", "return_dict")
"""Arguments of a causal language model, passed by wrappers, that its decoder does not take."""


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Targets of a forward pass that returns log-probs instead of logits.

    predict_index: [N] positions of the input, rows joined, whose hidden states predict the targets. target_ids: [N].
    logit_map: from the output layer's product to the softmax; the model sets scale and softcap. work: what is computed
    at the output layer in place of log-probs and entropies.
    """

    predict_index: Tensor
    target_ids: Tensor
    logit_map: LogitMap
    entropy: Entropy
    work: HeadWork | None = None


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
    if (group := tokens.group) is not None:  # each rank scores a share of them
        logprobs_N, entropy_N = score_tokens(model, tokens.dealt(), temperature=temperature, entropy=entropy)
        total = tokens.target_ids.numel()
        return group.collected(logprobs_N, total), None if entropy_N is None else group.collected(entropy_N, total)
    if not scores_itself(model):
        with autocasting(model):
            logits_NV = completion_logits(model, tokens)
        logprobs_N, entropy_N = selected_logprobs(logits_NV, tokens.target_ids, temperature=temperature)
        return logprobs_N, entropy_N if entropy != "none" else None
    assert takes_streams(model) or not tokens.packed, "the model's attention would read it as one row"
    with autocasting(model):
        scores = model(**tokens.inputs, use_cache=False, score=_request(tokens, temperature, entropy))
    return scores if isinstance(scores, tuple) else (scores, None)


def scores_and_balance(
    model: nn.Module, tokens: TokenBatch, *, temperature: float = 1.0, entropy: Entropy = "none"
) -> tuple[Tensor, Tensor | None, Tensor]:
    """`score_tokens`, and the load-balancing loss of the routers over the tokens of the same forward pass."""
    assert tokens.group is None, "the loss of a part of a stream is not a part of its loss"
    if not scores_itself(model):
        with autocasting(model):
            logits_NV, output = completion_output(model, tokens, output_router_logits=True)
        logprobs_N, entropy_N = selected_logprobs(logits_NV, tokens.target_ids, temperature=temperature)
        loss = balancing_loss(transformers_model(model), output.router_logits, tokens.inputs.get("attention_mask"))
        return logprobs_N, entropy_N if entropy != "none" else None, loss
    assert takes_streams(model) or not tokens.packed, "the model's attention would read it as one row"
    request = _request(tokens, temperature, entropy)
    with autocasting(model):
        scores, loss = model(**tokens.inputs, use_cache=False, score=request, output_router_logits=True)
    return (*scores, loss) if isinstance(scores, tuple) else (scores, None, loss)


def at_head(model: nn.Module, tokens: TokenBatch, work: HeadWork) -> Any:
    """What `work` gives at the output layer, at temperature 1, in one forward pass; tensors are [N].

    A rank of a group that shares a stream computes its share of the tokens, and gets the tensors of all.
    """
    if (group := tokens.group) is not None:
        result = at_head(model, tokens.dealt(), work)
        return tuple(group.collected(values_N, tokens.target_ids.numel()) for values_N in result)
    if not scores_itself(model):
        with autocasting(model):
            logits_NV = completion_logits(model, tokens)
        return work(Head(logits_NV), tokens.target_ids)
    assert takes_streams(model) or not tokens.packed, "the model's attention would read it as one row"
    request = replace(_request(tokens, 1.0, "none"), work=work)
    with autocasting(model):
        return model(**tokens.inputs, use_cache=False, score=request)


def _request(tokens: TokenBatch, temperature: float, entropy: Entropy) -> ScoreRequest:
    return ScoreRequest(tokens.predict_index, tokens.target_ids, LogitMap(temperature=temperature), entropy)


def score_requests(model: nn.Module, inputs: dict[str, Any], requests: tuple[ScoreRequest, ...]) -> tuple[Tensor, ...]:
    """Log-probs [N] of several requests without entropy, from one forward pass of a packed model.

    Args:
        model: as `score_tokens`.
        inputs: token ids, positions and layout of a stream.
        requests: each with its own targets and temperature.
    """
    if scores_itself(model):
        with autocasting(model):
            return tuple(model(**inputs, use_cache=False, score=requests))
    keep = torch.cat([request.predict_index for request in requests])
    with autocasting(model):
        logits = model(**inputs, use_cache=False, logits_to_keep=keep).logits[0]
    parts = logits.split([request.target_ids.numel() for request in requests])
    return tuple(
        selected_logprobs(part, request.target_ids, temperature=request.logit_map.temperature)[0]
        for part, request in zip(parts, requests, strict=True)
    )


def scores_itself(model: nn.Module) -> bool:
    """Whether this model takes score requests; see `prepare_scoring`."""
    return isinstance(getattr(transformers_model(model), "_scoring", None), LogitMap)


def prepare_scoring(model: nn.Module) -> str | None:
    """Let `model` take score requests if a trial finds its log-probs equal to those of its logits.

    What the model does with its logits is guessed from the names in its config, likeliest first; on the device "meta"
    the likeliest is taken.

    Args:
        model: without wrappers other than PEFT's; its attention is chosen (`choose_attention`).

    Returns:
        why it is scored from its logits, in a few words; None when it takes score requests.
    """
    base = transformers_model(model)
    if scores_itself(model):
        return None
    heads = _linear_heads(base)
    if isinstance(heads, str):
        return heads
    config, factors = base.config.get_text_config(), []
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        factors += [float(value)] if (value := getattr(config, name, None)) else []
    if value := getattr(config, "logits_scaling", None):  # Granite divides by it, HyperCLOVA X multiplies
        factors += [1.0 / float(value), float(value)]
    softcap = getattr(config, "final_logit_softcapping", None) or None
    for head in heads:
        head.forward = MethodType(_head_forward, head)  # type: ignore[method-assign]
        head.forbidden = placeholder_ids(base.config)  # type: ignore[assignment]
    base.forward = MethodType(_scoring_forward(base), base)
    if base.device.type == "meta":  # there are no numbers to compare
        base._scoring = LogitMap(factors[0] if factors else 1.0, softcap)
        return None
    for factor in dict.fromkeys([*factors, 1.0]):
        base._scoring = LogitMap(factor, softcap)
        obstacle = _gap(model)
        if obstacle is None:
            return None
    del base._scoring, base.forward
    for head in heads:
        del head.forward, head.forbidden
    return obstacle


# --- what the model runs ---------------------------------------------------------------------------------------------


def _scoring_forward(base: Any) -> Any:
    """A causal language model's forward; with `score`, the result of each request: log-probs [N], and entropies.

    With `output_router_logits` too, a pair of that and the load-balancing loss.
    """

    def forward(
        self: Any, *args: Any, score: ScoreRequest | tuple[ScoreRequest, ...] | None = None, **kwargs: Any
    ) -> Any:
        if score is None:
            return type(self).forward(self, *args, **kwargs)
        of_decoder = {name: value for name, value in kwargs.items() if name not in HEAD_ARGUMENTS}
        output = self.base_model(*args, **of_decoder)
        hidden, scores = output.last_hidden_state, []
        for request in score if isinstance(score, tuple) else (score,):
            request = replace(request, logit_map=replace(self._scoring, temperature=request.logit_map.temperature))
            hidden_NH = hidden.flatten(0, 1).index_select(0, request.predict_index)
            scores.append(self.get_output_embeddings()(hidden_NH, score=request))
        result = tuple(scores) if isinstance(score, tuple) else scores[0]
        if not kwargs.get("output_router_logits"):
            return result
        return result, balancing_loss(self, output.router_logits, kwargs.get("attention_mask"))

    forward.__signature__ = inspect.signature(type(base).forward)  # type: ignore[attr-defined]  # transformers looks
    return forward


def _head_forward(self: Any, hidden: Tensor, score: ScoreRequest | None = None) -> Any:
    """A linear layer's forward; with `score`, the result of the request."""
    if score is None:
        return type(self).forward(self, hidden)
    weight, bias, device = self.weight, self.bias, hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    hidden_NH, weight_VH = hidden.to(dtype), weight.to(dtype)
    bias_V = None if bias is None else bias.to(dtype)
    if self.forbidden:
        bias_V = hidden_NH.new_zeros(weight_VH.shape[0]) if bias_V is None else bias_V
        bias_V = bias_V.index_fill(0, to_device(self.forbidden, bias_V.device), lowest(dtype))
    with torch.autocast(device, enabled=False):
        if score.work is not None:
            return score.work(Head(hidden_NH, weight_VH, bias_V, score.logit_map), score.target_ids)
        logprobs_N, entropy_N = linear_logprobs(
            hidden_NH,
            weight_VH,
            score.target_ids,
            bias_V=bias_V,
            logit_map=score.logit_map,
            entropy=score.entropy,
        )
    return logprobs_N if entropy_N is None else (logprobs_N, entropy_N)


# --- preparation -----------------------------------------------------------------------------------------------------


def _linear_heads(base: Any) -> list[nn.Module] | str:
    """The linear layers that may be called as the output layer, or why score requests cannot be tried at all.

    PEFT's `modules_to_save` keeps the original output layer beside those that are trained.
    """
    if "forward" in vars(base):
        return "another library has replaced its forward pass"
    if base.base_model is base:
        return "its decoder has no name"
    head = base.get_output_embeddings()
    if head is None:
        return "it names no output layer"
    heads = [head]
    if hasattr(head, "modules_to_save") and hasattr(head, "original_module"):
        heads = [head.original_module, *head.modules_to_save.values()]
    if any(type(layer) is not nn.Linear or "forward" in vars(layer) for layer in heads):
        return f"its output layer is a {type(head).__name__} ({type(head).__module__.partition('.')[0]})"
    return heads


def _gap(model: nn.Module) -> str | None:
    """Compare the log-probs and entropies of a few tokens with those of the logits."""
    try:
        with trial(model) as (sequences, device), autocasting(model):
            tokens = arrange(model, sequences, device=device)
            logits = completion_logits(model, tokens)
            theirs = selected_logprobs(logits, tokens.target_ids, temperature=0.8)
            mine = score_tokens(model, tokens, temperature=0.8, entropy="value")
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        return f"its decoder cannot be called alone: {first_line(error)}"
    # two roundings of the largest logit, where the model caps and scales in its own type
    dtype = autocast_dtype(model) or next(model.parameters()).dtype
    tolerance = max(2 * torch.finfo(dtype).eps * float(possible(model, logits).abs().max()), 1e-4)
    gaps = [(a - b).abs().mean() for a, b in zip(mine, theirs, strict=True) if a is not None]
    gap = float(torch.stack(gaps).max())  # NaN where any is
    return None if gap <= tolerance else "its log-probs differ from its logits'"
