"""Nats of a split's targets by their position in the window, each target once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tasks.enwik8.data import gather
from tasks.enwik8.windows import deal_windows, eval_windows

_BATCH_BYTES = 16_384

Reader = Callable[[Int[Tensor, "b n"]], Iterator[Float[Tensor, "b piece 256"]]]
"""Reads windows from nothing and gives their logits, piece by piece."""


class Scored(NamedTuple):
    """What the targets at each position of the window cost.

    Attributes:
        nats: Their sum.
        targets: How many there are.
    """

    nats: Float[Tensor, " window"]
    targets: Int[Tensor, " window"]

    def bpc(self, begin: int, end: int) -> float:
        """Bits a byte of the targets whose inputs stand at positions begin ≤ p < end: Σ nats / (targets · ln 2)."""
        return float(self.nats[begin:end].sum() / self.targets[begin:end].sum()) / math.log(2)


def at_once(network: nn.Module) -> Reader:
    """Read a whole window in one call."""
    return lambda inputs: iter((network(inputs),))


def in_pieces(network: nn.Module, piece: int) -> Reader:
    """Read a window in calls of ``piece`` bytes, the state carried from each to the next."""

    def read(inputs: Tensor) -> Iterator[Tensor]:
        states = None
        for part in inputs.split(piece, dim=1):
            logits, states = network.stream(part, states)  # type: ignore[operator]
            yield logits

    return read


@torch.inference_mode()
def score(reader: Reader, split: UInt8[np.ndarray, " bytes"], window: int, device: torch.device) -> Scored:
    """Score every target of ``split`` once, in windows side by side that each begin from nothing.

    Args:
        reader: How a window is read.
        split: The bytes; all but the first are targets.
        window: Inputs of a window; the last one is as short as the split requires.
        device: Where the reader computes.

    Raises:
        ValueError: As the network that reads does.
    """
    window = min(window, len(split) - 1)
    nats, targets = torch.zeros(window, dtype=torch.float64), torch.zeros(window, dtype=torch.long)
    for rows in deal_windows(eval_windows(len(split), window, stride=0), max(1, _BATCH_BYTES // window)):
        tokens = gather(split, rows.starts, rows.num_bytes).to(device)
        ends = 0
        for logits in reader(tokens[:, :-1]):
            begins, ends = ends, ends + logits.shape[1]
            # In float64, as validation in training: rounding in float32 would show in the eighth digit.
            wide = logits.to("cpu" if device.type == "mps" else device, torch.float64)
            wanted = tokens[:, begins + 1 : ends + 1].to(wide.device)
            nats[begins:ends] += cross_entropy(wide.mT, wanted, reduction="none").sum(0).cpu()
            targets[begins:ends] += len(tokens)
    return Scored(nats, targets)


def bins(trained: int, longest: int) -> list[tuple[int, int]]:
    """Ranges of positions that cover ``longest`` bytes, cut at ⅛, ¼, ½, 1, 2, 4, … of ``trained``; none if nothing is cut."""
    cuts = itertools.takewhile(lambda cut: cut < longest, (round(trained * 2.0**k) for k in itertools.count(-3)))
    edges = sorted({0, *cuts, longest})
    return list(itertools.pairwise(edges)) if len(edges) > 2 else []
