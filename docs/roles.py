"""Docstrings name things as ``:class:`Rotary` ``; on the site they are code."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object


class Roles(Extension):
    """Turn references into code."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring."""
        if obj.docstring:
            obj.docstring.value = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", obj.docstring.value)
