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
_PATIENCE = 120.0  # seconds; a build takes two


class BuildError(RuntimeError):
    """There is no C compiler, or it does not build the kernel."""


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
    folder, name = cache_folder(), f"native-{_REAL[dtype]}-{key}"
    for built in folder.glob(f"{name}-*.so"):
        # Its name says what it must hold: code that is cut short would take the process down.
        if built.stem == f"{name}-{_digest(built)}":
            return _load(built)
    return _build(command, folder, name)


def cache_folder() -> Path:
    """Where built kernels are kept: $LINROPE_CACHE, else linrope in $XDG_CACHE_HOME or ~/.cache."""
    own, common = os.environ.get("LINROPE_CACHE"), os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(own) if own else Path(common or "~/.cache") / "linrope"
        return folder.expanduser().absolute()
    except RuntimeError as error:
        raise BuildError(f"no folder to build in: {error}; set LINROPE_CACHE to one") from None


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


def _compiler() -> list[str]:
    """The user's C compiler as a command: $CC, else cc, gcc or clang."""
    try:
        chosen = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise BuildError(f"CC={os.environ['CC']!r} is no command: {error}") from None
    candidates = [chosen] if chosen else [["cc"], ["gcc"], ["clang"]]
    for command in candidates:
        if shutil.which(command[0]):
            return command
    raise BuildError(f"no C compiler found (looked for {', '.join(c[0] for c in candidates)}; set CC to name one)")


def _build(command: list[str], folder: Path, name: str) -> ctypes.CDLL:
    """Compile, with OpenMP if that can be linked and loaded, and move the result into the cache."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        aside = tempfile.TemporaryDirectory(dir=folder, prefix="building-")
    except OSError as error:
        raise BuildError(f"cannot write to {folder}: {error}; set LINROPE_CACHE to another folder") from None
    undefined = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    # OpenMP, but without its library: torch's own is in the process, and two thread pools fight for the cores.
    # Then with a library of its own, for a torch or a compiler that knows another one; then one thread.
    ways = ((["-fopenmp"], undefined), (["-fopenmp"], ["-fopenmp"]), ([], []))
    with aside as building:
        compiled, linked = Path(building) / "native.o", Path(building) / "native.so"
        for number, (compiling, linking) in enumerate(ways, start=1):
            try:
                _run([*command, *compiling, "-c", str(SOURCE), "-o", str(compiled)])
                _run([*command, "-shared", str(compiled), "-o", str(linked), "-lm", *linking])
                _load(linked)
                break
            except BuildError:
                if number == len(ways):
                    raise
                linked.unlink(missing_ok=True)
        built = folder / f"{name}-{_digest(linked)}.so"
        os.replace(linked, built)  # in one step: another process may be building the same
    return _load(built)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_PATIENCE, stdin=subprocess.DEVNULL
        )
    except OSError as error:
        raise BuildError(f"{command[0]} did not run: {error}") from None
    except subprocess.TimeoutExpired:
        # Not a BuildError's business to be tried again with other flags.
        raise OSError(f"{command[0]} did not end within {_PATIENCE:.0f} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise BuildError(f"{' '.join(command)}: {lines[0] if lines else f'exit status {done.returncode}'}")
    return done.stdout


def _load(path: Path) -> ctypes.CDLL:
    try:
        loaded = ctypes.CDLL(str(path))
        for function in (loaded.forward, loaded.backward):
            function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_int
    except (OSError, AttributeError) as error:
        raise BuildError(f"{path} cannot be loaded: {error}") from None
    return loaded


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
