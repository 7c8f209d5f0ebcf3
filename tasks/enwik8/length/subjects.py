"""The trained networks whose reach is measured, and what their runs say of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plots.checkpoints import load_checkpoint, run_name
from plots.runs import Run, RunError, find_runs, read_run
from tasks.run_directory import RunDirectory


@dataclass(frozen=True)
class Subject:
    """One checkpoint.

    Attributes:
        name: Experiment, arm and seed of its run, as far as its path tells.
        arm: What was varied: the name that its run recorded, else ``name``.
        seed: Of the training.
        checkpoint: The file.
        trained: Bytes of a window in training.
        config: Settings of its run; empty where the checkpoint lies in no run's folder.
    """

    name: str
    arm: str
    seed: int
    checkpoint: Path
    trained: int
    config: dict[str, Any] = field(repr=False)


def find_subjects(checkpoints: Sequence[str], folders: Sequence[str]) -> tuple[list[Subject], list[str]]:
    """Find the checkpoints that are given, then the last ones of all finished runs in the folders; say what is left out.

    Raises:
        RunError: There is none, a file or folder is not there, two have one name, or a trained length is unknown.
    """
    subjects, left_out = [], []
    for checkpoint in (Path(path) for path in checkpoints):
        if not checkpoint.is_file():
            raise RunError(f"--ckpt {checkpoint}: no such file")
        folder = checkpoint.resolve().parents[1]
        subjects.append(_subject(checkpoint, read_run(folder) if (folder / "metrics.csv").is_file() else None))
    for run in find_runs(*folders) if folders else ():
        checkpoint = RunDirectory(run.directory).last_checkpoint
        if run.diverged or not run.finished or checkpoint is None:
            why = "it diverged" if run.diverged else "it has no checkpoint" if run.finished else "it is not finished"
            left_out.append(f"{run.directory} is left out: {why}")
        elif not any(checkpoint.samefile(subject.checkpoint) for subject in subjects):
            subjects.append(_subject(checkpoint, run))
    if not subjects:
        raise RunError("no checkpoint to measure: " + ("; ".join(left_out) or "give --ckpt FILE or --runs FOLDER"))
    names = [subject.name for subject in subjects]
    if twice := [name for index, name in enumerate(names) if name in names[:index]]:
        raise RunError(f"two checkpoints are called {twice[0]}; measure them into different folders")
    return subjects, left_out


def _subject(checkpoint: Path, run: Run | None) -> Subject:
    name = run_name(checkpoint.resolve())
    directory = RunDirectory(checkpoint.resolve().parents[1])
    config = (directory.config or directory.info.get("config", {})) if run else {}
    trained = config.get("data", {}).get("seq_len") or _length_of_network(checkpoint)
    return Subject(name, run.arm if run else name, run.seed if run else 0, checkpoint, trained, config)


def _length_of_network(checkpoint: Path) -> int:
    made = load_checkpoint(checkpoint).get("hyper_parameters", {}).get("network") or {}
    arguments = made.get("init_args", {})
    length = arguments.get("seq_len", arguments.get("max_seq_len"))
    if not isinstance(length, int):
        raise RunError(f"{checkpoint} does not say how long its windows were in training: no config, no seq_len")
    return length


def data_of(subjects: Iterable[Subject]) -> tuple[Any, Any]:
    """``corpus`` and ``path`` that the runs were trained on; both None, the built-in text, where nothing says it.

    Raises:
        RunError: The runs differ in it.
    """
    found = {(data.get("corpus"), data.get("path")) for s in subjects if (data := s.config.get("data", {}))}
    if len(found) > 1:
        listed = " and ".join(sorted(str(path or corpus or "the built-in text") for corpus, path in found))
        raise RunError(f"the runs were trained on {listed}; say with --data.path or --data.corpus what to measure on")
    return found.pop() if found else (None, None)
