"""Peak memory, in a process of its own: nothing that ran before counts."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tasks.environment import keep_freed_memory

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_of(step: Callable[..., Callable[[], Any]], *arguments: Any) -> int | None:
    """Bytes by which ``step(*arguments)()`` raises the peak of a fresh process above what it holds before.

    ``step`` is a function of a module; what it builds is not counted. None where the system keeps no such
    count (it is Linux that does), or holds other memory than the device's.
    """
    if not _RESET.exists():
        return None
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measure, (step, arguments, torch.get_num_threads()))


def _measure(step: Callable[..., Callable[[], Any]], arguments: tuple[Any, ...], threads: int) -> int:
    keep_freed_memory()
    torch.set_num_threads(threads)
    run = step(*arguments)
    before = _resident("VmRSS")
    _RESET.write_text("5")  # forgets the peak of importing and building
    run()
    return _resident("VmHWM") - before


def _resident(name: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
