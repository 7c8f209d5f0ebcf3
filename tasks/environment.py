"""What a run ran on: code, libraries, device, memory."""

from __future__ import annotations

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
