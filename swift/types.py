"""What travels through the pipeline: prompt, request, completion, group. Pure data, no torch.

Tokens in, tokens out: `token_ids` and `logprobs` are exactly what the engine sampled and are what the
trainer trains on; `text` exists for rewards and people and is never tokenised again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort", "error"]
EXTRACTED = "_extracted"
"""End of a column's name: `accuracy_extracted` has the answers that the reward function `accuracy` has read."""
Alternatives = list[tuple[int, float]]
"""Tokens that could have been drawn at one place, and their log-probs."""


@dataclass(slots=True, frozen=True)
class Image:
    """An image of a row, still encoded; `swift.data.images` reads and decodes it.

    `digest` is that of the encoded bytes: the first 32 hex digits of their SHA-256. Images with the same one are equal.
    `path` is where it was read, None for bytes that came in the row; of these `row` is the `file:line`, if they did not
    come from a hub. `content` are the encoded bytes; None if `path` is read again for them.
    """

    digest: str
    path: str | None = field(default=None, compare=False)
    content: bytes | None = field(default=None, compare=False, repr=False)
    row: str | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class ShownImage:
    """An image as a model's prompts show it.

    `token_ids` are those that the model's processor writes for it, with -1 for the placeholders of embeddings, in place
    of `mark`, the token that the chat template writes. () where that is not known.
    """

    image: Image
    mark: int
    token_ids: tuple[int, ...]


@dataclass(slots=True)
class Prompt:
    """One row of the data set, ready to be sampled.

    `prompt_id` is a digest of the row's content: stable over epochs, machines and shuffles; equal rows
    share it. `columns` holds every column that is not part of the prompt, under its own name. `is_chat`: the row held
    `messages`; otherwise it held one text, which is the last of them.
    """

    prompt_id: str
    messages: list[dict[str, Any]]
    token_ids: list[int]
    columns: dict[str, Any] = field(default_factory=dict)
    is_chat: bool = True


@dataclass(slots=True, frozen=True)
class SamplingParams:
    """The sampling distribution of one request.

    `top_k` -1 or 0, `top_p` 1.0 and `min_p` 0.0 are off. `temperature` 0 is greedy (evaluation and
    `swift infer` only). `seed` is the counter-based seed of the sample (see `swift.rollout.seeds`); where it is not
    `exact`, an engine may draw from a generator of its own instead, which vLLM does faster on a GPU.

    `frequency_penalty` and `presence_penalty` count sampled tokens only, `repetition_penalty` those of the prompt too.
    `min_tokens` keeps end tokens and stop texts from ending a completion before so many. `regex` is what the whole
    completion must match, up to its end token. `top_logprobs` is how many of the likeliest tokens are told beside each
    sampled one. `prompt_logprobs` is how many are told of each token of the prompt from number `scored_from` on, at
    least the second, at temperature 1 (`Completion.prompt_scores`); then nothing is sampled. `extra` holds further
    fields by the names of one engine; its values are JSON.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    exact: bool = True
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    min_tokens: int = 0
    regex: str | None = None
    top_logprobs: int = 0
    prompt_logprobs: int = 0
    scored_from: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def truncates(self) -> bool:
        """Whether the engine samples from a renormalised part of the vocabulary."""
        narrowed = self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0
        return narrowed or self.min_tokens > 0 or self.regex is not None or "structured_outputs" in self.extra

    @property
    def penalises(self) -> bool:
        """Whether the engine changes logits before it samples."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    def unusual(self) -> Iterator[str]:
        """Names of the fields in use that an engine need not have; see `Capabilities.sampling_fields`."""
        for name in ("frequency_penalty", "presence_penalty", "min_tokens", "top_logprobs", "prompt_logprobs"):
            if getattr(self, name):
                yield name
        yield from self.extra


@dataclass(slots=True, frozen=True)
class Request:
    """One sample to draw: training sends one request per sample, each with its own seed.

    `prompt` is the row it belongs to, for rollout functions; engines see the ids alone, and it goes to no other
    process. `limit_s` bounds it from its first token on: one that takes longer is aborted, and sampled
    once more if it is `exact`. `images` are those that the ids name, in a process that has not read the row.
    """

    request_id: str
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    prompt: Prompt | None = field(default=None, compare=False, repr=False)
    limit_s: float = math.inf
    images: Sequence[ShownImage] = field(default=(), repr=False)


