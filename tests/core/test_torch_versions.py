"""The package says `torch>=2.13`: private names of PyTorch are in one file, and may be missing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import shardwise

ROOT = Path(shardwise.__file__).parent
FILES = sorted(file for file in ROOT.rglob("*.py") if file.name != "_torch.py")
OPERATORS = ("_foreach_", "_fused_")


def private_names(text: str) -> list[str]:
    """Private names of torch and its modules; operators have such names too."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{each.name}" for each in node.names]
        elif isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        else:
            continue
        for name in names:
            if name.startswith("torch.distributed.tensor."):  # interop.py, which converts to it
                continue
            first, *rest = name.split(".")
            inside = first == "dist" or (first == "torch" and rest[:1] != ["ops"])
            hidden = [part for part in rest if part.startswith("_") and not part.startswith("__")]
            if inside and any(not part.startswith(OPERATORS) for part in hidden):
                found.append(name)
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_private_names_are_in_one_file(file: Path) -> None:
    assert private_names(file.read_text()) == []


def test_the_check_sees_what_it_should() -> None:
    assert private_names("import torch\ntorch._C._x()") == ["torch._C._x", "torch._C"]
    assert private_names("from torch._prims_common import y") == ["torch._prims_common.y"]
    assert private_names("torch._foreach_add(a, b); torch.ops.aten._to_copy(a)") == []


PROGRAM = """
import torch
{before}
import shardwise as sw
mesh = sw.init_device_mesh("cpu", (2,))
x = sw.distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [sw.Shard(0)]).requires_grad_()
(x * 2).sum().backward()
print(x.grad.full_tensor().sum().item())
"""
MISSING = {
    "the flag of torch.fx": "vars(torch.fx._symbolic_trace).pop('_is_fx_tracing_flag', None)",
    "the count of modes": "del torch._C._len_torch_dispatch_stack",
}


@pytest.mark.parametrize("name", MISSING)
def test_names_that_other_versions_lack(name: str) -> None:
    program = PROGRAM.format(before=MISSING[name])
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.stdout == "12.0\n", run.stderr
