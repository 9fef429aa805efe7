"""Causes of a sick run that lie in its rewards, its data or its texts: each a function from evidence to findings."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from swift.errors import counted
from swift.observability.answers import MARKED
from swift.observability.evidence import Evidence, Row, Series, is_short
from swift.observability.findings import Finding, between, percent, steps_of
from swift.types import EXTRACTED

FAULTS = ("timeout", "exception", "contract", "crash", "not_finite")
OF_FORM = ("form", "penalty")
"""What functions judge that do not ask whether an answer is right."""
TRUTHFUL = re.compile(
    r"^(?!.*(?:len|cost|time|count|penal)).*(?:acc|correct|right|answer|match|math|solution|exact|verif|gsm|code)",
    re.IGNORECASE,
)
"""Names of functions that ask whether an answer is right."""
TRUTHS = re.compile(r"solution|answer|label|target|truth|gold|expected|reference|result", re.IGNORECASE)
"""Names of columns that have the ground truth."""
KEYS = re.compile(r"^(?:.*_)?(?:id|idx|index|uid|uuid|key|hash|row|source|no|number)$", re.IGNORECASE)
"""Names of columns that number rows, and say nothing of their tasks."""
INTERACTIVE = ("rollout_func", "gym_env", "use_gym_env", "multi_turn_scheduler", "rollout_source")
"""Settings of runs whose tasks are in an environment rather than in the prompt."""


def to_test(e: Evidence, names: str) -> str:
    """The command line that shows what functions read in the completions of a run."""
    plugins = " ".join(map(str, e.arg("external_plugins", [])))
    given = f"--external_plugins {plugins} " if plugins else ""
    return f"swift reward-test {given}--reward_funcs {names} --completions <run>/completions.jsonl"


def values_of(e: Evidence, name: str) -> list[float | None]:
    """The values of a function, completion by completion."""
    return [value if isinstance(value := row["rewards"].get(name), int | float) else None for row in e.completions]


def equal_groups(e: Evidence, groups: Sequence[Sequence[Row]] | None = None) -> list[Sequence[Row]]:
    """The groups in which all rewards are equal."""
    return [rows for rows in (e.groups if groups is None else groups) if len({row.get("reward") for row in rows}) == 1]


def reward_failing(e: Evidence) -> Iterator[Finding]:
    """Exceptions, timeouts, values that are not numbers."""
    kinds: Counter[str] = Counter()
    steps: list[int] = []
    for row in e.completions:
        kind, _, name = str(row.get("excluded") or "").partition(": ")
        if kind in FAULTS:
            kinds[f"{name}: {kind}"] += 1
            steps.append(row["step"])
    unscored = [row["step"] for row in e.completions if row.get("excluded") == "no_reward"]
    failed = {key.rpartition("/")[2]: e.total(key) for key in keys(e, "health/reward_failed/")}
    late = {key.rpartition("/")[2]: e.total(key) for key in keys(e, "health/reward_timeout/")}
    all_rows = max(1, len(e.completions))
    per_step = all_rows / max(1, len({row["step"] for row in e.completions}))
    share = max(sum(kinds.values()) / all_rows, max(failed.values(), default=0) / max(1, per_step * e.num_steps))
    ended = [reason for reason in e.reasons if re.search(r"--reward_funcs: .*fail|failed on every sample", reason)]
    none = len(unscored) / all_rows  # some tasks may have no reward of any function
    if share < 0.01 and none < 0.2 and not ended:
        return
    of_right = _failed_on_right(e)
    selective = of_right > max(0.08, 4 * share)
    evidence = [f"{name} for {counted(count, 'completion')} of {all_rows}" for name, count in kinds.most_common(3)]
    evidence += [f"it fails on {percent(of_right)} of the right answers, so these are not learned"] if selective else []
    evidence += [f"every function is None for {percent(none)} of the completions"] if none >= 0.2 else []
    evidence += [f"health/reward_failed/{name} adds up to {count:.0f}" for name, count in failed.items() if count]
    evidence += [f"the run ended with: {reason}" for reason in ended[:1]]
    names = [name for name, count in failed.items() if count] or [one.partition(":")[0] for one in kinds]
    slow = sum(late.values()) > 0.5 * sum(failed.values()) > 0
    longer = f"--reward_timeout {max(120, 2 * e.arg('reward_timeout', 0.0)):g}" if slow else ""
    fix = f"{longer}, or a faster function" if slow else to_test(e, " ".join(names) or "<name>")
    strength = max(between(share, 0.01, 0.2, 0.3, 0.97), between(none, 0.2, 0.5, 0.35, 0.8), 0.9 if ended else 0)
    strength = max(strength, between(of_right, 0.08, 0.4, 0.6, 0.9) if selective else 0)
    yield Finding("reward_failing", strength, evidence, fix, steps or unscored, longer)


def _failed_on_right(e: Evidence) -> float:
    """Share of the completions with the right answer on which a function has failed; 0 if few are right."""
    rows = [row for row, right in zip(e.completions, e.right or (), strict=False) if right]
    failed = [str(row.get("excluded") or "").partition(": ")[0] in FAULTS for row in rows]
    return statistics.fmean(failed) if len(failed) > 19 else 0.0


def keys(e: Evidence, prefix: str) -> list[str]:
    """Metrics of the log that begin so."""
    return list(dict.fromkeys(key for row in e.log for key in row if key.startswith(prefix)))


def reward_unparsed(e: Evidence) -> Iterator[Finding]:
    """Right answers in the texts that a function scores as wrong."""
    if e.right is None:
        return
    rows = list(zip(e.completions, e.right, strict=True))
    sees = {name: _contrast(e, name) for name in e.names}
    for name in e.names:
        scored = [(row, right, v) for (row, right), v in zip(rows, values_of(e, name), strict=True) if v is not None]
        hits = [(row, v) for row, right, v in scored if right]
        if name in e.judging(*OF_FORM) or len(hits) < 5 or e.weights.get(name) == 0:
            continue
        lowest = min(v for _, _, v in scored)
        unseen = [row for row, v in hits if v <= lowest]
        constant = all(v == lowest for _, _, v in scored) and lowest <= 0
        others_see = any(value > 0.3 for other, value in sees.items() if other != name)
        if constant and others_see and not TRUTHFUL.search(name):
            continue
        share = len(unseen) / len(hits)
        blind = abs(sees[name]) < 0.05 and len(hits) > 19 < len(scored) - len(hits) and any(_inside(e, name))
        if not constant and blind and not (others_see or e.learns) and (len(e.names) == 1 or TRUTHFUL.search(name)):
            yield Finding("reward_unparsed", 0.8, _as_much_as_wrong(name, hits, scored), to_test(e, name))
            continue
        differs = any(_inside(e, name)) and not _stops_to_see(hits, lowest)
        if not constant and (sees[name] < 0.05 or share < 0.25 or not differs):
            continue
        example = unseen[0]
        yield Finding(
            "reward_unparsed",
            0.93 if constant else between(share, 0.25, 0.8, 0.5, 0.9),
            [
                f"{name} is {lowest:g} for {percent(share)} of {len(hits)} completions that have the right answer",
                f"step {example['step']}: {e.truth} {str(example['columns'][e.truth])!r}, completion ends "
                f"{example['completion'][-60:]!r}",
            ],
            f"{to_test(e, name)}; ask for the form that it reads (--system), or change the function",
            [row["step"] for row in unseen],
        )


def _stops_to_see(hits: Sequence[tuple[Row, float]], lowest: float) -> bool:
    """Whether right answers got a reward until some step, and none later."""
    seen, unseen = ([row["step"] for row, v in hits if (v > lowest) is paid] for paid in (True, False))
    return max(seen, default=0) < min(unseen, default=0)


def _as_much_as_wrong(
    name: str, hits: Sequence[tuple[Row, float]], scored: Sequence[tuple[Row, bool, float]]
) -> list[str]:
    """That a function gives right answers no more than wrong ones."""
    right, wrong = (
        statistics.fmean(v for _, v in hits),
        statistics.fmean(v for _, is_right, v in scored if not is_right),
    )
    return [
        f"{name} is {right:.3f} for the {len(hits)} completions that have the right answer, "
        f"{wrong:.3f} for the {len(scored) - len(hits)} others"
    ]


def _contrast(e: Evidence, name: str) -> float:
    """How much more a function gives to right texts than to others, as a share of its range."""
    scored = [(right, v) for right, v in zip(e.right or (), values_of(e, name), strict=False) if v is not None]
    hits, misses = [v for right, v in scored if right], [v for right, v in scored if not right]
    span = max((v for _, v in scored), default=0.0) - min((v for _, v in scored), default=0.0)
    return (statistics.fmean(hits) - statistics.fmean(misses)) / span if hits and misses and span else 0.0


def zero_variance(e: Evidence) -> Iterator[Finding]:
    """Groups with equal rewards: because of the function or its column, or because all are wrong, or all right."""
    dropped = e.arg("dynamic_sample", False)  # their rewards are equal, and they were drawn again
    groups = [[row for row in rows if row.get("reward") is not None] for rows in e.groups]
    groups = [
        rows for rows in groups if len(rows) > 1 and not (dropped and not any(row.get("used", True) for row in rows))
    ]
    flat = equal_groups(e, groups)
    if len(groups) < 4 or len(flat) < 0.7 * len(groups):
        return
    share = len(flat) / len(groups)
    enough = min(1.0, len({rows[0]["step"] for rows in groups}) / 8)
    late = groups[len(groups) // 2 :]
    now = len(equal_groups(e, late)) / len(late)
    strength = between(min(share, now), 0.7, 1.0, 0.45, 0.9) * enough
    values = [row["reward"] for rows in groups for row in rows]
    same_texts = statistics.fmean(len({row["completion"] for row in rows}) / len(rows) for rows in flat) < 0.3
    known = {id(row): right for row, right in zip(e.completions, e.right or (), strict=False)}
    mixed = [rows for rows in flat if len({known.get(id(row)) for row in rows}) == 2]
    at = [rows[0]["step"] for rows in flat]
    steps = f"{percent(share)} of {len(groups)} groups have equal rewards ({steps_of(at)})"
    if share > 0.95 and len(mixed) > 0.1 * len(flat) and not set(e.names) <= e.judging(*OF_FORM):
        said = f"right and wrong answers have the same reward in {len(mixed)} of these groups"
        yield Finding("reward_constant", 0.9, [steps, said], to_test(e, " ".join(e.names)), at)
    elif share > 0.9 and (why := _no_truth(e, values)):
        yield Finding("reward_constant", 0.75, [steps, *why], to_test(e, " ".join(e.names)), at)
    elif share > 0.95 and not same_texts and len(levels := {rows[0]["reward"] for rows in flat}) > 2:
        said = f"{len(levels)} rewards are there, but never two for one prompt, whatever the text"
        yield Finding("reward_constant", 0.8, [steps, said], to_test(e, " ".join(e.names)), at)
    low, high = min(values), max(values)
    top = high if high > low else (low if low > 0 else low + 1)
    bottom = sum(rows[0]["reward"] < top for rows in flat)
    reward = f"their rewards are from {min(r[0]['reward'] for r in flat):g} to {max(r[0]['reward'] for r in flat):g}"
    hard = bottom >= 0.5 * len(flat)
    again = "--dynamic_sample true" if not dropped and e.arg("rlhf_type", "") == "grpo" else ""
    if not hard and e.learns and len(equal_groups(e, early := groups[: len(groups) // 8 + 1])) < 0.5 * len(early):
        strength *= 0.5  # the run has solved it
    if same_texts and hard:
        strength *= 0.5
        reward += "; the completions of a group are mostly the same text"
    if hard:
        yield Finding(
            "zero_variance_hard",
            strength,
            [steps, reward],
            "easier prompts (--curriculum_column), --num_generations 16, --dynamic_sample true, or `swift sft` first",
            at,
            again,
        )
    else:
        fix, told = "harder prompts, or --dynamic_sample true", _share_of_told(e)
        leak = [f"{percent(told)} of the prompts have their {e.truth} in the text, which may give it away"]
        yield Finding("zero_variance_easy", strength, [steps, reward, *leak[: told > 0.8]], fix, at, again)


def _share_of_told(e: Evidence) -> float:
    """Share of the groups whose prompt has its ground truth in it; 0 where that is not known."""
    found = [(rows[0]["prompt"], str(rows[0]["columns"].get(e.truth))) for rows in e.groups if e.truth is not None]
    told = [
        len(truth) > 2 and bool(re.search(rf"(?<!\w){re.escape(truth)}(?!\w)", prompt)) for prompt, truth in found
    ]  # a shorter one, such as a letter of a choice, is in every prompt
    return statistics.fmean(told) if told else 0.0


def reward_stops(e: Evidence) -> Iterator[Finding]:
    """Rewards that were unequal, and from some step on are all the same, for texts that are as they were."""
    by_step: dict[int, set[float]] = {}
    for row in e.completions:
        if row["reward"] is not None:
            by_step.setdefault(row["step"], set()).add(row["reward"])
    steps = sorted(by_step)
    varied = [step for step in steps if len(by_step[step]) > 1]
    since = [step for step in steps if step > max(varied, default=0)]
    if not varied or len(since) < max(4, 0.2 * len(steps)) or len(set.union(*(by_step[step] for step in since))) != 1:
        return
    (value,) = by_step[since[0]]
    if value > 0 and value == max(set.union(*by_step.values())):
        return  # solved
    before, after = _able(e, steps[: steps.index(since[0])]), _able(e, since)
    if not before or min(before, after) < 0.7 * max(before, after):
        return
    said = [f"every reward is {value:g} from step {since[0]} on, before that they differ", "the texts are as before"]
    yield Finding("reward_constant", 0.85, said, to_test(e, " ".join(e.names)), since)


def _able(e: Evidence, steps: Sequence[int]) -> float:
    """Of these steps, the share of right answers; where no ground truth is known, the mean length of texts."""
    able = e.rightness if any(e.rightness.values) else e.by_step(lambda row: float(len(row["completion"])))
    chosen = [value for step, value in zip(able.steps, able.values, strict=True) if step in set(steps)]
    return statistics.fmean(chosen) if chosen else 0.0


def _no_truth(e: Evidence, values: Sequence[float]) -> list[str]:
    """Why equal rewards are the function's fault; [] if they may as well be the model's."""
    columns = {name for row in e.completions[:64] for name in row["columns"] if not name.endswith("_extracted")}
    for name in columns:
        found = {str(row["columns"].get(name)) for row in e.completions}
        if (
            e.truth is None
            and TRUTHS.search(name)
            and len(found) == 1
            and len({row["prompt"] for row in e.completions}) > 1
        ):
            shown = next(iter(found))
            return [
                f"column {name} is {shown[:40]!r} in every row"
                if shown not in ("None", "")
                else f"column {name} is empty"
            ]
        if TRUTHS.search(name) and all(_asks(row) == str(row["columns"].get(name)).strip() for row in e.completions):
            return [f"column {name} repeats the prompt in every row"]
    if set(e.names) <= e.judging(*OF_FORM):
        return []
    if len(set(values)) == 1 and values[0] > 0 and e.right is not None and statistics.fmean(e.right) < 0.8:
        return [f"every reward is {values[0]:g}, but {percent(statistics.fmean(e.right))} of the answers are right"]
    if len(set(values)) == 1 and not any(
        is_short(row["columns"].get(name)) for name in columns for row in e.completions[:8]
    ):
        return [f"every reward is {values[0]:g}, whatever the text"]
    if len(set(values)) == 1 and values[0] > 0 and e.right is None:
        return [f"every reward is {values[0]:g}, and the texts do not give their ground truth"]
    return []


def _asks(row: Row) -> str:
    """The last message of a prompt."""
    return row["prompt"].rpartition("]\n")[2].strip()


def rewards_cancel(e: Evidence) -> Iterator[Finding]:
    """Two functions that oppose each other in a group, or a weight with the wrong sign."""
    for name, weight in e.weights.items():
        values = [v for v in values_of(e, name) if v is not None]
        if weight >= 0 or not values:
            continue
        wanted = name in e.judging(*OF_FORM) or _tells_right(e, name) or max(values) <= 0
        evidence = [f"--reward_weights gives {name} {weight:g}, and its values are {min(values):g} to {max(values):g}"]
        if wanted:
            evidence.append("higher values of it are better, so the run is trained towards the worse ones")
        mended = [abs(other) if one == name else other for one, other in e.weights.items()]
        fix = f"--reward_weights {' '.join(f'{one:g}' for one in mended)}"
        yield Finding("rewards_cancel", 0.9 if wanted else 0.35, evidence, fix, settings=fix if wanted else "")
    parts = {name: _inside(e, name) for name in e.names if e.weights.get(name, 1.0)}
    trends = [e.rightness.trend, *(e.series(f"rewards/{name}/mean").trend for name in parts)]
    agreed = e.learns and min(trends) > -2  # the sum is learned, and neither is given up for it
    for first, a in parts.items():
        for second, b in parts.items():
            if first >= second or not a or len(a) != len(b):
                continue
            kept = statistics.pvariance([x + y for x, y in zip(a, b, strict=True)])
            whole = statistics.pvariance(a) + statistics.pvariance(b)
            likeness = correlation(a, b)
            if whole == 0 or likeness > -0.5 or kept > 0.6 * whole:
                continue
            yield Finding(
                "rewards_cancel",
                between(-likeness, 0.5, 0.95, 0.45, 0.95) * (0.5 if agreed else 1.0),
                [
                    f"inside of groups {first} and {second} have a correlation of {likeness:.2f}",
                    f"their sum keeps {percent(kept / whole)} of the variance that they have apart",
                ],
                f"leave out {first} or {second}, or lower its --reward_weights",
            )


def _inside(e: Evidence, name: str) -> list[float]:
    """Weighted values of a function minus the mean of their group."""
    weight, found = e.weights.get(name, 1.0), []
    for rows in e.groups:
        values = [row["rewards"].get(name) for row in rows]
        if all(isinstance(value, int | float) for value in values):
            middle = statistics.fmean(values)
            found += [weight * (value - middle) for value in values]
    return found


def correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Pearson's; 0 if one does not vary."""
    if len(a) < 3 or max(a) == min(a) or max(b) == min(b):
        return 0.0
    return statistics.correlation(a, b)


