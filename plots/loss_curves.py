"""Loss curves of many arms: training and validation bpc against steps, bytes and seconds.

``python -m plots.loss_curves RUN_DIR … [--out STEM]`` redraws them from what runs left, also across
experiments.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib import colors
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from plots.curves import Curve, over_seeds
from plots.files import save_figure
from plots.labels import spread
from plots.runs import Run, RunError, by_arm, find_runs
from plots.styles import FAINT, INK, PAPER, Style, styles

_NOTE: dict[str, Any] = {"color": FAINT, "fontsize": 8, "parse_math": False}
_LABEL_GAP = 0.15  # inches between the middles of two labels
_PANEL_HEIGHT, _PANEL_WIDTH = 2.7, 2.4  # inches
_SHOWN = 0.7  # of training sets the height: the first steps, at 8 bpc, would squash all differences
_POINTS = 300  # per drawn training curve: as many as the panel has dots to show


def draw(
    runs: Sequence[Run], path_stem: str | Path, *, title: str | None = None, window: int | None = None
) -> tuple[Path, Path]:
    """Draw 2 × 3 panels, one line per arm with the 95% t-interval of its mean over seeds.

    Rows are training and validation bpc; columns are optimizer steps, training bytes, training seconds.
    The height shown is that of the last 70% of training, where arms differ; an arm far above the others
    leaves the panel at the top, and an arrow in its label says so.

    Args:
        runs: What to draw, at least one.
        path_stem: Where to, without the suffix: ``<stem>.png`` and ``<stem>.svg`` are made.
        title: A line over the panels.
        window: Steps in the trailing mean of the training curves; 5% of the longest run by default.

    Returns:
        The paths of the picture as PNG and as SVG.

    Raises:
        RunError: There is no run.
    """
    if not runs:
        raise RunError("no run to draw")
    arms = by_arm(runs)
    window = window or max(1, round(0.05 * max(run.metrics["step"][-1] for run in runs)))
    seconds = max(float(np.nanmax(run.metrics["seconds"], initial=0.0)) for run in runs)
    unit, unit_seconds = ("hours", 3600) if seconds > 7200 else ("minutes", 60) if seconds > 600 else ("s", 1)
    columns = (
        ("step", 1.0, "optimizer steps"),
        ("tokens", 1e6, "training bytes (MB)"),
        ("seconds", unit_seconds, f"training time ({unit})"),
    )
    smoothing = f"\nmean of the last {window} steps" if window > 1 else ""
    rows = (
        ("train/bpc", window, f"training bits per byte (bpc){smoothing}"),
        ("val/bpc", 1, "validation bits per byte (bpc)"),
    )
    with matplotlib.rc_context(PAPER):
        figure, axes = _canvas(list(arms), title or "Loss curves", describe(runs))
        looks = styles(list(arms))
        for across, (y, smooth, y_label) in zip(axes, rows, strict=True):
            across[0].set_ylabel(y_label)
            heights = None  # chosen once a row, from the curves against steps: the row shares its y axis
            for axis, (x, scale, x_label) in zip(across, columns, strict=True):
                axis.set_xlabel(x_label)
                curves = {arm: over_seeds(group, x, y, window=smooth) for arm, group in arms.items()}
                drawn = {arm: curve for arm, curve in curves.items() if curve.x.size}
                if absent := [arm for arm in curves if arm not in drawn]:
                    note = "nothing yet that all seeds share:\n" + "\n".join(absent)
                    axis.text(0.97, 0.97, note, transform=axis.transAxes, ha="right", va="top", **_NOTE)
                if drawn:
                    heights = heights or _view(list(drawn.values()))
                    axis.set_ylim(*heights)
                    _panel(axis, drawn, scale, looks, marked=y == "val/bpc")
        return save_figure(figure, Path(path_stem))


def describe(runs: Sequence[Run]) -> str:
    """Say on what, how long and how the runs were measured; values that differ stand side by side."""

    def either(values: Iterable[Any], show: Callable[[Any], str] = str) -> str:
        return " or ".join(show(value) for value in dict.fromkeys(values) if value is not None)

    data = either(run.info.get("data", {}).get("name") for run in runs)
    steps = either((int(run.metrics["step"][-1]) for run in runs), "{:,}".format)
    seeds = sorted({run.seed for run in runs})
    measured = [run.info.get("validation", {}) for run in runs]
    parts = [data, f"{steps} steps", f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"]
    if context := either((m.get("context") for m in measured), "{:,}".format):
        parts.append(f"validated with {context} bytes of context")
    if len(seeds) > 1:
        parts.append("line: mean over seeds, band: its 95% t-interval")
    return " · ".join(part for part in parts if part)


def _canvas(arms: list[str], title: str, subtitle: str) -> tuple[Figure, np.ndarray]:
    """Make the figure: panels of fixed size in inches, with as much room at their right as names need."""
    figure = Figure(dpi=200, facecolor="white")
    renderer = FigureCanvasAgg(figure).get_renderer()
    probes = [figure.text(0, 0, arm, parse_math=False) for arm in arms]
    room = max(probe.get_window_extent(renderer).width for probe in probes) / figure.dpi + 0.28
    for probe in probes:
        probe.remove()
    height = max(_PANEL_HEIGHT, _LABEL_GAP * len(arms) + 0.3)
    left, top, between, bottom = 0.75, 0.72, 0.62, 0.5
    total_width = left + 3 * (_PANEL_WIDTH + room) + 2 * 0.1
    total_height = top + 2 * height + between + bottom
    figure.set_size_inches(total_width, total_height)
    axes = figure.subplots(2, 3, sharey="row", sharex="col")
    figure.subplots_adjust(
        left=left / total_width,
        right=1 - room / total_width,
        top=1 - top / total_height,
        bottom=bottom / total_height,
        wspace=(room + 0.1) / _PANEL_WIDTH,
        hspace=between / height,
    )
    x, line = left / total_width, 1 / total_height
    figure.text(x, 1 - 0.24 * line, title, size=12, weight="bold", color=INK, va="center", parse_math=False)
    figure.text(x, 1 - 0.48 * line, subtitle, color=FAINT, va="center", parse_math=False)
    return figure, axes


def _panel(axis: Axes, curves: dict[str, Curve], scale: float, looks: dict[str, Style], *, marked: bool) -> None:
    """Draw one panel: bands, lines, and each arm's name at the end of its line."""
    axis.set_xlim(0, 1.015 * max(curve.x[-1] for curve in curves.values()) / scale)
    axis.grid(axis="y")
    axis.tick_params(labelbottom=True, length=2.5)
    for arm, curve in curves.items():
        look = looks[arm]
        every = np.unique(np.linspace(0, curve.x.size - 1, min(curve.x.size, _POINTS)).round().astype(int))
        x, mean = curve.x[every] / scale, curve.mean[every]
        if curve.half is not None:
            half = curve.half[every]
            axis.fill_between(
                x, mean - half, mean + half, color=look.color, alpha=0.13 if marked else 0.09, linewidth=0
            )
        axis.plot(
            x,
            mean,
            color=look.color,
            linestyle=look.dash,
            linewidth=1.4,
            marker=look.marker if marked else None,
            markersize=3.2,
            markevery=max(1, x.size // 12),
        )
    _name_ends(axis, curves, scale, looks)


def _view(curves: list[Curve]) -> tuple[float, float]:
    """Choose the heights shown, bpc: what the last part of training covers, less arms far above the rest."""
    late = [curve.mean[curve.x >= (1 - _SHOWN) * curve.x[-1]] for curve in curves]
    low = min(float(values.min()) for values in late)
    tops = sorted(float(values.max()) for values in late)
    typical = tops[(len(tops) - 1) // 2]
    high = max(top for top in tops if top <= low + 2.5 * (typical - low))
    pad = max(0.05 * (high - low), 0.01)
    return low - pad, high + pad


def _name_ends(axis: Axes, curves: dict[str, Curve], scale: float, looks: dict[str, Style]) -> None:
    """Write each arm's name beside the panel, level with its line's end or as near as names allow."""
    low, high = axis.get_ylim()
    figure = axis.figure
    inches = axis.get_position().height * figure.get_figure(root=True).get_size_inches()[1]
    ends = [min(float(curve.mean[-1]), high) for curve in curves.values()]
    heights = spread(ends, _LABEL_GAP * (high - low) / inches, low, high)
    right = axis.get_xlim()[1]
    for (arm, curve), end, height in zip(curves.items(), ends, heights, strict=True):
        r, g, b = colors.to_rgb(looks[arm].color)
        dark = (0.75 * r, 0.75 * g, 0.75 * b)  # thin letters need more contrast than lines do
        name = f"{arm} ↑" if curve.mean[-1] > high else arm
        leader: dict[str, Any] = {"color": dark, "linewidth": 0.5, "clip_on": False}
        last = curve.x[-1] / scale
        axis.plot([last, right], [end, end], linestyle=(0, (1, 2)), **leader)
        elbow = axis.get_yaxis_transform()  # x in widths of the panel, y in bpc
        axis.plot([1.0, 1.07], [end, height], transform=elbow, **leader)
        axis.text(1.085, height, name, transform=elbow, color=dark, va="center", parse_math=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Redraw from the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m plots.loss_curves", description=__doc__)
    parser.add_argument("directories", nargs="+", metavar="RUN_DIR", help="runs, arms or experiments")
    parser.add_argument("--out", metavar="STEM", help="path without suffix (default: loss_curves, in RUN_DIR)")
    options = parser.parse_args(arguments)
    home = Path(options.directories[0]) if len(options.directories) == 1 else Path()
    try:
        runs = find_runs(*options.directories)
        for run in runs:
            if not run.finished:
                print(f"note: {run.directory} is not finished; drawn as far as it came", file=sys.stderr)
        pictures = draw(runs, options.out or home / "loss_curves")
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(*pictures, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
