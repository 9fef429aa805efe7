"""`swift plan`: the command line of a run, and flags of its own; nothing but configuration files is read.

swift plan [rlhf|sft|pt] <flags of the run> [--device NAME] [--num_devices N] [--prompt_tokens N] ...
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from swift.errors import ConfigError, first_line, join_problems, printable
from swift.flags import spellings_of

if TYPE_CHECKING:
    from swift.arguments import Resolved
    from swift.models.policy import Head
    from swift.planning.devices import Device
    from swift.planning.report import Plan

OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adamw_cpu")
RUNS = ("rlhf", "sft", "pt")
NOT_PLANNED = {
    "gkd": "a teacher beside the model",
    "seq_cls": "a head of labels",
}
"""Mode -> what of it is not traced."""

AS_FSDP = {
    "zero2": ("shard_grad_op", False),
    "zero3": ("full_shard", False),
    "zero2_offload": ("shard_grad_op", True),
    "zero3_offload": ("full_shard", True),
}
"""Preset of ZeRO -> FSDP's way, which cuts the same tensors into as many shards, and whether they are on the host."""

WITHOUT = {
    "use_lmdeploy": "only vLLM and transformers are planned so far",
    "use_liger_kernel": "its kernels are not known here; plan without them, which needs more",
    "torch_compile": "compiled code is not planned yet; plan without it, which needs more",
    "activation_offloading": "is not planned yet; plan without it, which needs more",
    "precompute_ref_log_probs": "is not planned yet; plan without it, which needs more",
}
"""Settings that are not planned, and what to do."""


def run(words: Sequence[str]) -> int | None:
    """The command, from the words after `plan`."""
    from swift.arguments import parse
    from swift.arguments.derived import Machine
    from swift.planning.choices import compared, fitted, require_rollouts, table
    from swift.planning.devices import find_device
    from swift.planning.measured import measured_in

    own, command, others = split(words)
    asked: Any = parse("plan", own, os.environ).args
    device = find_device(asked.device)
    first = parse(command, others, os.environ, machine=Machine(True, 1))
    os.environ.update(first.environment)  # of a config file
    if asked.compare:
        require_rollouts(first.args)
    processes = asked.num_devices or Machine.detect(os.environ).processes

    def planned(words: Sequence[str], processes: int) -> tuple[Plan, Resolved]:
        machine = Machine(has_accelerator=True, cores=os.cpu_count() or 1, processes=processes)
        resolved = parse(command, words, os.environ, machine=machine)
        with redirect_stdout(sys.stderr):  # DeepSpeed's import writes a line there
            return plan_of(resolved, device, processes, asked), resolved

    plan, resolved = planned(others, processes)
    if asked.measured:
        plan = replace(plan, measured=measured_in(asked.measured, resolved.args))
    settings: Any = type(resolved.args)
    spellings = spellings_of(settings)
    for note in resolved.notes:
        print(printable(f"swift: {note}"), file=sys.stderr)
    lines, found = plan.lines(), plan.as_json()
    if asked.fit and not plan.fits:
        changed, last = fitted(plan, resolved.args, others, spellings, lambda words: planned(words, processes))
        ranks = f"NPROC_PER_NODE={processes} " if processes > 1 else ""
        typed = f"{ranks}swift {command} {shlex.join(changed)}"
        lines += ["", f"fits with: {typed}" if last.fits else f"does not fit with this either: {typed}", *last.lines()]
        found |= {"fit": {"command": typed, **last.as_json()}}
    if asked.compare:
        rows = compared(resolved.args, others, processes, spellings, planned)
        lines += ["", *table(rows)]
        found |= {"compared": rows}
    print(json.dumps(found, indent=2) if asked.json else "\n".join(lines))
    return 0


def split(words: Sequence[str]) -> tuple[list[str], str, list[str]]:
    """The plan's own words, the mode of the run, and the words of the run."""
    from swift.arguments.modes import PlanArguments
    from swift.flags import flags_of

    names = set(flags_of(PlanArguments))
    words = list(words)
    command = words.pop(0) if words and words[0] in RUNS else "rlhf"
    own: list[str] = []
    others: list[str] = []
    place = others
    for word in words:
        if word.startswith("--"):
            place = own if word[2:].partition("=")[0].replace("-", "_") in names else others
        place.append(word)
    return own, command, others