def reward_hacked(e: Evidence) -> Iterator[Finding]:
    """The reward rises, and something that it should stand for falls."""
    reward = e.reward
    if reward.trend < 3:
        return
    rose = f"reward from {reward.first:.3f} to {reward.last:.3f}"
    watched = {"the share of right answers in the texts": e.rightness, "eval_reward": _evaluated(e)}
    counts = [name for name in e.names if e.weights.get(name, 1.0) > 0 or _tells_right(e, name)]
    watched |= {f"rewards/{name}/mean": e.series(f"rewards/{name}/mean") for name in counts}
    fix = "add a reward for what falls, or a larger weight for it (--reward_weights); --beta 0.1 holds the policy"
    for name, series in watched.items():
        if series and series.trend < -3 and series.first > 0 and series.last < 0.8 * series.first:
            yield Finding(
                "reward_hacked",
                between(series.last / series.first, 0.8, 0.3, 0.6, 0.92),
                [rose, f"{name} from {series.first:.3f} to {series.last:.3f}"],
                fix,
                series.since(max),
            )
    for what, measure in DEGENERATE.items():
        series = e.by_step(measure)
        if series and series.trend > 3 and series.last - series.first > 0.25:
            yield Finding(
                "reward_hacked",
                between(series.last - series.first, 0.25, 0.8, 0.6, 0.9),
                [rose, f"{what} from {percent(series.first)} to {percent(series.last)}"],
                "a repetition penalty (--reward_funcs ... repetition), a check of the form, or --beta 0.1",
                series.since(min),
            )
    spread = _different(e)
    if spread and len(set(e.rightness.values)) < 2 and spread.last < 0.15 < 0.5 < spread.first:
        yield Finding(
            "reward_hacked",
            0.7,
            [rose, f"different texts among all completions from {percent(spread.first)} to {percent(spread.last)}"],
            "a reward that depends on the prompt",
        )


