"""Causes of a sick run that lie in its updates, its sampler, its template or its machine, as in `causes_of_rewards`."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence

from swift.errors import counted
from swift.observability.causes_of_rewards import closed_answers, correlation
from swift.observability.evidence import Evidence, Series
from swift.observability.findings import Finding, between, percent, steps_of

MOVED = {"full": 1e-5, "adapter": 1e-4}
"""The sum of all learning rates below which no weight can have moved much: Adam moves it by at most about that. Weights
of language models are about 0.02; those of an adapter start at 0 and are multiplied."""
MANY_CUT = 0.2
"""Share of prompts at the limit of their length from which these are the cause."""
ENDS = re.compile(r"<\|im_end\|>|</s>|<\|eot_id\|>|<\|endoftext\|>|<end_of_turn>|<\|end\|>|<eos>")
HEADER = re.compile(
    r"<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>|\[INST\]|(?:^|\n)\[?(?:user|assistant|system)\]?:?\n"
)
"""Ends and headers of turns in the usual templates."""


def non_finite(e: Evidence) -> Iterator[Finding]:
    """Skipped updates, losses that are not numbers."""
    skips = e.series("health/nan_skips")
    skipped, at = sum(skips.values), skips.where(bool)
    null = [row["step"] for row in e.log if "loss" in row and row["loss"] is None]
    ended = [reason for reason in e.reasons if re.search(r"non-finite|not finite|\bnan\b", reason, re.IGNORECASE)]
    if not (skipped or null or ended):
        return
    share = max(skipped / max(1, e.num_steps), len(null) / max(1, len(e.log)))
    evidence = [f"health/nan_skips adds up to {skipped:.0f}"] if skipped else []
    evidence += [f"the loss is not finite at {steps_of(null)}"] if null else []
    evidence += [f"the run ended with: {reason[:160]}" for reason in ended[:1]]
    fix = "--torch_dtype bfloat16, a lower --learning_rate; a plugin's loss or reward may divide by 0"
    strength = max(between(share, 0.005, 0.1, 0.4, 0.95), 0.9 if ended else 0)
    half = "--torch_dtype bfloat16" if e.arg("torch_dtype", "") == "float16" else ""
    yield Finding("non_finite", strength, evidence, fix, [*null, *at], half)


def learning_rate_high(e: Evidence) -> Iterator[Finding]:
    """Updates that are far too large show in several metrics at once, and the reward falls."""
    reward, kl, norm, entropy = e.reward, e.series("kl"), e.series("grad_norm"), e.series("entropy")
    region, rate = e.series("clip_ratio/region_mean"), e.series("learning_rate")
    signs: list[tuple[float, str, Sequence[int]]] = []
    if kl and max(kl.values) > 1 and e.arg("beta", 0.0) < 0.5 and kl.values[0] < 0.05:
        strong = 0.3 if max(kl.values) < 5 else 0.45
        signs.append((strong, f"kl reaches {max(kl.values):.2g}", kl.where(lambda value: value > 1)))
    if norm and norm.late.mean > 2.5 * max(1e-9, norm.first) and norm.late.mean > 1:
        grown = f"grad_norm from {norm.first:.2g} to {norm.late.mean:.2g}, up to {max(norm.values):.2g}"
        signs.append((0.25, grown, norm.late.steps))
    if region and region.mean > 0.3:
        signs.append((0.3, f"clip_ratio/region_mean is {region.mean:.2f}", region.steps))
    if len(entropy.values) > 1 and entropy.late.mean > 1.5 * entropy.values[0]:
        signs.append((0.25, f"entropy from {entropy.values[0]:.2g} to {entropy.late.mean:.2g}", entropy.late.steps))
    broken, since = _texts_break(e)
    signs += [(0.55, broken, since)] if broken else []
    clear, share = reward.fall if len(reward.values) > 12 else (0.0, 0.0)
    fell = clear > 5 and share > 0.2
    if lost := _lost_at_once(e):
        signs.append((0.55, lost, reward.steps))
    elif fell:
        falls = f"reward falls by {percent(share)}, to {reward.last:.3f}, and stays there"
        alone = not signs and (e.rightness.trend > -3 or bool(e.arg("curriculum_column", "")))
        signs.append((0.2 if alone else 0.35, falls, reward.late.steps))
    total = sum(weight for weight, _, _ in signs)
    if not signs or not rate or (not fell and not broken and not lost and total < 0.6):
        return
    lower = f"--learning_rate {max(rate.values) / 10:.0e}"
    evidence = [said for _, said, _ in signs] + [f"learning_rate is up to {max(rate.values):.1e}"]
    yield Finding(
        "learning_rate_high",
        min(0.95, 0.15 + total),
        evidence,
        f"{lower} from an earlier checkpoint, or --max_grad_norm 0.2, --beta 0.04",
        [step for _, _, steps in signs for step in steps],
        lower,
    )


def _lost_at_once(e: Evidence) -> str:
    """What the first step could, and none of the later ones: the first updates have destroyed the policy."""
    able = e.rightness if any(e.rightness.values) else e.reward
    if len(able.values) < 8 or e.num_steps < 12 or min(able.values) < 0:
        return ""
    first, later = able.values[0], able.values[2:]
    if first < 0.1 or max(later) > 0.5 * first or statistics.fmean(later) > 0.1 * first:
        return ""
    what = "the share of right answers" if able is e.rightness else "reward"
    return (
        f"{what} is {first:.2f} at step {able.steps[0]}, and {statistics.fmean(later):.3f} from step {able.steps[2]} on"
    )


def _texts_break(e: Evidence) -> tuple[str, Sequence[int]]:
    """Completions that had an end at the beginning, and after some step never again, or nothing but an end; where."""
    ends, length = e.by_step(lambda row: float(row["finish_reason"] == "stop")), e.series("completions/mean_length")
    if e.learns or not ends or not length:
        return "", ()
    if ends.values[0] > 0.6 and ends.late.mean < 0.2:
        at, share = ends.where(lambda share: share < 0.3), percent(ends.values[0])
        return f"{share} of the completions end by themselves at first, almost none from step {at[0]} on", at
    if length.values[0] > 8 and length.late.mean < 0.15 * length.values[0]:
        said = f"completions/mean_length falls from {length.values[0]:.0f} to {length.late.mean:.1f}"
        return said, length.where(lambda tokens: tokens < 0.15 * length.values[0])
    return "", ()


def learning_rate_low(e: Evidence) -> Iterator[Finding]:
    """Rewards differ and gradients flow, and the policy stays what it was."""
    rate, kl, norm, entropy = (e.series(key) for key in ("learning_rate", "kl", "grad_norm", "entropy"))
    flat = e.series("frac_reward_zero_std")
    if len(rate.values) < 4 or e.num_steps < 20 or e.learns or (flat and flat.mean > 0.8):
        return
    if norm and max(norm.values) == 0:
        return
    per_line = statistics.fmean([b - a for a, b in zip([0, *rate.steps], rate.steps, strict=False)])
    total, bound = sum(rate.values) * per_line, MOVED["full" if e.arg("tuner_type", "full") == "full" else "adapter"]
    if e.arg("max_steps", 0) > 2 * e.num_steps and rate.values[-1] == max(rate.values) > rate.values[0]:
        return  # still in its warm-up
    still = bool(kl) and abs(kl.last) < 1e-5
    if entropy and len(entropy.values) > 1 and abs(entropy.values[-1] / (entropy.values[0] or 1) - 1) > 0.1:
        return
    if total > (100 * bound if still else bound):
        return
    evidence = [f"the learning rates of all {rate.steps[-1]} steps add up to {total:.1e}; weights cannot move by more"]
    evidence += [f"kl is {kl.last:.1e} at the end"] if still else []
    evidence += [f"reward stays at {e.reward.mean:.3f} although rewards differ inside of groups"] if e.reward else []
    warm = (
        rate.values[-1] == max(rate.values) > 3 * rate.values[len(rate.values) // 2]
        and e.arg("warmup_ratio", 0.0) > 0.5
    )
    wanted = 1e-5 if e.arg("tuner_type", "full") == "full" else 1e-4
    fix = "--warmup_ratio 0.05" if warm else f"--learning_rate {wanted:.0e}"
    strength = 0.5 + 0.25 * still + between(total / bound, 1, 0.1, 0.1, 0.2)
    changes = warm or wanted > 2 * e.arg("learning_rate", 0.0)
    yield Finding("learning_rate_low", strength, evidence, fix, settings=fix if changes else "")


def dead_adapter(e: Evidence) -> Iterator[Finding]:
    """B that stays 0, a KL that stays 0, or an engine that samples without the adapter."""
    if e.arg("tuner_type", "full") == "full":
        return
    kl, norm, rate = e.series("kl"), e.series("grad_norm"), e.series("learning_rate")
    differ = e.series("frac_reward_zero_std")
    fix = "check --target_modules, --freeze_parameters and plugins; `swift infer --adapters` shows the adapter's effect"
    moved = bool(norm) and max(norm.values) > 0
    if e.adapter and max(e.adapter) == 0 and moved:
        yield Finding("dead_adapter", 0.96, [f"all {len(e.adapter)} B matrices of the newest checkpoint are 0"], fix)
    elif moved and e.adapter and list(e.adapter) == list(e.adapter_before):
        said = f"the {len(e.adapter)} B matrices of the newest checkpoint are those of the oldest"
        yield Finding("dead_adapter", 0.9, [said], fix)
    elif norm and max(norm.values) == 0 and (not differ or differ.mean < 1):
        yield Finding("dead_adapter", 0.9, [f"grad_norm is 0 at {steps_of(norm.steps)} although rewards differ"], fix)
    elif len(kl.values) > 8 and max(map(abs, kl.values)) < 1e-7 and rate and sum(rate.values) > MOVED["adapter"]:
        yield Finding(
            "dead_adapter",
            0.85,
            [f"kl stays below 1e-7 although the learning rates add up to {sum(rate.values):.1e}"],
            fix,
        )
    gap, age = e.series("mismatch/kl"), e.series("off_policy/max")
    if gap and gap.trend > 3 and gap.last > 100 * max(abs(gap.values[0]), 1e-8) and not (age and max(age.values)):
        merged = "--vllm_enable_lora false"
        said = f"mismatch/kl grows from {gap.values[0]:.1e} to {gap.last:.1e} although no token is old"
        yield Finding(
            "dead_adapter",
            0.8,
            [said, "so the engine does not have what the trainer trains"],
            merged,
            gap.since(min),
            merged,
        )


def entropy_collapse(e: Evidence) -> Iterator[Finding]:
    """The policy samples the same, without having solved its task."""
    if not e.completions:
        return  # training on given texts lowers the entropy, as it should
    entropy = e.series("entropy")
    shares: dict[int, list[float]] = defaultdict(list)
    for rows in e.groups:
        shares[rows[0]["step"]].append(len({row["completion"] for row in rows}) / len(rows))
    distinct = Series(list(shares), [statistics.fmean(values) for values in shares.values()])
    low = bool(entropy) and entropy.values[-1] < 0.05 and entropy.values[-1] < 0.25 * entropy.values[0]
    cold = _sampled_cold(e)
    same = bool(distinct) and distinct.last < 0.4 and (bool(cold) or distinct.last < 0.6 * distinct.first)
    if not (low or same):
        return
    highest = max((row["reward"] for row in e.completions if isinstance(row.get("reward"), int | float)), default=0.0)
    solved = bool(e.reward) and e.reward.last >= 0.8 * highest > 0
    evidence = [f"entropy from {entropy.values[0]:.3f} to {entropy.values[-1]:.4f}"] if low else []
    if same:
        evidence.append(f"different texts inside of a group from {percent(distinct.first)} to {percent(distinct.last)}")
    strength = (0.65 if low and same else 0.5) + between(distinct.last if distinct else 1.0, 0.4, 0.15, 0.05, 0.25)
    evidence += [f"{cold} leaves little to draw"] if cold else []
    fix = (
        "--temperature 1.0 --top_p 1 --top_k -1"
        if cold
        else "--temperature 1.0, a lower --learning_rate, --beta 0.04 or --entropy_coef 0.01"
    )
    at = entropy.where(lambda value: value < 0.25 * entropy.values[0]) if low else []
    at += distinct.where(lambda share: share < 0.4) if same else []
    more = fix if cold else "--temperature 1.0 --entropy_coef 0.01"
    if e.arg("streaming_partial_batch", False) and not cold:
        more = ""  # which the coefficient does not go with
    yield Finding("entropy_collapse", strength * (0.4 if solved or e.learns else 1.0), evidence, fix, at, more)


def _sampled_cold(e: Evidence) -> str:
    """The setting of sampling that leaves almost one text to a prompt; "" if there is none."""
    values = {"temperature": e.arg("temperature", 1.0), "top_p": e.arg("top_p", 1.0), "top_k": e.arg("top_k", -1)}
    cold = {"temperature": values["temperature"] < 0.4, "top_p": values["top_p"] < 0.2, "top_k": values["top_k"] == 1}
    return next((f"--{name} {values[name]:g}" for name, is_cold in cold.items() if is_cold), "")


def endings(e: Evidence) -> Iterator[Finding]:
    """Completions that are cut: too early, or because nothing ends them."""
    cut = e.by_step(lambda row: float(row["finish_reason"] == "length"))
    if not cut or cut.late.mean < 0.5:
        return
    rows = [row for row in e.completions if row["finish_reason"] == "length"]
    stopped = 1 - len(rows) / len(e.completions)
    past = statistics.fmean(closed_answers(row) for row in rows)
    inside = statistics.fmean(bool(ENDS.search(row["completion"])) for row in rows)
    turns = statistics.fmean(bool(HEADER.search(row["completion"])) for row in rows)
    opened = statistics.fmean(_is_open(row["completion"]) for row in rows)
    entropy = e.series("entropy")
    untrained = bool(entropy) and entropy.values[0] > 3
    limit = e.arg("max_completion_length", 0)
    fact = f"{percent(cut.late.mean)} of the completions are cut at {limit} tokens ({steps_of(cut.late.steps)})"
    silent = statistics.fmean(row["completion_tokens"] > 5 * len(row["completion"]) for row in rows)
    signs = {
        "go on after their answer": past, "write another turn": turns, "have an end token inside": inside,
        "are mostly special tokens, which texts do not show": silent,
    }  # fmt: skip
    said, goes_on = max(signs.items(), key=lambda item: item[1])
    weaker = (0.6 if untrained else 1.0) * min(1.0, e.num_steps / 8)
    longer = f"--max_completion_length {2 * (limit or 512)}"
    if stopped < 0.1 and goes_on > 0.2:
        yield Finding(
            "never_stops",
            between(goes_on, 0.2, 0.6, 0.6, 0.92) * weaker,
            [fact, f"{percent(goes_on)} of these {said}; {percent(stopped)} of all end by themselves"],
            "check eos_token_id in generation_config.json and the template's end of turn, or --stop_words '<end>'",
            cut.late.steps,
        )
    evidence = [fact, f"{percent(opened)} of these end inside of an open tag, box or number"]
    strength = between(cut.late.mean, 0.5, 1.0, 0.35, 0.6) + between(opened, 0.3, 0.8, 0.1, 0.3)
    if (worse := _worse_when_cut(e)) > 0.3:
        evidence.append(f"their rewards are lower than the others' by {percent(worse)} of the range")
        strength = min(0.92, strength + 0.2)
    yield Finding(
        "truncation",
        strength * weaker * (0.5 if e.learns else 1.0) * (0.6 if goes_on > 0.2 and stopped < 0.1 else 1.0),
        evidence,
        f"{longer}; --overlong_filter true or soft_overlong meanwhile",
        cut.late.steps,
        longer,
    )


def _worse_when_cut(e: Evidence) -> float:
    """How much less completions get that are cut, as a share of the range of rewards."""
    scored = [(row["finish_reason"] == "length", row["reward"]) for row in e.completions if row["reward"] is not None]
    cut, others = [v for was_cut, v in scored if was_cut], [v for was_cut, v in scored if not was_cut]
    span = max((v for _, v in scored), default=0.0) - min((v for _, v in scored), default=0.0)
    return (statistics.fmean(others) - statistics.fmean(cut)) / span if cut and others and span else 0.0


def _is_open(text: str) -> bool:
    """Whether a text ends inside of a tag, a box, or before its answer's end."""
    tags = ("think", "answer")
    return any(text.count(f"<{tag}>") > text.count(f"</{tag}>") for tag in tags) or text.count("\\boxed{") > text.count(
        "}"
    )


