"""One training process of a comparison: started, stopped, judged."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from plots.files import write_whole
from tasks.compare.jobs import Job

_GRACE = 10.0  # seconds a run has to stop when asked, before it is killed


def prepare(job: Job) -> None:
    """Make the run's folder; written first, its record tells an interrupted run from a foreign one."""
    write_whole(job.directory / "arm.json", json.dumps(job.record, indent=2, ensure_ascii=False) + "\n")


def start(job: Job, command: Sequence[str], threads: int | None = None) -> subprocess.Popen[bytes]:
    """Start the training; what it prints is added to ``log.txt`` in its folder.

    It ends when this process does, however this one ends: a run left behind would use what its successor counts on.

    Args:
        job: The run.
        command: The training command, to which the run's arguments are added.
        threads: Of the run; None leaves the choice to PyTorch.
    """
    here = str(Path(__file__).resolve().parents[2])
    paths = [here, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "LINROPE_END_WITH_STDIN": "1"}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    with (job.directory / "log.txt").open("ab") as log:
        return subprocess.Popen(
            [*command, *job.arguments],
            stdin=subprocess.PIPE,  # never written to: it closes when this process ends
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
        )


def stop(children: Iterable[subprocess.Popen[bytes]]) -> None:
    """End processes that still run: they are asked first."""
    running = [child for child in children if child.poll() is None]
    for child in running:
        child.terminate()
    for child in running:
        try:
            child.wait(_GRACE)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def finished(job: Job) -> bool:
    """Whether the run has come to its planned end."""
    try:
        return json.loads((job.directory / "run.json").read_text())["finished"] is True
    except (OSError, ValueError, LookupError, TypeError):
        return False  # then it is run again, and the training command judges what lies there


def failure(job: Job, status: int) -> str | None:
    """Why the run failed, its process having ended with ``status``; None if it did not."""
    if status == 0 and finished(job):
        return None
    try:
        diverged = json.loads((job.directory / "run.json").read_text())["diverged"]
        return f"diverged at optimizer step {diverged['step']:,}: {diverged['why']}"
    except (OSError, ValueError, LookupError, TypeError):
        return "failed: " + (f"exit status {status}" if status else "it ended without finishing its training")
