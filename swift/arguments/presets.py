"""The values of papers, `--preset <name>`: one table, each value with its place in the paper.

A preset is a layer between the defaults and all values that the user gives: default < preset < file < environment <
command line. It sets the objective (loss, clip, advantage, KL, which groups are trained), not the scale of a run:
batch sizes, lengths, learning rate, reward functions and completions per prompt stay as given. Settings that a paper
does not give keep swift's default; `beside` names parts of the method that are not settings of the objective. Settings
that are derived from others anyway (a ratio per token) are left out, so that they also follow an overridden loss. A
plugin may register presets of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swift.flags import flags_of, typed
from swift.plugin.registry import losses, presets
from swift.rl.losses import CLIP_SETTINGS


@dataclass(frozen=True, slots=True)
class PaperValue:
    """`value` of a setting, and `where` it stands: a section or equation of the preset's paper, or another source."""

    value: Any
    where: str

    @property
    def shown(self) -> str:
        """The value as it would be typed."""
        return typed(self.value)


@dataclass(frozen=True, slots=True)
class Preset:
    """A method by the name and the identifier of its paper; `values`: setting -> value."""

    title: str
    paper: str
    values: Mapping[str, PaperValue]
    beside: str = ""

    def source(self, name: str) -> str:
        """Where the value of the setting `name` comes from, in full."""
        return f"{self.title}, {self.paper}, {self.values[name].where}"


presets["grpo"] = Preset(
    "GRPO",
    "arXiv:2402.03300",
    {
        "loss_type": PaperValue("grpo", "equation 3"),
        "advantage_estimator": PaperValue("grpo", "section 4.1.2"),
        "scale_rewards": PaperValue("group", "section 4.1.2"),
        "beta": PaperValue(0.04, "section 4.2"),
        "num_iterations": PaperValue(1, "section 4.2"),
    },
    "epsilon is not stated; 0.2 is that of PPO (arXiv:1707.06347). 64 completions per prompt.",
)
presets["dapo"] = Preset(
    "DAPO",
    "arXiv:2503.14476",
    {
        "loss_type": PaperValue("dapo", "section 3.3"),
        "epsilon": PaperValue(0.2, "section 4.1"),
        "epsilon_high": PaperValue(0.28, "section 4.1"),
        "advantage_estimator": PaperValue("grpo", "equation 9"),
        "scale_rewards": PaperValue("group", "equation 9"),
        "beta": PaperValue(0.0, "section 2.3"),
        "dynamic_sample": PaperValue(True, "section 3.2"),
        "overlong_filter": PaperValue(True, "section 3.4"),
    },
    "The final run has the reward soft_overlong too (section 3.4): "
    "`--soft_cache_length` 4096 of 20480 tokens. "
    "16 completions per prompt.",
)
presets["dr_grpo"] = Preset(
    "Dr. GRPO",
    "arXiv:2503.20783",
    {
        "loss_type": PaperValue("dr_grpo", "section 3.2"),
        "epsilon": PaperValue(0.2, "table 6"),
        "advantage_estimator": PaperValue("grpo", "section 3.2"),
        "scale_rewards": PaperValue("none", "section 3.2"),
        "beta": PaperValue(0.0, "section 3 and table 6"),
    },
    "8 completions per prompt.",
)
presets["gspo"] = Preset(
    "GSPO",
    "arXiv:2507.18071",
    {
        "loss_type": PaperValue("gspo", "equation 5"),
        "importance_sampling_level": PaperValue("sequence", "equation 7"),
        "epsilon": PaperValue(3e-4, "section 5.1"),
        "epsilon_high": PaperValue(4e-4, "section 5.1"),
        "advantage_estimator": PaperValue("grpo", "equation 6"),
        "scale_rewards": PaperValue("group", "equation 6"),
        "beta": PaperValue(0.0, "section 2"),
    },
    "Acts with several updates per rollout batch, in the paper four: "
    "`--steps_per_generation` = 4 x `--gradient_accumulation_steps`.",
)
presets["cispo"] = Preset(
    "CISPO",
    "arXiv:2506.13585",
    {
        "loss_type": PaperValue("cispo", "equation 4"),
        "epsilon_high": PaperValue(5.0, "arXiv:2510.13786; the paper gives no value"),
        "advantage_estimator": PaperValue("grpo", "section 3.1"),
        "scale_rewards": PaperValue("group", "section 3.1"),
        "beta": PaperValue(0.0, "section 3.1"),
        "dynamic_sample": PaperValue(True, "section 3.1"),
    },
    "The paper has the reward soft_overlong too.",
)
presets["sapo"] = Preset(
    "SAPO",
    "arXiv:2511.20347",
    {
        "loss_type": PaperValue("sapo", "equation 5"),
        "tau_pos": PaperValue(1.0, "section 5"),
        "tau_neg": PaperValue(1.05, "section 5"),
        "advantage_estimator": PaperValue("grpo", "section 3"),
        "scale_rewards": PaperValue("group", "section 3"),
        "beta": PaperValue(0.0, "section 3"),
    },
)
presets["luspo"] = Preset(
    "LUSPO",
    "arXiv:2602.05261",
    {
        "loss_type": PaperValue("luspo", "section 4"),
        "importance_sampling_level": PaperValue("sequence", "section 4"),
        "epsilon": PaperValue(2e-3, "section 5.1"),
        "epsilon_high": PaperValue(2.5e-3, "section 5.1"),
        "advantage_estimator": PaperValue("grpo", "section 4"),
        "scale_rewards": PaperValue("group", "section 4"),
        "beta": PaperValue(0.0, "section 4"),
    },
    "As gspo.",
)
presets["vespo"] = Preset(
    "VESPO",
    "arXiv:2602.10693",
    {
        "loss_type": PaperValue("vespo", "section 3.4"),
        "advantage_estimator": PaperValue("grpo", "section 3.4"),
        "scale_rewards": PaperValue("group", "section 3.4"),
        "beta": PaperValue(0.0, "section 3.4"),
    },
)
presets["rloo"] = Preset(
    "RLOO",
    "arXiv:2402.14740",
    {
        "advantage_estimator": PaperValue("rloo", "section 2"),
        "scale_rewards": PaperValue("none", "section 2"),
        "loss_type": PaperValue("dr_grpo", "section 2: a completion is one action, its tokens are summed"),
        "beta": PaperValue(0.03, "appendix C, TL;DR (0.1 for Anthropic-HH)"),
        "kl_in_reward": PaperValue(True, "section 2"),
        "num_iterations": PaperValue(1, "section 2: REINFORCE without ratio or clip"),
    },
    "With one update per rollout batch no clip acts, as in the paper. 2 or 4 completions per prompt.",
)
presets["reinforce_plus_plus"] = Preset(
    "REINFORCE++",
    "arXiv:2501.03262",
    {
        "advantage_estimator": PaperValue("reinforce_plus_plus", "appendix A of v2, the variant with baseline"),
        "scale_rewards": PaperValue("batch", "equation 10 of v2"),
        "loss_type": PaperValue("grpo", "equation 1 of v2"),
        "epsilon": PaperValue(0.2, "section 4.2.3 of v2"),
        "beta": PaperValue(0.001, "section 4.2.3 of v2"),
        "kl_in_reward": PaperValue(True, "equation 8 of v2"),
    },
)
presets["gdpo"] = Preset(
    "GDPO",
    "arXiv:2601.05242",
    {
        "scale_rewards": PaperValue("gdpo", "section 3"),
        "multi_objective_aggregation": PaperValue("normalize_then_sum", "section 3"),
        "advantage_estimator": PaperValue("grpo", "section 3"),
    },
    "Goes with any loss.",
)