def prompts_cut(e: Evidence) -> Iterator[Finding]:
    """Prompts on record that are as long as they may be."""
    limit, share = e.arg("max_length", 0), _share_of_cut_prompts(e)
    side = e.arg("truncation_strategy", "left")
    fits = not e.context or 2 * limit + e.arg("max_completion_length", 0) <= e.context
    longer = f"--max_length {2 * limit}" if fits else ""
    yield Finding(
        "truncation",
        between(share, MANY_CUT, 0.8, 0.6, 0.95) * (0.5 if e.learns else 1.0),
        [f"{percent(share)} of the prompts on record have {limit} tokens, the most that --max_length leaves ({side})"],
        f"{longer}, or --truncation_strategy delete" if fits else "--truncation_strategy delete",
        settings=longer,
    )


def _share_of_cut_prompts(e: Evidence) -> float:
    limit = e.arg("max_length", 0)
    if not limit or e.arg("truncation_strategy", "left") == "delete" or len(e.record) < 8:
        return 0.0
    return statistics.fmean(len(row["prompt_ids"]) == limit for row in e.record)


def template_wrong(e: Evidence) -> Iterator[Finding]:
    """Prompts on record that begin twice, leave a turn open, close one twice, or do not begin the answer."""
    if _share_of_cut_prompts(e) >= MANY_CUT:
        return  # what is missing was cut
    problems: list[tuple[float, str]] = []
    prompts = [list(row["prompt_ids"]) for row in e.record if len(row["prompt_ids"]) > 3 and row["prompt_ids"][0] >= 0]
    texts = {row["prompt"] for row in e.completions}
    if len(prompts) > 8 and len({tuple(prompt) for prompt in prompts}) == 1 and len(texts) > 8:
        problems.append((0.9, f"{len(texts)} different prompts have the same tokens: the template leaves texts out"))
    if prompts and len({tuple(prompt) for prompt in prompts}) > 1 and all(prompt[0] == prompt[1] for prompt in prompts):
        problems.append((0.9, f"every prompt begins with token {prompts[0][0]} twice (double BOS)"))
    faults = [] if e.learns else [_faults(text) for text in e.prompts]  # of one prompt, its row may be the cause
    sure = between(len(set(e.prompts)), 1, 3, 0.5, 0.9)
    problems += [(min(sure, weight), said) for kind, (weight, said) in (faults or [{}])[-1].items()
                 if all(kind in found for found in faults)]  # fmt: skip
    heads = e.by_step(
        lambda row: float(bool(re.match(r"\s*(?:<\|im_start\|>|\[?(?:assistant|user|system)\]?\b)", row["completion"])))
    )
    if heads and heads.mean > 0.2:
        problems.append((0.7, f"{percent(heads.mean)} of the completions begin with the header of a turn"))
    if problems:
        strength = min(0.97, max(weight for weight, _ in problems) + 0.05 * (len(problems) - 1))
        yield Finding(
            "template_wrong",
            strength,
            [said for _, said in problems],
            "--template of the model's family, or mend chat_template in its tokenizer_config.json",
        )


