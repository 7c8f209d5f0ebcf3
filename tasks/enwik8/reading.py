"""Reading a file of bytes so that what was checked is what is trained on."""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from plots.files import write_whole

_FRESH_SECONDS = 2.0  # a file changed less long ago may change again without its times showing it
_WATCH_SECONDS = 0.3
_MOST_REMEMBERED = 100


class ChangingError(OSError):
    """Somebody is writing the file."""


def read_bytes(path: Path, memory: Path) -> tuple[UInt8[np.ndarray, " n"], str]:
    """Read a whole file and its SHA-256, in hexadecimal.

    The bytes are a copy in memory, read-only: whoever truncates, overwrites or replaces the file later changes
    nothing for this process. The hash is computed once and remembered by the file's size, times and inode; one that
    has just been written is not remembered, for its times might not tell it from its successor.

    Args:
        path: The file.
        memory: JSON file of remembered hashes; if it cannot be written, nothing is remembered.

    Raises:
        ChangingError: The file grew or changed while it was looked at: a download, or a copy, still under way.
        OSError: It cannot be read.
    """
    before = _stamp(path)
    fresh = time.time() - max(before[1:3]) / 1e9 < _FRESH_SECONDS
    if fresh:
        time.sleep(_WATCH_SECONDS)
    data = np.fromfile(path, dtype=np.uint8)
    data.flags.writeable = False
    if _stamp(path) != before or len(data) != before[0]:
        raise ChangingError(f"it is being written ({before[0]:,} bytes a moment ago, {path.stat().st_size:,} now)")
    known = _remembered(memory)
    key = str(path.resolve())
    if key in known and known[key][0] == before:
        return data, known[key][1]
    sha256 = hashlib.sha256(data.data).hexdigest()
    if not fresh:
        known.pop(key, None)
        newest = dict([*known.items(), (key, [before, sha256])][-_MOST_REMEMBERED:])
        with suppress(OSError):
            write_whole(memory, json.dumps(newest, indent=1) + "\n")
    return data, sha256


def _stamp(path: Path) -> list[int]:
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _remembered(memory: Path) -> dict[str, Any]:
    try:
        content = json.loads(memory.read_text())
        return {key: [list(stamp), str(sha256)] for key, (stamp, sha256) in content.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}  # then it is computed again
