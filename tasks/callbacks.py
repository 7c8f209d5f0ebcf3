"""What happens around a training step: randomness, projections, records, the progress bar."""

from __future__ import annotations

import sys
import time
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, TQDMProgressBar

from linrope import redraw_feature_maps
from plots.runs import RunError
from tasks.environment import environment, own_code, peak_memory
from tasks.language_modeling import LanguageModeling, NonFiniteError, bits
from tasks.run_directory import RunDirectory

_FLUSH_SECONDS = 5.0


class Randomness(Callback):
    """Make all that is random in a training step a function of (seed, step), so that resuming needs no replay.

    Dropout, and projections that a network draws within forward, see a generator seeded for the batch;
    the projections of linrope's feature maps are redrawn after the optimizer steps at which they are due.

    Args:
        seed: Of the run.
        steps_before: Optimizer steps of an earlier training that this one is counted on from.
    """

    def __init__(self, seed: int, steps_before: int = 0) -> None:
        self.seed, self.steps_before = seed, steps_before
        self._step = self._batch = 0

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._step = trainer.global_step
        self._batch = (self.steps_before + trainer.global_step) * trainer.accumulate_grad_batches

    def on_train_batch_start(self, trainer: lightning.Trainer, *args: Any) -> None:
        torch.manual_seed(hash((self.seed, self._batch, trainer.global_rank)) & (2**63 - 1))
        self._batch += 1

    def on_train_batch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, *args: Any) -> None:
        if trainer.global_step != self._step:
            self._step = trainer.global_step
            redraw_feature_maps(pl_module, self.steps_before + self._step)


