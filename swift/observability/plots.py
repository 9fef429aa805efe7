"""images/*.png: the curves of a run, drawn from its log rows whenever a checkpoint is saved and at the end.

A picture is drawn only when at least one of its keys was logged. Drawing uses its own figure objects and the Agg
canvas: no window system, no global matplotlib state, safe beside a user's own plots.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift.errors import printable
from swift.observability.files import writing
from swift.observability.jsonl import series
from swift.observability.metrics import OUTSIDE_STEP
from swift.observability.summary import PHASES, steps_covered

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = Sequence[Mapping[str, Any]]
Panel = tuple[str, dict[str, str], dict[str, str]]
"""Title, log key -> label, and evaluation's log key -> label."""

_WIDTH_IN, _PANEL_HEIGHT_IN, _DPI = 8.0, 3.0, 110
_LEFT_IN, _RIGHT_IN, _TOP_IN, _BOTTOM_IN, _BETWEEN_IN = 0.95, 0.2, 0.45, 0.55, 0.55
"""Margins: room for tick labels of nine characters, a title and one axis label. A layout engine finds the same by
drawing everything three times, which takes as long as the last step of a short run."""

_SMOOTHING_SHARE = 0.1
_TICKS, _NARROWEST = 10, 200
_STYLES = ("-", "--", ":", "-.")
"""Of the curves of a panel, in turn; each is thinner than those below it, so that equal curves are all visible."""
_CUT_OFF, _CLIPPED = "share cut off", "clipped ratios"


@dataclass(frozen=True, slots=True)
class Marks:
    """What is marked beside the curves: the run's name, the steps of its alerts and of its checkpoints.

    regions: names of causes, each with the first and the last step of its evidence.
    """

    name: str = ""
    alerts: Sequence[int] = ()
    checkpoints: Sequence[int] = ()
    regions: Sequence[tuple[str, int, int]] = ()


def smooth(values: Sequence[float]) -> list[float]:
    """The mean of each value and those before it, over a tenth of the curve; short curves stay as they are."""
    window = math.ceil(len(values) * _SMOOTHING_SHARE) if len(values) >= 10 else 1
    parts = (values[max(0, end - window) : end] for end in range(1, len(values) + 1))
    return [math.fsum(part) / len(part) for part in parts]


def write_plots(rows: Rows, folder: Path, marks: Marks = Marks()) -> None:
    """Draw every picture that rows of logging.jsonl have values for into `folder`, made when there is one."""
    train, evaluation = _split(rows)
    means = (key for row in train for key in row if key.startswith("rewards/") and key.endswith("/mean"))
    functions = {key: key.removeprefix("rewards/").removesuffix("/mean") for key in dict.fromkeys(means)}
    panels: dict[str, list[Panel]] = {
        "reward": [
            ("reward", {"reward": "mean"}, {"eval_reward": "evaluation"}),
            ("per function" if len(functions) > 1 else "".join(functions.values()), functions, {}),
            ("spread inside groups", {"reward_std": "std", "frac_reward_zero_std": "share of groups without any"}, {}),
        ],
        "preference": [
            (
                "share of pairs in the right order",
                {"rewards/accuracies": "pairs", "accuracy": "pairs"},
                {"eval_rewards/accuracies": "evaluation", "eval_accuracy": "evaluation"},
            ),
            (
                "margin",
                {"rewards/margins": "margin", "margin": "margin"},
                {"eval_rewards/margins": "evaluation", "eval_margin": "evaluation"},
            ),
            ("implicit rewards", {f"rewards/{k}": k for k in ("chosen", "rejected")}, {}),
        ],
        "length": [
            ("completion tokens", {f"completions/{k}_length": k for k in ("max", "mean", "min")}, {}),
            (_CUT_OFF, {"completions/clipped_ratio": "cut off"}, {}),
        ],
        "policy": [
            ("KL to the reference", {"kl": "kl"}, {}),
            ("KL to the teacher", {"teacher_kl": "teacher_kl"}, {}),
            (_CLIPPED, {f"clip_ratio/{k}_mean": k for k in ("low", "high", "region")}, {}),
            ("entropy", {"entropy": "entropy"}, {}),
        ],
        "optimization": [
            ("loss", {"loss": "loss"}, {"eval_loss": "evaluation"}),
            ("gradient norm", {"grad_norm": "grad_norm"}, {}),
            ("learning rate", {"learning_rate": "learning_rate"}, {}),
        ],
    }
    for name, parts in panels.items():
        _draw_panels(folder / f"{name}.png", parts, train, evaluation, marks)
    _draw_time(folder / "time.png", train, marks)