def _faults(text: str) -> dict[str, tuple[float, str]]:
    """What is wrong with the turns of a prompt: by its kind, how sure it is, and a sentence."""
    found: dict[str, tuple[float, str]] = {}
    opened, closed = len(_STARTS.findall(text)), len(ENDS.findall(text))
    last_start, last_end = (max((m.start() for m in way.finditer(text)), default=-1) for way in (_STARTS, ENDS))
    roles, opens = _ROLES.findall(text), _HEADS.findall(text)
    of_others = bool(opens) and opens[-1] in ("user", "system")
    if (opened and last_end > last_start) or (roles and roles[-1] != "assistant") or of_others:
        found["end"] = 0.9, f"a prompt ends with {text[-30:]!r}: no generation prompt"
    elif opened > closed + 1:
        found["open"] = 0.85, f"a prompt opens {counted(opened, 'turn')} and closes {closed}: {text[:80]!r}"
    if twice := _CLOSED_TWICE.search(text):
        found["twice"] = 0.9, f"a prompt has {twice[0]!r}: a turn is closed twice, or a text of the data has an end"
    return found


_ROLES = re.compile(r"<\|(user|assistant|system)\|>")
"""Headers of turns of Phi, GLM and others, which do not all have ends."""
_CLOSED_TWICE = re.compile(rf"(?<=.)(?:{ENDS.pattern})\s*(?:{ENDS.pattern})", re.DOTALL)
_STARTS = re.compile(r"<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>")
_HEADS = re.compile(rf"(?:{_STARTS.pattern})\s*(\w+)")
"""Headers of the other templates, whose ends are in `ENDS`."""


