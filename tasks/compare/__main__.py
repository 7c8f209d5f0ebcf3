"""Run every arm of a comparison with every seed, then draw, count and report.

``python -m tasks.compare CONFIG [--root runs] [--name NAME] [--jobs N | --on ray] [--any.key=value …]``
``python -m tasks.compare CONFIG --report_only``
``python -m tasks.compare --check RUN_DIR [--steps K]``

Finished runs are kept, interrupted ones go on where they stopped, and each run is a process of its own,
so that one which fails takes no other with it.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from plots.loss_curves import draw
from plots.runs import Run, RunError, read_run
from tasks.compare.cluster import run_on_ray
from tasks.compare.jobs import Job, check_same, jobs, recorded
from tasks.compare.local import run_here
from tasks.compare.plan import Plan, PlanError, check_flags, read_plan
from tasks.compare.process import divergence, finished, signals
from tasks.compare.progress import Display, title
from tasks.compare.repeat import repeat
from tasks.compare.report import warnings, write_report
from tasks.compare.summary import summarize, write_summary
from tasks.compare.table import print_table
from tasks.locks import alone

COMMAND = (sys.executable, "-m", "tasks.enwik8")

Runner = Callable[[Sequence[Job], Sequence[str], Display, Sequence[int]], dict[Path, str]]
"""Runs jobs, by a training command, telling a display, until asked to stop; returns what failed, by folder, and why."""


def compare(
    plan: Plan,
    *,
    root: str | Path = "runs",
    flags: Sequence[str] = (),
    run: Runner | None = run_here,
    command: Sequence[str] = COMMAND,
    console: Console | None = None,
) -> int:
    """Run what is missing of a plan and leave the picture, the summary and the report beside the runs.

    Args:
        plan: What to compare.
        root: Folder of experiments; runs go to ``<root>/<name>/<arm>/seed-<k>``.
        flags: Further arguments for every run, overriding the plan's settings.
        run: How and where the runs are made; None: not at all, report what is there.
        command: The training command, to which each run's arguments are added.
        console: Where to print.

    Returns:
        Exit status: 0, or 1 when a run failed or none has finished.

    Raises:
        PlanError: A folder already holds a run with other configs or arguments. Nothing is started then.
        KeyboardInterrupt: Passed on after the current run has been stopped.
    """
    console = console or _console()
    home = Path(root) / plan.name
    if run is None and not flags:
        flags = _recorded_flags(jobs(plan, root))
    listed = jobs(plan, root, flags)
    with alone(home / ".lock", f"another comparison is running in {home}") if run else nullcontext():
        for job in listed:
            check_same(job)
        failures = _run_missing(listed, run, command, console) if run else {}
    runs, problems = _collect(listed, plan.name, failures)
    rows = summarize(runs, plan.baseline, plan.against)
    drawn = [run for run in runs if run.finished]
    problems = [*(warnings(drawn, rows) if drawn else ()), *problems]
    for problem in problems:
        console.print(f"[yellow]note:[/] {escape(problem)}", soft_wrap=True)
    if not drawn:
        console.print("No run has finished, so there is nothing to report.")
        return 1
    picture, vector = draw(drawn, home / "loss_curves", title=f"{plan.name}: {len({run.arm for run in drawn})} arms")
    write_summary(rows, home)
    texts = {job.arm.label: list(zip(map(str, job.arm.configs), job.configs.values(), strict=True)) for job in listed}
    again = ["python", "-m", "tasks.compare", str(plan.source), "--root", str(root), "--name", plan.name]
    report = write_report(
        home / "report.html",
        name=plan.name,
        runs=drawn,
        rows=rows,
        picture=vector,
        problems=problems,
        arms=texts,
        settings=[*plan.flags, *flags],
        command=shlex.join([*again, *flags]),
    )
    print_table(rows, console)
    console.print(f"picture: {picture}\nreport:  {report}", markup=False, soft_wrap=True)
    return 1 if failures else 0


def _console() -> Console:
    # Without a terminal rich assumes 80 columns, too few for the table.
    return Console(width=None if sys.stdout.isatty() else 130, highlight=False)


def _run_missing(listed: Sequence[Job], run: Runner, command: Sequence[str], console: Console) -> dict[Path, str]:
    """Run what has not finished; returns what failed, by folder, and why."""
    with signals() as asked_to_stop, Display(console, listed) as display:
        missing = []
        for job in listed:
            if finished(job):
                display.event(job, "already finished")
            else:
                missing.append(job)
        failures = run(missing, command, display, asked_to_stop)
    return {folder: f"{why}; see {folder / 'log.txt'}" for folder, why in failures.items()}


def _recorded_flags(listed: Sequence[Job]) -> Sequence[str]:
    """The flags that the runs were started with: a report need not be told them again."""
    records = (recorded(job.directory) for job in listed)
    return next((record.get("flags", []) for record in records if record is not None), [])


def _collect(listed: Sequence[Job], name: str, failures: dict[Path, str]) -> tuple[list[Run], list[str]]:
    """Read the runs that finished or diverged, arm by arm; say of every other one why it is left out."""
    runs, problems = [], []
    order = {job.arm.label: None for job in listed}
    for job in sorted(listed, key=lambda job: (list(order).index(job.arm.label), job.seed)):
        diverged = divergence(job.directory)
        failure = failures.get(job.directory)
        try:
            if failure and not diverged:
                raise RunError(failure)
            if not job.directory.is_dir():
                raise RunError("not run yet")
            run = read_run(job.directory)
            if run.info.get("seed") not in (None, job.seed):
                raise RunError(f"its run.json says seed {run.info['seed']}")
            if run.finished and "validation" not in run.info:
                raise RunError("it was never validated")
            if not (run.finished or diverged):
                raise RunError(f"not finished, it stands at step {run.metrics['step'][-1]:,.0f}")
        except RunError as error:
            problems.append(f"{title(job)} is left out: {diverged or error}")
            continue
        runs.append(replace(run, experiment=name, arm=job.arm.label, seed=job.seed))
        if diverged:
            problems.append(f"{title(job)} {failure or diverged}")
    return runs, problems


def _runner(options: argparse.Namespace, plan: Plan) -> Runner | None:
    if options.report_only:
        return None
    if options.jobs < 1:
        raise PlanError(f"--jobs must be at least 1, got {options.jobs}")
    if options.on == "here":
        if options.cpus is not None or options.gpus is not None:
            raise PlanError("--cpus and --gpus go with --on ray; here, --jobs divides the cores")
        return partial(run_here, side_by_side=options.jobs)
    if options.jobs > 1:
        raise PlanError("--jobs goes without --on ray: the cluster runs as many as it has room for")
    cpus = plan.cpus if options.cpus is None else options.cpus
    gpus = plan.gpus if options.gpus is None else options.gpus
    if cpus < 1 or gpus < 0:
        raise PlanError(f"a run needs at least 1 CPU and 0 GPUs, got {cpus} and {gpus:g}")
    return partial(run_on_ray, cpus=cpus, gpus=gpus)


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
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="comparison file, e.g. configs/compare/rope.yaml")
    parser.add_argument("--root", default="runs", metavar="DIR", help="folder of experiments (default: runs)")
    parser.add_argument("--name", help="folder of this experiment (default: the file's name)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs side by side, dividing the cores")
    parser.add_argument("--on", choices=["here", "ray"], default="here", help="ray: on the machines of a Ray cluster")
    parser.add_argument(
        "--cpus", type=int, metavar="N", help="with --on ray: cores of a run (default: the file's, or 1)"
    )
    parser.add_argument(
        "--gpus", type=float, metavar="N", help="with --on ray: GPUs of a run (default: the file's, or 0)"
    )
    parser.add_argument("--report_only", action="store_true", help="run nothing, report what is there")
    parser.add_argument(
        "--check", metavar="RUN_DIR", help="run the first steps again: do the recorded losses come out?"
    )
    parser.add_argument("--steps", type=int, default=10, metavar="K", help="with --check: how many (default: 10)")
    options, rest = parser.parse_known_args(given[:split])
    rest = [*rest, *given[split + 1 :]]
    try:
        if options.check:
            if options.config or rest:
                raise PlanError(
                    f"--check takes a folder of runs alone, got also {' '.join([options.config or '', *rest])}"
                )
            return repeat(options.check, options.steps, command=command, console=_console())
        if not options.config:
            raise PlanError("no comparison file given, e.g. configs/compare/quick.yaml")
        plan = read_plan(options.config, options.name)
        flags = check_flags(rest, "command line")
        return compare(plan, root=options.root, flags=flags, run=_runner(options, plan), command=command)
    except (PlanError, RunError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nInterrupted. The same command goes on where this one stopped.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
