"""The folder that keeps what was measured, checkpoint by checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from plots.files import write_whole
from plots.length_rows import LengthRow, read_rows, rows_as_csv
from plots.runs import RunError
from tasks.enwik8.length.plan import METHOD
from tasks.enwik8.length.subjects import Subject
from tasks.run_directory import differences

_NEEDED = ("sha256", "rows_sha256")  # of a checkpoint's entry, to know it and its rows again


class LengthFolder:
    """length.csv with the rows, and length.json with what they depend on.

    Args:
        path: The folder; made when the first checkpoint is kept.
        facts: ``settings`` and ``data``, by which a call knows its own folder again.

    Raises:
        RunError: It was made with other facts, or its files are not as this command left them.
    """

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        self.path, self.facts = path, json.loads(json.dumps(facts))
        then = self._read()
        changes = [d for key in facts if then for d in differences(then.get(key), self.facts[key], key)]
        if changes:
            listed = "; ".join(changes[:5])
            raise RunError(f"{path} was measured otherwise (then -> now): {listed}. Choose another --out, or delete it")
        self.checkpoints: dict[str, Any] = then.get("checkpoints", {})
        self.rows = self._read_rows()

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
            "rows_sha256": _digest(rows),
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
            if not (isinstance(content, dict) and isinstance(content.get("checkpoints"), dict)):
                raise ValueError("no checkpoints in it")
            for name, entry in content["checkpoints"].items():
                if missing := [key for key in _NEEDED if not (isinstance(entry, dict) and key in entry)]:
                    raise ValueError(f"no {' and no '.join(missing)} of {name} in it")
            return content
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise RunError(
                f"{path} is not what this command writes ({error}); choose another --out, or delete {self.path}"
            ) from None

    def _read_rows(self) -> list[LengthRow]:
        """Those of the checkpoints that count as done: rows reach the disk before the list of these."""
        path = self.path / "length.csv"
        again = f"delete {self.path}, and the same command measures again"
        try:
            rows = read_rows(path) if self.checkpoints and path.is_file() else []
        except RunError as error:
            raise RunError(f"{error}; {again}") from None
        for name, entry in self.checkpoints.items():
            if _digest(row for row in rows if row.run == name) != entry["rows_sha256"]:
                raise RunError(f"{path} is damaged: its rows of {name} are not those that were measured; {again}")
        return [row for row in rows if row.run in self.checkpoints]


def _digest(rows: Iterable[LengthRow]) -> str:
    return hashlib.sha256(rows_as_csv(rows).encode()).hexdigest()


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
