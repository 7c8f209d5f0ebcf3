"""Time and memory of one layer against the length of the text, from what ``python -m tasks.speed`` left.

``python -m plots.speed speed.json [--out STEM]``
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

from plots.files import save_figure
from plots.styles import FAINT, INK, PAPER, styles

_LIMIT = "limit"


def draw(path: str | Path, path_stem: str | Path) -> tuple[Path, Path]:
    """Write ``<stem>.png`` and ``<stem>.svg``.

    Args:
        path: speed.json, with a "growth" section.
        path_stem: Where to, without suffix.

    Raises:
        ValueError: There is nothing to draw in the file.
        OSError: It cannot be read, or the picture not written.
    """
    matplotlib.use("agg")
    from matplotlib.figure import Figure

    try:
        content = json.loads(Path(path).read_text())
        where = {name: str(content["environment"][name]) for name in ("device", "threads", "torch")}
        rows = [
            {"contender": str(row["contender"]), "n": int(row["n"])}
            | {key: float(row[key]) for key in ("seconds", "memory") if row.get(key) is not None}
            for row in content["rows"]
            if row["section"] == "growth"
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not what tasks.speed writes ({type(error).__name__}: {error})") from None
    if not rows:
        raise ValueError(f"{path}: no lengths were measured there")
    names = list(dict.fromkeys(row["contender"] for row in rows if row["contender"] != _LIMIT))
    looks = styles([f"layer, {name}" for name in names])
    with matplotlib.rc_context(PAPER):
        figure = Figure(figsize=(8.4, 3.8), layout="constrained")
        for axis, key, unit, title in zip(
            figure.subplots(1, 2), ("seconds", "memory"), (1e-3, 1e6), ("time, ms", "peak memory, MB"), strict=True
        ):
            for name in (_LIMIT, *names):
                points = [(r["n"], r[key] / unit) for r in rows if r["contender"] == name and r.get(key)]
                if not points:
                    continue
                if name == _LIMIT:
                    label = "its matrix products, at this machine's rate"
                    axis.plot(*zip(*points, strict=True), color=FAINT, linestyle=(0, (2, 2)), linewidth=1, label=label)
                    continue
                look = looks[f"layer, {name}"]
                axis.plot(*zip(*points, strict=True), color=look.color, linestyle=look.dash, marker=look.marker,
                          markersize=3.5, label=name)  # fmt: skip
            axis.set(xscale="log", yscale="log", xlabel="tokens", title=title)
            axis.set_xscale("log", base=2)
            lengths = sorted({r["n"] for r in rows})[::2]
            axis.set_xticks(lengths, [f"{n:,}" for n in lengths])
            axis.minorticks_off()
            axis.grid(True)
            axis.title.set(fontsize=9, color=INK)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, frameon=False, fontsize=8, loc="outside lower center", ncols=len(labels))
        figure.suptitle(
            f"One layer, d 256, 4 heads, elu + 1 or softmax, forward and backward: {where['device']}, {where['threads']} thread(s), "
            f"torch {where['torch']}",
            fontsize=9,
            color=INK,
        )
        return save_figure(figure, Path(path_stem))


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw from the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m plots.speed", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", help="speed.json")
    parser.add_argument("--out", metavar="STEM", default="speed", help="path without suffix")
    options: Any = parser.parse_args(arguments)
    try:
        pictures = draw(options.file, options.out)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(*pictures, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
