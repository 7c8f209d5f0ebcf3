"""Scalings of the rotation by their class paths, and a network that rotates by one of them for a while."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module

from torch import nn

from linrope.rotary import Rotary, Scaling
from plots.length_rows import UNSCALED
from plots.runs import RunError

_GIVEN = ("factor", "original_seq_len")


def find_scalings(paths: Sequence[str]) -> list[type[Scaling]]:
    """Import classes of scalings.

    Raises:
        RunError: A path leads to nothing, or to what is no scaling; a class needs more than a factor and the trained
            length; one is given twice.
    """
    found = [_find(path) for path in paths]
    if twice := [kind.__name__ for index, kind in enumerate(found) if kind in found[:index]]:
        raise RunError(f"--scalings names {twice[0]} twice")
    return found


def _find(path: str) -> type[Scaling]:
    module, _, name = path.rpartition(".")
    try:
        kind = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise RunError(f"--scalings: no class {path} ({error}); expected one like linrope.YaRN") from None
    if not (inspect.isclass(kind) and issubclass(kind, Scaling)) or inspect.isabstract(kind):
        raise RunError(f"--scalings: {path} is no scaling; expected a class made from linrope.rotary.Scaling")
    needed = _needed(kind)
    if not set(needed) <= set(_GIVEN):
        raise RunError(
            f"--scalings: {path} needs {', '.join(needed)}, but what there is to give is "
            f"{' and '.join(_GIVEN)}: the window over the trained length, and that length"
        )
    return kind


def _needed(kind: type[Scaling]) -> list[str]:
    """Arguments that have no default: a scaling that grows with the text by itself wants no factor."""
    return [p.name for p in inspect.signature(kind).parameters.values() if p.default is p.empty]


def name_of(kind: type[Scaling] | None) -> str:
    """What rows and lines call a scaling."""
    return UNSCALED if kind is None else kind.__name__


def rotates(network: nn.Module) -> bool:
    """Whether there is a rotation to scale."""
    return any(True for _ in _rotations(network))


def follows_length(network: nn.Module) -> bool:
    """Whether a rotation's frequencies change with the length of the text, so that no state can be carried."""
    return any(rotary.is_dynamic for _, rotary in _rotations(network))


@contextmanager
def scaled(network: nn.Module, kind: type[Scaling] | None, factor: float, trained: int) -> Iterator[None]:
    """Let every rotation in ``network`` be scaled as long as the block lasts; None leaves them as they are.

    Args:
        network: Whose modules hold a :class:`linrope.Rotary` as ``rotary``.
        kind: A class that needs ``factor``, ``original_seq_len`` or both.
        factor: How many times ``trained`` there is to be read.
        trained: Tokens of a window in training.

    Raises:
        ValueError: As ``kind`` does.
    """
    before = list(_rotations(network))
    try:
        if kind is not None:
            given = {"factor": factor, "original_seq_len": trained}
            scaling = kind(**{name: given[name] for name in _needed(kind)})
            for module, rotary in before:
                module.rotary = rotary.with_scaling(scaling)
        yield
    finally:
        for module, rotary in before:
            module.rotary = rotary


def _rotations(network: nn.Module) -> Iterator[tuple[nn.Module, Rotary]]:
    for module in network.modules():
        for name, child in module.named_children():  # others show it as a property of theirs
            if name == "rotary" and isinstance(child, Rotary):
                yield module, child