def plan_of(resolved: Resolved, device: Device, processes: int, asked: Any) -> Plan:
    """The plan of a run whose settings are these.

    Raises:
        ConfigError: what is not planned yet, or cannot be.
    """
    from swift.planning.choices import advice
    from swift.planning.grpo import plan_grpo
    from swift.planning.images import draw_images
    from swift.planning.trl import plan_trl
    from swift.trainers.trl.method import is_method, method_of

    args: Any = resolved.args
    told = []
    if args.deepspeed in AS_FSDP:
        way, offloads = AS_FSDP[args.deepspeed]
        flags = f"--fsdp {way}{' --fsdp_offload_params true' if offloads else ''}"
        told = [f"--deepspeed {args.deepspeed}: planned as {flags}, with what DeepSpeed holds besides"]
        args = replace(args, fsdp=way, fsdp_offload_params=offloads)
    join_problems(_not_planned(resolved.mode, args))
    method = method_of(resolved.mode) if is_method(resolved.mode) else None
    policy = _policy(args, method.reward_head if method is not None else None)
    images = draw_images(args, asked, policy.config)
    try:
        if method is None:
            plan = plan_grpo(args, policy, device, processes, asked, images)
        else:
            plan = plan_trl(resolved.mode, method, args, policy, device, processes, asked, images)
    except (RuntimeError, ValueError) as error:  # what reads numbers of tensors that have none
        raise ConfigError(f"--model: {args.model}: its step cannot be traced yet ({first_line(error)})") from error
    return replace(plan, advice=[*told, *advice(plan, args)])


def _policy(args: Any, head: Head | None) -> Any:
    """The model to train, on "meta"."""
    from swift.models.policy import check_policy

    policy = check_policy(args, head, weights=False)
    if policy is None:
        raise ConfigError(f"--model: {args.model}: code of its repository makes it, which needs real tensors")
    if hasattr(policy.config, "quantization_config") and not args.quant_method:
        raise ConfigError(f"--model: {args.model}: its files are quantised, which is not planned yet")
    return policy


def _not_planned(mode: str, args: Any) -> list[str]:
    """What `swift plan` does not know of, one line each."""
    if mode in NOT_PLANNED:
        return [f"plan: {mode}: has {NOT_PLANNED[mode]}, which is not planned yet"]
    given: dict[str, Any] = {name: getattr(args, name, None) for name in WITHOUT}
    problems = {
        f"--optim: {args.optim}: its memory is not known here; plan with one of {', '.join(OPTIMIZERS)}": (
            args.optim not in OPTIMIZERS
        ),
        f"--deepspeed: {args.deepspeed}: not planned; zero2 and zero3 are, as --fsdp, also with _offload": (
            args.deepspeed not in (None, *AS_FSDP)
        ),
        f"--quant_method: {args.quant_method}: is not planned yet with --fsdp; drop one": args.quant_method
        and args.fsdp,
        "--use_dora: true: is not planned yet on quantised weights": args.quant_method and args.use_dora,
        "--quant_bits: 8: only 4 is planned so far; plan with 4, which needs less, or without": (
            args.quant_method and args.quant_bits == 8
        ),
        f"--tuner_type: {args.tuner_type}: only lora and full are planned so far": (
            args.tuner_type not in ("lora", "full")
        ),
        "--gradient_checkpointing_kwargs: given: are not planned yet; leave them out": (
            args.gradient_checkpointing_kwargs not in ({}, {"use_reentrant": False})
        ),
        f"--torch_dtype: float16: not planned yet for {mode}; plan with bfloat16, which takes as much": (
            args.torch_dtype == "float16" and mode not in ("rlhf", "ebft")
        ),
        "--adapters: given: a run that starts from an adapter is not planned yet; plan with a new one": args.adapters,
        f"--ref_model: given: another model as reference is not planned yet for {mode}": (
            mode not in ("rlhf", "ebft")
            and bool(getattr(args, "beta", 0))
            and getattr(args, "ref_model", None) not in (None, args.model)
        ),
        "--reward_model: given: reward models on the trainer's device are not planned yet": (
            getattr(args, "reward_model", None)
        ),
        **{f"--{name}: true: {why}": given[name] for name, why in WITHOUT.items()},
    }
    return [problem for problem, holds in problems.items() if holds]
