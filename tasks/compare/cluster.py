"""Runs on the machines of a Ray cluster, or on this one through Ray."""

from __future__ import annotations

import logging
import os
import platform
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks.compare.jobs import Job
from tasks.compare.plan import PlanError
from tasks.compare.process import failure, prepare, start, stop
from tasks.compare.progress import Display

_TICK = 0.3  # seconds between two looks at the runs
RETRIES = 3
"""How often a run is started again when it, its worker or its machine dies."""


class KilledError(RuntimeError):
    """A training was killed from outside, as by a system that runs out of memory."""


def run_on_ray(
    jobs: Sequence[Job],
    command: Sequence[str],
    display: Display,
    asked_to_stop: Sequence[int],
    cpus: int = 1,
    gpus: float = 0,
) -> dict[Path, str]:
    """Run all jobs, as many at a time as the cluster has room for.

    Joins the cluster that ``RAY_ADDRESS`` names or that runs on this machine, else starts one here. Every machine needs
    the same file system: runs go to the same folders, and one whose worker dies goes on from its checkpoint elsewhere.

    Args:
        jobs: What to run.
        command: The training command.
        display: Told what happens.
        asked_to_stop: Fills when the user interrupts.
        cpus: Cores, and threads, of one run.
        gpus: GPUs of one run.

    Returns:
        What failed, by folder, and why.

    Raises:
        PlanError: Ray is not installed, or no machine of the cluster has that many cores and GPUs.
        KeyboardInterrupt: After the runs have been stopped.
    """
    try:
        import ray
        from ray.exceptions import RayError
    except ImportError as error:
        raise PlanError("--on ray needs Ray: pip install 'linrope[ray]'") from error
    # The workers need this code, and what the user's configs import: both are where they are here.
    paths = [str(Path(__file__).resolve().parents[2]), os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"PYTHONPATH": os.pathsep.join(paths)}
    mine = not ray.is_initialized()
    if mine:
        handlers = {kind: signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)}
        ray.init(log_to_driver=False, logging_level=logging.ERROR, runtime_env={"env_vars": variables})
        for kind, handler in handlers.items():  # Ray puts its own there, which abort
            signal.signal(kind, handler)
    failures: dict[Path, str] = {}
    running: dict[Any, Job] = {}
    try:
        room = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if not any(node.get("CPU", 0) >= cpus and node.get("GPU", 0) >= gpus for node in room):
            raise PlanError(f"no machine of the cluster has {cpus} CPUs and {gpus:g} GPUs for a run")
        # A fresh worker for every run: nothing of one is left to the next.
        again: Any = {"max_retries": RETRIES, "retry_exceptions": [KilledError]}
        remote = ray.remote(num_cpus=cpus, num_gpus=gpus, max_calls=1, **again)(_train)
        for job in jobs:
            prepare(job)
            (job.directory / "worker.txt").unlink(missing_ok=True)
            running[remote.remote(job, list(command), cpus, os.getcwd())] = job
        started: set[Path] = set()
        while running:
            if asked_to_stop:
                raise KeyboardInterrupt
            done, _ = ray.wait(list(running), timeout=_TICK)
            for job in running.values():
                if job.directory not in started and (job.directory / "worker.txt").is_file():
                    started.add(job.directory)
                    display.event(job, "starts")
            for reference in done:
                job = running.pop(reference)
                try:
                    why = failure(job, ray.get(reference))
                except RayError as error:
                    why = f"failed: its worker or its training was killed {RETRIES + 1} times ({type(error).__name__})"
                if why:
                    failures[job.directory] = why
                display.ended(job, why)
            display.tick()
    finally:
        for reference in running:
            ray.cancel(reference)
        if running:
            ray.wait(list(running), num_returns=len(running), timeout=15)
        if mine:
            ray.shutdown()
    return failures


def _train(job: Job, command: list[str], cpus: int, folder: str) -> int:
    """Run one training process on a worker; returns its exit status."""
    os.chdir(folder)
    child = start([*command, *job.arguments], job.directory / "log.txt", threads=cpus)
    try:
        (job.directory / "worker.txt").write_text(f"{platform.node()} {os.getpid()} {child.pid}\n")
        while child.poll() is None:  # not wait(): a cancellation must not strike while its lock is taken
            time.sleep(0.1)
        if child.returncode == -signal.SIGKILL:
            raise KilledError(f"the training in {job.directory} was killed, perhaps for lack of memory")
        return child.returncode
    finally:
        stop([child])
