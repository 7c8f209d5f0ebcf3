"""Writing files and figures so that a reader never meets half of one."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # training writes files too, and needs no matplotlib for it
    from matplotlib.figure import Figure


def write_whole(path: str | Path, content: str | bytes | memoryview) -> Path:
    """Write ``content`` beside ``path``, then rename it into place; folders are made as needed.

    A full disk, a kill or a power cut in the middle leaves the old file as it was.

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
        with aside.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())  # before the renaming, or a power cut could leave the new name without content
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    return path


def save_figure(figure: Figure, stem: Path) -> tuple[Path, Path]:
    """Write ``<stem>.png`` and ``<stem>.svg``, the same bytes for the same figure; returns their paths.

    Raises:
        OSError: A file cannot be written.
    """
    paths = []
    for suffix, metadata in ((".png", {"Software": None}), (".svg", {"Date": None})):
        buffer = io.BytesIO()
        figure.savefig(buffer, format=suffix[1:], metadata=metadata, dpi=200)
        paths.append(write_whole(stem.with_name(stem.name + suffix), buffer.getvalue()))
    return paths[0], paths[1]
