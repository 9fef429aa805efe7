"""What several engines are as one: common capabilities, one ack, calls on all of them at the same time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from swift.errors import SyncFailed
from swift.rollout.engines.base import Ack, Capabilities

T = TypeVar("T")


def common_capabilities(all_of_them: Sequence[Capabilities]) -> Capabilities:
    """What every engine can do."""
    first = all_of_them[0]
    support = max((one.logprob_support for one in all_of_them), key=["full", "truncated", "raw"].index)
    return replace(
        first,
        logprob_support=support,
        seeded=all(one.seeded for one in all_of_them),
        shares_weights=False,
        max_model_len=min(one.max_model_len for one in all_of_them),
        devices=tuple(device for one in all_of_them for device in one.devices),
        lora=all(one.lora for one in all_of_them),
        max_lora_rank=min(one.max_lora_rank for one in all_of_them),
        sleep_levels=tuple(
            level for level in first.sleep_levels if all(level in one.sleep_levels for one in all_of_them)
        ),
        kv_release=all(one.kv_release for one in all_of_them),
        in_flight_updates=all(one.in_flight_updates for one in all_of_them),
        transports=tuple(way for way in first.transports if all(way in one.transports for one in all_of_them)),
        guided=all(one.guided for one in all_of_them),
        sampling_fields=tuple(
            name for name in first.sampling_fields if all(name in one.sampling_fields for one in all_of_them)
        ),
        extra={**first.extra, "engines": str(len(all_of_them))},
    )


def joint_ack(acks: Sequence[Ack]) -> Ack:
    """One ack for several equal ones.

    Raises:
        SyncFailed: the engines confirm different things.
    """
    first = acks[0]
    for ack in acks[1:]:
        if (ack.version, ack.tensors, ack.nbytes, ack.digest) != (
            first.version, first.tensors, first.nbytes, first.digest
        ):  # fmt: skip
            raise SyncFailed(f"weights: version {first.version}: the engines confirm different things: {first}, {ack}")
    notes = list(dict.fromkeys(ack.note for ack in acks if ack.note))
    return replace(
        first,
        seconds=max(ack.seconds for ack in acks),
        rounded=any(ack.rounded for ack in acks),
        note="; ".join(notes),
    )


def in_parallel(work: Sequence[Callable[[], T]]) -> list[T | Exception]:
    """What each of them returns or raises, in order."""
    if len(work) == 1:
        return [outcome_of(work[0])]
    with ThreadPoolExecutor(len(work), thread_name_prefix="engine") as threads:
        return list(threads.map(outcome_of, work))


def outcome_of(work: Callable[[], T]) -> T | Exception:
    """What it returns or raises."""
    try:
        return work()
    except Exception as error:  # the caller raises it once the others are done
        return error


def first_failure(outcomes: Sequence[object]) -> None:
    """Raise the first exception among outcomes."""
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
