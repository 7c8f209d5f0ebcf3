"""Tables of cosines and sines, kept for the next layer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from linrope.transforms import is_transformed

# Queries and keys of a model may be of two lengths, and a second model of a program of two more.
_MOST = 4


class _Table(NamedTuple):
    key: Hashable
    positions: weakref.ref[Tensor] | None
    version: int
    turns: Tensor


_tables: tuple[_Table, ...] = ()


def once(key: Hashable, positions: Tensor | None, make: Callable[[], Tensor]) -> Tensor:
    """What ``make`` returned for an equal ``key`` and the very same ``positions``, if that was not long ago; else what it returns."""
    global _tables  # replaced whole, so that another thread sees one state or the other
    version = 0 if positions is None else positions._version
    for table in _tables:
        # Of positions that are gone, the reference gives None too.
        same = table.positions is None if positions is None else table.positions and table.positions() is positions
        if same and table.key == key and table.version == version:
            return table.turns
    with torch.inference_mode(False), torch.no_grad():  # a training step may come after inference
        turns = make()
    reference = None if positions is None else weakref.ref(positions)
    _tables = (_Table(key, reference, version, turns), *_tables[: _MOST - 1])
    return turns


def may_be_kept(*tensors: Tensor | None) -> bool:
    """Whether what is made of these may be kept: what a compiler, a transform or a fake mode makes must not outlive it."""
    if torch.compiler.is_compiling() or is_transformed():
        return False
    # A tensor of inference mode does not say whether it was written to.
    return all(x is None or (type(x) in (Tensor, nn.Parameter) and not x.is_inference()) for x in tensors)
