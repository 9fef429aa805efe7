"""What parses today and comes to life with a later part of swift: one table, shortened as parts land.

A feature is off while each of its settings has one of the values listed for it; otherwise one line names the
part it comes with and the values that turn it off. Parsing never fails because of this table: `check` is
called before a run and by the dry run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swift.flags import Flag


@dataclass(frozen=True, slots=True)
class Feature:
    """`what` comes with `part`. off: setting -> values without the feature, the advised one first."""

    part: str
    what: str
    off: Mapping[str, Sequence[Any]]


FEATURES: tuple[Feature, ...] = (
    Feature("generative judges", "reward models of another type come", {"reward_model_type": ([],)}),
)


def check(args: Any, given: Collection[str] | None = None) -> list[str]:
    """One line per feature that these settings ask for and that this version does not have.

    Args:
        args: the settings of a mode, resolved.
        given: the settings that the user wrote (`Resolved.given`); others are consequences of these and go
            unmentioned. None counts every setting.
    """
    lines = []
    for feature in FEATURES:
        wanted = {
            name: off
            for name, off in feature.off.items()
            if hasattr(args, name) and getattr(args, name) not in off and (given is None or name in given)
        }
        if wanted:
            lines.append(_line(feature, wanted, args))
    return lines


def waits_for(flag: Flag) -> str | None:
    """The part of swift without which a setting does nothing; None when some use of it works already."""
    names = (flag.name, (flag.details.needs or "").partition("=")[0])
    return next((item.part for item in FEATURES for name in names if len(item.off.get(name, ())) == 1), None)


def _line(feature: Feature, wanted: Mapping[str, Sequence[Any]], args: Any) -> str:
    first = next(iter(wanted))
    use = " ".join(f"--{name} {_text(off[0])}" for name, off in wanted.items() if off[0] not in (None, []))
    drop = " ".join(f"--{name}" for name, off in wanted.items() if off[0] in (None, []))
    fix = " and ".join([f"use {use}"] * bool(use) + [f"drop {drop}"] * bool(drop))
    value = _text(getattr(args, first))
    return f"--{first}: {value}: {feature.what} with the {feature.part} part of swift; {fix}"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
