"""Do the recorded losses come out again?"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from plots.runs import Run, RunError, by_arm, find_runs, read_run
from tasks.compare.process import divergence, signals, start, stop

TOLERANCE = 1e-4
"""Relative difference of two losses up to which they count as the same, computed on other machines or versions."""

_SAME_ANYWAY = {
    "config",
    "diverged",
    "seconds",
    "tokens_per_second",
    "peak_memory_bytes",
    "steps",
    "tokens",
    "experiment",
    "arm",
}


class Repetition(NamedTuple):
    """A run beside its first steps made again.

    Attributes:
        steps: How many there are of both.
        largest: Largest relative difference of their training losses.
        where: Step of that difference.
        changed: What the two ran on, where it differs, as (recorded, now).
    """

    steps: int
    largest: float
    where: int
    changed: dict[str, tuple[Any, Any]]

    @property
    def is_same(self) -> bool:
        """Whether there is something that came out again, a divergence included, and nothing that did not."""
        return self.steps > 0 and self.largest <= TOLERANCE and "diverged" not in self.changed


def repeat(directory: str | Path, steps: int, *, command: Sequence[str], console: Console) -> int:
    """Make the first steps of each arm again and compare the losses with the recorded ones.

    Args:
        directory: An experiment, an arm or a run; of each arm the run with the smallest seed is taken.
        steps: How many to make, at most.
        command: The training command.
        console: Where to print.

    Returns:
        Exit status: 0 if all losses come out again, else 1.

    Raises:
        RunError: There is no run, or ``steps`` is not positive.
        KeyboardInterrupt: After the current repetition has been stopped.
    """
    if steps < 1:
        raise RunError(f"--steps must be at least 1, got {steps}")
    same = True
    with signals() as asked_to_stop:
        for arm, runs in by_arm(find_runs(directory)).items():
            run = min(runs, key=lambda run: run.seed)
            with tempfile.TemporaryDirectory() as folder:
                # Three levels down, as where a run lies.
                again = Path(folder, run.experiment or "experiment", "again", f"seed-{run.seed}")
                problem = _again(run, again, steps, command, asked_to_stop)
                if problem is None:
                    result = compare_runs(run, read_run(again), steps)
                    same &= result.is_same
                    text = describe(result)
                else:
                    same, text = False, f"cannot be repeated: {problem}"
            console.print(f"{arm} · seed {run.seed}: {text}", markup=False, soft_wrap=True)
    return 0 if same else 1


def _again(run: Run, again: Path, steps: int, command: Sequence[str], asked_to_stop: Sequence[int]) -> str | None:
    """Make the first steps; returns what prevented it."""
    config = run.directory / "config.yaml"
    if not config.is_file():
        return "it has no config.yaml"
    if (run.info.get("config") or {}).get("ckpt_path"):
        return f"it began from a checkpoint, {run.info['config']['ckpt_path']}"
    arguments = ["fit", "--config", str(config), "--run_dir", str(again), "--trainer.limit_val_batches=0"]
    # Not max_steps, on which the learning rate depends.
    stop_after = ["--trainer.callbacks+=tasks.callbacks.StopAfter", f"--trainer.callbacks.steps={steps}"]
    again.mkdir(parents=True)
    log = again / "log.txt"
    child = start([*command, *arguments, *stop_after], log)
    try:
        while child.poll() is None:
            if asked_to_stop:
                raise KeyboardInterrupt
            time.sleep(0.1)
    finally:
        stop([child])
    if asked_to_stop:
        raise KeyboardInterrupt
    if child.returncode and not divergence(again):  # a run that diverges again is repeated
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        first = next((number for number, line in enumerate(lines) if line.startswith("error")), -1)
        return " ".join(line.strip() for line in lines[first:])[:400] or "it failed without a word"
    return None


def compare_runs(run: Run, again: Run, steps: int) -> Repetition:
    """Set the training losses of both runs side by side, step by step."""
    common = sorted({int(step) for step in run.metrics["step"]} & {int(step) for step in again.metrics["step"]})[:steps]
    largest, where = 0.0, 0
    for step in common:
        then, now = (float(one.metrics["train/bpc"][list(one.metrics["step"]).index(step)]) for one in (run, again))
        if then == now or (math.isnan(then) and math.isnan(now)):
            continue
        difference = abs(now - then) / abs(then) if math.isfinite(then) and math.isfinite(now) else math.inf
        if difference > largest:
            largest, where = difference, step
    keys = (run.info.keys() & again.info.keys()) - _SAME_ANYWAY
    changed = {key: (run.info[key], again.info[key]) for key in sorted(keys) if run.info[key] != again.info[key]}
    ends = [(one.info.get("diverged") or {}).get("step", math.inf) for one in (run, again)]
    if ends[0] != ends[1] and min(ends) <= steps:
        changed["diverged"] = (run.info.get("diverged"), again.info.get("diverged"))
    return Repetition(len(common), largest, where, changed)


def describe(result: Repetition) -> str:
    """Say in one sentence what came out."""
    if result.steps == 0:
        return "no step could be compared"
    if result.largest == 0:
        text = f"the same losses to the last digit, {result.steps} steps"
    elif result.largest <= TOLERANCE:
        text = f"the same losses within {result.largest:.1e}, {result.steps} steps"
    else:
        text = f"OTHER losses, most at step {result.where} (relative difference {result.largest:.1e})"
    changed = "; ".join(f"{key}: {then} then, {now} now" for key, (then, now) in result.changed.items())
    return f"{text} ({changed})" if changed else text
