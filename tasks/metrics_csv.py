"""One metrics.csv for the whole life of a run."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from plots.files import write_whole


class MetricsCSV(Logger):
    """One row an optimizer step, in order; all that is logged for a step joins its row.

    The file outlives interruptions: :meth:`rewind` drops the rows after the checkpoint that a run goes
    on from. Columns are added as new names appear, never taken away.

    Args:
        path: The file; its folder must exist when it is first saved.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._pending: dict[int, dict[str, Any]] = {}
        self._columns, self._last_step = ["step"], -1
        self._follow(list(self.read()))

    @property
    def name(self) -> str:
        """What Lightning calls it."""
        return "csv"

    @property
    def version(self) -> str:
        """There is but one: the file goes on."""
        return ""

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: hyperparameters are in the run's config.yaml."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Add ``metrics`` to the row of ``step``; they reach the disk at the next :meth:`save`."""
        assert step is not None
        self._pending.setdefault(step, {"step": step}).update(metrics)

    @rank_zero_only
    def save(self) -> None:
        """Write what is pending: appended where it can be, else the file is written aside and renamed."""
        if not self._pending:
            return
        new = [name for row in self._pending.values() for name in row if name not in self._columns]
        self._columns += dict.fromkeys(new)
        if new or min(self._pending) <= self._last_step or not self.path.is_file():
            rows: dict[int, dict[str, Any]] = {int(row["step"]): row for row in self.read()}
            for step, row in self._pending.items():
                rows.setdefault(step, {}).update(row)
            self._rewrite(rows[step] for step in sorted(rows))
        else:
            with self.path.open("a", newline="") as file:
                self._writer(file).writerows(self._pending.values())
        self._last_step = max(self._last_step, *self._pending)
        self._pending = {}

    @rank_zero_only
    def rewind(self, step: int) -> None:
        """Drop all rows after optimizer step ``step``."""
        self._pending = {}
        if self.path.is_file():
            rows = [row for row in self.read() if int(row["step"]) <= step]
            self._follow(rows)  # others may have written since this was made
            self._rewrite(rows)

    def _follow(self, rows: list[dict[str, Any]]) -> None:
        """Go on after these rows."""
        self._columns = list(rows[0]) if rows else ["step"]
        self._last_step = int(rows[-1]["step"]) if rows else -1

    def finalize(self, status: str) -> None:
        """Write what is pending."""
        self.save()

    def read(self) -> Iterable[dict[str, Any]]:
        """The rows on disk; one that a crash cut short is left out."""
        if not self.path.is_file():
            return
        with self.path.open(newline="") as file:
            text = file.read()
        for row in csv.DictReader(text[: text.rfind("\n") + 1].splitlines()):
            if None not in row and None not in row.values():
                yield row

    def _rewrite(self, rows: Iterable[dict[str, Any]]) -> None:
        text = io.StringIO()
        writer = self._writer(text)
        writer.writeheader()
        writer.writerows(rows)
        write_whole(self.path, text.getvalue())

    def _writer(self, file: Any) -> csv.DictWriter:
        return csv.DictWriter(file, self._columns, restval="", lineterminator="\n")
