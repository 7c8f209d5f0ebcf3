"""What a run ran on: code, libraries, device, memory."""

from __future__ import annotations

import contextlib
import ctypes
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, device, threads: what it takes to know where figures come from."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "code_version": code_version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": version("lightning"),
        "device": f"{device.type} ({name})",
        "threads": torch.get_num_threads(),
    }


def code_version() -> str:
    """linrope's version, and the commit of this checkout, marked if files have changed since."""
    try:
        number = version("linrope")
    except PackageNotFoundError:
        number = "unknown version"
    git = ["git", "-C", str(Path(__file__).resolve().parents[1]), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return number
    return f"{number} ({commit})"


def keep_freed_memory() -> None:
    """Have this process keep the memory that it frees, for the next step needs as much (glibc; elsewhere nothing).

    By default large blocks go back to the system at once, and each page of the next one is a fault: a quarter of the
    time of attention over long texts.
    """
    trim_threshold, mmap_threshold = -1, -3  # glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD
    with contextlib.suppress(OSError, AttributeError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(mmap_threshold, 2**30)
        mallopt(trim_threshold, -1)


def peak_memory(device: torch.device) -> int:
    """Largest memory so far in bytes: of tensors on a GPU, of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows has no such count
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
