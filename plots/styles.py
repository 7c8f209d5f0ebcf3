"""How figures look, and how arms are told apart: by hue on a screen, by dash and marker in print and to the colour-blind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

INK, FAINT = "#222222", "#666666"

PAPER: dict[Any, Any] = {  # matplotlib's settings
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "axes.linewidth": 0.7,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.6,
    "svg.fonttype": "none",  # text stays text: searchable, and small
    "svg.hashsalt": "linrope",  # the same runs give the same bytes
}

# Okabe and Ito's colour-blind-safe set without its yellow, which white paper swallows; black goes last.
HUES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.6)), (0, (1.3, 1.1)), (0, (6, 1.5, 1.3, 1.5)), (0, (9, 2)))
MARKERS = ("o", "s", "^", "D", "v")


class Style(NamedTuple):
    """How one arm looks in every panel; hue, dash and marker each survive without the others."""

    color: str
    dash: Any
    marker: str


def styles(arms: Sequence[str]) -> dict[str, Style]:
    """Give each arm its look: hue by what stands before the first comma, dash and marker by the rest.

    ``elu+1, none`` and ``elu+1, before`` share a hue; ``elu+1, none`` and ``FAVOR+, none`` share a dash.
    When all arms share what stands before the comma, hues would tell nothing and go by the rest too.
    """
    parts = {arm: tuple(piece.strip() for piece in (*arm.split(",", 1), "")[:2]) for arm in arms}
    families = list(dict.fromkeys(family for family, _ in parts.values()))
    variants = list(dict.fromkeys(variant for _, variant in parts.values()))
    looks: dict[str, Style] = {}
    for arm, (family, variant) in parts.items():
        dash = variants.index(variant)
        hue = families.index(family) if len(families) > 1 else dash
        # More names than looks: take the next one nobody has, changing the dash before the hue.
        for shift in range(len(HUES) * len(DASHES)):
            color = HUES[(hue + shift // len(DASHES)) % len(HUES)]
            number = (dash + shift) % len(DASHES)
            looks[arm] = Style(color, DASHES[number], MARKERS[number])
            if list(looks.values()).count(looks[arm]) == 1:
                break
    return looks
