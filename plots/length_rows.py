"""Bits per byte against the length of windows, as ``python -m tasks.enwik8 length`` left them: rows, and means over seeds."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

import numpy as np

from plots.curves import half_interval
from plots.runs import RunError

UNSCALED = "none"
"""The scaling of a network that is measured as it was trained."""


@dataclass(frozen=True)
class LengthRow:
    """Bits per byte of the targets whose inputs stand at some positions of the windows of one length.

    Attributes:
        run: Experiment, arm and seed, as folders.
        arm: What was varied.
        seed: Of the training.
        trained: Bytes of a window in training.
        scaling: Name of the rotation's scaling, or ``UNSCALED``.
        factor: What the scaling was given: the window over ``trained``; None where there is no scaling.
        finetune_steps: Optimizer steps with that scaling and longer windows before this; 0: none.
        evaluation: "windows", each from nothing, or "stream", with the state carried.
        window: Most bytes that a prediction can see: of a window, or between two states from nothing.
        position_from: First position inside the window that counts, from 0.
        position_to: The one after the last.
        targets: How many bytes were predicted.
        bpc: Bits a byte.
    """

    run: str
    arm: str
    seed: int
    trained: int
    scaling: str
    factor: float | None
    finetune_steps: int
    evaluation: str
    window: int
    position_from: int
    position_to: int
    targets: int
    bpc: float

    @property
    def is_total(self) -> bool:
        """Whether all positions of the window count."""
        return self.position_from == 0 and self.position_to == self.window


def rows_as_csv(rows: Iterable[LengthRow]) -> str:
    """The text of length.csv; numbers read back as they were."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, [field.name for field in fields(LengthRow)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return buffer.getvalue()


def read_rows(path: Path) -> list[LengthRow]:
    """Read length.csv.

    Raises:
        RunError: It is not there, or is not what ``tasks.enwik8 length`` writes.
    """
    columns = [field.name for field in fields(LengthRow)]
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            if list(reader.fieldnames or ()) != columns:
                raise ValueError(
                    f"its columns should be {', '.join(columns)}, got {', '.join(reader.fieldnames or ())}"
                )
            return [_row(cells) for cells in reader]
    except FileNotFoundError:
        raise RunError(f"{path}: no such file; `python -m tasks.enwik8 length --out {path.parent}` makes it") from None
    except (OSError, ValueError, TypeError, csv.Error) as error:
        raise RunError(f"{path}: not what tasks.enwik8 length writes ({type(error).__name__}: {error})") from None


def read_data(path: Path) -> str:
    """What was measured on, as length.json says it.

    Raises:
        RunError: It is not there, or is not what ``tasks.enwik8 length`` writes.
    """
    try:
        content = json.loads(path.read_text())
        data, split = content["data"], content["settings"]["split"]
        return f"{data['name']}, {data['bytes']:,} bytes of the {split} split"
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RunError(f"{path}: not what tasks.enwik8 length writes ({type(error).__name__}: {error})") from None


def _row(cells: dict[str, str]) -> LengthRow:
    return LengthRow(
        run=cells["run"],
        arm=cells["arm"],
        seed=int(cells["seed"]),
        trained=int(cells["trained"]),
        scaling=cells["scaling"],
        factor=float(cells["factor"]) if cells["factor"] else None,
        finetune_steps=int(cells["finetune_steps"]),
        evaluation=cells["evaluation"],
        window=int(cells["window"]),
        position_from=int(cells["position_from"]),
        position_to=int(cells["position_to"]),
        targets=int(cells["targets"]),
        bpc=float(cells["bpc"]),
    )


class LengthCurve(NamedTuple):
    """Mean bpc over seeds at ``x`` in bytes, and half the width of its 95% t-interval (NaN for one seed, or where one's is not finite)."""

    x: np.ndarray
    mean: np.ndarray
    half: np.ndarray


def by_window(rows: Sequence[LengthRow]) -> LengthCurve:
    """Bpc against the length of windows, each from nothing; ``rows`` of one arm, one scaling, one state of training."""
    chosen = [row for row in rows if row.evaluation == "windows" and row.is_total]
    return _over_seeds(chosen, lambda row: row.window)


def by_position(rows: Sequence[LengthRow]) -> LengthCurve:
    """Bpc against the position inside the longest window, at the end of each bin; ``rows`` as in :func:`by_window`."""
    windows = [row for row in rows if row.evaluation == "windows"]
    longest = max((row.window for row in windows), default=0)
    chosen = [row for row in windows if row.window == longest and not row.is_total]
    return _over_seeds(chosen, lambda row: row.position_to)


def carried(rows: Sequence[LengthRow]) -> LengthCurve:
    """Bpc with the state carried, at one point; empty where that was not measured; ``rows`` as in :func:`by_window`."""
    return _over_seeds([row for row in rows if row.evaluation == "stream" and row.is_total], lambda row: row.window)


def _over_seeds(rows: Iterable[LengthRow], x_of: Callable[[LengthRow], int]) -> LengthCurve:
    values: dict[int, list[float]] = {}
    for row in rows:
        values.setdefault(x_of(row), []).append(row.bpc)
    x = sorted(values)
    return LengthCurve(
        np.array(x, dtype=float),
        np.array([np.mean(values[key]) for key in x]),
        np.array([_half(np.array(values[key])) for key in x]),
    )


def _half(values: np.ndarray) -> float:
    return float(half_interval(values)) if len(values) > 1 and np.isfinite(values).all() else math.nan
