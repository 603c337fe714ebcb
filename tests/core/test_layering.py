"""A folder imports only folders above it, so the package can be read from the top."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import shardwise

ROOT = Path(shardwise.__file__).parent
ORDER = [
    "errors",
    "_torch",
    "config",
    "layout",
    "comm",
    "redistribute",
    "storage",
    "rules",
    "dispatch",
    "random",
    "tensor",
    "forms",
    "register",
    "interop",
    "parallel",
    "tools",
    "report",
    "capture",
    "experimental",
    "debug",
    "__init__",
    "__main__",
]
FILES = sorted(ROOT.rglob("*.py"))


def part_of(file: Path) -> str:
    """The entry of the list that a file belongs to: its module, or its sub-package."""
    inside = file.relative_to(ROOT)
    return inside.parts[0] if len(inside.parts) > 1 else inside.stem


def imports(node: ast.AST, package: list[str]) -> Iterator[tuple[int, str]]:
    """The absolute names that run-time imports below `node` ask for, with their lines."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Import):
            for name in child.names:
                yield child.lineno, name.name
        elif isinstance(child, ast.ImportFrom):
            base = package[: len(package) - child.level + 1] if child.level else []
            stem = [*base, *(child.module.split(".") if child.module else [])]
            for name in child.names:
                yield child.lineno, ".".join([*stem, name.name])
        else:
            yield from imports(child, package)


@cache
def imports_of(file: Path) -> list[tuple[int, str]]:
    package = ["shardwise", *file.relative_to(ROOT).parts[:-1]]
    return list(imports(ast.parse(file.read_text()), package))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_module_imports_only_earlier_ones(file: Path) -> None:
    own = part_of(file)
    assert own in ORDER, f"{own} is not in the order of modules: add it where it belongs"
    late = []
    for line, name in imports_of(file):
        parts = name.split(".")
        if parts[0] != "shardwise":
            continue
        asked = parts[1] if len(parts) > 1 and parts[1] in ORDER else "__init__"
        if asked != own and ORDER.index(asked) > ORDER.index(own):
            late.append(f"{file.name}:{line} imports {name}, which comes later")
    assert not late, "\n".join(late)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_only_interop_knows_torchs_own_dtensor(file: Path) -> None:
    if part_of(file) == "interop":
        return
    names = [name for _, name in imports_of(file)]
    assert not [name for name in names if name.startswith("torch.distributed.tensor")]
    assert "torch.distributed._tensor" not in names


def test_the_check_sees_what_it_should(tmp_path: Path) -> None:
    text = "from .. import layout\nfrom ..mesh import topology\nimport torch\n"
    found = [name for _, name in imports(ast.parse(text), ["shardwise", "engine"])]
    assert found == ["shardwise.layout", "shardwise.mesh.topology", "torch"]
    guarded = "if TYPE_CHECKING:\n    from .tensor import DTensor\n"
    assert list(imports(ast.parse(guarded), ["shardwise"])) == []


COLLECTIVE = re.compile(
    r"\bdist\.(all_|reduce_|broadcast|scatter|gather|barrier|batch_isend|send|recv|isend|irecv)"
)


def test_one_module_asks_for_collectives() -> None:
    """Beside it, the first rank gives a new mesh its random state, and `calibrate` measures."""
    found = [file for file in FILES if COLLECTIVE.search(file.read_text())]
    assert {part_of(file) for file in found} == {"comm", "layout", "tools"}
    assert [file.stem for file in found if part_of(file) == "comm"] == ["group"]
