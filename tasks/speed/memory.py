"""Memory: its peak, in a process of its own where nothing that ran before counts; and how to keep it out of timings."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

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


def keep_freed_memory() -> None:
    """Have this process keep the memory that it frees (glibc; elsewhere nothing).

    By default large blocks go back to the system, and each page of the next one is a fault. Between the layers of a
    model that is rare, for what one has freed serves the next; where attention alone runs over and over it is up to
    half of its time.
    """
    trim_threshold, mmap_threshold = -1, -3  # glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD
    with contextlib.suppress(OSError, AttributeError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(mmap_threshold, 2**30)
        mallopt(trim_threshold, -1)


def _measure(step: Callable[..., Callable[[], Any]], arguments: tuple[Any, ...], threads: int) -> int:
    torch.set_num_threads(threads)
    run = step(*arguments)
    before = _resident("VmRSS")
    _RESET.write_text("5")  # forgets the peak of importing and building
    run()
    return _resident("VmHWM") - before


def _resident(name: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