def mismatch(e: Evidence) -> Iterator[Finding]:
    """Log-probs of engine and trainer that differ, by the age of the tokens."""
    biased, age = e.series("mismatch/biased"), e.series("off_policy/max")
    gap, ratio = e.series("mismatch/logp_abs_diff_mean"), e.series("mismatch/kl")
    bound = 0.02 if e.arg("torch_dtype", "") == "float32" else 0.05
    old = bool(age) and age.mean >= 1
    ended = [r for r in e.reasons if re.search(r"engine and trainer disagree|parity", r, re.IGNORECASE)]
    if ((not gap or gap.mean < bound) and not ended) or (biased and biased.mean):
        return
    evidence = [f"mismatch/logp_abs_diff_mean is {gap.mean:.3g}"] if gap else []
    evidence += [f"mismatch/kl is {ratio.mean:.2g}"] if ratio else []
    evidence += [f"the run ended with: {reason[:160]}" for reason in ended[:1]]
    fresh, at = _fresh_gap(e), gap.where(lambda value: value >= bound)
    grows = gap and gap.values[0] < 0.3 * gap.mean
    if grows and not old and gap.trend > 3 and e.arg("tuner_type", "full") == "full":
        evidence.append("it grows from about 0 although no token is old: new weights do not reach the engine")
        fix = "`--parity_check every:10` shows when; read logs/attempt-<k>/engine-<n>.log"
        yield Finding("stale_weights", between(gap.mean, bound, 5 * bound, 0.6, 0.92), evidence, fix, at)
        return
    if old and (grows or (fresh is not None and fresh < 0.5 * gap.mean)):
        evidence.append(f"tokens are {age.mean:.1f} steps old in the mean, up to {max(age.values):.0f}")
        evidence += [f"those of the newest version differ by {fresh:.2g} only"] if fresh is not None else []
        yield Finding(
            "stale_weights",
            between(gap.mean, bound, 5 * bound, 0.6, 0.92) * (0.5 if _as_planned(e, age) else 1.0),
            evidence,
            "--max_staleness 1, --vllm_sync_interval 1, --prefetch_depth 1, or --off_policy_sequence_mask_delta 0.5",
            at,
            "--vllm_sync_interval 1 --prefetch_depth 1" if e.arg("async_generate", False) else "",
        )
        return
    at_first = f"already at step {gap.steps[0]}: {gap.values[0]:.3g}" if gap else ""
    strength = between(gap.mean, bound, 5 * bound, 0.6, 0.93) if gap else 0.0
    yield Finding(
        "sampler_mismatch",
        max(strength, 0.9 if ended else 0.0),
        [*evidence, at_first],
        "--parity_check start names the layer; same --torch_dtype, template and temperature on both sides",
        at,
    )


