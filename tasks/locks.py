"""One process at a time, where two would spoil each other's files."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


@contextmanager
def alone(lock: Path, waiting: str) -> Iterator[None]:
    """Keep other processes out as long as the block lasts; wait, and say so, while another one is in.

    The system frees the lock of a process that dies, however it dies; the file itself means nothing and stays.

    Args:
        lock: A file that all of them agree on; its folder is made.
        waiting: What is printed before the wait.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    held = FileLock(lock)
    try:
        held.acquire(timeout=0)
    except Timeout:
        print(f"waiting: {waiting}", file=sys.stderr, flush=True)
        held.acquire()
    try:
        yield
    finally:
        held.release()
