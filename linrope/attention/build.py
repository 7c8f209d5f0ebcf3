"""Build native.c with the user's own compiler, once, into the user's cache folder, and load it."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("native.c")
_FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-fno-math-errno", "-Wno-unknown-pragmas")
_TUNING = (("-march=native",), ("-mcpu=native",), ())  # the first that the compiler knows
_REAL = {torch.float32: "float", torch.float64: "double"}


class BuildError(RuntimeError):
    """There is no C compiler, or it does not build the kernel."""


def cache_folder() -> Path:
    """Where built kernels are kept: $LINROPE_CACHE, else linrope in $XDG_CACHE_HOME or ~/.cache."""
    own, common = os.environ.get("LINROPE_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(own) if own else Path(common or Path.home() / ".cache") / "linrope"


def _compiler() -> list[str]:
    """The user's C compiler as a command: $CC, else cc, gcc or clang."""
    chosen = os.environ.get("CC")
    candidates = [shlex.split(chosen)] if chosen else [["cc"], ["gcc"], ["clang"]]
    for command in candidates:
        if shutil.which(command[0]):
            return command
    raise BuildError(f"no C compiler found (looked for {', '.join(c[0] for c in candidates)}; set CC to name one)")


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} did not run: {error}") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise BuildError(f"{' '.join(command)}: {lines[0] if lines else f'exit status {done.returncode}'}")
    return done.stdout


@functools.cache
def library(dtype: torch.dtype) -> ctypes.CDLL:
    """The kernel for ``dtype``, built if the cache does not hold it.

    Raises:
        BuildError: It cannot be built.
    """
    if dtype not in _REAL:
        raise BuildError(f"the kernel computes in float32 or float64, not in {dtype}")
    command, macros = _command(_REAL[dtype])
    key = hashlib.sha256("\0".join([*command, macros, SOURCE.read_text()]).encode()).hexdigest()[:20]
    built = cache_folder() / f"native-{_REAL[dtype]}-{key}.so"
    try:
        loaded = ctypes.CDLL(str(built))
    except OSError:  # not built yet, or damaged since
        _build(command, built)
        loaded = ctypes.CDLL(str(built))
    for function in (loaded.forward, loaded.backward):
        function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_int
    return loaded


def _command(real: str) -> tuple[list[str], str]:
    """How to compile, and what the compiler defines then: which compiler it is, and which instructions the CPU has."""
    command, tuning = [*_compiler(), *_FLAGS, f"-DREAL={real}"], list(_TUNING)
    while True:
        tuned = [*command, *tuning.pop(0)]
        try:
            return tuned, _run([*tuned, "-dM", "-E", "-x", "c", os.devnull])
        except BuildError:
            if not tuning:
                raise


def _build(command: list[str], built: Path) -> None:
    try:
        built.parent.mkdir(parents=True, exist_ok=True)
        aside = tempfile.TemporaryDirectory(dir=built.parent, prefix="building-")
    except OSError as error:
        raise BuildError(f"cannot write to {built.parent}: {error}; set LINROPE_CACHE to another folder") from None
    with aside as folder:
        compiled, linked = Path(folder) / "native.o", Path(folder) / "native.so"
        try:
            _run([*command, "-fopenmp", "-c", str(SOURCE), "-o", str(compiled)])
        except BuildError:  # a compiler without OpenMP: one thread
            _run([*command, "-c", str(SOURCE), "-o", str(compiled)])
        # Linked without OpenMP's library: torch's own is in the process, and two thread pools fight for the cores.
        undefined = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
        link = [*command, "-shared", str(compiled), "-o", str(linked), "-lm"]
        _run([*link, *undefined])
        try:
            ctypes.CDLL(str(linked))
        except OSError:  # a torch without OpenMP
            _run([*link, "-fopenmp"])
        os.replace(linked, built)  # in one step: another process may be building the same
