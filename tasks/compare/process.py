"""One training process of a comparison: started, stopped, judged."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from plots.files import write_whole
from tasks.compare.jobs import Job

_GRACE = 10.0  # seconds a run has to stop when asked, before it is killed


def prepare(job: Job) -> None:
    """Make the run's folder; written first, its record tells an interrupted run from a foreign one."""
    for copy, text in job.configs.items():
        write_whole(copy, text)
    write_whole(job.directory / "arm.json", json.dumps(job.record, indent=2, ensure_ascii=False) + "\n")


def start(command: Sequence[str], log: Path, threads: int | None = None) -> subprocess.Popen[bytes]:
    """Start a training.

    It ends when this process does, however this one ends: a run left behind would use what its successor counts on.

    Args:
        command: With all its arguments.
        log: What it prints is added to this file.
        threads: Of the run; None leaves the choice to PyTorch.
    """
    here = str(Path(__file__).resolve().parents[2])
    paths = [here, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "LINROPE_END_WITH_STDIN": "1"}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # never written to: it closes when this process ends
            stdout=output,
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
    if why := divergence(job.directory):
        return why
    return "failed: " + (f"exit status {status}" if status else "it ended without finishing its training")


def divergence(directory: Path) -> str | None:
    """Where a run's loss or gradients stopped being finite, if its last call ended with that."""
    try:
        diverged = json.loads((directory / "run.json").read_text())["diverged"]
        return f"diverged at optimizer step {diverged['step']:,}: {diverged['why']}"
    except (OSError, ValueError, LookupError, TypeError):
        return None


@contextmanager
def signals() -> Iterator[list[int]]:
    """Collect Ctrl-C and SIGTERM in a list instead of raising where they happen to strike.

    An exception inside ``Popen.wait`` can leave its lock taken; waiting for the stopped process would
    then never end.
    """
    came: list[int] = []
    kinds = (signal.SIGINT, signal.SIGTERM)
    before = {kind: signal.signal(kind, lambda number, _: came.append(number)) for kind in kinds}
    try:
        yield came
    finally:
        for kind, handler in before.items():
            signal.signal(kind, signal.SIG_IGN if came else handler)  # who has asked need not ask again: it is ending
