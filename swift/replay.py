"""`swift replay RUN --step N`: the loss of a recorded step again, and under other settings or another model.

Advantages, ratios, corrections, masks and the loss come from the code of the training step, over log-probs of the
record, or of `--model`. So what is found under the run's own settings is what was logged, up to rounding.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from swift.arguments.ebft import FeatureArguments
from swift.errors import ConfigError, counted
from swift.models.router_loss import router_coefficient
from swift.observability.rollout_record import read_rollouts, read_step, recorded_steps
from swift.observability.run_dir import list_versions
from swift.rl.advantages import compute_advantages, reward_matrix
from swift.rl.declared import parameters_of
from swift.rl.estimators import get_estimator
from swift.rollout.samples import RolloutBatch, TrainSample
from swift.trainers.grpo.arguments import trainer_settings
from swift.trainers.grpo.entropy import EntropyControl
from swift.trainers.grpo.metrics import StepMetrics, summarise
from swift.trainers.grpo.micro_batch import collate
from swift.trainers.grpo.step import GlobalBatchStep, _Shared

if TYPE_CHECKING:
    from torch import nn

    from swift.arguments import Resolved
    from swift.trainers.grpo.build import Beside
    from swift.trainers.grpo.settings import GRPOSettings

EQUAL = 1e-6
"""Relative distance of a metric from what was logged, beyond which it is told; of values below 1, absolute."""
KEPT = (
    "ref_model", "teacher_model", *(field.name for field in fields(FeatureArguments) if field.name != "ebft_ce_coef"),
)  # fmt: skip
"""Settings of models and features, whose values are on record."""
ALONE: Any = SimpleNamespace(world_size=1, rank=0, is_main=True, gather=lambda value: [value])


def run(resolved: Resolved) -> int:
    """The mode: prints the table of metrics; returns 0.

    Raises:
        ConfigError: no record of the step, or settings that it cannot be replayed under.
    """
    from swift.arguments import parse

    args: Any = resolved.args
    folder = _folder(args.run)
    steps = recorded_steps(folder)
    step = steps[-1] if args.step is None and steps else args.step or 0
    about = read_step(folder, step)[1]
    words = [word for pair in args.set for word in _flag(pair)]
    own, other = (parse("rlhf", [str(folder / "args.json"), *more], {}).args for more in ([], words))
    rows = list(read_rollouts(folder, [step]))
    names = about["reward_names"]
    groups = dict.fromkeys(row["group_id"] for row in rows)
    if args.group and args.group not in groups:
        raise ConfigError(f"--group: {args.group}: not in step {step}; there are: {', '.join(groups)}")
    for settings in (own, other):
        _refuse(settings, rows, computes=bool(args.model))
    for name in KEPT:
        if getattr(own, name, None) != (given := getattr(other, name, None)):
            raise ConfigError(
                f"--set: {name}: {given}: a replay keeps what the run's has given; leave it out, or train with it "
                f"(--replay_from {folder})"
            )
    template, models = None, None
    if args.model:
        from swift.trainers.grpo.recorded_step import load_recorded, moved_tokens

        model = str(folder / args.model) if args.model.startswith("checkpoint-") else args.model
        template, models = load_recorded(own, model, rows, about["prompt"])
    found, again = replayed(rows, names, own, about, advantages=False, models=models)
    metrics = {"logged": about["metrics"], "again": found}
    if words:
        features = hasattr(own, "ebft_mode")  # their advantages are not those of rewards in groups
        made = not features and advantages_of(rows, names, other) != advantages_of(rows, names, own)
        metrics["changed"], _ = replayed(rows, names, other, about, advantages=made, models=models)
    gaps = differences(about["metrics"], found)
    group = [_told(row) for row in again if row["group_id"] == args.group]
    told = {"step": step, "metrics": metrics, "differences": gaps, "group": group}
    if template is not None:
        told["moved"] = moved_tokens(again, template.decode)
    print(json.dumps(told) if args.json else "\n".join(_lines(folder, rows, told, args.set)))
    return 0


def _lines(
    folder: Path, rows: Sequence[Mapping[str, Any]], told: Mapping[str, Any], settings: Sequence[str]
) -> list[str]:
    trained = sum(int(row["trained"].sum()) for row in rows)
    groups = counted(len({row["group_id"] for row in rows}), "group")
    gaps = ", ".join(told["differences"])
    return [
        f"{folder}: step {told['step']}: {counted(len(rows), 'completion')} of {groups}, {trained} tokens",
        *_table(told["metrics"], settings),
        f"differs from the log by more than {EQUAL:g}: {gaps}" if gaps else f"equal to the log within {EQUAL:g}",
        *_group_lines(told["group"]),
        *_moved_lines(told.get("moved", [])),
    ]


def _folder(given: str) -> Path:
    """The folder of a run, or of runs, of which it is the newest with a record."""
    folder = Path(given).expanduser()
    for one in (folder, *reversed(list_versions(folder))):
        if recorded_steps(one):
            return one
    raise ConfigError(f"--run: {given}: no rollouts on record there; give the folder of a run with --record_rollouts")


def _flag(pair: str) -> list[str]:
    name, equals, value = pair.partition("=")
    if not equals:
        raise ConfigError(f"--set: {pair}: not understood; write name=value, such as loss_type=dapo")
    return [f"--{name.lstrip('-')}", *value.split(",")]


def replayed(
    rows: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    args: Any,
    about: Mapping[str, Any],
    *,
    advantages: bool,
    models: tuple[nn.Module, Beside] | None = None,
) -> tuple[dict[str, float], Sequence[Mapping[str, Any]]]:
    """The metrics of a recorded global batch under the settings `args`, and its rows with the log-probs of the policy.

    rows: of `read_rollouts`. names: of the rewards. advantages: whether they are made of the rewards again; else they
    are those on record. models: the policy, which gives log-probs and a gradient, and frozen ones beside it; None:
    log-probs are those on record.
    """
    settings = _settings(args, about, models[0] if models else None)
    samples = [_sample(row, settings, of_policy=models is not None) for row in rows]
    if advantages:
        for sample, value in zip(samples, advantages_of(rows, names, args), strict=True):
            sample.advantage = value
    report = StepMetrics()
    batch = RolloutBatch(samples, 1, 1, references=[*map(_reference, filter(_has_reference, rows))])
    if models is None:
        loss = _loss(settings, batch, rows, report)
        for weight, name in ((settings.router_aux_loss_coef, "aux_loss"), (settings.ce_coef, "ebft/ce_loss")):
            loss = loss + (weight or 0.0) * about["metrics"].get(name, 0.0)
        report.add("loss", loss, 0.0)
    else:
        from swift.trainers.grpo.recorded_step import compute

        made = compute(*models, settings, batch, report, about["step"])
        columns = "old_logprobs", "policy_logprobs"
        rows = [{**row, **{name: new[name] for name in columns}} for row, new in zip(rows, made, strict=True)]
    return summarise(report, batch, settings, ALONE), rows


def _settings(args: Any, about: Mapping[str, Any], policy: nn.Module | None) -> GRPOSettings:
    """Settings of the step; a controller's weight of the entropy bonus is the logged one."""
    balance = (
        args.router_aux_loss_coef or 0.0 if policy is None else router_coefficient(args.router_aux_loss_coef, policy)
    )
    settings = trainer_settings(args, logprob_support=about["logprob_support"], router_aux_loss_coef=balance)
    if settings.entropy.adaptive is None:
        return settings
    coefficient = about["metrics"].get("entropy_coef", settings.entropy.coefficient)
    return replace(settings, entropy=replace(settings.entropy, coefficient=coefficient))


