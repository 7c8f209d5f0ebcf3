"""Bits per byte past the trained window as a Markdown table."""

from __future__ import annotations

import math
from collections.abc import Sequence

from plots.length_rows import LengthCurve, LengthRow, by_window, carried


def table(rows: Sequence[LengthRow]) -> str:
    """A line for each arm, scaling and state of training: bpc of windows of each length, and with the state carried.

    Cells are means over seeds ± half their 95% t-interval; empty where nothing was measured.
    """
    lengths = sorted({row.window for row in rows if row.evaluation == "windows"})
    groups: dict[tuple[str, str, int], list[LengthRow]] = {}
    for row in rows:
        groups.setdefault((row.arm, row.scaling, row.finetune_steps), []).append(row)
    states = any(row.evaluation == "stream" for row in rows)
    head = ["arm", "scaling", "fine-tuned", "seeds", *(f"{length:,} bytes" for length in lengths)]
    lines = [[*head, "state carried"] if states else head]
    lines.append(["---"] * len(lines[0]))
    for (arm, scaling, steps), group in groups.items():
        curve = by_window(group)
        cells = {int(x): _cell(curve, index) for index, x in enumerate(curve.x)}
        end = carried(group)
        seeds = str(len({row.seed for row in group}))
        line = [arm, scaling, f"{steps:,} steps" if steps else "", seeds, *(cells.get(x, "") for x in lengths)]
        lines.append([*line, _cell(end, 0) if end.x.size else ""] if states else line)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(curve: LengthCurve, index: int) -> str:
    half = curve.half[index]
    return f"{curve.mean[index]:.3f}" + ("" if math.isnan(half) else f" ± {half:.3f}")
