"""Next-byte prediction as a LightningModule: loss, bits per byte, optimizer, schedule."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import lightning
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from tasks.optimizers import MuonAdamW, split_parameters


class NonFiniteError(RuntimeError):
    """A loss or a gradient is infinite or NaN."""


class _SkippedStep(Exception):
    """This optimizer step is not taken; never leaves this module."""


class LanguageModeling(lightning.LightningModule):
    """Train and evaluate a ``network`` that maps bytes ``(b, n)`` to logits ``(b, n, 256)``.

    AdamW, or Muon with it; the learning rate rises linearly over ``warmup_steps`` optimizer steps, then follows a half
    cosine down to ``final_lr_fraction`` of itself at the trainer's last step.

    Args:
        network: Any module ``tokens -> logits``; with ``stream(tokens, states) -> (logits, states)``
            it can also be evaluated with its state carried through the whole split.
        learning_rate: Peak learning rate.
        weight_decay: Of weight matrices; gains, biases and embeddings have none.
        betas: AdamW's decay rates of the first and second moment.
        warmup_steps: Optimizer steps until the peak.
        final_lr_fraction: Learning rate at the last step, as a fraction of the peak.
        muon: Whether Muon trains the matrices inside the network, and AdamW all else.
        max_skipped_steps: Optimizer steps that may be left out, weights and moments untouched, because their loss or
            gradients are not finite; the next one stops the run, as the first does by default.

    Raises:
        ValueError: ``max_skipped_steps`` is negative.
    """

    def __init__(
        self,
        network: nn.Module,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        warmup_steps: int = 50,
        final_lr_fraction: float = 0.1,
        muon: bool = False,
        max_skipped_steps: int = 0,
    ) -> None:
        super().__init__()
        if max_skipped_steps < 0:
            raise ValueError(f"max_skipped_steps must be at least 0, got {max_skipped_steps}")
        self.save_hyperparameters(ignore=["network"])  # whoever knows how it was made adds that
        self.network = network
        self.learning_rate, self.weight_decay, self.betas = learning_rate, weight_decay, betas
        self.warmup_steps, self.final_lr_fraction, self.muon = warmup_steps, final_lr_fraction, muon
        self.max_skipped_steps, self.skipped_steps = max_skipped_steps, 0
        self.grad_norm = math.nan
        self.scored: dict[str, tuple[float, int]] = {}
        self._states: Any = None

    def configure_model(self) -> None:
        """Shard the network, layer by layer, where the strategy shards (FSDP2: Lightning's ModelParallelStrategy)."""
        mesh = self.device_mesh
        if mesh is None or isinstance(next(self.network.parameters()), DTensor):  # it may be called again
            return
        places = Counter(module for _, module in self.network.named_modules(remove_duplicate=False))
        for module, times in places.items():
            if times > 1 and next(module.parameters(recurse=False), None) is not None:  # of several layers: of none
                fully_shard(module, mesh=mesh["data_parallel"])
        for layers in (module for module in self.network.modules() if isinstance(module, nn.ModuleList)):
            for layer in layers:
                fully_shard(layer, mesh=mesh["data_parallel"])
        fully_shard(self.network, mesh=mesh["data_parallel"])

    def training_step(self, tokens: Tensor, batch_index: int) -> Tensor:
        """Mean cross-entropy in nats of ``tokens[:, 1:]`` given what stands before; ``tokens`` are (b, n + 1)."""
        loss = mean_loss(self.network(tokens[:, :-1]), tokens[:, 1:])
        if torch.isfinite(loss):
            return loss
        if self.max_skipped_steps == 0 and self.trainer.world_size == 1:
            culprit = first_non_finite_module(self.network, tokens[:, :-1])
            raise NonFiniteError(
                f"the loss is {loss.item()}; first non-finite output: {culprit or 'none, the loss alone'}"
            )
        # Spoils every gradient, so that all processes skip the same step, or all of them stop.
        return loss * math.nan

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Take the step, unless its gradients are not finite and it may be skipped."""
        try:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        except _SkippedStep:
            self.skipped_steps += 1

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip as the trainer is told, and keep the norm from before in ``grad_norm``."""
        parameters = {name: p for name, p in self.network.named_parameters() if p.grad is not None}
        norm = nn.utils.get_total_norm([p.grad for p in parameters.values() if p.grad is not None])
        self.grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        # A scaler for float16 skips such a step by itself and lowers its scale.
        if not math.isfinite(self.grad_norm) and self.trainer.precision != "16-mixed":
            if self.skipped_steps < self.max_skipped_steps:
                raise _SkippedStep
            name = next((n for n, p in parameters.items() if p.grad is not None and not p.grad.isfinite().all()), None)
            already = f", and {self.skipped_steps} steps were skipped already" if self.skipped_steps else ""
            raise NonFiniteError(
                f"the gradients are not finite, first that of {name or 'none, but their norm'}{already}"
            )
        if gradient_clip_val and gradient_clip_algorithm in (None, "norm"):
            nn.utils.clip_grads_with_norm_(parameters.values(), gradient_clip_val, norm)
        elif gradient_clip_val:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Count on after an interruption."""
        checkpoint["skipped_steps"] = self.skipped_steps

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """As :meth:`on_save_checkpoint`."""
        self.skipped_steps = checkpoint.get("skipped_steps", 0)

    def on_validation_epoch_start(self) -> None:
        """Forget the last evaluation."""
        self._nats = torch.zeros((), dtype=torch.float64)
        self._targets = torch.zeros((), dtype=torch.float64)
        self._states = None

    def validation_step(self, batch: tuple[Tensor, int, bool], batch_index: int) -> None:
        """Add up the nats of the batch's targets; see ``tasks.enwik8.data.EvalBatch``."""
        tokens, first, carries_state = batch
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        if self._streams():
            logits, self._states = self.network.stream(inputs, self._states if carries_state else None)  # type: ignore[operator]
        else:
            logits = self.network(inputs)
        # In float64: rounding in float32 would show in the eighth digit of the figure.
        wide = logits[:, first:].to("cpu" if logits.device.type == "mps" else logits.device, torch.float64)
        nats = cross_entropy(wide.mT, targets[:, first:].to(wide.device), reduction="none")
        self._nats += nats.sum().cpu()
        self._targets += nats.numel()

    def on_validation_epoch_end(self) -> None:
        """Nats per target over the whole split, each target once, whatever the batches and processes."""
        self._finish("val")

    on_test_epoch_start = on_validation_epoch_start
    test_step = validation_step

    def on_test_epoch_end(self) -> None:
        """As :meth:`on_validation_epoch_end`."""
        self._finish("test")

    def _streams(self) -> bool:
        streams = getattr(self.trainer.datamodule, "evaluation", "windows") == "stream"  # type: ignore[attr-defined]
        if streams and not hasattr(self.network, "stream"):
            raise ValueError(
                f"evaluation='stream' needs a network with a stream method, {type(self.network).__name__} has none; "
                "use --data.evaluation=windows"
            )
        return streams

    def _finish(self, name: str) -> None:
        reduce = self.trainer.strategy.reduce
        nats = reduce(self._nats.to(torch.float64), reduce_op="sum")
        targets = reduce(self._targets, reduce_op="sum")
        self._states = None
        if targets == 0:
            return
        loss = float(nats / targets)
        self.scored[name] = (loss, int(targets))
        self.log_dict({f"{name}/loss": loss, f"{name}/bpc": bits(loss)}, prog_bar=True, logger=False)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW, or Muon with it, with warm-up and cosine by optimizer step."""
        hidden, readout, others = split_parameters(self.network)
        plain = [
            {"params": readout, "weight_decay": self.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        if self.muon and any(isinstance(parameter, DTensor) for parameter in hidden):
            raise ValueError("Muon takes whole matrices, and this strategy shards them: give --model.muon=false")
        if self.muon:
            optimizer = MuonAdamW(hidden, plain, self.learning_rate, self.weight_decay, self.betas)
        else:
            plain[0]["params"] = hidden + readout
            optimizer = torch.optim.AdamW(plain, lr=self.learning_rate, betas=self.betas)
        num_steps = int(self.trainer.estimated_stepping_batches)

        def factor(step: int) -> float:
            return learning_rate_factor(step, num_steps, self.warmup_steps, self.final_lr_fraction)

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats of ``targets`` (b, n) under ``logits`` (b, n, v), in float32 or wider."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return cross_entropy(wide.flatten(0, 1), targets.flatten())


def bits(nats: float) -> float:
    """Bits per byte (bpc) of a loss in nats per byte."""
    return nats / math.log(2)


def learning_rate_factor(step: int, num_steps: int, warmup_steps: int, final: float) -> float:
    """Fraction of the peak at optimizer step ``step`` = 0, 1, …: a linear rise, then a half cosine to ``final``."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, num_steps - 1 - warmup_steps))
    return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2


@torch.no_grad()
def first_non_finite_module(network: nn.Module, tokens: Tensor) -> str | None:
    """Name of the first module, in order of computation, whose output is not finite; innermost first."""
    culprits: list[str] = []

    def watch(name: str):
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.is_floating_point() and not output.isfinite().all():
                culprits.append(f"{name or 'network'} ({type(module).__name__})")

        return hook

    handles = [module.register_forward_hook(watch(name)) for name, module in network.named_modules()]
    try:
        network(tokens)
    finally:
        for handle in handles:
            handle.remove()
    return culprits[0] if culprits else None