def _tells_right(e: Evidence, name: str) -> bool:
    """Whether a function asks whether an answer is right, by its name or by its values."""
    return bool(TRUTHFUL.search(name)) or _contrast(e, name) > 0.3


def repeated(row: Row) -> float | None:
    """Share of the four-character pieces of a text that are there more than once."""
    text = row["completion"]
    pieces = [text[at : at + 4] for at in range(len(text) - 3)]
    return 1 - len(set(pieces)) / len(pieces) if len(pieces) >= 8 else None


def empty_thoughts(row: Row) -> float:
    """Whether a text thinks nothing."""
    return float(bool(re.search(r"<think>\s*</think>", row["completion"])))


DEGENERATE: dict[str, Callable[[Row], float | None]] = {
    "repetition inside of texts": repeated,
    "empty thoughts": empty_thoughts,
}


def _evaluated(e: Evidence) -> Series:
    found = [(row["step"], row["eval_reward"]) for row in e.evals if isinstance(row.get("eval_reward"), float)]
    return Series([step for step, _ in found], [value for _, value in found])


def _different(e: Evidence) -> Series:
    """Share of different texts among the completions of a step."""
    steps: dict[int, list[str]] = {}
    for row in e.completions:
        steps.setdefault(row["step"], []).append(row["completion"])
    kept = {step: texts for step, texts in steps.items() if len(texts) >= 8}
    return Series(list(kept), [len(set(texts)) / len(texts) for texts in kept.values()])


