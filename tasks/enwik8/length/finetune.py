"""A few more training steps with longer windows, as the run's own but slower."""

from __future__ import annotations

import warnings
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import lightning
import numpy as np
import torch
from jaxtyping import UInt8
from torch import nn
from torch.utils.data import DataLoader

from plots.checkpoints import load_checkpoint
from plots.runs import RunError
from tasks.callbacks import Randomness
from tasks.enwik8.data import CountFrom, CropBatches
from tasks.enwik8.length.subjects import Subject
from tasks.language_modeling import LanguageModeling

_ACCELERATORS = {"cpu": "cpu", "cuda": "gpu", "mps": "mps"}


@dataclass(frozen=True)
class Recipe:
    """How a network is trained on.

    Attributes:
        steps: Optimizer steps; the run's warm-up and decay happen within them, and AdamW's moments begin anew.
        window: Inputs of a window.
        batch_size: Windows in a batch; as many bytes as the run's batches had.
        seed: The run's; with the step it decides on the windows, so all scalings see the same.
        steps_before: Optimizer steps of the run: the order of the data and the redraws of random features go on from there.
        optimizer: Arguments of :class:`tasks.language_modeling.LanguageModeling`.
        trainer: Arguments of Lightning's trainer.
    """

    steps: int
    window: int
    batch_size: int
    seed: int
    steps_before: int
    optimizer: dict[str, Any] = field(repr=False)
    trainer: dict[str, Any] = field(repr=False)


def recipe_for(subject: Subject, steps: int, factor: float, learning_rate: float | None) -> Recipe:
    """The run's settings, with windows of ``factor`` times its length and a tenth of its learning rate unless one is given.

    Raises:
        RunError: The checkpoint lies in no run's folder, or the bytes of its batches are no whole number of windows.
    """
    if not subject.config:
        raise RunError(
            f"{subject.checkpoint}: fine-tuning needs the settings of its run, and config.yaml is not beside checkpoints/"
        )
    checkpoint = load_checkpoint(subject.checkpoint)
    hyperparameters = {k: v for k, v in checkpoint["hyper_parameters"].items() if k not in ("network", "_instantiator")}
    hyperparameters["learning_rate"] = learning_rate or hyperparameters["learning_rate"] / 10
    trainer, window = subject.config["trainer"], round(factor * subject.trained)
    bytes_per_batch = subject.config["data"]["batch_size"] * subject.trained
    if bytes_per_batch % window:
        raise RunError(
            f"{subject.name}: fine-tuning keeps the {bytes_per_batch:,} bytes of a training batch, "
            f"which are no whole number of windows of {window:,}; choose another --finetune_factor than {factor:g}"
        )
    kept = ("gradient_clip_val", "gradient_clip_algorithm", "accumulate_grad_batches", "precision")
    return Recipe(
        steps=steps,
        window=window,
        batch_size=bytes_per_batch // window,
        seed=subject.seed,
        steps_before=checkpoint["global_step"],
        optimizer=hyperparameters,
        trainer={name: trainer[name] for name in kept},
    )


def finetuned(network: nn.Module, recipe: Recipe, split: UInt8[np.ndarray, " n"], device: torch.device) -> nn.Module:
    """A trained copy of ``network``, which stays as it is.

    Raises:
        NonFiniteError: A loss or a gradient was not finite.
        ValueError: As the network does, for windows that it does not take.
    """
    module = LanguageModeling(deepcopy(network), **recipe.optimizer).train()
    accumulated = recipe.trainer["accumulate_grad_batches"]
    batches = CropBatches(split, recipe.window, recipe.batch_size, recipe.seed)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        trainer = lightning.Trainer(
            **recipe.trainer,
            max_steps=recipe.steps,
            max_epochs=-1,
            accelerator=_ACCELERATORS[device.type],
            devices=1 if device.index is None else [device.index],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[Randomness(recipe.seed, recipe.steps_before)],
        )
        order = CountFrom(lambda: recipe.steps_before * accumulated)
        try:
            trainer.fit(module, DataLoader(batches, batch_size=None, sampler=order))
        except SystemExit:  # so the trainer ends after Ctrl-C
            raise KeyboardInterrupt from None
    return module.network.to(device).eval()
