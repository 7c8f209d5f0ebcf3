"""Bits per byte of one network by the length of windows, by position and with its state carried, for each scaling."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import nn

from linrope import SoftmaxAttention
from linrope.rotary import Scaling
from plots.checkpoints import load_network
from plots.length_rows import LengthRow
from tasks.enwik8.corpus import Corpus
from tasks.enwik8.length.finetune import Recipe, finetuned, recipe_for
from tasks.enwik8.length.plan import Plan
from tasks.enwik8.length.scalings import follows_length, name_of, rotates, scaled
from tasks.enwik8.length.score import Scored, at_once, bins, in_pieces, score
from tasks.enwik8.length.subjects import Subject
from tasks.language_modeling import NonFiniteError


class _Case(NamedTuple):
    """A network as it is measured: with a scaling or without, after so many steps of fine-tuning."""

    network: nn.Module
    scaling: type[Scaling] | None
    finetune_steps: int = 0

    def __str__(self) -> str:
        steps = f" after {self.finetune_steps} steps" if self.finetune_steps else ""
        return f"scaling {name_of(self.scaling)}{steps}"


class Measurement:
    """All that a plan asks of one checkpoint, which stays as it is.

    Args:
        subject: The checkpoint.
        plan: What is measured.
        corpus: What it is measured on, and fine-tuned.
        device: Where.
        say: Is told how it goes, a line at a time.

    Raises:
        RunError: The file is no whole checkpoint of ours, or cannot be fine-tuned as asked.
    """

    def __init__(
        self, subject: Subject, plan: Plan, corpus: Corpus, device: torch.device, say: Callable[[str], None]
    ) -> None:
        self.subject, self.plan, self.corpus, self.device, self.say = subject, plan, corpus, device, say
        self.split = getattr(corpus, plan.split)[: plan.max_bytes]
        self.rows: list[LengthRow] = []
        self.notes: list[str] = []
        self.network = load_network(subject.checkpoint).to(device)
        self.recipe: Recipe | None = None
        if plan.finetune_steps:
            self.recipe = recipe_for(subject, plan.finetune_steps, plan.finetune_factor, plan.finetune_learning_rate)

    def run(self) -> list[LengthRow]:
        """Measure; ``notes`` then say what is left out, and why."""
        scalings = [None, *(self.plan.scalings if rotates(self.network) else ())]
        if self.plan.scalings and len(scalings) == 1:
            self._note("there is no rotation to scale")
        if self._why_no_state is not None:
            self._note(f"no state is carried: {self._why_no_state}")
        for scaling in scalings:
            self._evaluate(_Case(self.network, scaling))
        for scaling in scalings if self.recipe else ():
            if (network := self._finetune(scaling)) is not None:
                self._evaluate(_Case(network, scaling, self.plan.finetune_steps))
        return self.rows

    def _finetune(self, scaling: type[Scaling] | None) -> nn.Module | None:
        assert self.recipe is not None
        self.say(f"scaling {name_of(scaling)}: {self.recipe.steps} steps with windows of {self.recipe.window:,}")
        try:
            with scaled(self.network, scaling, self.plan.finetune_factor, self.subject.trained):
                return finetuned(self.network, self.recipe, self.corpus.train, self.device)
        except (NonFiniteError, ValueError, AssertionError) as error:
            self._note(f"scaling {name_of(scaling)}: fine-tuning is left out: {error}")
            return None

    def _evaluate(self, case: _Case) -> None:
        trained = self.subject.trained
        longest: tuple[float, int, Scored] | None = None
        for factor, window in self.plan.windows(trained).items():
            try:
                with scaled(case.network, case.scaling, factor, trained):
                    scored = score(at_once(case.network), self.split, window, self.device)
            except (ValueError, AssertionError) as error:  # PerformerLM asserts where others raise
                self._note(f"{case}: windows of {window:,} are left out: {error}")
                continue
            longest = factor, window, scored
            self._add(case, factor, "windows", scored, [(0, window)])
            self.say(f"{case}: windows of {window:,}: {scored.bpc(0, window):.4f} bpc")
        if longest is not None:
            factor, window, scored = longest
            self._add(case, factor, "windows", scored, bins(trained, window))
            if self._why_no_state is None:
                self._carry(case, factor)

    @property
    def _why_no_state(self) -> str | None:
        if not hasattr(self.network, "stream"):
            return f"{type(self.network).__name__} has no stream()"
        if any(isinstance(module, SoftmaxAttention) for module in self.network.modules()):
            return "softmax attention's is every key, as in one long window"
        return None

    def _carry(self, case: _Case, factor: float) -> None:
        """Carry the state through the split."""
        trained, span = self.subject.trained, len(self.split) - 1
        try:
            with scaled(case.network, case.scaling, factor, trained):
                if follows_length(case.network):
                    self._note(f"{case}: no state is carried: its frequencies change with the length of the text")
                    return
                scored = score(in_pieces(case.network, trained), self.split, span, self.device)
        except ValueError as error:
            self._note(f"{case}: no state is carried: {error}")
            return
        self._add(case, factor, "stream", scored, [(0, span), *bins(trained, span)])
        self.say(f"{case}: state carried over {span:,} bytes: {scored.bpc(0, span):.4f} bpc")

    def _add(
        self, case: _Case, factor: float, evaluation: str, scored: Scored, ranges: Iterable[tuple[int, int]]
    ) -> None:
        for begin, end in ranges:
            self.rows.append(
                LengthRow(
                    run=self.subject.name,
                    arm=self.subject.arm,
                    seed=self.subject.seed,
                    trained=self.subject.trained,
                    scaling=name_of(case.scaling),
                    factor=None if case.scaling is None else factor,
                    finetune_steps=case.finetune_steps,
                    evaluation=evaluation,
                    window=len(scored.nats),
                    position_from=begin,
                    position_to=end,
                    targets=int(scored.targets[begin:end].sum()),
                    bpc=scored.bpc(begin, end),
                )
            )

    def _note(self, note: str) -> None:
        self.notes.append(note)
        self.say(note)
