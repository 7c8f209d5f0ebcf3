"""The numbers of a comparison: one row per arm, each difference paired by seed. No training, no drawing."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text
from scipy import stats

from plots.curves import half_interval
from plots.files import write_whole
from plots.runs import Run, by_arm


@dataclass(frozen=True)
class Row:
    """What the finished runs of one arm say; None where they say nothing.

    Attributes:
        arm: Its name.
        is_baseline: Whether the others are compared with this one, unless told otherwise.
        baseline: The arm that this one is compared with, "the baseline" below.
        seeds: Seeds of its finished runs.
        diverged: Those of them whose final bpc is not finite; then no mean is given.
        bpc: Final validation bits per byte, mean over seeds.
        bpc_half: Half the 95% t-interval of that mean; None with one seed.
        paired_seeds: Seeds that both this arm and the baseline finished.
        difference: bpc minus the baseline's, mean over paired seeds; None with fewer than two.
        difference_half: Half its 95% t-interval.
        p: Two-sided paired t-test; None also when every seed differs by the same amount, because the
            test divides by that spread.
        reached: Seeds whose validation came down to the baseline's final mean bpc.
        steps_to_baseline: Optimizer steps it took, mean over seeds; None unless every seed got there.
        seconds_to_baseline: Training seconds it took, likewise. The baseline has its own totals here.
        tokens_per_second: Training bytes per second, mean over seeds.
        peak_memory_bytes: The largest over seeds.
        parameters: Trainable numbers in the model.
        context, stride, bytes_scored: How the validation was measured, in bytes; None where seeds differ.
    """

    arm: str
    is_baseline: bool
    baseline: str
    seeds: tuple[int, ...]
    diverged: tuple[int, ...]
    bpc: float | None
    bpc_half: float | None
    paired_seeds: tuple[int, ...]
    difference: float | None
    difference_half: float | None
    p: float | None
    reached: int
    steps_to_baseline: float | None
    seconds_to_baseline: float | None
    tokens_per_second: float | None
    peak_memory_bytes: int | None
    parameters: int | None
    context: int | None
    stride: int | None
    bytes_scored: int | None


def unfinished(runs: Iterable[Run]) -> list[Run]:
    """Runs that ``summarize`` leaves out because they did not come to their planned end."""
    return [run for run in runs if not run.finished]


def summarize(runs: Sequence[Run], baseline: str, against: Mapping[str, str] | None = None) -> list[Row]:
    """Compare arms by their finished runs.

    Args:
        runs: Any runs; those not finished are left out (``unfinished`` names them).
        baseline: The arm that the others are compared with; without a finished run of it, rows carry
            no differences.
        against: For some arms, another arm that they are compared with instead.

    Returns:
        One row per arm that has a finished run, in the order in which arms first appear.
    """
    arms = by_arm(run for run in runs if run.finished)
    others = {arm: (against or {}).get(arm, baseline) for arm in arms}
    return [_row(arm, group, baseline, others[arm], arms.get(others[arm], [])) for arm, group in arms.items()]


def _row(arm: str, runs: list[Run], main_baseline: str, baseline: str, against: list[Run]) -> Row:
    ends = [_validations(run)[2][-1:] for run in against if math.isfinite(run.final_bpc)]
    target = float(np.mean(ends)) if against and len(ends) == len(against) else None
    final = {run.seed: run.final_bpc for run in runs}
    diverged = tuple(seed for seed, bpc in final.items() if not math.isfinite(bpc))
    values = np.array(list(final.values()))
    known = not diverged
    base = {run.seed: run.final_bpc for run in against if arm != baseline}
    paired = tuple(sorted(final.keys() & base.keys()))
    mean, half, p = paired_difference([final[s] for s in paired], [base[s] for s in paired])
    if arm == baseline:
        ends = [_validations(run) for run in runs]
        arrivals = [(float(step[-1]), float(seconds[-1])) for step, seconds, _ in ends if step.size]
    else:
        found = [first_at_or_below(run, target) for run in runs] if target is not None else []
        arrivals = [arrival for arrival in found if arrival is not None]
    everywhere = len(arrivals) == len(runs)
    measured = [run.info.get("validation", {}) for run in runs]
    return Row(
        arm=arm,
        is_baseline=arm == main_baseline,
        baseline=baseline,
        seeds=tuple(final),
        diverged=diverged,
        bpc=float(values.mean()) if known else None,
        bpc_half=float(half_interval(values)) if known and len(values) > 1 else None,
        paired_seeds=paired,
        difference=mean,
        difference_half=half,
        p=p,
        reached=len(arrivals),
        steps_to_baseline=_mean([step for step, _ in arrivals]) if everywhere else None,
        seconds_to_baseline=_mean([seconds for _, seconds in arrivals]) if everywhere else None,
        tokens_per_second=_mean([run.info.get("tokens_per_second") for run in runs]),
        peak_memory_bytes=max((run.info.get("peak_memory_bytes") or 0 for run in runs), default=0) or None,
        parameters=_shared(run.info.get("parameters") for run in runs),
        context=_shared(one.get("context") for one in measured),
        stride=_shared(one.get("stride") for one in measured),
        bytes_scored=_shared(one.get("bytes_scored") for one in measured),
    )


def paired_difference(
    values: Sequence[float], base: Sequence[float]
) -> tuple[float | None, float | None, float | None]:
    """Mean of values − base, half its 95% t-interval, and the two-sided paired t-test's p.

    Pairs share a seed, hence batches and initial draws: what a seed does to both arms cancels.

    Args:
        values: Final bpc by seed.
        base: The baseline's, same seeds in the same order.

    Returns:
        Three Nones with fewer than two pairs or a value that is not finite. When all pairs differ
        by the same amount the interval is 0 wide and p is None.
    """
    if len(values) < 2 or not np.all(np.isfinite([values, base])):
        return None, None, None
    differences = np.subtract(values, base)
    # Equal up to rounding: a t statistic would be rounding noise divided by rounding noise.
    if np.ptp(differences) <= 1e-12 * max(np.max(np.abs(values)), np.max(np.abs(base))):
        return float(differences.mean()), 0.0, None
    p: Any = stats.ttest_rel(values, base).pvalue
    return float(differences.mean()), float(half_interval(differences)), float(p)


def first_at_or_below(run: Run, bpc: float) -> tuple[float, float] | None:
    """Step and training second at which a run's validation first came down to ``bpc``.

    Between two validations the curve is taken as straight; at the first there is nothing to
    interpolate from, so its own step stands.

    Returns:
        (steps, seconds), or None when no validation was that low.
    """
    step, seconds, values = _validations(run)
    below = np.flatnonzero(values <= bpc)
    if below.size == 0:
        return None
    last = below[0]
    if last == 0:
        return float(step[0]), float(seconds[0])
    part = (values[last - 1] - bpc) / (values[last - 1] - values[last])
    between = [float(x[last - 1] + part * (x[last] - x[last - 1])) for x in (step, seconds)]
    return between[0], between[1]


def _validations(run: Run) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    done = np.isfinite(run.metrics["val/bpc"]) & np.isfinite(run.metrics["seconds"])
    return run.metrics["step"][done], run.metrics["seconds"][done], run.metrics["val/bpc"][done]


def _mean(values: Iterable[float | None]) -> float | None:
    known = [float(value) for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _shared(values: Iterable[int | None]) -> int | None:
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else None


HEADINGS = (
    ("arm", ""),
    ("seeds", ""),
    ("validation bpc", "± 95%"),
    ("difference", "paired ± 95%"),
    ("p", "paired t"),
    ("steps to", "baseline bpc"),
    ("seconds to", "baseline bpc"),
    ("bytes/s", "training"),
    ("peak", "MB"),
    ("parameters", ""),
)
"""Column titles, each with the line that goes below it."""


def cells(row: Row) -> tuple[str, ...]:
    """Spell a row out for the reader, one cell per heading; the terminal and the report share it."""
    if row.is_baseline:
        difference, p = "baseline", ""
    elif row.difference is not None and row.difference_half is not None:
        difference = f"{row.difference:+.3f} ± {row.difference_half:.3f}\nto {row.baseline}"
        p = "n/a: no spread" if row.p is None else "< 0.001" if row.p < 0.001 else f"{row.p:.3f}"
    else:
        reason = "n/a: needs ≥ 2 seeds" if len(row.paired_seeds) < 2 else "n/a: diverged"
        difference, p = reason, "n/a"
    if row.bpc is None:
        bpc = f"diverged (seed {', '.join(map(str, row.diverged))})"
    else:
        bpc = f"{row.bpc:.3f}" + (f" ± {row.bpc_half:.3f}" if row.bpc_half is not None else "")
    missed = f"not reached\n({row.reached} of {len(row.seeds)})"

    def number(value: float | None, missing: str = "n/a") -> str:
        return missing if value is None else f"{value:,.0f}"

    return (
        row.arm,
        str(len(row.seeds)),
        bpc,
        difference,
        p,
        number(row.steps_to_baseline, missed),
        number(row.seconds_to_baseline, "–"),
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
        console.print(table(rows, (0, 1, 2, 3, 4)), table(rows, (0, 5, 6, 7, 8, 9)))


def write_summary(rows: Sequence[Row], directory: str | Path) -> tuple[Path, Path]:
    """Write the rows, in full precision, as ``summary.csv`` and ``summary.json``.

    Seeds are separated by blanks in the CSV; what is unknown is an empty cell there and null in JSON.

    Raises:
        OSError: The folder cannot be written.
    """
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, [field.name for field in fields(Row)], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        flat = {k: " ".join(map(str, v)) if isinstance(v, tuple) else v for k, v in asdict(row).items()}
        writer.writerow(flat)
    content = json.dumps([asdict(row) for row in rows], indent=2, ensure_ascii=False, allow_nan=False)
    home = Path(directory)
    return write_whole(home / "summary.csv", buffer.getvalue()), write_whole(home / "summary.json", content + "\n")
