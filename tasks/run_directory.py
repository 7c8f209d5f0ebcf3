"""A run's folder: what it holds, whose it is, and how far it has come."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import yaml

from plots.files import write_whole
from plots.runs import RunError
from tasks.locks import alone
from tasks.metrics_csv import MetricsCSV

# What may change between two calls that go on with one run: it changes neither weights nor batches.
_FREE = (
    "ckpt_path",
    "run_dir",
    "checkpoint_every",
    "trainer.enable_progress_bar",
    "trainer.logger",
    "data.num_workers",
)


class RunDirectory:
    """``runs/<experiment>/<arm>/seed-<k>/``: config.yaml, metrics.csv, run.json and checkpoints/.

    Args:
        path: The folder; made when the first file is written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = MetricsCSV(path / "metrics.csv")

        self.checkpoint = path / "checkpoints" / "last.ckpt"

    def alone(self) -> AbstractContextManager[None]:
        """Let one process train in this folder at a time; a second one waits for the first, then goes on from there."""
        return alone(self.path / ".lock", f"another process is training in {self.path}")

    @property
    def arm(self) -> str:
        """What is varied, by the folders' names."""
        return self.path.resolve().parts[-2]

    @property
    def last_checkpoint(self) -> Path | None:
        """The checkpoint to go on from, if there is one."""
        return self.checkpoint if self.checkpoint.is_file() else None

    @property
    def is_finished(self) -> bool:
        """Whether the training came to its end."""
        return bool(self.info.get("finished"))

    @property
    def info(self) -> dict[str, Any]:
        """What run.json says; empty where there is none."""
        path = self.path / "run.json"
        if not path.is_file():
            return {}
        try:
            content = json.loads(path.read_text())
            return content if isinstance(content, dict) else {}
        except ValueError as error:
            raise RunError(
                f"{path} is not JSON ({error}); delete it, and the run goes on from its checkpoint"
            ) from None

    @property
    def config(self) -> dict[str, Any]:
        """What config.yaml says; empty where there is none."""
        path = self.path / "config.yaml"
        if not path.is_file():
            return {}
        try:
            content = yaml.safe_load(path.read_text())
        except yaml.YAMLError as error:
            raise RunError(f"{path} is not YAML ({' '.join(str(error).split())}); delete the folder") from None
        return content if isinstance(content, dict) else {}

    def update(self, facts: dict[str, Any]) -> None:
        """Merge ``facts`` into run.json; the file is whole at every moment."""
        write_whole(self.path / "run.json", json.dumps(self.info | facts, indent=2) + "\n")

    def began_with(self, settings: dict[str, Any]) -> bool:
        """Whether the run was called with these settings, the checkpoint that it began from included."""
        was = self._settings
        return bool(was) and not differences(was, settings) and was.get("ckpt_path") == settings.get("ckpt_path")

    def check(self, settings: dict[str, Any]) -> None:
        """Refuse a call with settings other than those of the run that is here.

        Raises:
            RunError: The folder belongs to a run with other settings, or it cannot be told with which.
        """
        if not self._is_begun:
            return
        if not self._settings:
            raise RunError(
                f"{self.path / 'config.yaml'} is empty or gone, so whose run this is cannot be told; delete the folder"
            )
        changes = differences(self._settings, settings)
        if changes:
            listed = "\n".join(f"  {change}" for change in changes[:10])
            raise RunError(
                f"{self.path} belongs to a run with other settings (its own, then those of this call):\n{listed}\n"
                "Choose another --run_dir, delete that folder, or go on from its checkpoint with the new "
                f"settings: --ckpt_path {self.checkpoint}"
            )

    def claim(self, settings: dict[str, Any], starts_elsewhere: bool) -> None:
        """Keep the settings of a call that begins to train here.

        Args:
            settings: All of them.
            starts_elsewhere: The call names a checkpoint to start from that is not this run's last.
        """
        for left in (*self.path.glob(".*.part"), *self.checkpoint.parent.glob(".*.part")):
            left.unlink(missing_ok=True)  # of a process that was killed while it wrote
        if starts_elsewhere:
            if not Path(settings["ckpt_path"]).resolve().is_relative_to(self.path.resolve()):
                self.metrics.rewind(0)  # the rows are of a run that this one does not continue
            if self.info:
                self.update({"finished": False, "diverged": None})
        elif not self._is_begun:
            (self.path / "run.json").unlink(missing_ok=True)
        if starts_elsewhere or not self._is_begun or not self.config:
            write_whole(self.path / "config.yaml", yaml.safe_dump(settings, sort_keys=False))

    @property
    def _settings(self) -> dict[str, Any]:
        """What the run was called with; run.json has a copy."""
        return self.config or self.info.get("config") or {}

    @property
    def _is_begun(self) -> bool:
        """A call that failed before its first checkpoint claims nothing."""
        return self.last_checkpoint is not None or "steps" in self.info


def differences(old: Any, new: Any, key: str = "") -> list[str]:
    """``key: old -> new`` for every setting that differs and matters, dotted keys."""
    if key in _FREE or old == new:
        return []
    if isinstance(old, dict) and isinstance(new, dict):
        names = dict.fromkeys((*old, *new))
        return [d for name in names for d in differences(old.get(name), new.get(name), f"{key}.{name}".lstrip("."))]
    return [f"{key}: {json.dumps(old)} -> {json.dumps(new)}"]