_ONE_CHOICE = frozenset({"scale_rewards", "multi_objective_aggregation"})
"""Two names of one choice: if one of them is given, it decides the other."""


def values_under(name: str, given: Mapping[str, Any]) -> dict[str, PaperValue]:
    """What the preset `name` decides in a run whose user wrote the settings `given` (name -> value).

    Ranges and levels belong to their kind of loss: 5 is a cap on the ratio for one, and means 6 for another. So a run
    with a loss of another objective, or another level of the ratio, takes none of them.
    """
    decided = set(given) | (_ONE_CHOICE if _ONE_CHOICE & set(given) else set())
    own = presets[name].values.get("loss_type")
    if own is not None:
        loss, chosen = losses[own.value], losses.get(given.get("loss_type") or own.value)
        if chosen is None or (chosen.objective, chosen.default_level) != (loss.objective, loss.default_level):
            decided |= {*CLIP_SETTINGS, *(flags_of(loss.parameters) if loss.parameters else ())}
    return {setting: item for setting, item in presets[name].values.items() if setting not in decided}


def plan_lines(args: Any, provenance: Mapping[str, Mapping[str, str | None]]) -> list[str]:
    """The preset of resolved settings: a line of values with their places, those overridden marked, and what is beside.

    provenance: as in args.json.
    """
    preset = presets[args.preset]
    parts = []
    for name, item in preset.values.items():
        now, part = getattr(args, name), f"{name} {item.shown} ({item.where}"
        if now != item.value:
            by = provenance[name]["given_as"] or provenance[name]["rule"] or "the default, as the loss is another"
            part += f"; OVERRIDDEN: {typed(now)} by {by}"
        parts.append(part + ")")
    line = f"preset {args.preset} ({preset.title}, {preset.paper}): {', '.join(parts)}"
    return [line, *([f"beside preset {args.preset}: {preset.beside}"] if preset.beside else [])]


def table() -> str:
    """The presets as a table in Markdown, for docs/algorithms.md."""
    lines = ["|preset|paper|values, and where the paper has them|beside|", "|---|---|---|---|"]
    for name, preset in presets.items():
        number = preset.paper.removeprefix("arXiv:")
        places: dict[str, list[str]] = {}
        for key, item in preset.values.items():
            places.setdefault(item.where, []).append(f"`{key} {item.shown}`")
        values = "; ".join(f"{', '.join(shown)} ({where})" for where, shown in places.items())
        paper = f"{preset.title}, [{number}](https://arxiv.org/abs/{number})"
        lines.append(f"|{name}|{paper}|{values}|{preset.beside}|")
    return "\n".join(lines) + "\n"