def write_diagnosis(rows: Rows, path: Path, marks: Marks) -> None:
    """Draw the curves that a diagnosis speaks of into one picture, with the regions of `marks`."""
    parts: list[Panel] = [
        ("reward", {"reward": "mean"}, {"eval_reward": "evaluation"}),
        ("share of groups with equal rewards", {"frac_reward_zero_std": "share"}, {}),
        ("completion tokens", {"completions/mean_length": "mean"}, {}),
        (_CUT_OFF, {"completions/clipped_ratio": "cut off"}, {}),
        ("KL to the reference", {"kl": "kl"}, {}),
        ("entropy", {"entropy": "entropy"}, {}),
        ("sampler and trainer: difference of log-probs", {"mismatch/logp_abs_diff_mean": "mean"}, {}),
        ("loss", {"loss": "loss"}, {"eval_loss": "evaluation"}),
        ("gradient norm", {"grad_norm": "grad_norm"}, {}),
        ("seconds per step", {"step_time": "step_time"}, {}),
    ]
    _draw_panels(path, parts, *_split(rows), marks)


def _split(rows: Rows) -> tuple[Rows, Rows]:
    """The rows of training and those of evaluation."""
    train = [row for row in rows if not any(key.startswith("eval_") for key in row)]
    return train, [row for row in rows if any(key.startswith("eval_") for key in row)]


def _panels(count: int, height_in: float) -> list[Axes]:
    """The panels of a new figure, from top to bottom; they share the axis of steps."""
    from matplotlib.figure import Figure

    height = height_in * count
    inside = (height - _TOP_IN - _BOTTOM_IN - (count - 1) * _BETWEEN_IN) / count
    figure = Figure(figsize=(_WIDTH_IN, height), dpi=_DPI)
    figure.subplots_adjust(
        left=_LEFT_IN / _WIDTH_IN,
        right=1 - _RIGHT_IN / _WIDTH_IN,
        bottom=_BOTTOM_IN / height,
        top=1 - _TOP_IN / height,
        hspace=_BETWEEN_IN / inside,
    )
    return list(figure.subplots(count, 1, sharex=True, squeeze=False)[:, 0])


def _draw_panels(path: Path, parts: Sequence[Panel], train: Rows, evaluation: Rows, marks: Marks) -> None:
    """One picture of panels on top of each other; those without a value are left out.

    A curve of ten values or more is drawn faint, and its smoothed values strong.
    """
    filled = []
    for title, keys, eval_keys in parts:
        curves = [(_text(label), *series(train, key), False) for key, label in keys.items()]
        curves += [(_text(label), *series(evaluation, key), True) for key, label in eval_keys.items()]
        curves = [curve for curve in curves if curve[1]]
        if curves:
            filled.append((_text(title), curves))
    if not filled:
        return
    steps = sorted({step for _, curves in filled for _, curve_steps, _, _ in curves for step in curve_steps})
    panels = _panels(len(filled), _PANEL_HEIGHT_IN)
    for axes, (title, curves) in zip(panels, filled, strict=True):
        for number, (label, curve_steps, values, is_evaluation) in enumerate(curves):
            width = max(1.6, 1.0 + 0.8 * (min(len(curves), 4) - number))
            style: dict[str, Any] = {
                "color": f"C{number}",
                "linestyle": _STYLES[number % len(_STYLES)],
                "linewidth": width,
            }
            if is_evaluation or len(values) < 10:  # dots: a single point would be invisible
                axes.plot(curve_steps, values, label=label, marker="o", markersize=2.5 * width, **style)
            else:
                axes.plot(curve_steps, values, color=f"C{number}", alpha=0.3, linewidth=0.9)
                axes.plot(curve_steps, smooth(values), label=label, **style)
        _finish(axes, title, steps)
        if title in (_CUT_OFF, _CLIPPED):
            most = max(value for _, _, values, _ in curves for value in values) if title == _CLIPPED else 1.0
            axes.set_ylim(-0.04 * (most or 1.0), 1.04 * (most or 1.0))
        if len(curves) > 1:
            axes.legend(loc="best", fontsize="small", framealpha=0.7)
    _save(panels, marks, path)


def _text(text: str) -> str:
    """A name of the user's, escaped: matplotlib reads `$` as a formula and hides labels with a leading `_`."""
    return printable(text).replace("$", r"\$").lstrip("_")


