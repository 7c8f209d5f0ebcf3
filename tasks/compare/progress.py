"""How far a comparison is: one live table on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import csv
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import yaml
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tasks.compare.jobs import Job

_QUIET_SECONDS = 30.0  # between two lines where there is no terminal
_LIVE_SECONDS = 0.5
_LOG_LINES = 15  # of a failed run's log that are shown


class Display:
    """Show progress: one live table of all arms on a terminal, a plain line now and then elsewhere.

    Args:
        console: Where to.
        jobs: All runs of the comparison, in order.
    """

    def __init__(self, console: Console, jobs: Sequence[Job]) -> None:
        self.console = console
        self._numbers = {job.directory: number for number, job in enumerate(jobs, start=1)}
        self._arms: dict[str, list[Job]] = {}
        for job in jobs:
            self._arms.setdefault(job.arm.label, []).append(job)
        self._states: dict[Path, str] = {}
        self._planned: dict[Path, int | None] = {}
        self._looked = self._said = time.monotonic()
        # Two looks a second: the cores belong to the training whose speed is being measured.
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> Display:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.update(self._table(), refresh=True)
            self._live.stop()

    def event(self, job: Job, what: str) -> None:
        """Say that a run starts, or is already finished."""
        self._states[job.directory] = "runs" if what == "starts" else "done"
        if not (self._live and what == "starts"):  # the table shows that itself
            self._say(job, what, with_step=what != "starts")

    def ended(self, job: Job, why: str | None) -> None:
        """Say that a run has finished, or why it failed, with the end of what it printed."""
        self._states[job.directory] = "failed" if why else "done"
        self._say(job, "failed" if why else "finished")
        if not why:
            return
        log = job.directory / "log.txt"
        self.console.print(f"{title(job)}: {why}. The end of {log}:", style="red", markup=False)
        tail = log.read_text(errors="replace").splitlines()[-_LOG_LINES:] if log.is_file() else []
        self.console.print("\n".join(f"  {line}" for line in tail), markup=False)

    def tick(self) -> None:
        """Look how far the runs are, if it is time to."""
        now = time.monotonic()
        if self._live and now - self._looked > _LIVE_SECONDS:
            self._looked = now
            self._live.update(self._table(), refresh=True)
        elif not self._live and now - self._said > _QUIET_SECONDS:
            for job in self._running():
                self._say(job, "runs")

    def _running(self) -> list[Job]:
        return [job for arm in self._arms.values() for job in arm if self._states.get(job.directory) == "runs"]

    def _say(self, job: Job, what: str, with_step: bool = True) -> None:
        self._said = time.monotonic()
        now = latest(job.directory)
        values = now.describe() if now and with_step else ""
        step = f" step {now.step:,}/{self._steps(job) or '?'}" if now and with_step else ""
        line = f"[{self._numbers[job.directory]}/{len(self._numbers)}] {title(job)}: {what}{step} {values}".rstrip()
        self.console.print(line, markup=False, soft_wrap=True)

    def _steps(self, job: Job) -> int | None:
        if self._planned.get(job.directory) is None:
            self._planned[job.directory] = _planned_steps(job.directory)
        return self._planned[job.directory]

    def _table(self) -> Table:
        """One row an arm; on a terminal too low for all of them, those that run or failed."""
        grid = Table(box=None, pad_edge=False)
        for heading in ("arm", "runs", "now", "step", "train", "val bpc", "bytes/s"):
            grid.add_column(heading, justify="left" if heading in ("arm", "now") else "right")
        few = len(self._arms) + 3 > self.console.height
        for label, jobs in self._arms.items():
            states = [self._states.get(job.directory, "waits") for job in jobs]
            if few and not {"runs", "failed"} & set(states):
                continue
            lines = [self._line(job) for job, state in zip(jobs, states, strict=True) if state == "runs"]
            failed = [f"seed {job.seed} failed" for job, state in zip(jobs, states, strict=True) if state == "failed"]
            lines += [(text, "", "", "", "") for text in failed]
            # Text, so that an arm called "[red]" is shown and not obeyed.
            columns = [Text("\n".join(column)) for column in zip(*lines, strict=True)]
            grid.add_row(Text(label), f"{states.count('done')}/{len(jobs)}", *columns)
        done = sum(state == "done" for state in self._states.values())
        grid.add_row("all", f"{done}/{len(self._numbers)}", style="bold")
        return grid

    def _line(self, job: Job) -> tuple[str, str, str, str, str]:
        now = latest(job.directory)
        if now is None:
            return f"seed {job.seed}", "begins", "", "", ""
        figures = (("{:.3f}", now.train_bpc), ("{:.3f}", now.val_bpc), ("{:,.0f}", now.tokens_per_second))
        train, val, rate = ("" if value is None else form.format(value) for form, value in figures)
        return f"seed {job.seed}", f"{now.step:,}/{self._steps(job) or '?'}", train, val, rate


class Latest(NamedTuple):
    """How far a run is: bpc and bytes per second are None until first measured."""

    step: int
    train_bpc: float | None
    val_bpc: float | None
    tokens_per_second: float | None

    def describe(self) -> str:
        """Spell the values out in one line."""
        parts = (
            ("train {:.3f}", self.train_bpc),
            ("val {:.3f} bpc", self.val_bpc),
            ("{:,.0f} bytes/s", self.tokens_per_second),
        )
        return " · ".join(form.format(value) for form, value in parts if value is not None)


def latest(directory: Path) -> Latest | None:
    """Read the end of a growing ``metrics.csv``; None while it says nothing yet."""
    try:
        with (directory / "metrics.csv").open("rb") as file:
            header = next(csv.reader([file.readline().decode()]))
            start = file.tell()
            # Enough for some hundred rows, so that the last validation is usually among them.
            file.seek(max(start, file.seek(0, os.SEEK_END) - 65_536))
            text = file.read().decode(errors="replace")
        rows = list(csv.reader(text[: text.rfind("\n") + 1].splitlines()))
        rows = [dict(zip(header, row, strict=True)) for row in rows if len(row) == len(header)]

        def last(name: str) -> float | None:
            return next((float(row[name]) for row in reversed(rows) if row.get(name)), None)

        step = last("step")
        return None if step is None else Latest(int(step), *map(last, ("train/bpc", "val/bpc", "tokens_per_second")))
    except (OSError, ValueError, StopIteration):
        return None  # only a display: a file in the middle of being written is looked at again


def _planned_steps(directory: Path) -> int | None:
    try:
        return int(yaml.safe_load((directory / "config.yaml").read_text())["trainer"]["max_steps"])
    except (OSError, yaml.YAMLError, LookupError, TypeError, ValueError):
        return None  # only a display: the bar then has no end


def title(job: Job) -> str:
    """Name a run for the reader."""
    return f"{job.arm.label} · seed {job.seed}"
