"""Guided decoding: completions that match a regular expression or a JSON schema.

xgrammar compiles the expression for the tokenizer and computes the tokens that may follow; vLLM and LMDeploy use the
same package. It is optional (`pip install xgrammar`) and imported in this module only.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from swift.errors import ConfigError, EngineError, ResourceError, first_line
from swift.types import SamplingParams

FLAG = "--vllm_guided_decoding_regex"
PACKAGE = "xgrammar"
Guide = tuple[str, str]
"""A constraint on completions: "regex" and an expression, or "json" and a schema."""
KEPT_EXPRESSIONS = 64
"""Size of the cache of compiled expressions; a run has one expression, a server may have several per client."""


def available() -> bool:
    """Whether xgrammar is installed; does not import it."""
    return importlib.util.find_spec(PACKAGE) is not None


def require(backend: str, regex: str) -> None:
    """Check package and expression before weights are loaded; backends of plugins check requests themselves.

    Raises:
        ResourceError: xgrammar is missing.
        ConfigError: the backend does not support the expression.
    """
    if backend == "transformers" and not available():
        raise ResourceError(
            f"{FLAG}: {regex}: the transformers engine needs the package {PACKAGE} for it; pip install {PACKAGE}, or "
            "--infer_backend vllm"
        )
    if backend not in ("transformers", "vllm", "lmdeploy") or not available():
        return
    problem = refusal(regex)
    if problem and not (backend == "vllm" and _llguidance_supports(regex)):
        raise ConfigError(f"{FLAG}: {regex}: {problem}; see docs/sampling_extras.md for the supported syntax")


def _llguidance_supports(regex: str) -> bool:
    """Whether llguidance supports an expression; vLLM uses it for expressions that xgrammar does not support."""
    if importlib.util.find_spec("llguidance") is None:
        return False
    from llguidance import LLMatcher, grammar_from

    return not LLMatcher.validate_grammar(grammar_from("regex", regex))


def refusal(regex: str) -> str:
    """Reason why xgrammar does not support an expression, in one line; "" if it does."""
    import xgrammar

    try:
        xgrammar.Grammar.from_regex(regex)
    except (RuntimeError, ValueError) as error:
        return str(error).strip().splitlines()[0].rpartition(".cc:")[2].partition(": ")[2] or str(error)
    return ""


def guide_of(sampling: SamplingParams) -> Guide | None:
    """The constraint on a completion; None is unconstrained. Raises EngineError: another kind of constraint."""
    wanted = sampling.extra.get("structured_outputs")
    if wanted is None:
        return None if sampling.regex is None else ("regex", sampling.regex)
    if sampling.regex is not None or not isinstance(wanted, Mapping) or list(wanted) != ["json"]:
        raise EngineError(
            f"structured_outputs: {str(wanted)[:80]}: the transformers engine takes one of regex and json"
        )
    schema = wanted["json"]
    return "json", schema if isinstance(schema, str) else json.dumps(schema)


class GuideFactory:
    """Compiles expressions for one tokenizer. vocab_size: size of the logits, at least the number of tokens."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        import xgrammar

        self._xgrammar: Any = xgrammar
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size)
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1)
        self.compiled = functools.lru_cache(KEPT_EXPRESSIONS)(self._compiled)

    def _compiled(self, guide: Guide) -> Any:
        """The compiled expression or JSON schema. Raises EngineError: xgrammar does not support it."""
        kind, text = guide
        if kind == "json":
            try:
                return self._compiler.compile_json_schema(text)
            except (RuntimeError, ValueError) as error:
                raise EngineError(f"structured_outputs: json: {text[:80]}: {first_line(error)}") from error
        if problem := refusal(text):
            raise EngineError(f"{FLAG}: {text}: {problem}; correct the expression")
        return self._compiler.compile_regex(text)

    def matcher(self, guide: Guide, end_token_ids: Sequence[int]) -> Any:
        """A matcher for one completion; after a full match one of the end tokens may follow."""
        return self._xgrammar.GrammarMatcher(self.compiled(guide), override_stop_tokens=list(end_token_ids))


def allowed_tokens(matchers: Sequence[Any], logits_RV: Tensor) -> Tensor:
    """[R, V] bool: the tokens that each row may sample next; all of them without a matcher (None)."""
    import xgrammar

    num_tokens = logits_RV.shape[1]
    words_RW = xgrammar.allocate_token_bitmask(len(matchers), num_tokens)  # 32 tokens in a word, all allowed
    for row, matcher in enumerate(matchers):
        if matcher is not None and not matcher.is_terminated():
            matcher.fill_next_token_bitmask(words_RW, row)
    shifts = torch.arange(32, dtype=torch.int32, device=logits_RV.device)
    bits_RW32 = (words_RW.to(logits_RV.device)[:, :, None] >> shifts) & 1
    return bits_RW32.flatten(1)[:, :num_tokens].bool()
