"""Read what training runs left behind, without running or importing any of it.

A run is a folder with ``metrics.csv`` in it, usually ``<experiment>/<arm>/seed-<k>``. Beside the
metrics lie ``run.json`` (what was trained, on what, how well; absent in a run killed early) and, when a
comparison started the run, ``arm.json`` with the arm's full name.
"""

from __future__ import annotations

import csv
import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

REQUIRED_COLUMNS = ("step", "tokens", "seconds", "train/bpc")
"""What ``metrics.csv`` always has; ``val/bpc`` appears with the first validation."""

_DEPTH = 3  # a folder of experiments, an experiment, an arm: never further down than runs lie


class RunError(RuntimeError):
    """A folder does not hold what a run leaves, or cannot be used for what was asked; the message says why."""


@dataclass(frozen=True)
class Run:
    """One training run, as read from its folder.

    Attributes:
        directory: Where it lies, absolute.
        experiment: The folder that holds the arms.
        arm: What was varied: the name in ``arm.json``, else the folder's.
        seed: Everything random in the run follows from it; arms of one seed saw the same batches.
        metrics: Columns of ``metrics.csv``, one value per logged step; NaN where a cell is empty.
        info: What ``run.json`` holds; empty when there is none.
    """

    directory: Path
    experiment: str
    arm: str
    seed: int
    metrics: dict[str, np.ndarray]
    info: dict[str, Any]

    @property
    def finished(self) -> bool:
        """Whether the run came to its planned end."""
        return self.info.get("finished") is True

    @property
    def diverged(self) -> bool:
        """Whether its loss or gradients stopped being finite and ended it."""
        return isinstance(self.info.get("diverged"), dict)

    @property
    def final_bpc(self) -> float:
        """Validation bits per byte at the end; NaN when it diverged or was never measured."""
        if self.diverged:
            return math.nan
        measured = self.info.get("validation", {}).get("bpc")
        if measured is None:
            curve = self.metrics["val/bpc"]
            curve = curve[~np.isnan(curve)]
            measured = curve[-1] if curve.size else math.nan
        return float(measured)


def read_run(directory: str | Path) -> Run:
    """Read one run folder.

    Raises:
        RunError: ``metrics.csv`` is missing, empty or malformed, or a JSON file cannot be read.
    """
    folder = Path(directory).resolve()
    metrics = _read_metrics(folder / "metrics.csv")
    info = _read_json(folder / "run.json")
    _check_info(folder / "run.json", info)
    seed = re.fullmatch(r"seed-(\d+)", folder.name)
    arm_folder = folder.parent if seed else folder
    return Run(
        directory=folder,
        experiment=arm_folder.parent.name,
        arm=str(_read_json(folder / "arm.json").get("label", arm_folder.name)),
        seed=int(seed[1]) if seed else int(info.get("seed") or 0),
        metrics=metrics,
        info=info,
    )


def find_runs(*directories: str | Path) -> list[Run]:
    """Read every run at or below the given folders: runs, arms, experiments, or a mix of them.

    When they belong to more than one experiment, each arm is called ``experiment/arm``.

    Returns:
        The runs, sorted by folder (``seed-10`` after ``seed-2``), each once.

    Raises:
        RunError: A folder does not exist, none holds a run, or a run cannot be read.
    """
    for directory in directories:
        if not Path(directory).is_dir():
            raise RunError(f"{directory}: no such folder")
    folders = {found.resolve() for directory in directories for found in _run_folders(Path(directory))}
    if not folders:
        raise RunError(
            f"no run found in {', '.join(map(str, directories)) or 'no folder at all'}: "
            "expected metrics.csv in it, or up to three folders down (experiment/arm/seed-<k>/metrics.csv)"
        )
    runs = [read_run(folder) for folder in sorted(folders, key=_natural)]
    experiments = {run.directory: _experiment_folder(run) for run in runs}
    if len(set(experiments.values())) == 1:
        return runs
    # Two experiments may have one name in different places: name them from where their paths part.
    common = os.path.commonpath([folder.parent for folder in experiments.values()])
    return [replace(run, arm=f"{experiments[run.directory].relative_to(common)}/{run.arm}") for run in runs]


def by_arm(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Group runs by arm, in the order in which the arms first appear."""
    arms: dict[str, list[Run]] = {}
    for run in runs:
        arms.setdefault(run.arm, []).append(run)
    return arms


def _run_folders(folder: Path, depth: int = _DEPTH) -> Iterator[Path]:
    if (folder / "metrics.csv").is_file():
        yield folder
    elif depth:
        for child in folder.iterdir():
            if child.is_dir():
                yield from _run_folders(child, depth - 1)


def _experiment_folder(run: Run) -> Path:
    return run.directory.parents[1 if re.fullmatch(r"seed-\d+", run.directory.name) else 0]


def _natural(path: Path) -> list[tuple[int, int, str]]:
    pieces = re.split(r"(\d+)", str(path))
    return [(1, int(piece), "") if piece.isdigit() else (0, 0, piece) for piece in pieces]


def _read_metrics(path: Path) -> dict[str, np.ndarray]:
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise RunError(f"{path.parent}: not a run folder, it has no metrics.csv") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"{path}: cannot be read: {error}") from None
    # A last line without its newline is still being written, or was cut off by a kill.
    header, *rows = list(csv.reader(text[: text.rfind("\n") + 1].splitlines())) or [[]]
    if not rows:
        raise RunError(f"{path}: no complete row yet; was the run stopped before its first step?")
    if missing := [name for name in REQUIRED_COLUMNS if name not in header]:
        raise RunError(f"{path}: no column {', '.join(missing)}; its columns are {', '.join(header)}")
    table = np.empty((len(rows), len(header)))
    for line, row in enumerate(rows, start=2):
        if len(row) != len(header):
            raise RunError(f"{path}, line {line}: expected {len(header)} cells, got {len(row)}")
        for column, cell in enumerate(row):
            try:
                table[line - 2, column] = float(cell) if cell else math.nan
            except ValueError:
                raise RunError(f"{path}, line {line}: {header[column]} is no number: {cell!r}") from None
    metrics = {name: table[:, column] for column, name in enumerate(header)}
    if np.isnan(metrics["step"]).any():
        raise RunError(f"{path}: a row has no step")
    for name in ("step", "tokens", "seconds"):
        if np.any(np.diff(metrics[name][~np.isnan(metrics[name])]) < 0):
            raise RunError(f"{path}: {name} goes backwards; do the rows come from two runs?")
    metrics.setdefault("val/bpc", np.full(len(rows), math.nan))
    return metrics


def _check_info(path: Path, info: dict[str, Any]) -> None:
    """Refuse figures that are none: what reads them counts on it."""
    validation = info.get("validation", {})
    if not isinstance(validation, dict):
        raise RunError(f"{path}: validation should be an object, got {validation!r}")
    figures = {key: info.get(key) for key in ("tokens_per_second", "peak_memory_bytes", "parameters", "skipped_steps")}
    for key, value in {**figures, "validation.bpc": validation.get("bpc")}.items():
        if value is not None and not isinstance(value, (int, float)):
            raise RunError(f"{path}: {key} should be a number, got {value!r}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise RunError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content