def length_hacking(e: Evidence) -> Iterator[Finding]:
    """Completions grow, and are not better for it."""
    length = e.series("completions/mean_length")
    if not length or length.trend < 3 or length.last < 1.25 * length.first:
        return
    paid = {name: _paid_by_length(e, name) for name in e.names}
    better = {name for name in e.names if paid[name] < 0.6 and e.series(f"rewards/{name}/mean").trend > 3}
    if better or e.rightness.trend > 3:
        return
    binary = {name for name in e.names if len({v for v in values_of(e, name) if v is not None}) == 2}
    grown = f"completions/mean_length from {length.first:.0f} to {length.last:.0f} tokens ({steps_of(length.steps)})"
    evidence, strength = [grown], between(length.last / length.first, 1.25, 2.0, 0.5, 0.8)
    for name, likeness in paid.items():
        if likeness >= 0.6:
            evidence.append(f"{name} pays for length: a correlation of {likeness:.2f} inside of groups")
            sure = 0.5 if name in binary and e.rightness.trend >= 0 else 1.0
            strength = max(strength * sure, between(likeness, 0.9, 0.99, 0.6, 0.95) * sure)
    if not any(likeness >= 0.6 for likeness in paid.values()):
        evidence.append(
            f"reward from {e.reward.first:.3f} to {e.reward.last:.3f}" if e.reward else "no reward rises with it"
        )
        strength *= 0.6 if e.learns else 1.0
    yield Finding(
        "length_hacking",
        strength,
        evidence,
        "--reward_funcs ... soft_overlong --soft_cache_length <tokens>, or --loss_type dr_grpo",
        length.since(min),
        "--loss_type dr_grpo",
    )


