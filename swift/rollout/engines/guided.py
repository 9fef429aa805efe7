"""Completions that match a regular expression: which tokens a row may sample next, and why an expression is refused.

The library xgrammar compiles the expression for the tokenizer and walks it; vLLM and LMDeploy use the same one inside.
It is an optional package (`pip install xgrammar`), imported here only.

    GuideFactory(tokenizer, V) -> compiled(regex)          once per expression
    Guides(requests, ...)      -> mask(logits), advance()  once per decode step, rows without an expression are free
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from swift.errors import ConfigError, EngineError, ResourceError
from swift.types import Request

FLAG = "--vllm_guided_decoding_regex"
PACKAGE = "xgrammar"
KEPT_EXPRESSIONS = 64
"""Compiled expressions that are kept; a run has one, a server as many as its clients."""
BITS = 32
"""Tokens per number of xgrammar's masks."""


def available() -> bool:
    """Whether the package is installed; imports nothing."""
    return importlib.util.find_spec(PACKAGE) is not None


def require(backend: str, regex: str) -> None:
    """Checks package and expression before weights are loaded, as far as it can be told here.

    Args:
        backend: a name of `swift.rollout.engines.spec`; those of plugins look for themselves.
        regex: what completions are to match.

    Raises:
        ResourceError: the package is missing.
        ConfigError: the backend would refuse the expression.
    """
    if backend == "transformers" and not available():
        raise ResourceError(
            f"{FLAG}: {regex}: the transformers engine needs the package {PACKAGE} for it; pip install {PACKAGE}, or "
            "--use_vllm true"
        )
    if backend not in ("transformers", "vllm", "lmdeploy") or not available():
        return
    problem = refusal(regex)
    if problem and not (backend == "vllm" and _guidance_takes(regex)):
        raise ConfigError(f"{FLAG}: {regex}: {problem}; see docs/sampling_extras.md for what an expression may have")


def _guidance_takes(regex: str) -> bool:
    """Whether llguidance takes an expression: vLLM asks it where xgrammar refuses."""
    if importlib.util.find_spec("llguidance") is None:
        return False
    from llguidance import LLMatcher, grammar_from

    return not LLMatcher.validate_grammar(grammar_from("regex", regex))


def refusal(regex: str) -> str:
    """Why xgrammar does not take an expression, in one line; "" when it does."""
    import xgrammar

    try:
        xgrammar.Grammar.from_regex(regex)
    except (RuntimeError, ValueError) as error:
        return str(error).strip().splitlines()[0].rpartition(".cc:")[2].partition(": ")[2] or str(error)
    return ""


class GuideFactory:
    """Compiles expressions for one tokenizer.

    Args:
        tokenizer: of the model.
        vocab_size: columns of its logits, which may be more than the tokenizer has tokens.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        import xgrammar

        self._xgrammar: Any = xgrammar
        self.vocab_size = vocab_size
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size)
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1)
        self.compiled = functools.lru_cache(KEPT_EXPRESSIONS)(self._compiled)

    def _compiled(self, regex: str) -> Any:
        """The automaton of an expression.

        Raises:
            EngineError: xgrammar refuses it.
        """
        if problem := refusal(regex):
            raise EngineError(f"{FLAG}: {regex}: {problem}; correct the expression")
        return self._compiler.compile_regex(regex)

    def matcher(self, regex: str, end_token_ids: Sequence[int]) -> Any:
        """A walk through an expression; once it matches, one of the end tokens may follow."""
        return self._xgrammar.GrammarMatcher(self.compiled(regex), override_stop_tokens=list(end_token_ids))


class Guides:
    """The walks of a batch's rows.

    Args:
        requests: one per row.
        end_token_ids: of each request.
        factory: of the model; None when no request has an expression.
    """

    def __init__(
        self, requests: Sequence[Request], end_token_ids: Sequence[Sequence[int]], factory: GuideFactory | None
    ) -> None:
        self.matchers: list[Any] = []
        self.active = factory is not None and any(request.sampling.regex is not None for request in requests)
        if not self.active:
            return
        assert factory is not None
        self.matchers = [
            factory.matcher(request.sampling.regex, ends) if request.sampling.regex is not None else None
            for request, ends in zip(requests, end_token_ids, strict=True)
        ]
        words = -(-factory.vocab_size // BITS)
        self._words_RW = torch.full((len(requests), words), -1, dtype=torch.int32)
        self._shifts = torch.arange(BITS, dtype=torch.int32)

    def mask(self, logits_RV: Tensor, rows: Tensor) -> Tensor:
        """The logits with -inf where the expression forbids a token.

        Args:
            logits_RV: of the live rows.
            rows: the request of each live row, on the CPU.
        """
        if not self.active:
            return logits_RV
        for request in rows.tolist():
            matcher = self.matchers[request]
            if matcher is None or matcher.is_terminated():
                self._words_RW[request] = -1
            else:
                matcher.fill_next_token_bitmask(self._words_RW, request)
        bits = (self._words_RW[rows].to(logits_RV.device)[:, :, None] >> self._shifts.to(logits_RV.device)) & 1
        allowed_RV = bits.flatten(1)[:, : logits_RV.shape[1]].bool()
        return logits_RV.masked_fill(~allowed_RV, -torch.inf)

    def advance(self, token_R: Tensor, rows: Tensor) -> None:
        """Note the tokens that the live rows have sampled; rows that have ended do not move any more."""
        if not self.active:
            return
        for request, token in zip(rows.tolist(), token_R.tolist(), strict=True):
            matcher = self.matchers[request]
            if matcher is not None and not matcher.is_terminated():
                matcher.accept_token(token)