def advantages_of(rows: Sequence[Mapping[str, Any]], names: Sequence[str], args: Any) -> list[float]:
    """Advantages of the rows from their rewards; statistics over a batch are those of this step."""
    groups = {group: number for number, group in enumerate(dict.fromkeys(row["group"] for row in rows))}
    weights = list(args.reward_weights) or [1.0] * len(names)
    kl_coef = args.beta if args.kl_in_reward else 0.0
    penalties = [kl_coef * row["reward_kl"] for row in rows] if kl_coef else None
    made = compute_advantages(
        reward_matrix([[row["rewards"].get(name) for name in names] for row in rows]),
        torch.tensor([groups[row["group"]] for row in rows]),
        weights_K=torch.tensor(weights, dtype=torch.float64),
        excluded_S=torch.tensor([row["excluded"] is not None for row in rows]),
        estimator=args.advantage_estimator,
        parameters=parameters_of(get_estimator(args.advantage_estimator), args),
        scale=args.scale_rewards,
        kl_penalty_S=None if penalties is None else torch.tensor(penalties, dtype=torch.float64),
    )
    return [float(value) for value in made.advantages_S.tolist()]


def _refuse(args: Any, rows: Sequence[Mapping[str, Any]], *, computes: bool) -> None:
    """Raises ConfigError: the loss needs what is not on record. computes: a model gives log-probs and entropies."""
    computed = [row for row in rows if row["trained"].any() and (computes or row["policy_logprobs"] is not None)]
    if args.rlhf_type == "gkd":
        if not computes:
            raise ConfigError(
                "--model: none given: gkd compares whole distributions, which are not on record; give the checkpoint "
                "before the step, such as --model checkpoint-11"
            )
        if not args.teaches_here:
            raise ConfigError(
                "--run: its teacher was elsewhere, and the likeliest tokens are not on record; replay a run with "
                "--teacher_model and without --teacher_device"
            )
        return
    in_reward = bool(args.kl_in_reward)
    entropic = not computes and (args.top_entropy_quantile < 1 or args.entropy_coef > 0 or args.use_adaptive_entropy)
    for name, column, needed, of in (
        ("beta", "ref_logprobs", args.beta > 0 and not in_reward, computed),
        ("kl_in_reward", "reward_kl", args.beta > 0 and in_reward, rows),
        ("teacher_model", "teacher_logprobs", args.has_teacher, computed),
        ("entropy_coef, top_entropy_quantile", "entropy", entropic, computed),
        (
            "ebft_ce_coef",
            "reference_ids",
            bool(getattr(args, "ebft_ce_coef", 0)),
            [row for row in rows if not row["index"]],
        ),
    ):
        if needed and any(row[column] is None for row in of):
            raise ConfigError(f"--set: {name}: the run has not computed {column}, so the record has none; leave it out")