@dataclass(slots=True)
class Episode:
    """What happened in a rollout of several turns.

    `messages` is the chat, `start` the number of its messages that came before the first answer. `prompt_ids` are the
    tokens of those where the environment wrote them, else empty: the row's prompt. `rewards` are the environment's, one
    per turn that has one. `problem` says in a word or two why the sample is excluded; "" where it is not. `metrics` are
    its numbers for the log, each a mean over the samples that have it.

    The rest is of samples that another process made: `logprobs_known` is False where nobody knows those of the sampler
    (all NaN then), `ref_logprobs` are the reference's, or [], and `advantage` stands in for that from rewards;
    `advantages` are one per token where they differ, else [], and `advantage` is their mean then.
    """

    messages: list[dict[str, Any]]
    start: int
    num_turns: int
    prompt_ids: list[int] = field(default_factory=list)
    rewards: list[float | None] = field(default_factory=list)
    problem: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    logprobs_known: bool = True
    ref_logprobs: list[float] = field(default_factory=list)
    advantage: float | None = None
    advantages: list[float] = field(default_factory=list)

    @property
    def turns(self) -> list[dict[str, Any]]:
        """The messages after the prompt, answers with the environment's reward."""
        rewards = iter(self.rewards)
        return [
            {**turn, "reward": next(rewards, None)} if turn["role"] == "assistant" and self.rewards else dict(turn)
            for turn in self.messages[self.start :]
        ]


@dataclass(slots=True)
class Routes:
    """The experts that each layer of the sampler chose, for each token that it computed.

    These are the prompt's and the completion's but its last one. `experts` is [tokens, num_layers, top_k] in rows,
    little-endian unsigned integers of `width` bytes. Layers are those with experts, or all of the model.
    """

    num_layers: int
    top_k: int
    width: int
    experts: bytes = field(repr=False)


@dataclass(slots=True)
class TokenScores:
    """A model's likeliest tokens at each of T places, and their log-probs at temperature 1.

    token_ids: int32, little-endian, and logprobs: float32, both [T, top_k] in rows. own: float32 [T], of the tokens
    that are there.
    """

    top_k: int
    token_ids: bytes = field(repr=False)
    logprobs: bytes = field(repr=False)
    own: bytes = field(repr=False)


@dataclass(slots=True)
class Completion:
    """One sampled continuation of a prompt.

    `token_ids` includes the end token; `logprobs[t]` is the log-prob of `token_ids[t]` under the
    distribution it was drawn from (natural log, <= 0), of equal length. `log_mass[t]` is the log of the
    probability that truncation (top-k, top-p, min-p, `min_tokens`) kept at that token, so that the sum of both is the
    log-prob over the whole vocabulary; empty without truncation, or where the engine does not know it. `versions` is
    the policy version of the tokens, run-length coded as (version, start, end). `columns` are what a rollout function
    says of it; reward functions get them like the columns of its prompt. `logged` are columns that these write for
    the log. `mask[t]` is 1 where the policy sampled the
    token and 0 where the environment wrote it (log-prob 0); empty where all were sampled. `top_logprobs[t]` are the
    likeliest tokens there and their log-probs, likeliest first, if they were asked for; a token that could not be drawn
    is none of them. `routes` are the experts of the tokens, if they were asked for. `episode` is what happened in
    a rollout of several turns; `text` is its last answer then. `prompt_scores` are those of the prompt, if they were
    asked for; `teacher_scores` those of its own tokens by a teacher that is elsewhere; `teacher_prompt_ids` the prompt
    that a teacher gets, if it is another one.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    text: str = ""
    versions: list[tuple[int, int, int]] = field(default_factory=list)
    columns: dict[str, Any] = field(default_factory=dict)
    logged: dict[str, Any] = field(default_factory=dict)
    log_mass: list[float] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    top_logprobs: list[Alternatives] = field(default_factory=list)
    episode: Episode | None = None
    routes: Routes | None = None
    prompt_scores: TokenScores | None = None
    teacher_scores: TokenScores | None = None
    teacher_prompt_ids: list[int] = field(default_factory=list)

    @property
    def full_logprobs(self) -> list[float]:
        """Log-probs over the whole vocabulary, as far as the engine knows them."""
        if not self.log_mass:
            return self.logprobs
        return [logprob + mass for logprob, mass in zip(self.logprobs, self.log_mass, strict=True)]


@dataclass(slots=True)
class RolloutGroup:
    """The unit of work: one prompt, its G completions and, once scored, their rewards.

    `launch_index` counts the groups of the whole run in the order of their launch; `launch` counts the
    earlier launches of this very prompt and goes into the seeds.
    """

    group_id: str
    launch_index: int
    launch: int
    prompt: Prompt
    completions: list[Completion] = field(default_factory=list)
    scores: GroupScores | None = None


@dataclass(slots=True)
class GroupScores:
    """Rewards of one group with n completions and K reward functions and models, in the order given.

    `values[i][k]` is None where function k does not apply to completion i, or failed on it.
    `excluded[i]` is None, or the reason why completion i takes no part in anything: a fault of a reward
    function ("timeout: slow", "exception: accuracy", ...) or "no_reward" when no function applied.
    `advantages` stand in for those from rewards, one per completion; [] where these count.
    """

    values: list[list[float | None]]
    excluded: list[str | None]
    advantages: list[float] = field(default_factory=list)


@dataclass(slots=True, frozen=True)
class TrainerProgress:
    """What reward functions see as `trainer_state`."""

    global_step: int
    max_steps: int
    epoch: float
