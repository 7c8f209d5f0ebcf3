"""Run every arm of a comparison with every seed, then draw, count and report.

``python -m tasks.compare CONFIG [--root runs] [--name NAME] [--report_only] [--any.key=value …]``

Finished runs are kept, interrupted ones go on where they stopped, and each run is a process of its own,
so that one which fails takes no other with it.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from plots.files import write_whole
from plots.loss_curves import draw
from plots.runs import Run, RunError, read_run
from tasks.compare.jobs import Job, check_same, jobs, recorded
from tasks.compare.plan import Plan, PlanError, check_flags, read_plan
from tasks.compare.progress import display, title
from tasks.compare.report import write_report
from tasks.compare.summary import summarize, write_summary
from tasks.compare.table import print_table

COMMAND = (sys.executable, "-m", "tasks.enwik8")
_TICK = 0.5  # seconds between two looks at a run
_GRACE = 10.0  # seconds a run has to stop when asked, before it is killed
_LOG_LINES = 15  # of a failed run's log that are shown


def compare(
    plan: Plan,
    *,
    root: str | Path = "runs",
    flags: Sequence[str] = (),
    report_only: bool = False,
    command: Sequence[str] = COMMAND,
    console: Console | None = None,
) -> int:
    """Run what is missing of a plan and leave the picture, the summary and the report beside the runs.

    Args:
        plan: What to compare.
        root: Folder of experiments; runs go to ``<root>/<name>/<arm>/seed-<k>``.
        flags: Further arguments for every run, overriding the plan's settings.
        report_only: Run nothing, report what is there.
        command: The training command, to which each run's arguments are added.
        console: Where to print.

    Returns:
        Exit status: 0, or 1 when a run failed or none has finished.

    Raises:
        PlanError: A folder already holds a run with other configs or arguments. Nothing is started then.
        KeyboardInterrupt: Passed on after the current run has been stopped.
    """
    # Without a terminal rich assumes 80 columns, too few for the table.
    console = console or Console(width=None if sys.stdout.isatty() else 130, highlight=False)
    home = Path(root) / plan.name
    if report_only and not flags:
        flags = _recorded_flags(jobs(plan, root))
    listed = jobs(plan, root, flags)
    for job in listed:
        check_same(job)
    failures = {} if report_only else _run_all(listed, command, console)
    runs, problems = _collect(listed, plan.name, failures)
    for problem in problems:
        console.print(f"[yellow]note:[/] {escape(problem)}")
    if not runs:
        console.print("No run has finished, so there is nothing to report.")
        return 1
    rows = summarize(runs, plan.baseline, plan.against)
    picture, vector = draw(runs, home / "loss_curves", title=f"{plan.name}: {len(rows)} arms")
    write_summary(rows, home)
    again = ["python", "-m", "tasks.compare", str(plan.source), "--root", str(root), "--name", plan.name]
    report = write_report(
        home / "report.html",
        name=plan.name,
        runs=runs,
        rows=rows,
        picture=vector,
        problems=problems,
        arms={arm.label: arm.configs for arm in plan.arms},
        settings=[*plan.flags, *flags],
        command=shlex.join([*again, *flags]),
    )
    print_table(rows, console)
    console.print(f"picture: {picture}\nreport:  {report}", markup=False, soft_wrap=True)
    return 1 if failures else 0


def _run_all(listed: Sequence[Job], command: Sequence[str], console: Console) -> dict[Path, str]:
    """Run what has not finished, in order; returns what failed, by folder, and why."""
    failures: dict[Path, str] = {}
    with _signals() as asked_to_stop, display(console, len(listed)) as show:
        for number, job in enumerate(listed, start=1):
            if asked_to_stop:
                raise KeyboardInterrupt
            if _finished(job.directory):
                show(job, number, "already finished")
                continue
            # Written first: a run interrupted at any later moment can be told from a foreign one.
            write_whole(job.directory / "arm.json", json.dumps(job.record, indent=2, ensure_ascii=False) + "\n")
            show(job, number, "starts")
            status = _run(job, command, asked_to_stop, lambda job=job, number=number: show(job, number, ""))
            if status == 0 and _finished(job.directory):
                show(job, number, "finished")
                continue
            log = job.directory / "log.txt"
            why = f"exit status {status}" if status else "it ended without finishing its training"
            failures[job.directory] = f"failed: {why}; see {log}"
            show(job, number, "failed")
            tail = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
            console.print(f"{title(job)}: {why}. The end of {log}:", style="red", markup=False)
            console.print("\n".join(f"  {line}" for line in tail), markup=False)
    return failures


def _run(job: Job, command: Sequence[str], asked_to_stop: Sequence[int], tick: Callable[[], None]) -> int:
    """Run one training process to its end, or stop it and raise KeyboardInterrupt once a signal came."""
    here = str(Path(__file__).resolve().parents[2])
    paths = [here, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with (job.directory / "log.txt").open("ab") as log:
        child = subprocess.Popen(
            [*command, *job.arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            while not asked_to_stop:
                try:
                    status = child.wait(_TICK)
                except subprocess.TimeoutExpired:
                    tick()
                    continue
                if not asked_to_stop:  # Ctrl-C reaches the process too: its end is then no failure
                    return status
            raise KeyboardInterrupt
        finally:
            _stop(child)  # whatever ends the wait, a full disk included: no process is left behind


@contextmanager
def _signals() -> Iterator[list[int]]:
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
            signal.signal(kind, handler)


def _stop(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(_GRACE)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _finished(directory: Path) -> bool:
    try:
        return json.loads((directory / "run.json").read_text())["finished"] is True
    except (OSError, ValueError, LookupError, TypeError):
        return False  # then it is run again, and the training command judges what lies there


def _recorded_flags(listed: Sequence[Job]) -> Sequence[str]:
    """The flags that the runs were started with: a report need not be told them again."""
    records = (recorded(job.directory) for job in listed)
    return next((record.get("flags", []) for record in records if record is not None), [])


def _collect(listed: Sequence[Job], name: str, failures: dict[Path, str]) -> tuple[list[Run], list[str]]:
    """Read the finished runs, arm by arm; say of every other one why it is left out."""
    runs, problems = [], []
    order = {job.arm.label: None for job in listed}
    for job in sorted(listed, key=lambda job: (list(order).index(job.arm.label), job.seed)):
        problem = failures.get(job.directory)
        if problem is None and not job.directory.is_dir():
            problem = "not run yet"
        if problem is None:
            try:
                run = read_run(job.directory)
                if run.finished:
                    runs.append(replace(run, experiment=name, arm=job.arm.label, seed=job.seed))
                    continue
                problem = f"not finished, it stands at step {run.metrics['step'][-1]:,.0f}"
            except RunError as error:
                problem = str(error)
        problems.append(f"{title(job)} is left out: {problem}")
    return runs, problems


def main(arguments: Sequence[str] | None = None, *, command: Sequence[str] = COMMAND) -> int:
    """Run a comparison from the command line; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    split = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(
        prog="python -m tasks.compare",
        allow_abbrev=False,
        description="Run every arm of a comparison with every seed; then draw, count and report.",
        epilog="Any further --key=value goes to every run, e.g. --data.path FILE --trainer.max_steps 600.",
    )
    parser.add_argument("config", metavar="CONFIG", help="comparison file (YAML), e.g. configs/compare/rope.yaml")
    parser.add_argument("--root", default="runs", metavar="DIR", help="folder of experiments (default: runs)")
    parser.add_argument("--name", help="folder of this experiment (default: the file's name)")
    parser.add_argument("--report_only", action="store_true", help="run nothing, report what is there")
    options, rest = parser.parse_known_args(given[:split])
    try:
        plan = read_plan(options.config, options.name)
        flags = check_flags([*rest, *given[split + 1 :]], "command line")
        return compare(plan, root=options.root, flags=flags, report_only=options.report_only, command=command)
    except (PlanError, RunError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nInterrupted. The same command goes on where this one stopped.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
