"""The table of a comparison, as the terminal and the report show it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tasks.compare.summary import Row

HEADINGS = (
    ("arm", ""),
    ("seeds", ""),
    ("validation bpc", "± 95%"),
    ("difference", "paired ± 95%"),
    ("p", "paired t"),
    ("p", "Holm"),
    ("p", "permutation"),
    ("steps to", "baseline bpc, ± 95%"),
    ("seconds to", "baseline bpc"),
    ("bytes/s", "training"),
    ("peak", "MB"),
    ("parameters", ""),
)
"""Column titles, each with the line that goes below it."""


def cells(row: Row) -> tuple[str, ...]:
    """Spell a row out for the reader, one cell per heading; the terminal and the report share it."""

    def number(value: float | None, missing: str = "n/a") -> str:
        return missing if value is None else f"{value:,.0f}"

    if row.is_baseline:
        difference = "baseline"
    elif row.difference is not None and row.difference_half is not None:
        spread = f" ± {row.difference_half:.3f}" if row.p is not None else ", every seed"
        difference = f"{row.difference:+.3f}{spread}\nto {row.baseline}"
    else:
        difference = "n/a: needs ≥ 2 seeds" if len(row.paired_seeds) < 2 else "n/a: diverged"
    if row.bpc is None:
        bpc = f"diverged (seed {', '.join(map(str, row.diverged))})"
    else:
        bpc = f"{row.bpc:.3f}" + (f" ± {row.bpc_half:.3f}" if row.bpc_half is not None else "")
    if row.steps_to_baseline is not None:
        steps = number(row.steps_to_baseline)
        if row.steps_half is not None and not row.is_baseline:
            steps += f" ± {row.steps_half:,.0f}"
    else:
        bound = "" if row.steps_at_least is None else f"> {row.steps_at_least:,.0f}, "
        steps = f"{bound}not reached\n({row.reached} of {len(row.seeds)})"

    def p(value: float | None) -> str:
        if row.is_baseline:
            return ""
        if value is None:
            return "n/a" if row.difference is None else "n/a: no spread"
        return "< 0.001" if value < 0.001 else f"{value:.3f}"

    return (
        row.arm,
        str(len(row.seeds)),
        bpc,
        difference,
        p(row.p),
        p(row.p_holm),
        p(row.p_permutation),
        steps,
        "–"
        if row.seconds_to_baseline is None
        else f"{row.seconds_to_baseline:,.{0 if row.seconds_to_baseline >= 100 else 1}f}",
        number(row.tokens_per_second),
        number(None if row.peak_memory_bytes is None else row.peak_memory_bytes / 1e6),
        number(row.parameters),
    )


def table(rows: Sequence[Row], columns: Sequence[int] = range(len(HEADINGS))) -> Table:
    """Lay the rows out for a terminal, all ``HEADINGS`` or the chosen ones."""
    grid = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for number in columns:
        heading, below = HEADINGS[number]
        justify = "right" if number else "left"
        grid.add_column(f"{heading}\n{below}".strip(), justify=justify, overflow="fold")
    for row in rows:
        # Text, so that an arm called "[red]" is shown and not obeyed.
        texts = [Text(cell) for cell in cells(row)]
        grid.add_row(*(texts[number] for number in columns), style="bold" if row.is_baseline else "")
    return grid


def print_table(rows: Sequence[Row], console: Console) -> None:
    """Print the table: whole where the terminal is wide enough, else quality first and cost below."""
    whole = table(rows)
    if console.measure(whole, options=console.options.update(width=1000)).maximum <= console.width:
        console.print(whole)
    else:
        console.print(table(rows, range(7)), table(rows, (0, *range(7, len(HEADINGS)))))
