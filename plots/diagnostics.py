"""What each layer and head of a trained network does to real text: ``python -m plots.diagnostics --ckpt …/last.ckpt``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from linrope.diagnostics import QUANTILES, Diagnostics, diagnose
from plots.checkpoints import load_network, real_text, run_name
from plots.files import save_figure
from plots.runs import RunError
from plots.styles import FAINT, HUES, INK, PAPER

_TITLES = {
    "row_sums": "sum of a query's weights",
    "negative_share": "share of negative weights",
    "growth": "largest Σ|weights| of a query",
    "smallest_normalizer": "smallest normalizer,\nrelative to ‖φ(q)‖‖φ(k)‖",
    "entropy": "entropy of a query (nats)",
    "effective_rank": "effective rank",
    "distance": "mean distance (tokens)",
    "softmax_error": "relative error\nagainst softmax, same q and k",
}


def draw(found: Mapping[str, Diagnostics], stem: str | Path, *, title: str = "") -> tuple[Path, Path]:
    """Draw a panel for each measure: layers from left to right, a point for each head.

    Args:
        found: What :func:`linrope.diagnostics.diagnose` found, of layers with any numbers of heads.
        stem: Where to, without the suffix: ``<stem>.png`` and ``<stem>.svg`` are made.
        title: Above the panels.

    Returns:
        The paths of the picture as PNG and as SVG.

    Raises:
        ValueError: There is no layer.
    """
    if not found:
        raise ValueError("there is no layer to draw")
    with matplotlib.rc_context(PAPER):
        figure = Figure(figsize=(9.6, 5.0), layout="constrained")
        axes: Any = figure.subplots(2, 4, sharex=True)
        for axis, name in zip(axes.flat, _TITLES, strict=True):
            _panel(axis, name, list(found.values()))
        most = max(len(layer.growth) for layer in found.values())
        figure.suptitle(
            f"{title}\na point is a head, {most} a layer; of row sums the median, with 5 to 95% and all of the queries",
            fontsize=9,
            color=INK,
        )
        figure.supxlabel("layer", fontsize=9, color=INK)
        return save_figure(figure, Path(stem))


def _panel(axis: Axes, name: str, layers: list[Diagnostics]) -> None:
    for number, layer in enumerate(layers):
        values = getattr(layer, name)
        h = len(values)
        at = number + (torch.arange(h) - (h - 1) / 2) * 0.6 / h
        for head in range(h):
            color = HUES[head % len(HUES)]
            if name == "row_sums":
                low, five, _, median, _, most, high = values[head].tolist()
                axis.plot([at[head]] * 2, [low, high], color=color, linewidth=0.6)
                axis.plot([at[head]] * 2, [five, most], color=color, linewidth=2.2, solid_capstyle="butt")
                axis.plot(at[head], median, "o", color=color, markersize=3.5)
            else:
                axis.plot(at[head], values[head], "o", color=color, markersize=3.5)
    if name in ("row_sums", "growth"):
        axis.axhline(1, color=FAINT, linewidth=0.7, linestyle=(0, (3, 2)), zorder=0)
    if name == "smallest_normalizer" and all((getattr(layer, name) > 0).all() for layer in layers):
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.set_ylim(min(0.01, axis.get_ylim()[0]), 1)
    elif name not in ("row_sums", "growth"):
        axis.set_ylim(0, 1.08 * axis.get_ylim()[1])
    if all(getattr(layer, name).isnan().all() for layer in layers):
        axis.text(0.5, 0.5, "none here", transform=axis.transAxes, ha="center", color=FAINT, fontsize=8)
    axis.set_title(_TITLES[name], fontsize=8.5, color=INK)
    axis.set_xticks(range(len(layers)), [str(number + 1) for number in range(len(layers))])
    axis.set_xlim(-0.6, len(layers) - 0.4)
    axis.grid(True, axis="y")


def table(found: Mapping[str, Diagnostics]) -> str:
    """Lines of text: a layer each, means over heads; of row sums 5%, median and 95%."""
    columns: dict[str, Callable[[Diagnostics], str]] = {
        "layer": lambda _: "",
        "row sums": lambda x: " ".join(
            f"{x.row_sums[:, QUANTILES.index(q)].mean().item():.3g}" for q in (0.05, 0.5, 0.95)
        ),
        "negative": lambda x: f"{x.negative_share.mean().item():.1%}",
        "growth": lambda x: f"{x.growth.max().item():.3g}",
        "normalizer": lambda x: f"{x.smallest_normalizer.min().item():.2g}",
        "entropy": lambda x: f"{x.entropy.mean().item():.2f}",
        "rank": lambda x: f"{x.effective_rank.mean().item():.1f}",
        "distance": lambda x: f"{x.distance.mean().item():.1f}",
        "softmax error": lambda x: f"{x.softmax_error.mean().item():.2f}",
    }
    rows = [list(columns), *([name, *(f(x) for f in list(columns.values())[1:])] for name, x in found.items())]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw from the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m plots.diagnostics", description=__doc__, allow_abbrev=False)
    parser.add_argument("--ckpt", type=Path, required=True, help="checkpoint of a run")
    parser.add_argument("--text", type=Path, help="file whose bytes are read (default: Python's help texts)")
    parser.add_argument("--tokens", type=int, default=256, help="bytes of a sequence (default: 256)")
    parser.add_argument("--sequences", type=int, default=4, help="how many, spread over the text (default: 4)")
    parser.add_argument("--out", metavar="STEM", default="diagnostics", help="path without suffix")
    options: Any = parser.parse_args(arguments)
    try:
        tokens = real_text(options.text, options.sequences, options.tokens)
        found = diagnose(load_network(options.ckpt), tokens, max_tokens=options.tokens)
        source = options.text.name if options.text else "Python's help texts"
        pictures = draw(
            found,
            options.out,
            title=f"{run_name(options.ckpt)}, {options.sequences} × {options.tokens} bytes of {source}",
        )
    except (RunError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(found), *pictures, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
