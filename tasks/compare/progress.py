"""How far a comparison is: one live line on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import csv
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tasks.compare.jobs import Job

_QUIET_SECONDS = 30.0  # between two lines where there is no terminal


@contextmanager
def display(console: Console, total: int) -> Iterator[Callable[[Job, int, str], None]]:
    """Show progress: a live line on a terminal, a plain line now and then elsewhere.

    Yields:
        A function of the job, its number, and what happened; nothing happened means: look how far it is.
    """
    columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=20), MofNCompleteColumn())
    fields = (TextColumn("{task.fields[values]}", markup=False), TimeElapsedColumn())
    said, planned = time.monotonic(), None
    live = console.is_terminal
    # Two looks a second: the cores belong to the training whose speed is being measured.
    with Progress(*columns, *fields, console=console, disable=not live, refresh_per_second=2) as progress:
        whole = progress.add_task("runs", total=total, values="")
        bar = progress.add_task("", total=None, values="", visible=False)

        def show(job: Job, number: int, event: str) -> None:
            nonlocal said, planned
            now = latest(job.directory)
            values = "" if now is None else now.describe()
            if event:
                planned = None
            planned = planned or _planned_steps(job.directory)
            if event == "starts":
                progress.reset(bar, total=planned, description=title(job), values="", visible=True)
            progress.update(bar, total=planned, completed=now.step if now else 0, values=values)
            if event and event != "starts":
                progress.update(whole, completed=number)
            if event or (not live and time.monotonic() - said > _QUIET_SECONDS):
                said = time.monotonic()
                step = f" step {now.step:,}/{planned or '?'}" if now and event != "starts" else ""
                # A live line already says that a run starts.
                if not (live and event == "starts"):
                    line = f"[{number}/{total}] {title(job)}: {event or 'runs'}{step} {values}".rstrip()
                    console.print(line, markup=False, soft_wrap=True)

        yield show


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
