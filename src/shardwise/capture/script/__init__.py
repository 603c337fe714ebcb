"""A captured step as a script in plain PyTorch and `torch.distributed`, one file for all ranks."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from ..._torch import pytree
from ...comm import all_equal
from ...errors import CaptureError
from ...storage.wrapper import Wrapper
from ..graph import Graph
from .merge import merged
from .roll import rolled
from .statements import CHECKS, Writer
from .text import block, hang, with_short_lists


def save_inputs(graph: Graph, prefix: str, batches: Sequence[Sequence[Any]]) -> None:
    """Write the tensors of this rank, and the arguments of the next steps."""
    leaves = [pytree.tree_leaves((tuple(batch), {})) for batch in batches]
    found = graph.inputs(leaves[0]).items()
    values = {
        "state": {name: _part(value).clone() for name, value in found},
        "options": [
            [{k: v for k, v in group.items() if k != "params"} for group in each.param_groups]
            for each in graph.state.optimizers
        ],
        "random": torch.get_rng_state(),
        "batches": [[_part(value) for value in each] for each in leaves],
    }
    torch.save(values, f"{prefix}.{dist.get_rank()}.pt")


def _part(value: Any) -> Any:
    """The local tensor of a tensor."""
    return value._locals[0] if isinstance(value, Wrapper) else value


def script(graph: Graph) -> str:
    """The source of a script. All ranks call it, and get the same."""
    mesh = graph.meshes[0] if graph.meshes else None
    if mesh is None or mesh.virtual:
        raise CaptureError(
            "code: on a virtual mesh one process plays all ranks. Capture the step under torchrun "
            "to get the program of a rank."
        )
    writer = Writer(graph)
    if len(mesh.ranks) != dist.get_world_size():
        raise CaptureError(f"code: mesh {mesh} has not all ranks of the program.")
    own = json.dumps([writer.lines, writer.groups, writer.checks, writer.state])
    world = mesh.world
    assert world is not None
    world.store.set(world.key("code", world.rank), own)
    all_equal(mesh, 0)
    every = [json.loads(world.store.get(world.key("code", rank))) for rank in range(world.size)]
    all_equal(mesh, 0)
    lines, constants = merged([each[0] for each in every])
    groups = _kinds([each[1] for each in every])
    checks = dict.fromkeys(name for each in every for name in each[2])
    state = {name: text for each in every for name, text in each[3].items()}
    return _file(lines, constants, groups, list(checks), state)


def _kinds(every: Sequence[Sequence[Sequence[int]]]) -> list[list[tuple[int, ...]]]:
    """The groups of all ranks, given those of each rank in the order of their first use: the first
    of all ranks, the second, and so on."""
    kinds = [sorted(set(map(tuple, found))) for found in zip(*every, strict=False)]
    disjoint = [len(set(chain(*kind))) == sum(map(len, kind)) for kind in kinds]
    if len(set(map(len, every))) > 1 or not all(disjoint):
        raise CaptureError(
            "code: the ranks use their process groups in another order, or some use more of them."
        )
    return kinds


def _layouts(state: Mapping[str, str]) -> list[str]:
    """The layouts of tensors as comments; layers that are alike are one line."""
    found: dict[str, dict[str, str]] = {}
    for name, layout in state.items():
        if layout:
            found.setdefault(re.sub(r"\.\d+\.", ".*.", name, count=1), {})[name] = layout
    lines = []
    for pattern, own in found.items():
        alike = len(own) > 1 and len(set(own.values())) == 1
        shown = {pattern: next(iter(own.values()))} if alike else own
        lines += [f"#   {name}: {layout}" for name, layout in shown.items()]
    return lines


def _file(
    lines: list[str],
    constants: list[list[str]],
    groups: Any,
    checks: Sequence[str],
    state: Mapping[str, str],
) -> str:
    lines, names = with_short_lists(lines)
    functions, body = rolled(lines)
    parts = [CHECKS[name].strip() for name in checks]
    parts += ["\n".join(block(each.text()[0], each.text()[1:])) for each in functions]
    step = "def step(s, options, args):"
    parts.append("\n".join(["@torch.no_grad()", *block(step, body)]))
    code = "\n\n\n".join(parts)
    imports = [
        f"import {name}\n" for name in ("builtins", "math", "operator") if f"{name}." in code
    ]
    rows = [line for row in constants for line in hang(f"    [{', '.join(row)}],")]
    head = "CONSTANTS = [  # by rank: the numbers in which ranks differ"
    tables = [head, *rows, "]", "c = CONSTANTS[rank]"] if constants else []
    tables += [line for name, each in names.items() for line in hang(f"{name} = {list(each)!r}")]
    return _FILE.format(
        world=dist.get_world_size(),
        imports="".join(imports[:2]),
        operator="".join(imports[2:]),
        layouts="\n".join(_layouts(state)),
        groups=groups,
        tables="".join(f"{line}\n" for line in tables),
        code=code,
    )


_FILE = '''"""A training step, as each rank runs it. Written by shardwise; it does not need it.

    torchrun --nproc-per-node {world} FILE PREFIX

PREFIX.RANK.pt, as `captured.save_inputs` writes it, has the tensors of a rank: `state` by name,
`options` of the optimizers, `random` numbers' state, and `batches`.
"""

{imports}import os
import sys

import torch
import torch.distributed as dist

aten = torch.ops.aten
rank = int(os.environ["RANK"])
# The whole tensors, of which the state `s` has this rank's part:
{layouts}
# The ranks that talk, in each kind of group, and this rank's groups:
GROUPS = {groups!r}
groups = []
{tables}

{code}


def main():
    dist.init_process_group()
    for kind in GROUPS:
        made = [dist.new_group(list(ranks)) for ranks in kind]
        groups.extend(group for ranks, group in zip(kind, made, strict=True) if rank in ranks)
    given = torch.load(f"{{sys.argv[1]}}.{{rank}}.pt")
    torch.set_rng_state(given["random"])
    for batch in given["batches"]:
        result = step(given["state"], given["options"], batch)
        shown = result.item().hex() if isinstance(result, torch.Tensor) else result
        print(f"rank {{rank}}: {{shown}}\\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''
