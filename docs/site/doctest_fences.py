"""For `make docs`: examples in docstrings become blocks of code."""

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"(?:^>>> .*\n?(?:^(?!>>> ).+\n?)*)+", re.MULTILINE)


class DoctestFences(griffe.Extension):
    """Put a fence around each run of `>>>` lines and what they print."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            text = obj.docstring.value
            obj.docstring.value = _EXAMPLE.sub(
                lambda m: f"\n```pycon\n{m[0].rstrip()}\n```\n", text
            )