class Claim(Callback):
    """Put a call's settings into the run's folder, once every process is there and has looked into it.

    Checkpoints remember the data, too: a run does not go on with others.

    Args:
        run: Where the run leaves its files.
        settings: All of them.
        starts_elsewhere: The call names a checkpoint to start from that is not this run's last.
    """

    def __init__(self, run: RunDirectory, settings: dict[str, Any], starts_elsewhere: bool) -> None:
        self.run, self.settings, self.starts_elsewhere = run, settings, starts_elsewhere
        self._data: dict[str, Any] = {}

    def setup(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        self._data = described(trainer)
        if stage == "fit" and trainer.is_global_zero:
            self.run.claim(self.settings, self.starts_elsewhere)

    def state_dict(self) -> dict[str, Any]:
        return {"data": self._data}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        then, now = state_dict["data"], self._data
        if then != now and not self.starts_elsewhere:
            raise RunError(f"{self.run.path} was trained on other data: {_named(then)} then, {_named(now)} now")


def described(trainer: lightning.Trainer) -> dict[str, Any]:
    """Name, size and SHA-256 of the data."""
    corpus = trainer.datamodule.corpus  # type: ignore[attr-defined]
    return {"name": corpus.name, "size": corpus.size, "sha256": corpus.sha256}


class Recorder(Callback):
    """Write one row of metrics an optimizer step, and run.json whenever an evaluation or the run ends.

    Args:
        run: Where the run leaves its files.
        is_fitting: Whether evaluations are part of a training run; others are only kept in ``result``.
    """

    def __init__(self, run: RunDirectory, is_fitting: bool) -> None:
        self.run, self.is_fitting = run, is_fitting
        self.seconds = 0.0
        self.validated_step = -1
        self.result: dict[str, Any] = {}
        self._step, self._tokens, self._start = 0, 0, 0.0
        self._losses: list[torch.Tensor] = []
        self._then: dict[str, Any] = {}
        self._step_seconds = self._rate = self._flushed = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "tokens": self._tokens}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seconds, self._tokens = state_dict["seconds"], state_dict["tokens"]

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: LanguageModeling) -> None:
        self._then = self.run.info
        if trainer.is_global_zero:
            self.run.update(self._origin(trainer, pl_module))

    def on_train_start(self, trainer: lightning.Trainer, pl_module: LanguageModeling) -> None:
        self._step = trainer.global_step
        self.run.metrics.rewind(self._step)
        if self._step and trainer.is_global_zero:
            then, now = self._then, self._origin(trainer, pl_module)
            changed = {key: [then[key], value] for key, value in now.items() if key in then and then[key] != value}
            again = {"step": self._step, "changed": changed}
            self.run.update({"resumed": [*then.get("resumed", []), again]})

    def on_train_batch_start(self, trainer: lightning.Trainer, *args: Any) -> None:
        self._start = time.perf_counter()
        self._rate = trainer.optimizers[0].param_groups[0]["lr"]  # of this step; the schedule moves on before its end

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: LanguageModeling, outputs: Any, batch: torch.Tensor, batch_idx: int
    ) -> None:
        self._losses.append(outputs["loss"].detach() * trainer.accumulate_grad_batches)
        if trainer.global_step == self._step:  # gradients are still being accumulated
            self._step_seconds += time.perf_counter() - self._start
            return
        loss = trainer.strategy.reduce(torch.stack(self._losses).mean(), reduce_op="mean").item()
        self._step_seconds += time.perf_counter() - self._start
        self._step = trainer.global_step
        self.seconds += self._step_seconds
        batches = trainer.world_size * trainer.accumulate_grad_batches
        self._tokens = batch.shape[0] * (batch.shape[1] - 1) * batches
        row = {
            "tokens": self._tokens * self._step,
            "seconds": round(self.seconds, 4),
            "train/loss": loss,
            "train/bpc": bits(loss),
            "lr": self._rate,
            "grad_norm": pl_module.grad_norm,
            "tokens_per_second": round(self._tokens / self._step_seconds, 1),
        }
        if pl_module.max_skipped_steps:
            row["skipped_steps"] = pl_module.skipped_steps
        self._losses, self._step_seconds = [], 0.0
        self._log(trainer, row)
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:  # so that others can follow the run
            self._flushed = time.monotonic()
            self.run.metrics.save()
        pl_module.log_dict(
            {"loss": loss, "bpc": row["train/bpc"], "tokens/s": row["tokens_per_second"]}, prog_bar=True, logger=False
        )

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: LanguageModeling) -> None:
        self._evaluated(trainer, pl_module, "val", "validation")

    def on_test_end(self, trainer: lightning.Trainer, pl_module: LanguageModeling) -> None:
        self._evaluated(trainer, pl_module, "test", "test")

    def on_save_checkpoint(self, *args: Any) -> None:
        """Rows reach the disk before the checkpoint that counts them as done."""
        self.run.metrics.save()

    def on_exception(self, trainer: lightning.Trainer, pl_module: LanguageModeling, exception: BaseException) -> None:
        """Keep the rows; say where a loss or gradient stopped being finite, and what is left."""
        self.run.metrics.save()
        if isinstance(exception, NonFiniteError):
            step, last = trainer.global_step + 1, self.run.last_checkpoint
            if self.is_fitting and trainer.is_global_zero:
                self.run.update({"diverged": {"step": step, "why": str(exception)}})
            exception.args = (
                f"optimizer step {step} of arm {self.run.arm!r} ({self.run.path}): {exception}; last good checkpoint: "
                f"{last or 'none yet'}. A lower learning rate or a tighter --trainer.gradient_clip_val may help"
                + (
                    ""
                    if pl_module.max_skipped_steps
                    else "; --model.max_skipped_steps leaves such steps out, from the start"
                )
                + ".",
            )
        elif isinstance(exception, KeyboardInterrupt) and self.is_fitting and trainer.is_global_zero:
            last = (
                "goes on from its last checkpoint"
                if self.run.last_checkpoint
                else "begins again, for lack of a checkpoint"
            )
            print(f"\nInterrupted after step {trainer.global_step}. The same command {last}.", file=sys.stderr)

    def _evaluated(self, trainer: lightning.Trainer, pl_module: LanguageModeling, key: str, split: str) -> None:
        if key not in pl_module.scored:
            return
        loss, targets = pl_module.scored[key]
        step = max(self._step, trainer.global_step)
        measured = trainer.datamodule.measurement(split) | {"bytes_scored": targets}  # type: ignore[attr-defined]
        if measured["evaluation"] == "stream":  # it may have been told to stop before the end of the split
            measured["context"] = targets
        self.result = {"bpc": bits(loss), "loss": loss, "step": step} | measured
        if not self.is_fitting:
            return
        self._step = self.validated_step = step
        self._log(trainer, {f"{key}/loss": loss, f"{key}/bpc": bits(loss)})
        self.run.metrics.save()
        if trainer.is_global_zero:
            self.run.update({"validation": self.result} | self._facts(pl_module))
            if not sys.stderr.isatty():  # where no bar is drawn
                print(f"step {step} of {trainer.max_steps}: validation {bits(loss):.3f} bpc", flush=True)

    def _origin(self, trainer: lightning.Trainer, pl_module: LanguageModeling) -> dict[str, Any]:
        """What it takes to make the run again."""
        return {
            "config": self.run.config,
            "data": described(trainer),
            "own_code": own_code([*pl_module.modules(), *trainer.callbacks]),  # type: ignore[attr-defined]
            "precision": trainer.precision,
            "processes": trainer.world_size,
        } | environment(pl_module.device)

    def _facts(self, pl_module: LanguageModeling) -> dict[str, Any]:
        """How far the run has come, and at what price."""
        return {
            "steps": self._step,
            "tokens": self._tokens * self._step,
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(self._tokens * self._step / self.seconds, 1) if self.seconds else None,
            "skipped_steps": pl_module.skipped_steps,
            "parameters": sum(p.numel() for p in pl_module.network.parameters()),
            "peak_memory_bytes": peak_memory(pl_module.device),
        }

    def _log(self, trainer: lightning.Trainer, row: dict[str, float]) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(row, step=self._step)


def _named(data: dict[str, Any]) -> str:
    return f"{data.get('name')} ({data.get('size')} bytes, SHA-256 {str(data.get('sha256'))[:12]}…)"


class StopAfter(Callback):
    """End the training early, with the schedule of the whole.

    Args:
        steps: Optimizer steps to take.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_train_batch_end(self, trainer: lightning.Trainer, *args: Any) -> None:
        if trainer.global_step >= self.steps:
            trainer.should_stop = True


class ProgressBar(TQDMProgressBar):
    """Loss, bpc and tokens/s as they come, in a terminal; silent where nobody looks."""

    def __init__(self) -> None:
        super().__init__(refresh_rate=5 if sys.stderr.isatty() else 0)

    def get_metrics(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        metrics = super().get_metrics(*args, **kwargs)
        metrics.pop("v_num", None)
        return metrics
