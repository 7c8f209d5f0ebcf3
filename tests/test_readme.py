"""What the README says can be done, and what it names exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


def test_the_layer_example_is_ten_lines():
    (example,) = [code for code in blocks("python") if "LinearAttention(" in code]
    assert len([line for line in example.splitlines() if line.strip()]) <= 10


def test_files_that_are_named_exist():
    named = set(re.findall(r"(?<![\w/])((?:configs|linrope|tasks|plots|tests)/[\w./-]*[\w/])", README))
    assert named
    missing = [name for name in sorted(named) if not (ROOT / name).exists()]
    assert not missing


def test_there_are_two_marked_commands():
    for mark in ("compare", "test"):
        assert len(re.findall(rf"<!-- command: {mark} -->\n```sh\n.+\n```\n", README)) == 1
