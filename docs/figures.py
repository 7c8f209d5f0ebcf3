"""Figures that need no training, drawn anew whenever the site is built."""

from __future__ import annotations

import tempfile
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from plots import kernel_error, rotary_decay


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the figures, and the one that the README shows."""
    readme = Path(config.config_file_path).parents[1] / "plots/rope.png"
    files.append(File.generated(config, "figures/rope.png", content=readme.read_bytes()))
    with tempfile.TemporaryDirectory() as folder:
        drawn = [
            kernel_error.draw(Path(folder) / "kernel_error"),
            rotary_decay.draw(Path(folder) / "rotary_decay", bases=(100.0, 10_000.0, 500_000.0)),
        ]
        for png, _ in drawn:
            files.append(File.generated(config, f"figures/{png.name}", content=png.read_bytes()))
    return files
