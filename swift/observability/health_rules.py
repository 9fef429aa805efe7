"""Health rules: the limits of a run's metrics, each with a sentence that names the fault and the fix.

A rule checks one number of a training log line. `RULES` has them all; `--health_rules FILE` changes limits.
`swift.observability.health` applies them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from swift.errors import ConfigError, join_problems, shortened, suggest
from swift.plugin.registry import judging

GROWTH_STEPS, WARM_UP_STEPS = 100, 20
"""Optimizer steps over which the growth of memory is measured, after those in which caches fill."""

NEAR_LIMIT = 0.9
"""Share of `max_completion_length` from which a mean length is at the limit."""

Limit = float | list[float]
COMPARISONS: dict[str, Callable[[float, Any], bool]] = {
    "<": operator.lt,
    ">": operator.gt,
    "=": operator.eq,
    "outside": lambda value, limits: not limits[0] <= value <= limits[1],
}


@dataclass(slots=True)
class Memory:
    """The numbers of earlier lines that rules need.

    best_reward: of the run; best_short: while completions were not at the limit. entropies: the last five. rss: (step,
    GiB) of the last `GROWTH_STEPS`, from step `warm` of the run on.
    """

    best_reward: float = -math.inf
    best_short: float = -math.inf
    first_length: float | None = None
    entropies: list[float] = field(default_factory=list)
    rss: list[list[float]] = field(default_factory=list)
    warm: int = WARM_UP_STEPS


@dataclass(frozen=True, slots=True)
class Line:
    """A training log line and the other inputs of a rule.

    most_tokens: `max_completion_length`. stalest: optimizer steps that a token may be old.
    """

    step: int
    logs: Mapping[str, Any]
    memory: Memory
    most_tokens: float
    stalest: float

    def get(self, name: str) -> float | None:
        """A number of the line; None where it has none."""
        value = self.logs.get(name)
        return float(value) if isinstance(value, int | float) else None

    def remember(self) -> None:
        """Adds the line to the memory that later lines use."""
        memory, reward, length = self.memory, self.get("reward"), self.get("completions/mean_length")
        if reward is not None:
            memory.best_reward = max(memory.best_reward, reward)
            if length is not None and length <= NEAR_LIMIT * self.most_tokens:
                memory.best_short = max(memory.best_short, reward)
        memory.first_length = memory.first_length or length
        if (entropy := self.get("entropy")) is not None:
            memory.entropies = [*memory.entropies, entropy][-5:]
        if (rss := self.get("perf/rss_gib")) is not None and self.step >= memory.warm:
            memory.rss.append([self.step, rss])
            while len(memory.rss) > 1 and self.step - memory.rss[1][0] >= GROWTH_STEPS:
                del memory.rss[0]


Reading = float | tuple[float, str] | None
"""The number that a rule checks, or the number and a detail for its sentence; None if the line has no such number."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A number, the limit beyond which it is wrong, and the sentence to show.

    number: a metric (`rewards/*/mean`: that of each function, the sentence's {name}), or a function of the line.
    sentence: with {name}, {value}, {percent} (100 times the value) and {detail}.
    lines: wrong lines in a row before an alert. steps: instead, optimizer steps that they must cover.
    ignored: kinds of reward functions (`ORM.judges`) that the rule does not watch.
    share_of: a metric by which the number is divided. unless: a metric; a line in which it is not 0 is not judged.
    """

    number: str | Callable[[Line], Reading]
    comparison: str
    limit: Limit
    sentence: str
    lines: int = 5
    steps: int = 0
    ignored: Sequence[str] = ()
    share_of: str = ""
    unless: str = ""

    def readings(self, line: Line) -> Iterator[tuple[str, float, str]]:
        """(name, number, detail) of the line; the name is "" except for `*`."""
        if self.unless and line.get(self.unless):
            return
        if isinstance(self.number, str):
            head, star, tail = self.number.partition("*")
            for key in [key for key in line.logs if key.startswith(head) and key.endswith(tail)] if star else [head]:
                name = key[len(head) : len(key) - len(tail)]
                whole = line.get(self.share_of) if self.share_of else 1.0
                if name not in judging(*self.ignored) and whole and (value := line.get(key)) is not None:
                    yield name, value / whole, ""
        elif (found := self.number(line)) is not None:
            yield "", *(found if isinstance(found, tuple) else (found, ""))


# --- numbers that take more than one metric, or earlier lines ------------------------------------------------------


def _share_of_best(line: Line) -> Reading:
    reward, best = line.get("reward"), line.memory.best_reward
    return None if reward is None or best <= 0 else reward / best


def _gradient_of_unequal_rewards(line: Line) -> Reading:
    equal = line.get("frac_reward_zero_std")
    return None if equal is None or equal >= 1 else line.get("grad_norm")


def _entropy_not_falling(line: Line) -> Reading:
    entropy, before = line.get("entropy"), line.memory.entropies
    if entropy is None or line.step <= 50:
        return None
    return 0.0 if before and entropy < before[0] else entropy


def _length_without_reward(line: Line) -> Reading:
    """The share of the limit that completions have grown to, 0 where they have not grown or the reward has."""
    length, reward, first = line.get("completions/mean_length"), line.get("reward"), line.memory.first_length
    if length is None or reward is None or first is None:
        return None
    return length / line.most_tokens if length > 1.5 * first and reward <= line.memory.best_short else 0.0


def _staleness(line: Line) -> Reading:
    age = line.get("off_policy/max")
    return None if age is None else age - line.stalest


def _loss(line: Line) -> Reading:
    loss = line.logs.get("loss")
    return None if loss is None else loss if math.isfinite(loss) else -math.inf


def _excluded(line: Line) -> Reading:
    reasons = {key.removeprefix("health/excluded/"): line.get(key) or 0.0 for key in line.logs if "/excluded/" in key}
    share = line.get("completions/excluded_ratio")
    return None if share is None else (share, max(reasons, key=reasons.__getitem__, default="unknown"))


def _growth(line: Line) -> Reading:
    now = line.get("perf/rss_gib")
    if now is None or not line.memory.rss or line.step - line.memory.rss[0][0] < GROWTH_STEPS:
        return None
    before = line.memory.rss[0][1]
    return now / before - 1, f"{now - before:.1f}"


RULES: dict[str, Rule] = {
    "reward_zero": Rule("rewards/*/mean", "=", 0.0, steps=20, ignored=("penalty",),
        sentence="Reward {name} stays 0: run it alone with `swift reward-test` and check its columns."),
    "equal_rewards": Rule("frac_reward_zero_std", "=", 1.0, unless="teacher_kl", sentence=
        "Every group has equal rewards, so nothing is learned: change prompts, more generations, or dynamic_sample."),
    "reward_halved": Rule(_share_of_best, "<", 0.5, steps=50,
        sentence="Reward halved from its best: go back to the best checkpoint and lower learning_rate."),
    "gradient_large": Rule("grad_norm", ">", 10.0, "Gradients explode: lower learning_rate or max_grad_norm."),
    "gradient_zero": Rule(_gradient_of_unequal_rewards, "=", 0.0,
        "Zero gradient although rewards differ: check masks and frozen weights."),
    "entropy_low": Rule("entropy", "<", 0.01,
        "The policy collapsed: temperature 0.8-1.0, lower learning_rate, beta > 0, 16+ generations."),
    "entropy_high": Rule(_entropy_not_falling, ">", 1.0,
        "No convergence: check the reward, use more generations."),
    "kl": Rule("kl", ">", 2.0, "The policy left the reference: raise beta or lower learning_rate."),
    "logp_difference": Rule("mismatch/logp_abs_diff_mean", ">", 1.0, unless="mismatch/biased", sentence=
        "Sampler and trainer disagree: run the parity check, sync more often."),
    "mismatch_kl": Rule("mismatch/kl", ">", 0.015, unless="mismatch/biased", sentence=
        "Train/inference mismatch: check dtype, log-prob mode, stale weights."),
    "ratio_low": Rule("mismatch/ratio_min", "<", 0.01, unless="mismatch/biased", sentence="Samples are stale: decrease "
        "vllm_sync_interval or prefetch_depth, or set off_policy_sequence_mask_delta 0.5."),
    "ratio_off_centre": Rule("mismatch/ratio_mean", "outside", [0.8, 1.2], unless="mismatch/biased", sentence=
        "Importance ratio off centre: sync failed or temperatures differ."),
    "clipped_updates": Rule("clip_ratio/region_mean", ">", 0.3,
        "Most updates are clipped: lower learning_rate or num_iterations."),
    "clipped_completions": Rule("completions/clipped_ratio", ">", 0.8,
        "Answers hit the length limit: raise max_completion_length or add soft_overlong."),
    "length_hacking": Rule(_length_without_reward, ">", NEAR_LIMIT,
        "Length grows without reward: likely length hacking."),
    "staleness": Rule(_staleness, ">", 0.0, "Staleness bound broken: please report this run.", lines=1),
    "alignment": Rule("alignment/diff_abs_mean", ">", 0.1,
        "Environment log-probs do not match the trainer: weights not shared or positions shifted."),
    "loss": Rule(_loss, "<", -10.0, lines=1, sentence="Loss diverged ({value:g}): lower learning_rate. A non-finite "
        "update is skipped; the batch is in completions.jsonl."),
    "rollout_bound": Rule("time/wait_rollout", ">", 0.6, share_of="step_time", sentence=
        "Rollout-bound ({percent:.0f} %): add inference workers."),
    "trainer_bound": Rule("time/wait_train", ">", 0.6, share_of="step_time", sentence=
        "Trainer-bound ({percent:.0f} %): give training more devices."),
    "excluded": Rule(_excluded, ">", 0.05, "{percent:.0f} % of samples excluded, mostly {detail}."),
    "memory": Rule(_growth, ">", 0.1, f"Host memory grows: {{detail}} GiB in {GROWTH_STEPS} steps.", lines=1),
}  # fmt: skip
"""All rules by the name that `--health_rules` uses."""


def load_rules(path: str | None) -> dict[str, Rule]:
    """The rules with the limits of a YAML or JSON file: rule -> limit, or `false` for no such rule."""
    if path is None:
        return dict(RULES)
    flag = f"--health_rules: {path}"
    try:
        given = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag}: cannot be read ({getattr(error, 'strerror', None) or 'no text'})") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{flag}: neither YAML nor JSON: {shortened(' '.join(str(error).split()), 200)}") from error
    if not isinstance(given, dict):
        raise ConfigError(f"{flag}: must map rules to limits, such as `kl: 5.0`; rules: {', '.join(RULES)}")
    rules, problems = dict(RULES), []
    for name, value in given.items():
        if name not in RULES:
            problems.append(f"{flag}: {name}: no such rule; {suggest(str(name), list(RULES))}")
        elif value is False:
            del rules[name]
        elif (limit := _limit(value, like=RULES[name].limit)) is not None:
            rules[name] = replace(RULES[name], limit=limit)
        else:
            form = "[low, high]" if isinstance(RULES[name].limit, list) else "a number"
            problems.append(f"{flag}: {name}: {value}: not a limit; give {form}, or false to leave the rule out")
    join_problems(problems)
    return rules


def _limit(value: Any, *, like: Limit) -> Limit | None:
    """A limit of the same form; None if `value` is not a limit. YAML reads 1e-2 as text."""
    if isinstance(like, list):
        pair = [_limit(bound, like=0.0) for bound in value] if isinstance(value, list) else []
        return pair if len(pair) == 2 and None not in pair else None  # type: ignore[return-value]
    try:
        number = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
