"""What a run ran on: code, libraries, device, memory."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from linrope.attention.backends import choose

_ROOT = Path(__file__).resolve().parents[1]
# What these are set to can change the last digits of a result.
_VARIABLES = ("LINROPE_BACKEND", "OMP_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE")
_LIBRARIES = ("numpy", "einops", "jsonargparse", "performer-pytorch")


def environment(device: torch.device) -> dict[str, Any]:
    """Code, libraries, device, threads and switches: what it takes to know where figures come from, and to repeat them."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    number, commit, modified = code_version()
    return {
        "code_version": f"{number} ({commit})" if commit else number,
        "code_modified": modified,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": version("lightning"),
        "libraries": {library: _installed(library) for library in _LIBRARIES},
        "platform": platform.platform(),
        "device": f"{device.type} ({name})",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "attention": choose("auto", torch.float32, device.type),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


@cache  # the code that runs is the code that was imported
def code_version() -> tuple[str, str | None, bool | None]:
    """linrope's version, the commit of this checkout, and whether files have changed since; None without git."""
    number = _installed("linrope") or "unknown version"
    git = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return number, None, None
    return number, commit, commit.endswith("-dirty")


def _installed(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def own_code(parts: Iterable[object]) -> dict[str, str]:
    """SHA-256 of the files, by module, that the user's own classes among ``parts`` come from: no version speaks of them."""
    # Not the whole checkout: a file that lies in it, but is none of ours, is what no commit tells of.
    ours = [_ROOT / package for package in ("linrope", "tasks", "plots")]
    others = [*ours, *(Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "purelib", "platlib"))]
    found = {}
    for module in {type(part).__module__ for part in parts}:
        file = getattr(sys.modules.get(module), "__file__", None)
        if file and not any(Path(file).resolve().is_relative_to(folder) for folder in others):
            found[module] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return dict(sorted(found.items()))


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
