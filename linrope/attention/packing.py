"""Sequences of different lengths end to end in one row, each attending to itself alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor


def check_offsets(offsets: Int[Tensor, " p+1"], num_rows: int, num_tokens: int) -> None:
    """Refuse offsets that do not cut one row of ``num_tokens`` into sequences.

    Raises:
        ValueError: The message says what was expected.
    """
    if num_rows != 1:
        raise ValueError(f"packed sequences lie in one row, so b must be 1 with offsets, got {num_rows}")
    if offsets.ndim != 1 or len(offsets) < 2 or offsets.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"offsets must be whole numbers (p + 1,), got {offsets.dtype} of shape {tuple(offsets.shape)}")
    if offsets[0] != 0 or offsets[-1] != num_tokens or (offsets.diff() < 0).any():
        raise ValueError(f"offsets must rise from 0 to the number of tokens, {num_tokens}, got {offsets.tolist()}")


def packed_positions(offsets: Int[Tensor, " p+1"]) -> Int[Tensor, " n"]:
    """Position of each token in its own sequence: 0, 1, … from each offset on."""
    starts, lengths = offsets[:-1].long(), offsets.diff().long()
    return torch.arange(int(offsets[-1]), device=offsets.device) - starts.repeat_interleave(lengths)


def apart(
    offsets: Int[Tensor, " p+1"],
    attend: Callable[[list[Tensor], Tensor], Float[Tensor, "p h l e"]],
    tensors: list[Tensor],
) -> Float[Tensor, "1 h n e"]:
    """Attend within each sequence: those of like length side by side in a batch, padded and masked.

    Lengths are rounded up to powers of two, so that padding is at most as much as there are tokens, and there are as
    many calls as there are such powers among the lengths. Waits for the device to tell them.

    Args:
        offsets: Sequence i is the tokens from ``offsets[i]`` to ``offsets[i + 1]``.
        attend: Attention of ``(p, h, l, …)`` tensors, made of ``tensors``, under a mask ``(p, l)`` that is True for
            tokens.
        tensors: ``(1, h, n, …)``.
    """
    device = offsets.device
    by_power: dict[int, list[tuple[int, int]]] = {}
    ends = offsets.tolist()
    for start, end in itertools.pairwise(ends):
        if end > start:
            by_power.setdefault(1 << (end - start - 1).bit_length(), []).append((start, end))
    outputs, places = [], []
    for sequences in by_power.values():
        starts, stops = torch.tensor(sequences, device=device).T
        longest = max(end - start for start, end in sequences)
        index = starts[:, None] + torch.arange(longest, device=device)
        mask = index < stops[:, None]
        index = torch.where(mask, index, starts[:, None])  # some token stands in, masked
        parts = [x[0][:, index].transpose(0, 1) for x in tensors]
        outputs.append(attend(parts, mask).transpose(1, 2)[mask])
        places.append(index[mask])
    return torch.cat(outputs)[torch.cat(places).argsort()].transpose(0, 1)[None]