def _sample(row: Mapping[str, Any], settings: GRPOSettings, *, of_policy: bool) -> TrainSample:
    """A row as it was trained on; `of_policy`: old log-probs that it lacks are those of the policy on record."""
    fields = (
        "prompt_ids", "token_ids", "sampler_logprobs", "trained", "advantage", "ref_logprobs", "teacher_logprobs",
        "token_advantages", "teacher_prompt_ids",
    )  # fmt: skip
    old = row["sampler_logprobs" if settings.old_logprobs == "sampler" else "old_logprobs"]
    if old is None and of_policy:
        old = row["policy_logprobs"]
    return TrainSample(row["group"], old_logprobs=old, **{name: row[name] for name in fields})


def _has_reference(row: Mapping[str, Any]) -> bool:
    return row["reference_ids"] is not None


def _reference(row: Mapping[str, Any]) -> TrainSample:
    """The reference of a group, which is learnt."""
    ids = row["reference_ids"]
    unknown = np.full(ids.size, np.nan, dtype=np.float32)
    return TrainSample(row["group"], row["prompt_ids"], ids, unknown, row["reference_trained"], 0.0)


def _loss(
    settings: GRPOSettings,
    batch: RolloutBatch,
    rows: Sequence[Mapping[str, Any]],
    report: StepMetrics,
) -> torch.Tensor:
    """The loss of the samples that the run computed, in one micro-batch; the others have no gradient."""
    logprobs: Any = SimpleNamespace(settings=settings, collectives=ALONE, device=torch.device("cpu"))
    step = GlobalBatchStep(logprobs, EntropyControl(logprobs, None), accelerator=ALONE, sequences=0, timer=ALONE)
    held = [number for number, row in enumerate(rows) if row["policy_logprobs"] is not None]
    if not held:
        return torch.zeros(())
    weights = step._weights(batch.samples)
    shared = _Shared(
        batch,
        dict(enumerate(weights)),
        filler=held[0],
        report=report,
        num_tokens=sum(sample.num_trained for sample in batch.samples),
        coefficient=settings.entropy.coefficient if settings.entropy.has_bonus else 0.0,
    )
    micro = collate([batch.samples[number] for number in held], [weights[number] for number in held], device="cpu")
    values = {name: [rows[number][name] for number in held] for name in ("policy_logprobs", "entropy")}
    policy_N = torch.from_numpy(np.concatenate(values["policy_logprobs"]))
    known = all(entropy is not None for entropy in values["entropy"])
    entropy_N = torch.from_numpy(np.concatenate(values["entropy"])) if known else None
    return step._loss(shared, held, micro, policy_N, entropy_N)


