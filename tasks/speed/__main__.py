"""Measure speed and memory, side by side in one run.

``python -m tasks.speed [--quick] [--out STEM] [--device cpu|cuda] [--only SECTION …]``

Leaves a table here, and STEM.csv, STEM.json and STEM.png/.svg. Nothing else should use the cores meanwhile.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from plots.files import write_whole
from plots.speed import draw
from tasks.environment import environment
from tasks.speed import attention, growth, positions, startup, streaming, training
from tasks.speed.memory import keep_freed_memory
from tasks.speed.rows import Row

SECTIONS: dict[str, Callable[[torch.device, bool], Iterable[Row]]] = {
    "attention": attention.measure,
    "training": training.measure,
    "positions": positions.measure,
    "streaming": streaming.measure,
    "growth": growth.measure,
    "import": lambda device, quick: startup.measure(quick),
}


TITLES = {
    "attention": "attention: forward, and total with backward, float32; b batch, h heads, n tokens, m features, e values",
    "training": "training: one step with AdamW, float32; memory: what the step adds to the peak",
    "positions": "positions: one model with each scheme, forward, and total with backward, float32",
    "streaming": "streaming: one token more in one layer; memory: of the state",
    "growth": "growth: one layer, d 256, 4 heads, forward, and total with backward; memory: what they add to the peak",
    "import": "import",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure from the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tasks.speed", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer cases and rounds: about a minute")
    parser.add_argument("--out", metavar="STEM", default="speed", help="path of what is left, without suffix")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION")
    options: Any = parser.parse_args(arguments)
    try:
        device, stem = _device(options.device), _stem(options.out)
    except ValueError as error:  # now, not after ten minutes
        print(f"error: {error}", file=sys.stderr)
        return 2
    keep_freed_memory()
    console = Console(width=None if sys.stdout.isatty() else 130, highlight=False)
    where = environment(device)
    console.print(
        f"torch {where['torch']}, {where['threads']} thread(s), {where['device']}, linrope {where['code_version']}"
    )
    rows: list[Row] = []
    for section in options.only:
        with console.status(f"measuring: {section}"):
            measured = list(SECTIONS[section](device, options.quick))
        console.print(table(section, measured))
        rows += measured
    try:
        for path in write(rows, where, stem):
            print(path)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {name}: {str(error).splitlines()[0]}") from None
    if device.type == "meta":
        raise ValueError("--device meta: it computes nothing")
    return device


def _stem(out: str) -> Path:
    stem = Path(out)
    if stem.name in ("", ".."):
        raise ValueError(f"--out must end in a name, got {out!r}")
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {out}: {error}") from None
    if not os.access(stem.parent, os.W_OK):
        raise ValueError(f"--out {out}: {stem.parent} cannot be written to")
    return stem


def write(rows: Sequence[Row], where: dict[str, Any], stem: Path) -> list[Path]:
    """Write STEM.csv and STEM.json, and the picture where lengths were measured; returns the paths."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, [field.name for field in fields(Row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    content = json.dumps({"environment": where, "rows": [asdict(row) for row in rows]}, indent=2, ensure_ascii=False)
    paths = [
        write_whole(stem.with_name(stem.name + ".csv"), buffer.getvalue()),
        write_whole(stem.with_name(stem.name + ".json"), content + "\n"),
    ]
    if any(row.section == "growth" for row in rows):
        paths += draw(paths[1], stem)
    return paths


def table(section: str, rows: Sequence[Row]) -> Table:
    """Lay out a section; columns that it has no figures for are left out."""
    columns: dict[str, Callable[[Row], str]] = {
        "case": lambda row: row.case,
        "": lambda row: row.contender,
        "forward": lambda row: _seconds(row.forward),
        "total": lambda row: _seconds(row.seconds),
        "a token": lambda row: _seconds(row.seconds / row.n if section == "growth" and row.seconds and row.n else None),
        "tokens/s": lambda row: "" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}",
        "of limit": lambda row: "" if row.limit_share is None else f"{row.limit_share:.0%}",
        _ratio_title(section, rows): lambda row: "" if row.ratio is None else f"{row.ratio:,.3g}",
        "memory": lambda row: "" if row.memory is None else f"{row.memory / 1e6:,.2f} MB",
        "note": lambda row: row.note,
    }
    grid = Table(title=TITLES[section], title_justify="left", pad_edge=False, box=None)
    shown = {name: column for name, column in columns.items() if any(column(row) for row in rows)}
    for name in shown:
        grid.add_column(name, justify="left" if name in ("case", "", "note") else "right", overflow="fold")
    last = None
    for row in rows:
        cells = [Text(column(row)) for column in shown.values()]
        if "case" in shown and row.case == last:
            cells[0] = Text("")
        last = row.case
        grid.add_row(*cells)
    return grid


def _ratio_title(section: str, rows: Sequence[Row]) -> str:
    against = next((row.against for row in rows if row.against), "")
    return f"{'speed' if section == 'training' else 'time'} / {against}"


def _seconds(value: float | None) -> str:
    if value is None:
        return ""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= size or unit == "µs":
            return f"{value / size:.3g} {unit}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
