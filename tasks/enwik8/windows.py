"""Windows over a split that score every byte exactly once, whatever the batches and processes."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Int64
from torch import Tensor

from tasks.enwik8.corpus import DataError


class Window(NamedTuple):
    """Bytes ``split[start:stop]``; targets at index ``first`` and later are scored."""

    start: int
    stop: int
    first: int


def eval_windows(split_size: int, seq_len: int, stride: int) -> list[Window]:
    """Cover a split with windows so that each of its ``split_size - 1`` targets is scored exactly once.

    A window of w inputs holds w + 1 bytes: its target ``j`` is its byte ``j + 1``. Windows advance by
    ``seq_len - stride``; the ``stride`` targets a window shares with the one before are context only.
    So each target but the first ``stride`` of the split is predicted from more than ``stride`` bytes.
    The last window is as short as the split requires.

    Args:
        split_size: Bytes in the split, >= 2.
        seq_len: Most inputs in a window.
        stride: Overlap of neighbouring windows in bytes, ``0 <= stride < seq_len``.

    Raises:
        DataError: ``stride`` is outside its range.
    """
    if not 0 <= stride < seq_len:
        raise DataError(
            f"--data.stride is the overlap of windows of --data.seq_len={seq_len} bytes: "
            f"it must be from 0 to {seq_len - 1}, got {stride}"
        )
    # A window that starts where fewer than stride + 1 targets remain would have nothing left to score.
    starts = range(0, max(1, split_size - 1 - stride), seq_len - stride)
    return [Window(start, min(start + seq_len + 1, split_size), first=stride if start else 0) for start in starts]


class EvalBatch(NamedTuple):
    """Windows to score, all of the same length.

    ``first`` may equal w: then nothing is scored. Such batches keep the processes of a distributed run
    in step, which sharded models need, without scoring a window twice.

    Args:
        tokens: Bytes as ids 0..255; inputs are ``tokens[:, :-1]``, targets ``tokens[:, 1:]``.
        first: Targets ``tokens[:, 1:][:, first:]`` are scored, the ones before are context.
        carries_state: The inputs continue those of the batch before: start from the state it left.
    """

    tokens: Int64[Tensor, "b w+1"]
    first: int
    carries_state: bool


class Rows(NamedTuple):
    """What an :class:`EvalBatch` holds, as places in the split."""

    starts: list[int]
    num_bytes: int
    first: int
    carries_state: bool


def deal_windows(windows: list[Window], batch_size: int, rank: int = 0, world_size: int = 1) -> list[Rows]:
    """Batch the windows that process ``rank`` of ``world_size`` scores; alike ones go together.

    A batch holds ``batch_size`` windows over all processes, so that the first batches cover the same windows whatever
    their number. Each window goes to exactly one process, and all processes get the same number of batches, of the same
    lengths in the same order.
    """
    alike: dict[tuple[int, int], list[int]] = {}
    for start, stop, first in windows:
        alike.setdefault((stop - start, first), []).append(start)
    batches = []
    for (num_bytes, first), starts in alike.items():
        for i in range(0, len(starts), batch_size):
            if rows := starts[i : i + batch_size][rank::world_size]:
                batches.append(Rows(rows, num_bytes, first, carries_state=False))
            else:
                batches.append(Rows(starts[-1:], num_bytes, first=num_bytes - 1, carries_state=False))
    return batches
