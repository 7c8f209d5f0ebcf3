"""Runs on this machine, some of them side by side."""

from __future__ import annotations

import os
import subprocess
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from tasks.compare.jobs import Job
from tasks.compare.process import failure, prepare, start, stop
from tasks.compare.progress import Display

_TICK = 0.1  # seconds between two looks at the processes


def run_here(
    jobs: Sequence[Job], command: Sequence[str], display: Display, asked_to_stop: Sequence[int], side_by_side: int = 1
) -> dict[Path, str]:
    """Run all jobs, in order.

    Args:
        jobs: What to run.
        command: The training command.
        display: Told what happens.
        asked_to_stop: Fills when the user interrupts.
        side_by_side: Processes at a time; they share the threads of the machine evenly.

    Returns:
        What failed, by folder, and why.

    Raises:
        KeyboardInterrupt: After the running processes have been stopped.
    """
    threads = None if side_by_side == 1 else max(1, usable_cpus() // side_by_side)
    waiting, running = deque(jobs), list[tuple[Job, subprocess.Popen[bytes]]]()
    failures: dict[Path, str] = {}
    try:
        while waiting or running:
            if asked_to_stop:
                raise KeyboardInterrupt
            while waiting and len(running) < side_by_side:
                job = waiting.popleft()
                prepare(job)
                display.event(job, "starts")
                running.append((job, start([*command, *job.arguments], job.directory / "log.txt", threads)))
            time.sleep(_TICK)
            ended = [(job, child) for job, child in running if child.poll() is not None]
            if ended and asked_to_stop:  # Ctrl-C reaches the processes too: their end is then no failure
                raise KeyboardInterrupt
            for job, child in ended:
                running.remove((job, child))
                why = failure(job, child.returncode)
                if why:
                    failures[job.directory] = why
                display.ended(job, why)
            display.tick()
    finally:
        stop(child for _, child in running)  # whatever ends the loop, a full disk included: none is left behind
    return failures


def usable_cpus() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
