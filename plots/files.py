"""Writing a file so that a reader never meets half of it."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: str | Path, content: str | bytes) -> Path:
    """Write ``content`` beside ``path``, then rename it into place; folders are made as needed.

    A full disk or a kill in the middle leaves the old file as it was.

    Args:
        path: The file to make or replace.
        content: Bytes, or text that is stored as UTF-8.

    Returns:
        ``path`` as a ``Path``.

    Raises:
        OSError: The file cannot be written.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        aside.write_bytes(content.encode() if isinstance(content, str) else content)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    return path
