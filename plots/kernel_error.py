"""How near each feature map's kernel φ(q)·φ(k) comes to softmax's exp(q·k/√d), and how fast random ones near it.

``python -m plots.kernel_error [--head_dim D] [--out STEM]`` draws every map of linrope: its kernel against
softmax's for random q and k, and for maps that estimate it, their relative error against the number of features.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

import linrope
from linrope import FavorHyperbolic, FavorPlus, FavorPlusPlus, FeatureMap, RandomFourier
from plots.files import save_figure
from plots.labels import spread
from plots.styles import FAINT, INK, PAPER, styles

ESTIMATORS = (FavorPlus, FavorHyperbolic, FavorPlusPlus, RandomFourier)
_PAIRS = 400  # dots in a panel
_ACROSS = 5  # panels in a row
_SEEDS = 40  # draws of the projection that an error is averaged over


class Kernels(NamedTuple):
    """Two kernels of the same pairs.

    Attributes:
        softmax: exp(q·k/√d).
        product: φ(q)·φ(k), times the factor that makes its median ratio to the first 1: attention divides
            by the sum of the kernel, so a factor does not count.
    """

    softmax: np.ndarray
    product: np.ndarray


def normal_pairs(count: int, head_dim: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Queries and keys ~ N(0, I), float64."""
    generator = torch.Generator().manual_seed(seed)
    query, key = torch.randn(2, count, head_dim, generator=generator, dtype=torch.float64)
    return query, key


def kernels(feature_map: FeatureMap, query: Tensor, key: Tensor) -> Kernels:
    """Both kernels of row i of ``query`` with row i of ``key``."""
    with torch.no_grad():
        # All at one position, for maps that look at positions.
        where = (torch.zeros(len(query), dtype=torch.long),) if feature_map.uses_positions else ()
        product = (feature_map.map_query(query, *where) * feature_map.map_key(key, *where)).sum(-1)
        softmax = ((query * key).sum(-1) / query.shape[-1] ** 0.5).exp()
    positive = product > 0
    if positive.any():
        product = product / (product / softmax)[positive].median()
    return Kernels(softmax.numpy(), product.numpy())


def relative_error(kind: Callable[..., FeatureMap], num_features: int, query: Tensor, key: Tensor, seeds: int) -> float:
    """Root mean square, over pairs and draws, of φ(q)·φ(k) / exp(q·k/√d) - 1."""
    softmax = ((query * key).sum(-1) / query.shape[-1] ** 0.5).exp()
    squares = []
    for seed in range(seeds):
        feature_map = kind(query.shape[-1], num_features=num_features, seed=seed).double()
        product = (feature_map.map_query(query) * feature_map.map_key(key)).sum(-1)
        squares.append((product / softmax - 1).square().mean())
    return torch.stack(squares).mean().sqrt().item()


def exported_maps() -> dict[str, type[FeatureMap]]:
    """Every map that linrope exports, by name."""
    things = {name: getattr(linrope, name) for name in linrope.__all__}
    return {
        name: thing
        for name, thing in things.items()
        if inspect.isclass(thing) and issubclass(thing, FeatureMap) and not inspect.isabstract(thing)
    }