def _paid_by_length(e: Evidence, name: str) -> float:
    """The correlation of a function with the length inside of groups, in tokens or characters."""
    values, found = _inside(e, name), []
    for size in (lambda row: row["completion_tokens"], lambda row: len(row["completion"])):
        sizes = [size(row) - statistics.fmean(map(size, rows)) for rows in e.groups for row in rows]
        found.append(correlation(sizes, values) if len(values) == len(sizes) else 0.0)
    return max(found)


def data_repeated(e: Evidence) -> Iterator[Finding]:
    """Few different prompts."""
    if len(e.groups) < 16 or any(e.args.get(name) not in (None, False, "", "engine") for name in INTERACTIVE):
        return
    prompts = Counter(_task(rows[0]) for rows in e.groups)
    yield from _without_task(e)
    times, ids = len(e.groups) / len(prompts), len({rows[0].get("prompt_id") for rows in e.groups})
    epochs = e.series("epoch")
    evidence = [
        f"{counted(len(prompts), 'different prompt')} in {len(e.groups)} groups: each was sampled {times:.0f} times"
    ]
    if epochs:
        evidence.append(f"epoch {epochs.values[-1]:.1f} at step {epochs.steps[-1]}")
    if ids > 2 * len(prompts):
        evidence.append(f"{ids} rows of the dataset have these texts")
    yield Finding(
        "data_repeated",
        between(times, 5, 16, 0.3, 0.85),
        evidence,
        "more prompts (--dataset), fewer epochs (--max_steps)",
    )


