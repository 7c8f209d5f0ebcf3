"""Checkpoints: when they are taken, and how they reach the disk whole and come back as data."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.callbacks import Callback

from plots.checkpoints import load_checkpoint
from plots.files import write_whole
from plots.runs import RunError
from tasks.run_directory import RunDirectory


class Checkpoints(Callback):
    """Keep the last checkpoint, so that a run can be interrupted at any moment.

    One is taken every so many steps, after every validation and at the end. Where a step is followed by a
    validation, the checkpoint waits for its end: otherwise a run that is interrupted in between would go
    on without having validated there. None is taken while gradients are being accumulated, for they are not in it.

    Args:
        run: Where the run leaves its files.
        every: Optimizer steps between two checkpoints.
    """

    def __init__(self, run: RunDirectory, every: int) -> None:
        self.run, self.every = run, every
        self._saved_step, self._batches = -1, 0

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._saved_step = trainer.global_step
        self._batches = trainer.global_step * trainer.accumulate_grad_batches

    def on_train_batch_end(self, trainer: lightning.Trainer, *args: Any) -> None:
        self._batches += 1
        validates = trainer.enable_validation and self._batches % (trainer.val_check_batch or math.inf) == 0
        if not validates and trainer.global_step % self.every == 0:
            self._save(trainer)

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if trainer.state.fn == "fit":
            self._save(trainer)

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._save(trainer)

    def _save(self, trainer: lightning.Trainer) -> None:
        step = trainer.global_step
        if step != self._saved_step and self._batches == step * trainer.accumulate_grad_batches:
            self._saved_step = step
            try:
                trainer.save_checkpoint(self.run.checkpoint, weights_only=False)  # with the optimizer and the counters
            except OSError as error:
                kept = self.run.last_checkpoint or "none yet"
                raise RunError(
                    f"no checkpoint could be written at step {step} ({error}); the last good one: {kept}"
                ) from error


class WholeFiles(CheckpointIO):
    """Checkpoints written aside and renamed, and loaded as tensors and plain values: no code in them is run."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write the file; what was there stays if that fails.

        Raises:
            OSError: It cannot be written.
        """
        content = io.BytesIO()
        torch.save(checkpoint, content)
        write_whole(path, content.getbuffer())

    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> Mapping[str, Any]:
        """As :func:`load_checkpoint`."""
        return load_checkpoint(Path(path))

    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete the file."""
        Path(path).unlink()
