"""What importing linrope costs beside torch."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator

from tasks.speed.rows import Row

_CODE = """
import time
begin = time.perf_counter()
import torch
middle = time.perf_counter()
import linrope
print(middle - begin, time.perf_counter() - middle)
"""


def measure(quick: bool) -> Iterator[Row]:
    """Median seconds of both imports, each in new processes."""
    times = []
    for _ in range(4 if quick else 10):
        done = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, check=True)
        times.append(tuple(map(float, done.stdout.split())))
    torch_seconds, own_seconds = (statistics.median(part) for part in zip(*times[1:], strict=True))
    yield Row("import", "", "torch", seconds=torch_seconds)
    yield Row(
        "import", "", "linrope, after torch", seconds=own_seconds, ratio=own_seconds / torch_seconds, against="torch"
    )