def _as_planned(e: Evidence, age: Series) -> bool:
    """Whether tokens are as old as the settings make them, and updates are too large for that age."""
    updates = e.arg("steps_per_generation", 1) * e.arg("num_iterations", 1)
    ahead = e.arg("prefetch_depth", 1) if e.arg("async_generate", False) else 0
    if max(age.values) > (ahead + 1) * updates:
        return False
    return any(finding.confidence > 0.6 for finding in learning_rate_high(e))


def _fresh_gap(e: Evidence) -> float | None:
    """Mean difference of log-probs on record in completions whose tokens were of the newest version of their step."""
    found: list[float] = []
    for row in e.record:
        theirs, ours = row.get("sampler_logprobs"), row.get("old_logprobs")
        fresh = bool(row["versions"]) and all(version >= row["step"] - 1 for version, _, _ in row["versions"])
        if fresh and theirs is not None and ours is not None and len(theirs) == len(ours) and len(ours):
            found.append(float(abs(theirs - ours).mean()))
    return statistics.fmean(found) if found else None


def reference_drift(e: Evidence) -> Iterator[Finding]:
    """The KL term is larger than what the rewards ask for."""
    kl, beta = e.series("kl"), float(e.arg("beta", 0.0))
    if not kl or not beta:
        return
    pull, first, less = beta * kl.late.mean, kl.values[0], f"--beta {min(beta / 10, 0.04):g}"
    evidence = [
        f"kl is {kl.late.mean:.3g} in the second half: times beta {beta:g} it is {pull:.2g}; advantages are about 1"
    ]
    if first > 0.05 and beta * max(first, kl.late.mean) > 0.005:
        evidence.append(
            f"kl is {first:.2g} at step {kl.steps[0]} already: the reference is not the model that the run began with"
        )
        yield Finding(
            "reference_drift",
            between(first, 0.05, 0.5, 0.6, 0.92),
            evidence,
            "--ref_model with the model of --model, or --beta 0",
            settings="--beta 0",
        )
    elif pull > 0.1 and not e.learns:
        strength = between(pull, 0.1, 0.5, 0.5, 0.75) + (0.15 if beta >= 0.5 else 0)
        yield Finding(
            "reference_drift",
            min(0.93, strength),
            evidence,
            f"{less}, or --sync_ref_model true",
            kl.late.steps,
            less,
        )
    elif beta >= 0.5 and not e.learns and e.reward and abs(e.reward.trend) < 3:
        evidence.append(f"reward stays at {e.reward.mean:.3f}")
        yield Finding("reference_drift", between(beta, 0.5, 5, 0.5, 0.85), evidence, less, settings=less)


