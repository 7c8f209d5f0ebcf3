"""How far rotation lets a token look: RoFormer's bound, and what trained layers make of it.

``python -m plots.rotary_decay`` draws the bound; ``--ckpt …/last.ckpt`` adds the layers of a trained network.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import torch
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from torch import Tensor

from linrope.diagnostics import attention_weights
from linrope.rotary import Rotary, inv_freq, rotated_width
from plots.checkpoints import load_network, real_text, run_name
from plots.files import save_figure
from plots.runs import RunError
from plots.styles import DASHES, FAINT, HUES, INK, PAPER


def decay_bound(distances: Int[Tensor, " n"], width: int = 128, base: float = 10_000.0) -> Float[Tensor, " n"]:
    """Mean over j of |S_j|, S_j = Σ_{k<j} exp(i·m·θ_k), for relative distances m and the frequencies θ_k = base^(-2k/width).

    By summation by parts |q·R_m k| is at most max_j |h_{j+1} - h_j| Σ_j |S_j|, h the complex products of q's and k's pairs.
    It falls with distance, but not monotonically.

    Args:
        distances: m, in tokens.
        width: Number of features that turn, two for each frequency; even.
        base: Of the frequencies, dimensionless.

    Returns:
        The means, float64, (width/2 + 1)/2 at m = 0.

    Raises:
        ValueError: ``width`` is odd or below 2, or ``base`` is not positive.

    Source: Su et al. 2021 (arXiv 2104.09864), section 3.4.3, eq. 35 to 37.
    """
    if width < 2 or width % 2:
        raise ValueError(f"width must be even and at least 2, got {width}")
    if not base > 0:
        raise ValueError(f"base must be positive, got {base}")
    angles = distances.double()[:, None] * inv_freq(width, base)
    return torch.polar(torch.ones_like(angles), angles).cumsum(-1).abs().mean(-1)


def learned_decay(network: torch.nn.Module, tokens: Tensor) -> dict[str, Float[Tensor, " n"]]:
    """What rotation leaves of the kernel at each relative distance, for each layer that rotates in the numerator.

        Σ (R_t φ(q_t))·(R_s φ(k_s)) / D_t / Σ φ(q_t)·φ(k_s) / D_t

    over the pairs t - s = m of all sequences and heads, D_t what the layer divides by, float64: 1 at m = 0, and 1 everywhere
    if nothing turned.

    Args:
        network: Whose causal layers are looked at.
        tokens: Of one call of it, b n.

    Returns:
        By the layers' names, for m = 0, …, n - 1.

    Raises:
        ValueError: No layer rotates in the numerator and divides by the sum of its features.
    """
    ratios = {}
    n = tokens.shape[-1]
    for name, found in attention_weights(network, tokens, max_tokens=n).items():
        if found.unrotated is not None and found.normalizer is not None:
            rotated, unrotated = (
                torch.stack([x.diagonal(-m, -2, -1).sum() for m in range(n)]) for x in (found.weights, found.unrotated)
            )
            ratios[name] = rotated / unrotated
    if not ratios:
        raise ValueError(
            "no layer of this network rotates in the numerator, over a sum of its features: there is no decay to draw"
        )
    return ratios


def draw(
    stem: str | Path,
    *,
    width: int = 128,
    bases: Sequence[float] = (10_000.0,),
    distances: int = 256,
    learned: Mapping[str, Tensor] | None = None,
    source: str = "",
) -> tuple[Path, Path]:
    """Draw the bound for each base and, below it, the ``learned`` decay of each layer.

    Args:
        stem: Where to, without the suffix: ``<stem>.png`` and ``<stem>.svg`` are made.
        width: As in :func:`decay_bound`.
        bases: As in :func:`decay_bound`; a line each.
        distances: How many, from 0 on, in tokens.
        learned: What :func:`learned_decay` gave.
        source: Where that is from.

    Returns:
        The paths of the picture as PNG and as SVG.

    Raises:
        ValueError: ``distances`` below 1, or as :func:`decay_bound`.
    """
    if distances < 1:
        raise ValueError(f"distances must be at least 1, got {distances}")
    m = torch.arange(distances)
    curves = {base: decay_bound(m, width, base) for base in bases}
    with matplotlib.rc_context(PAPER):
        figure = Figure(figsize=(6.4, 5.6 if learned else 3.2), layout="constrained")
        axes: Any = figure.subplots(2 if learned else 1, 1, squeeze=False)[:, 0]
        for (base, bound), color in zip(curves.items(), HUES * len(curves), strict=False):
            axes[0].plot(m, bound, color=color, linewidth=1.2, label=f"base {base:,g}")
        axes[0].set_ylim(bottom=0)
        axes[0].set_title(f"RoFormer's bound for {width} features", fontsize=9, color=INK)
        axes[0].set_ylabel("mean $|S_j|$")
        for number, (name, ratio) in enumerate((learned or {}).items()):
            look = {"color": HUES[number % len(HUES)], "linestyle": DASHES[number // len(HUES) % len(DASHES)]}
            axes[1].plot(ratio, linewidth=1.2, label=name.removesuffix(".kernel").removesuffix(".attention"), **look)
        if learned:
            axes[1].axhline(0, color=FAINT, linewidth=0.7)
            axes[1].set_title(f"what rotation leaves of the kernel\n{source}", fontsize=9, color=INK)
            axes[1].set_ylabel("rotated / unrotated")
        for axis in axes:
            axis.grid(True)
            axis.legend(frameon=False, fontsize=8)
        axes[-1].set_xlabel("relative distance (tokens)")
        return save_figure(figure, Path(stem))


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw from the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m plots.rotary_decay", description=__doc__, allow_abbrev=False)
    parser.add_argument("--width", type=int, help="features that turn (default: those of --ckpt's layers, else 128)")
    parser.add_argument("--base", type=float, nargs="+", help="one or several (default: that of --ckpt's, else 10000)")
    parser.add_argument("--distances", type=int, default=256, help="how many, from 0 on, in tokens (default: 256)")
    parser.add_argument("--ckpt", type=Path, help="checkpoint of a run whose layers rotate in the numerator")
    parser.add_argument("--text", type=Path, help="file whose bytes it reads (default: Python's help texts)")
    parser.add_argument("--out", metavar="STEM", default="rotary_decay", help="path without suffix")
    options: Any = parser.parse_args(arguments)
    try:
        learned, source, width, bases = None, "", 128, [10_000.0]
        if options.ckpt is not None:
            tokens, network = real_text(options.text, 4, options.distances), load_network(options.ckpt)
            learned = learned_decay(network, tokens)
            layer: Any = network.get_submodule(next(iter(learned)))
            width = rotated_width(layer.feature_map.num_features, layer.rotary.fraction)
            if isinstance(layer.rotary, Rotary) and isinstance(layer.rotary.base, float) and not layer.rotary.scaling:
                bases = [layer.rotary.base]
            elif options.base is None:
                raise RunError(f"{layer.rotary} has no one base for the bound: give --base")
            text = options.text.name if options.text else "Python's help texts"
            source = f"{run_name(options.ckpt)}, 4 × {options.distances} bytes of {text}"
        pictures = draw(
            options.out,
            width=width if options.width is None else options.width,
            bases=options.base or bases,
            distances=options.distances,
            learned=learned,
            source=source,
        )
    except (RunError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(*pictures, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
