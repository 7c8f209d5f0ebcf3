"""One measured figure, and how contenders are timed against each other."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

Timed = Callable[[], tuple[float, float]]  # runs once; seconds of forward and of backward


@dataclass(frozen=True)
class Row:
    """What one contender took in one case.

    Attributes:
        section: What is measured: "attention", "training", "positions", "streaming", "growth" or "import".
        case: Under which conditions: sizes, a position.
        contender: Who.
        n: Tokens, where the length varies.
        forward: Seconds of the forward pass, median over rounds.
        seconds: Seconds of all: forward and backward pass, a training step, a token.
        tokens_per_second: Of a training step.
        memory: Bytes: the peak of a fresh process above what it began with, or of a state.
        limit_share: Share of the matrix products' own time at this machine's rate.
        ratio: ``seconds`` of ``against`` over ours.
        against: Whom ``ratio`` compares with.
        note: Why figures are missing, or what a contender leaves out.
    """

    section: str
    case: str
    contender: str
    n: int | None = None
    forward: float | None = None
    seconds: float | None = None
    tokens_per_second: float | None = None
    memory: int | None = None
    limit_share: float | None = None
    ratio: float | None = None
    against: str | None = None
    note: str = ""


def interleaved(contenders: dict[str, Timed], rounds: int, patience: float = 30.0) -> dict[str, tuple[float, float]]:
    """Median seconds of forward and backward, each round running every contender three times in a row.

    The first of the three brings the contender's data back into the caches, which the others have had in between,
    and does not count; nor does the first round. Who takes longer than a second runs once a round, and who has used
    up its ``patience`` (seconds) drops out of the rounds that remain, but not before one run counts.
    """
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    spent = dict.fromkeys(contenders, 0.0)
    for turn in range(rounds + 1):
        first = turn % len(contenders)  # each comes first in turn
        for name in (*list(contenders)[first:], *list(contenders)[:first]):
            if spent[name] > patience and times[name]:
                continue
            seconds = [contenders[name]()]
            if sum(seconds[0]) < 1.0:
                seconds = [contenders[name]() for _ in range(2)]
            spent[name] += sum(map(sum, seconds))
            if turn or spent[name] > patience:  # one that is so slow needs no warm-up
                times[name] += seconds
    return {name: tuple(statistics.median(part) for part in zip(*all_, strict=True)) for name, all_ in times.items()}  # type: ignore[misc]


def clock(device: torch.device) -> float:
    """Seconds, after what was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def matmul_rate(device: torch.device, size: int = 2048) -> Callable[[], tuple[float, float]]:
    """A contender that multiplies two square float32 matrices: 2·size³ operations."""
    left, right, product = (torch.randn(size, size, device=device) for _ in range(3))

    def run() -> tuple[float, float]:
        begin = clock(device)
        torch.mm(left, right, out=product)
        return clock(device) - begin, 0.0

    return run


def limit_operations(b: int, h: int, n: int, m: int, e: int, chunk: int = 64) -> float:
    """Operations of the matrix products that forward and backward cannot do without, in chunks of 64 tokens.

    Forward has the causal halves of the scores (chunk/2·m) and of their product with the values (chunk/2·e), the
    product with the state and its update (m·e each), backward twice as much; each is a multiplication and an addition.
    """
    return 3 * 2 * b * h * n * (chunk / 2 * m + chunk / 2 * e + 2 * m * e)