def engine_flapping(e: Evidence) -> Iterator[Finding]:
    """Restarts of engines."""
    restarts = e.series("health/engine_restarts")
    total, at = sum(restarts.values), restarts.where(bool)
    ended = [reason for reason in e.reasons if "engine_restarts" in reason]
    if total or ended:
        evidence = [f"{total:.0f} restarts, at {steps_of(at)}"] if total else []
        yield Finding(
            "engine_flapping",
            max(between(total / max(1, e.num_steps), 0.005, 0.05, 0.35, 0.95), 0.9 if ended else 0),
            [*evidence, *ended[:1]],
            "read logs/attempt-<k>/engine-<n>.log; often out of memory: a lower --vllm_gpu_memory_utilization",
            at,
        )


def memory_growth(e: Evidence) -> Iterator[Finding]:
    """Main memory of rank 0, or of its reward workers and engines, that grows all the time."""
    for name in ("perf/rss_gib", "perf/children_rss_gib"):
        yield from _growth(name, e.series(name))


def _growth(name: str, rss: Series) -> Iterator[Finding]:
    late = Series(rss.steps[len(rss.steps) // 3 :], rss.values[len(rss.values) // 3 :])
    if len(late.values) < 6 or late.values[0] <= 0:
        return
    grown, rising = (
        late.values[-1] / late.values[0] - 1,
        sum(b > a for a, b in zip(late.values, late.values[1:], strict=False)),
    )
    steady = rising / (len(late.values) - 1)
    if grown > 0.05 and steady > 0.7 and correlation(list(late.steps), list(late.values)) > 0.95:
        said = f"{name} from {late.values[0]:.2f} to {late.values[-1]:.2f} ({steps_of(late.steps)})"
        yield Finding(
            "memory_growth",
            between(grown, 0.05, 0.3, 0.6, 0.95),
            [said, f"it rises in {percent(steady)} of the log lines"],
            "look for lists that grow in plugins (reward functions, callbacks); --save_steps and resume meanwhile",
            late.steps,
        )


RULES = (
    non_finite,
    learning_rate_high,
    learning_rate_low,
    dead_adapter,
    entropy_collapse,
    endings,
    prompts_cut,
    template_wrong,
    mismatch,
    reference_drift,
    engine_flapping,
    memory_growth,
)
