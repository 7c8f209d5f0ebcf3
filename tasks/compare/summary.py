"""The numbers of a comparison: one row per arm, each difference paired by seed. No training, no drawing."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np

from plots.curves import half_interval
from plots.files import write_whole
from plots.runs import Run, by_arm
from tasks.compare.statistics import Arrival, arrival, arrived, holm, paired_difference, validations


@dataclass(frozen=True)
class Row:
    """What the finished runs of one arm say; None where they say nothing.

    Attributes:
        arm: Its name.
        is_baseline: Whether the others are compared with this one, unless told otherwise.
        baseline: The arm that this one is compared with, "the baseline" below.
        seeds: Seeds of its runs that finished or diverged.
        diverged: Those of them whose final bpc is not finite, or that ended for it; then no mean is given.
        bpc: Final validation bits per byte, mean over seeds.
        bpc_half: Half the 95% t-interval of that mean; None with one seed.
        paired_seeds: Seeds that both this arm and the baseline finished.
        difference: bpc minus the baseline's, mean over paired seeds; None with fewer than two.
        difference_half: Half its 95% t-interval.
        p: Two-sided paired t-test; None also when every seed differs by the same amount, because the
            test divides by that spread.
        p_holm: The same, corrected for the number of such tests in the table.
        p_permutation: Two-sided paired permutation test; never below 2/2ⁿ for n seeds.
        reached: Seeds whose validation came down to the baseline's final mean bpc.
        steps_to_baseline: Optimizer steps it took, mean over seeds; None unless every seed got there.
        steps_half: Half its 95% t-interval over seeds; None also with one seed.
        steps_at_least: Where some seed did not get there, what the mean of all exceeds.
        seconds_to_baseline: Training seconds it took, like the steps. The baseline has its own totals here.
        skipped_steps: Steps left out because they were not finite, over all seeds.
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
    p_holm: float | None
    p_permutation: float | None
    reached: int
    steps_to_baseline: float | None
    steps_half: float | None
    steps_at_least: float | None
    seconds_to_baseline: float | None
    skipped_steps: int
    tokens_per_second: float | None
    peak_memory_bytes: int | None
    parameters: int | None
    context: int | None
    stride: int | None
    bytes_scored: int | None


def unfinished(runs: Iterable[Run]) -> list[Run]:
    """Runs that ``summarize`` leaves out because they came neither to their planned end nor to a divergence."""
    return [run for run in runs if not run.finished and not run.diverged]


def summarize(runs: Sequence[Run], baseline: str, against: Mapping[str, str] | None = None) -> list[Row]:
    """Compare arms by their finished runs.

    Args:
        runs: Any runs; those that neither finished nor diverged are left out (``unfinished`` names them).
        baseline: The arm that the others are compared with; without a finished run of it, rows carry
            no differences.
        against: For some arms, another arm that they are compared with instead.

    Returns:
        One row per arm that has such a run, in the order in which arms first appear.
    """
    arms = by_arm(run for run in runs if run.finished or run.diverged)
    others = {arm: (against or {}).get(arm, baseline) for arm in arms}
    rows = [_row(arm, group, baseline, others[arm], arms.get(others[arm], [])) for arm, group in arms.items()]
    corrected = iter(holm([row.p for row in rows if row.p is not None]))
    return [row if row.p is None else replace(row, p_holm=next(corrected)) for row in rows]


def _row(arm: str, runs: list[Run], main_baseline: str, baseline: str, against: list[Run]) -> Row:
    ends = [validations(run)[2][-1:] for run in against if math.isfinite(run.final_bpc)]
    target = float(np.mean(ends)) if against and len(ends) == len(against) else None
    final = {run.seed: run.final_bpc for run in runs}
    diverged = tuple(seed for seed, bpc in final.items() if not math.isfinite(bpc))
    values = np.array(list(final.values()))
    known = not diverged
    base = {run.seed: run.final_bpc for run in against if arm != baseline}
    paired = tuple(sorted(final.keys() & base.keys()))
    difference = paired_difference([final[s] for s in paired], [base[s] for s in paired])
    if arm == baseline:
        own = [validations(run) for run in runs]
        arrives = arrived([(float(step[-1]), float(seconds[-1])) for step, seconds, _ in own if step.size])
    else:
        arrives = arrival(runs, target) if target is not None else Arrival(0)
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
        difference=difference.mean if difference else None,
        difference_half=difference.half if difference else None,
        p=difference.p if difference else None,
        p_holm=None,  # known when all rows are
        p_permutation=difference.p_permutation if difference else None,
        reached=arrives.reached,
        steps_to_baseline=arrives.steps,
        steps_half=arrives.steps_half,
        steps_at_least=arrives.steps_at_least,
        seconds_to_baseline=arrives.seconds,
        skipped_steps=sum(run.info.get("skipped_steps") or 0 for run in runs),
        tokens_per_second=_mean([run.info.get("tokens_per_second") for run in runs]),
        peak_memory_bytes=max((run.info.get("peak_memory_bytes") or 0 for run in runs), default=0) or None,
        parameters=_shared(run.info.get("parameters") for run in runs),
        context=_shared(one.get("context") for one in measured),
        stride=_shared(one.get("stride") for one in measured),
        bytes_scored=_shared(one.get("bytes_scored") for one in measured),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [float(value) for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _shared(values: Iterable[int | None]) -> int | None:
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else None


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
