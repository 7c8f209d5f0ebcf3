"""The folder that keeps what was measured, checkpoint by checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plots.files import write_whole
from plots.length_rows import LengthRow, read_rows, rows_as_csv
from plots.runs import RunError
from tasks.enwik8.length.plan import METHOD
from tasks.enwik8.length.subjects import Subject
from tasks.run_directory import differences


class LengthFolder:
    """length.csv with the rows, and length.json with what they depend on.

    Args:
        path: The folder; made when the first checkpoint is kept.
        facts: ``settings`` and ``data``, by which a call knows its own folder again.

    Raises:
        RunError: It was made with other facts, or its files cannot be read.
    """

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        self.path, self.facts = path, json.loads(json.dumps(facts))
        then = self._read()
        changes = [d for key in facts if then for d in differences(then.get(key), self.facts[key], key)]
        if changes:
            listed = "; ".join(changes[:5])
            raise RunError(f"{path} was measured otherwise (then -> now): {listed}. Choose another --out, or delete it")
        self.checkpoints: dict[str, Any] = then.get("checkpoints", {})
        # Rows reach the disk before the list that counts their checkpoint as done.
        rows = read_rows(path / "length.csv") if self.checkpoints else []
        self.rows = [row for row in rows if row.run in self.checkpoints]

    def has(self, subject: Subject) -> bool:
        """Whether the checkpoint was measured already.

        Raises:
            RunError: Another one of its name was.
        """
        if subject.name not in self.checkpoints:
            return False
        if self.checkpoints[subject.name]["sha256"] != _sha256(subject.checkpoint):
            raise RunError(
                f"{subject.checkpoint} is not the checkpoint that was measured into {self.path} under its name, "
                f"{subject.name}; choose another --out, or delete it"
            )
        return True

    def keep(self, subject: Subject, rows: Sequence[LengthRow], notes: Sequence[str], environment: Any) -> None:
        """Add what was measured of one checkpoint; both files are whole at every moment.

        Raises:
            OSError: They cannot be written.
        """
        self.rows += rows
        self.checkpoints[subject.name] = {
            "checkpoint": str(subject.checkpoint),
            "sha256": _sha256(subject.checkpoint),
            "trained_length": subject.trained,
            "notes": list(notes),
            "code_version": environment["code_version"],
        }
        content = {**self.facts, "method": METHOD, "checkpoints": self.checkpoints, "environment": environment}
        write_whole(self.path / "length.csv", rows_as_csv(self.rows))
        write_whole(self.path / "length.json", json.dumps(content, indent=2, ensure_ascii=False) + "\n")

    def _read(self) -> dict[str, Any]:
        path = self.path / "length.json"
        try:
            content = json.loads(path.read_text())
            if isinstance(content, dict) and isinstance(content.get("checkpoints"), dict):
                return content
            raise ValueError("no checkpoints in it")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise RunError(f"{path} is not what this command writes ({error}); choose another --out") from None


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
