"""``python -m tasks.enwik8 length``: the command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from jsonargparse import ArgumentParser

from plots.length_rows import LengthRow
from plots.runs import RunError
from tasks.environment import environment
from tasks.enwik8.corpus import Corpus, load_corpus
from tasks.enwik8.length.folder import LengthFolder
from tasks.enwik8.length.measure import Measurement
from tasks.enwik8.length.plan import Plan
from tasks.enwik8.length.scalings import find_scalings
from tasks.enwik8.length.subjects import Subject, data_of, find_subjects
from tasks.locks import alone


def parser() -> ArgumentParser:
    """Arguments of the command."""
    parser = _Parser(
        prog="python -m tasks.enwik8 length",
        description="Measure how far trained networks reach past their trained window.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", action="config", help="YAML with any of these arguments, e.g. configs/length.yaml")
    add("--ckpt", type=str, nargs="+", default=[], metavar="FILE", help="checkpoints of runs")
    add("--runs", type=str, nargs="+", default=[], metavar="FOLDER", help="runs, arms or experiments")
    add("--data.path", type=str | None, default=None, help="file to measure on (default: that of the runs)")
    add("--data.corpus", type=Literal["builtin", "enwik8", "file"] | None, default=None, help="as in training")
    add("--split", type=Literal["validation", "test"], default="validation", help="part of the data that is scored")
    add("--max_bytes", type=int | None, default=None, help="score the first bytes of the split alone (default: all)")
    add("--factors", type=float, nargs="+", default=[1, 2, 4, 8, 16], help="windows over the trained one")
    add("--scalings", type=str, nargs="*", default=[], metavar="CLASS", help="of the rotation, e.g. linrope.YaRN")
    add("--finetune_steps", type=int, default=0, help="train on for so many steps, then measure again; 0: do not")
    add("--finetune_factor", type=float, default=4, help="windows of these steps over the trained one")
    add("--finetune_learning_rate", type=float | None, default=None, help="peak (default: a tenth of the run's)")
    add("--device", type=str, default="cpu", help="where to compute")
    add("--out", type=str, default="length", metavar="FOLDER", help="gets length.csv and length.json")
    return parser


class _Parser(ArgumentParser):
    """Refuses a YAML file that gives one value, or none, where a list is expected."""

    def parse_string(self, content: str, *args: Any, **kwargs: Any) -> Any:
        given: Any = None
        with suppress(yaml.YAMLError):  # of which parsing then says more
            given = yaml.safe_load(content)
        for name in [action.dest for action in self._actions if action.nargs in ("+", "*")]:
            if isinstance(given, dict) and not isinstance(given.get(name, []), list):
                self.error(f"{name} expects a list, as in {name}: [...], got {given[name]!r}")
        return super().parse_string(content, *args, **kwargs)


def main(arguments: Sequence[str]) -> int:
    """Measure what is missing; a fault of the call ends in one message and an exit status that is not 0."""
    options = parser().parse_args(list(arguments))
    try:
        _run(options)
    except (RunError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted. The same command goes on where this one stopped.", file=sys.stderr)
        return 130
    return 0


def _run(options: Any) -> None:
    plan = Plan(
        split=options.split,
        max_bytes=options.max_bytes,
        factors=tuple(sorted({float(factor) for factor in options.factors})),
        scalings=tuple(find_scalings(options.scalings)),
        finetune_steps=options.finetune_steps,
        finetune_factor=options.finetune_factor,
        finetune_learning_rate=options.finetune_learning_rate,
    )
    subjects, left_out = find_subjects(options.ckpt, options.runs)
    for line in left_out:
        print(f"note: {line}", file=sys.stderr)
    given = options.data.corpus, options.data.path
    corpus = load_corpus(*(given if any(given) else data_of(subjects)))
    size = len(getattr(corpus, plan.split)[: plan.max_bytes])
    for trained in {subject.trained for subject in subjects}:
        plan.check(trained, size)
    device, home = _device(options.device), Path(options.out)
    with alone(home / ".lock", f"another process is measuring into {home}"):
        measured = {"name": corpus.name, "size": corpus.size, "sha256": corpus.sha256, "bytes": size}
        folder = LengthFolder(home, {"settings": plan.settings(), "data": measured})
        print(
            f"{plan.split} split of {corpus.name}, {size:,} bytes; {len(subjects)} checkpoints, into {home}", flush=True
        )
        for number, subject in enumerate(subjects, start=1):
            _measure(
                f"[{number}/{len(subjects)}] {subject.arm} · seed {subject.seed}", subject, plan, corpus, device, folder
            )


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise RunError(f"--device {name}: {str(error).splitlines()[0]}") from None
    return device


def _measure(
    title: str, subject: Subject, plan: Plan, corpus: Corpus, device: torch.device, folder: LengthFolder
) -> None:
    def say(line: str) -> None:
        print(f"{title}: {line}", flush=True)

    if folder.has(subject):
        say("already measured")
        return
    measurement = Measurement(subject, plan, corpus, device, say)
    rows: list[LengthRow] = measurement.run()
    folder.keep(subject, rows, measurement.notes, environment(device))