def draw(path_stem: str | Path, *, head_dim: int = 32) -> tuple[Path, Path]:
    """Draw a panel for each map, and below them the errors of the estimators.

    Args:
        path_stem: Where to, without the suffix: ``<stem>.png`` and ``<stem>.svg`` are made.
        head_dim: d.

    Returns:
        The paths of the picture as PNG and as SVG.

    Raises:
        ValueError: ``head_dim`` is smaller than 2.
    """
    if head_dim < 2:
        raise ValueError(f"head_dim must be at least 2, got {head_dim}")
    torch.manual_seed(0)  # learned maps are drawn as they begin
    query, key = normal_pairs(_PAIRS, head_dim)
    maps = {name: kind(head_dim).double() for name, kind in exported_maps().items()}
    rows = -(-len(maps) // _ACROSS)
    with matplotlib.rc_context(PAPER):
        figure = Figure(figsize=(8.6, 1.75 * rows + 3.4), layout="constrained")
        halves: Any = figure.subfigures(2, 1, height_ratios=(1.75 * rows, 3.0))
        top, bottom = halves
        top.suptitle(
            f"Kernels against softmax's, d = {head_dim}, q and k normal, maps at their defaults and untrained\n"
            "line: equality up to a factor, what lies outside is drawn on the edge",
            fontsize=9,
            color=INK,
        )
        top.supxlabel("exp(q·k/√d)", fontsize=9, color=INK)
        top.supylabel("φ(q)·φ(k)", fontsize=9, color=INK)
        axes = top.subplots(rows, _ACROSS, sharex=True, sharey=True)
        for axis in axes.flat[len(maps) :]:
            axis.set_visible(False)
        for axis, (name, feature_map) in zip(axes.flat, maps.items(), strict=False):
            _scatter(axis, name, feature_map, kernels(feature_map, query, key))
        _errors(bottom.subplots(), head_dim)
        return save_figure(figure, Path(path_stem))


def _scatter(axis: Axes, name: str, feature_map: FeatureMap, pairs: Kernels) -> None:
    low, high = 10**-1.8, 10**1.8
    inside = pairs.product > 0
    axis.plot([low, high], [low, high], color=FAINT, linewidth=0.7)
    axis.scatter(pairs.softmax[inside], pairs.product[inside].clip(low, high), s=2.5, color="#0072B2", linewidths=0)
    axis.scatter(pairs.softmax[~inside], np.full((~inside).sum(), low), s=6, marker="|", color="#D55E00")
    axis.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    axis.set_title(f"{name}, m = {feature_map.num_features}", fontsize=8, color=INK)
    if not inside.all():
        share = f"{(~inside).mean():.0%} not above 0"
        paper = {"facecolor": "white", "linewidth": 0, "alpha": 0.85, "pad": 1}
        axis.text(0.97, 0.06, share, transform=axis.transAxes, ha="right", fontsize=7, color="#D55E00", bbox=paper)


def _errors(axis: Axes, head_dim: int) -> None:
    """Error against width, at half the usual length, where all of them say something."""
    query, key = (x / 2 for x in normal_pairs(_PAIRS, head_dim, seed=1))
    widths = [2**power for power in range(3, 11)]
    curves = {
        kind.__name__: [relative_error(kind, width, query, key, _SEEDS) for width in widths] for kind in ESTIMATORS
    }
    logs = np.log10(list(curves.values()))
    lowest, highest = logs.min(), logs.max()
    gap = 0.07 * (highest - lowest)
    heights = spread(logs[:, -1].tolist(), gap, lowest - gap, highest)
    looks = styles([f"map, {name}" for name in curves])
    for (name, errors), height in zip(curves.items(), heights, strict=True):
        look = looks[f"map, {name}"]
        axis.plot(widths, errors, color=look.color, linestyle=look.dash, marker=look.marker, markersize=3.5)
        axis.annotate(
            name,
            (widths[-1], errors[-1]),
            (widths[-1] * 1.12, 10**height),
            textcoords="data",
            va="center",
            color=look.color,
            arrowprops={"arrowstyle": "-", "color": look.color, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 2},
        )
    axis.set(xscale="log", yscale="log", xlabel="features m", ylabel="relative RMS error")
    axis.set_xticks(widths, [str(width) for width in widths])
    axis.minorticks_off()
    axis.grid(True)
    axis.set_xlim(right=widths[-1] * 2.2)
    axis.set_ylim(bottom=10 ** (lowest - 2 * gap))
    axis.set_title(
        f"Error of the estimators of softmax's kernel, orthogonal rows, q and k normal at half length, {_SEEDS} draws",
        fontsize=9,
        color=INK,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw from the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m plots.kernel_error", description=__doc__)
    parser.add_argument("--head_dim", type=int, default=32, help="d, the width of queries and keys")
    parser.add_argument("--out", metavar="STEM", default="kernel_error", help="path without suffix")
    options: Any = parser.parse_args(arguments)
    try:
        pictures = draw(options.out, head_dim=options.head_dim)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(*pictures, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
