"""Bits per byte past the trained window: ``python -m plots.length FOLDER [--out STEM]``, FOLDER as tasks.enwik8 length left it.

Draws bpc against the length of windows, and by position in the longest; prints a table.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from plots.files import save_figure
from plots.length_rows import UNSCALED, LengthCurve, LengthRow, by_position, by_window, read_data, read_rows
from plots.length_table import table
from plots.runs import RunError
from plots.styles import DASHES, FAINT, INK, PAPER, Style, styles

_PANEL_WIDTH, _PANEL_HEIGHT = 2.0, 2.3  # inches
_MARGIN, _TOP, _BETWEEN, _BELOW, _LEGEND_ROW = 0.62, 0.95, 0.62, 0.5, 0.2
_HIGHEST = 2.0  # times the least bpc of a row of panels: what lies above says no more than that it lies there

_NOTHING = "nothing to draw: no bpc of windows is there and finite"
_AS_TRAINED, _BESIDE = "as trained", " (not scaled)"

Line = tuple[str, list[LengthRow]]
Curves = list[tuple[str, LengthCurve]]

_AXES: dict[str, Callable[[Sequence[LengthRow]], LengthCurve]] = {  # by what is drawn along x
    "bytes of a window": by_window,
    "position in the longest window, up to": by_position,
}


def panels(rows: Sequence[LengthRow]) -> dict[str, list[Line]]:
    """What is drawn together: of each arm that was scaled a line for each scaling, and its family's other arms beside them.

    Windows from nothing alone are drawn. A family is what stands before the first comma of an arm's name; one without a scaled arm has one panel, a line an arm.

    Returns:
        Lines by panel, each with its label and rows.
    """
    arms: dict[str, dict[str, list[LengthRow]]] = {}
    for row in (row for row in rows if row.evaluation == "windows"):
        arms.setdefault(row.arm, {}).setdefault(row.scaling, []).append(row)
    families: dict[str, list[str]] = {}
    for arm in arms:
        families.setdefault(_family(arm), []).append(arm)
    found: dict[str, list[Line]] = {}
    for family, members in families.items():
        scaled = [arm for arm in members if set(arms[arm]) != {UNSCALED}]
        beside = [(_variant(arm), arms[arm][UNSCALED]) for arm in members if arm not in scaled]
        for arm in scaled:
            named = [(_AS_TRAINED if name == UNSCALED else name, of) for name, of in arms[arm].items()]
            found[arm] = [*named, *((f"{label}{_BESIDE}", of) for label, of in beside)]
        if not scaled:
            found[family] = beside
    return found


def _family(arm: str) -> str:
    return arm.split(",", 1)[0].strip()


def _variant(arm: str) -> str:
    return (arm.split(",", 1)[1:] or [arm])[0].strip()


def figure(rows: Sequence[LengthRow], title: str, data: str = "") -> Figure:
    """Make the picture: above bpc against the length of windows, below by position in the longest; a column for each panel.

    Lines are means over seeds, bands their 95% t-intervals. What lies far above the rest, or is infinite, leaves a panel
    at its top, where an arrow says so; NaN is a gap. Of the two, the one without a finite mean is left out.

    Args:
        rows: Of one state of training.
        title: Above the panels.
        data: What was measured on.

    Raises:
        RunError: No mean is finite.
    """
    columns = panels(rows)
    views = _shown(columns)
    if not views:
        raise RunError(_NOTHING)
    labels = list(dict.fromkeys(label for lines in columns.values() for label, _ in lines))
    looks = _looks(labels)
    made, axes = _canvas(len(views), len(columns), len(labels), title, _described(rows, data))
    for across, (xlabel, drawn) in zip(axes, views.items(), strict=True):
        low, high = _view([curve for curves in drawn for _, curve in curves])
        for axis, name, lines, curves in zip(across, columns, columns.values(), drawn, strict=True):
            axis.set_ylim(low, high)
            _panel(axis, curves, looks, {row.trained for _, of in lines for row in of})
            axis.set_xlabel(xlabel, fontsize=8)
            axis.set_title(name, fontsize=9, color=INK, parse_math=False)
            if any((curve.mean > high).any() for _, curve in curves):
                axis.text(0.98, 1.0, "↑", transform=axis.transAxes, ha="right", va="bottom", color=FAINT)
    for across in axes:
        across[0].set_ylabel("bits per byte (bpc)")
    handles = [_handle(looks[label], label) for label in labels]
    made.legend(
        handles=handles, ncols=_legend_columns(len(columns)), loc="lower center", frameon=False, fontsize=8,
        handlelength=3.2,
    )  # fmt: skip
    return made


def _shown(columns: dict[str, list[Line]]) -> dict[str, list[Curves]]:
    """Curves of each panel, by what is drawn along x, where any mean is finite."""
    drawn = {
        xlabel: [[(label, curve_of(of)) for label, of in lines] for lines in columns.values()]
        for xlabel, curve_of in _AXES.items()
    }
    return {
        xlabel: across
        for xlabel, across in drawn.items()
        if any(np.isfinite(curve.mean).any() for curves in across for _, curve in curves)
    }


def draw(rows: Sequence[LengthRow], stem: Path, data: str = "") -> list[Path]:
    """Write ``<stem>.png`` and ``<stem>.svg``, and ``<stem>_finetuned`` of what was measured after fine-tuning.

    A state of training without a finite mean is left out.

    Args:
        rows: Of all states of training.
        stem: Where to, without the suffix.
        data: What was measured on.

    Raises:
        RunError: No mean is finite.
        OSError: A file cannot be written.
    """
    states = {
        steps: [row for row in rows if row.finetune_steps == steps] for steps in {row.finetune_steps for row in rows}
    }
    drawn = {steps: chosen for steps, chosen in sorted(states.items()) if _shown(panels(chosen))}
    if not drawn:
        raise RunError(_NOTHING)
    paths: list[Path] = []
    for steps, chosen in drawn.items():
        title = f"After {steps:,} steps of fine-tuning" if steps else "Past the trained window"
        with matplotlib.rc_context(PAPER):
            paths += save_figure(
                figure(chosen, title, data), stem.with_name(stem.name + ("_finetuned" if steps else ""))
            )
    return paths


def _looks(labels: Sequence[str]) -> dict[str, Style]:
    """Ink for a network as it was trained, grey for what stands beside it, hues for scalings, or for arms."""
    beside = [label for label in labels if label.endswith(_BESIDE)]
    named = [label for label in labels if label not in (_AS_TRAINED, *beside)]
    looks = dict(zip(named, styles([f"line, {label}" for label in named]).values(), strict=True))
    looks |= {label: Style(FAINT, DASHES[(number + 2) % len(DASHES)], "x") for number, label in enumerate(beside)}
    return looks | {_AS_TRAINED: Style(INK, "-", "o")}


def _described(rows: Sequence[LengthRow], data: str) -> str:
    seeds = sorted({row.seed for row in rows})
    parts = [*([data] if data else []), f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"]
    if len(seeds) > 1:
        parts.append("line: mean over seeds, band: its 95% t-interval")
    return " · ".join(parts)


def _canvas(views: int, columns: int, labels: int, title: str, subtitle: str) -> tuple[Figure, np.ndarray]:
    """Panels of fixed size in inches, with room for the legend below."""
    legend = 0.15 + _LEGEND_ROW * -(-labels // _legend_columns(columns))
    width = _MARGIN + columns * _PANEL_WIDTH + (columns - 1) * 0.2 + 0.15
    width_all = max(width, 4.6)
    height = _TOP + views * _PANEL_HEIGHT + (views - 1) * _BETWEEN + _BELOW + legend
    made = Figure(figsize=(width_all, height), dpi=200, facecolor="white")
    axes = made.subplots(views, columns, sharey="row", squeeze=False)
    made.subplots_adjust(
        left=_MARGIN / width_all,
        right=(width - 0.15) / width_all,
        top=1 - _TOP / height,
        bottom=(_BELOW + legend) / height,
        wspace=0.2 / _PANEL_WIDTH,
        hspace=(_BETWEEN + 0.1) / _PANEL_HEIGHT,
    )
    x = 0.12 / width_all
    made.text(x, 1 - 0.22 / height, title, size=12, weight="bold", color=INK, va="center", parse_math=False)
    made.text(x, 1 - 0.45 / height, subtitle, color=FAINT, va="center", parse_math=False)
    return made, axes


def _legend_columns(columns: int) -> int:
    return max(2, min(7, 2 * columns - 2))


def _panel(axis: Axes, curves: Sequence[tuple[str, LengthCurve]], looks: dict[str, Style], trained: set[int]) -> None:
    axis.set_xscale("log", base=2)
    for label, curve in curves:
        look = looks[label]
        axis.fill_between(
            curve.x, curve.mean - curve.half, curve.mean + curve.half, color=look.color, alpha=0.13, linewidth=0
        )
        axis.plot(
            curve.x, curve.mean, color=look.color, linestyle=look.dash, marker=look.marker, linewidth=1.3, markersize=3,
            label=label,
        )  # fmt: skip
    ticks = sorted({x for _, curve in curves for x in curve.x})
    axis.set_xticks(ticks, [f"{x:,.0f}" for x in ticks], fontsize=7, rotation=45 if len(ticks) > 5 else 0)
    axis.minorticks_off()
    axis.tick_params(length=2.5)
    axis.grid(axis="y")
    for length in trained:
        axis.axvline(length, color=FAINT, linewidth=0.7, linestyle=(0, (3, 2)), zorder=0)
        axis.text(
            length, 0.985, " trained", transform=axis.get_xaxis_transform(), color=FAINT, fontsize=7, va="top"
        )  # fmt: skip


def _view(curves: Sequence[LengthCurve]) -> tuple[float, float]:
    """Heights shown, bpc: all finite means, of which there is one, up to ``_HIGHEST`` times the least."""
    means = np.concatenate([curve.mean for curve in curves])
    means = means[np.isfinite(means)]
    low = float(means.min())
    high = min(float(means.max()), _HIGHEST * low)
    pad = max(0.05 * (high - low), 0.02)
    return low - pad, high + 3 * pad


def _handle(look: Style, label: str) -> Line2D:
    return Line2D([], [], color=look.color, linestyle=look.dash, marker=look.marker, markersize=3, label=label)


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw from the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m plots.length", description=__doc__, allow_abbrev=False)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="where tasks.enwik8 length left length.csv")
    parser.add_argument("--out", metavar="STEM", help="path without suffix (default: length, in FOLDER)")
    options: Any = parser.parse_args(arguments)
    try:
        if not (rows := read_rows(options.folder / "length.csv")):
            raise RunError(f"{options.folder / 'length.csv'}: nothing was measured; length.json says why")
        stem = Path(options.out) if options.out else options.folder / "length"
        pictures = draw(rows, stem, read_data(options.folder / "length.json"))
    except (RunError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(rows), *pictures, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