def _draw_time(path: Path, rows: Rows, marks: Marks) -> None:
    """Seconds of a step, stacked by phase; what no phase accounts for is "other".

    A bar is as wide as the steps whose mean it is. Evaluation and saving follow a step that is logged, so they are in
    the row after it: their bars stand on that step.
    """
    timed = [row for row in rows if isinstance(row.get("step_time"), int | float)]
    names = [name for name in PHASES if any(f"time/{name}" in row for row in timed)]
    if not timed or not names:
        return
    layers = {name: [float(row.get(f"time/{name}") or 0.0) for row in timed] for name in names}
    known = [math.fsum(seconds) for seconds in zip(*layers.values(), strict=True)]
    layers["other"] = [max(0.0, float(row["step_time"]) - used) for row, used in zip(timed, known, strict=True)]
    (axes,) = _panels(1, _PANEL_HEIGHT_IN * 1.3)
    steps = [int(row["step"]) for row in timed]
    edges = [steps[0] - steps_covered(timed)[0] + 0.5, *(step + 0.5 for step in steps)]
    heights = [0.0] * len(steps)
    for name, values in layers.items():
        below, heights = heights, [height + value for height, value in zip(heights, values, strict=True)]
        axes.stairs(heights, edges, baseline=below, fill=True, alpha=0.85, label=name)
    width = max(1.0, (edges[-1] - edges[0]) / _NARROWEST)
    for colour, name in enumerate(OUTSIDE_STEP, start=len(layers)):
        after = {i: float(row[f"time/{name}"]) for i, row in enumerate(timed[1:]) if row.get(f"time/{name}")}
        if after:
            places = [steps[i] for i in after]
            bottoms = [heights[i] for i in after]
            axes.bar(places, list(after.values()), width, bottoms, color=f"C{colour}", alpha=0.85, label=name)
            heights = [height + after.get(i, 0.0) for i, height in enumerate(heights)]
    _finish(axes, "seconds per step, by phase", steps)
    axes.set_ylim(0.0, max(max(heights) * 1.2, 1e-9))  # room for the legend above the bars
    axes.legend(loc="upper left", fontsize="small", framealpha=0.7, ncols=len(layers) + len(OUTSIDE_STEP))
    _save([axes], marks, path)


def _finish(axes: Axes, title: str, steps: Sequence[int]) -> None:
    """Title, frame and ticks; these are round numbers of steps, or the logged steps nearest to them.

    steps: of all panels, which share an axis.
    """
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, loc="left", fontsize="medium")
    axes.grid(True, alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    first, last = min(steps), max(steps)
    round_steps = MaxNLocator(_TICKS, integer=True).tick_values(first, last)
    axes.set_xticks(sorted({min(steps, key=lambda step: abs(step - tick)) for tick in round_steps}))
    if first == last:
        low, high = axes.get_xlim()
        axes.set_xlim(min(low, first - 1), max(high, last + 1))


def _save(panels: Sequence[Axes], marks: Marks, path: Path) -> None:
    """Writes a picture: the name of the run above; in each panel regions, checkpoints below and alerts above."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    panels[0].set_title(_text(marks.name), loc="right", fontsize="small", color="gray")
    panels[-1].set_xlabel("optimizer step")
    kinds = (("checkpoints", marks.checkpoints, "^", 0.0, "gray"), ("alerts", marks.alerts, "v", 1.0, "red"))
    for axes in panels:
        low, high = axes.get_xlim()
        for number, (cause, first, last) in enumerate(marks.regions):
            colour = f"C{number + 1}"
            axes.axvspan(first - 0.5, last + 0.5, color=colour, alpha=0.12, linewidth=0, gid="region")
            if axes is panels[0]:
                place = (first, 0.97 - 0.09 * number, cause)
                axes.text(*place, transform=axes.get_xaxis_transform(), color=colour, fontsize="small", va="top")
            axes.set_xlim(low, high)
        for name, steps, shape, height, colour in kinds:
            inside = sorted({step for step in steps if low <= step <= high})
            style: dict[str, Any] = {
                "marker": shape,
                "color": colour,
                "linestyle": "",
                "markersize": 5,
                "clip_on": False,
            }
            if inside:
                axes.plot(inside, [height] * len(inside), transform=axes.get_xaxis_transform(), gid=name, **style)
    if shown := [f"{'▲' if shape == '^' else '▼'} {name}" for name, steps, shape, _, _ in kinds if steps]:
        panels[-1].figure.text(0.01, 0.01, "  ".join(shown), fontsize="small", color="gray")
    figure: Any = panels[-1].figure
    canvas = FigureCanvasAgg(figure)
    staging = path.with_name(f".{path.name}.tmp")
    with writing(path):
        path.parent.mkdir(exist_ok=True)  # not a run folder that is gone
        try:
            canvas.print_png(staging)  # `savefig` would draw twice
            staging.replace(path)
        finally:
            staging.unlink(missing_ok=True)