def differences(logged: Mapping[str, float], again: Mapping[str, float]) -> list[str]:
    """Metrics of both that are not equal within `EQUAL`."""
    both = [name for name in again if name in logged]
    return [name for name in both if not _equal(logged[name], again[name])]


def _equal(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=EQUAL, abs_tol=EQUAL) or (math.isnan(one) and math.isnan(other))


def _table(metrics: Mapping[str, Mapping[str, float]], settings: Sequence[str]) -> list[str]:
    """Metrics in rows, the log and the replays in columns."""
    titles = {"logged": "logged", "again": "again", "changed": " ".join(settings)}
    names = [name for name in metrics["again"] if name in metrics["logged"] or "changed" in metrics]
    width = max(map(len, names), default=0)
    lines = [f"  {'':<{width}}  " + "  ".join(f"{titles[column]:>14}" for column in metrics)]
    for name in names:
        cells = (f"{column[name]:>14.7g}" if name in column else f"{'-':>14}" for column in metrics.values())
        lines.append(f"  {name:<{width}}  " + "  ".join(cells))
    return lines


def _told(row: Mapping[str, Any]) -> dict[str, Any]:
    """What is said of a completion of `--group`."""
    trained, policy, old = row["trained"], row["policy_logprobs"], row["old_logprobs"]
    ratio = None
    if policy is not None and trained.any():
        ratio = float(np.exp(policy - (policy if old is None else old))[trained].mean())
    plain = {name: row[name] for name in ("index", "finish_reason", "excluded", "rewards", "advantage")}
    return {**plain, "tokens": len(row["token_ids"]), "trained": int(trained.sum()), "ratio": ratio}


def _group_lines(group: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    for told in group:
        rewards = ", ".join(f"{name} {value:g}" for name, value in told["rewards"].items() if value is not None)
        ratio = "not computed" if told["ratio"] is None else f"ratio {told['ratio']:.6f}"
        why = f", {told['excluded']}" if told["excluded"] else ""
        lines.append(
            f"  {told['index']:>3}: {told['tokens']} tokens ({told['finish_reason']}{why}); {rewards or 'no reward'}; "
            f"advantage {told['advantage']:+.4f}; {ratio}"
        )
    return lines


def _moved_lines(moved: Sequence[Mapping[str, Any]]) -> list[str]:
    """The tokens that have moved most, with those around them; quoted, as they may control a terminal."""
    return ["log-probs that moved most:"] * bool(moved) + [
        f"  {one['group_id']} {one['index']}, token {one['position']}: {one['before']:.4f} -> {one['after']:.4f}  "
        f"{one['left']!r} [{one['token']!r}] {one['right']!r}"
        for one in moved
    ]
