"""Run folders with known contents, for the tests of what reads them."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COLUMNS = ("lr", "step", "tokens", "seconds", "train/loss", "train/bpc", "val/loss", "val/bpc", "grad_norm")


def make_run(
    directory: Path,
    validations: Sequence[tuple[int, float]],
    *,
    seconds_per_step: float = 0.5,
    bytes_per_step: int = 1000,
    finished: bool = True,
    label: str | None = None,
    **info: Any,
) -> Path:
    """Write a run whose (step, bpc) validations are given; training bpc falls as 2 + 6 / step."""
    directory.mkdir(parents=True, exist_ok=True)
    known = dict(validations)
    with (directory / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        for step in range(1, validations[-1][0] + 1):
            row = {"step": step, "tokens": step * bytes_per_step, "seconds": step * seconds_per_step}
            writer.writerow({**row, "train/bpc": 2 + 6 / step, "val/bpc": known.get(step, "")})
    content = {
        "finished": finished,
        "steps": validations[-1][0],
        "tokens": validations[-1][0] * bytes_per_step,
        "tokens_per_second": bytes_per_step / seconds_per_step,
        "parameters": 1234,
        "peak_memory_bytes": 5_000_000,
        "data": {"name": "a text", "size": 3_000_000, "sha256": "ab" * 32},
        "device": "cpu",
        "threads": 2,
        "precision": "32-true",
        "code_version": "0.1.0",
        "torch": "2.x",
        "validation": {
            "bpc": validations[-1][1],
            "split": "validation",
            "evaluation": "window",
            "context": 256,
            "stride": 128,
            "bytes_scored": 149_999,
        },
        **info,
    }
    (directory / "run.json").write_text(json.dumps(content))
    if label is not None:
        (directory / "arm.json").write_text(json.dumps({"label": label}))
    return directory
