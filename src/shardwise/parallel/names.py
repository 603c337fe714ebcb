"""Names of parameters that differ only in the indices of layers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")


def generic_name(name: str) -> str:
    """A name with `*` in place of each index.

    >>> generic_name("layers.0.mlp.2.weight")
    'layers.*.mlp.*.weight'
    """
    return _INDEX.sub("*", name)


def common_names(names: Iterable[str]) -> list[str]:
    """Names that differ only in indices as one, with `*` in place of the indices that differ.

    >>> common_names(["layers.0.mlp.2.weight", "norm.weight", "layers.1.mlp.2.weight"])
    ['layers.*.mlp.2.weight', 'norm.weight']
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(generic_name(name), []).append(name)
    return list(map(common_name, groups.values()))


def common_name(names: Sequence[str]) -> str:
    """One name for names that differ only in indices."""
    parts = zip(*[re.split(r"([.:])", name) for name in names], strict=True)
    return "".join([each[0] if len(set(each)) == 1 else "*" for each in parts])