def _without_task(e: Evidence) -> Iterator[Finding]:
    """Prompts of one turn that have several ground truths, which completions do not give."""
    groups = [rows for rows in e.groups if rows[0].get("turns") is None and e.truth is None and not e.learns]
    if len(groups) < 16:
        return
    heads = [rows[0] for rows in groups]
    logged = {name for first, *rows in groups for row in rows for name, value in row["columns"].items()
              if value != first["columns"].get(name)}  # fmt: skip
    for name in {name for row in heads for name in _of_task(row) if TRUTHS.search(name)} - logged:
        pairs = {(row["prompt"], str(row["columns"].get(name))) for row in heads}
        prompts = {prompt for prompt, _ in pairs}
        said = f"{counted(len(prompts), 'different prompt')} with {len(pairs)} different values of {name}"
        yield Finding(
            "data_repeated",
            between(len(pairs) / len(prompts), 4, 8, 0.5, 0.95),
            [f"{said}: what tells the tasks apart is not in the prompts"],
            """name the column of the task: --columns '{"<column>": "query"}'""",
        )


def _task(row: Row) -> str:
    """A prompt, with the columns that make another task of the same text, as in a game."""
    return repr((row["prompt"], list(_of_task(row).items())))


def _of_task(row: Row) -> Row:
    """The columns that say something of a task: not numbers of rows, nor what reward functions have read."""
    columns = row["columns"].items()
    return {name: value for name, value in columns if not name.endswith(EXTRACTED) and not KEYS.search(name)}


def closed_answers(row: Row) -> bool:
    """Whether a text goes on after its marked answer."""
    ends = [found.end() for way in MARKED[:3] for found in way.finditer(row["completion"])]
    return bool(ends) and len(row["completion"]) - min(ends) > 8


RULES = (
    reward_failing,
    reward_unparsed,
    zero_variance,
    reward_stops,
    rewards_cancel,
    reward_hacked,
    length_hacking,
    data_repeated,
)
