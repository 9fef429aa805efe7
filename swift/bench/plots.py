"""One curve per trainer over one property of the work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

SIZE_INCHES = (6.4, 4.0)
DPI = 110


def draw(path: Path, *, label: str, curves: Mapping[str, Sequence[tuple[float, float]]], unit: str) -> Path:
    """Write a PNG with logarithmic axes.

    Args:
        path: of the file; its folder is made.
        label: of the property.
        curves: name -> points (value, measured).
        unit: of what was measured.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    axes = figure.add_subplot()
    for name, points in curves.items():
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(ScalarFormatter())
        axis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(label)
    axes.set_ylabel(unit)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(str(path))
    return path
