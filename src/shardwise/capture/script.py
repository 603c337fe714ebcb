"""A captured step as a script in plain PyTorch and `torch.distributed`, one file for all ranks."""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from .._torch import OpOverload, pytree
from ..comm import engine_of
from ..errors import CaptureError
from ..storage.wrapper import Wrapper
from .agree import COLLECTIVES
from .emit import INFIX, infix
from .graph import Graph
from .passes import has_effects, is_view
from .recorder import finish, set_random_state

aten = torch.ops.aten
_CALLS = {"all_gather": "all_gather_single", "reduce_scatter": "reduce_scatter_single"}
_CALLS |= {"all_to_all": "all_to_all_single"}
_NUMBER = re.compile(r"(?<![\w.\"])-?\d+(?:\.\d+)?(?:e-?\d+)?(?![\w.\"])")
_LONGEST = 70
"""A longer call is a statement of its own."""
_CHECKS = {
    "_refuse_outside": """
def refuse_outside(index, least, size, dim):
    low, high = (int(bound) for bound in torch.aminmax(index))
    if low < least or high >= size:
        bad = high if high >= size else low
        raise IndexError(f"index {bad} is out of bounds for dimension {dim} with size {size}")
""",
    "_refuse_targets": """
def refuse_targets(target, outside):
    if bool(outside.any()):
        raise IndexError(f"Target {int(target[outside][0])} is out of bounds.")
""",
    "_refuse_classes": """
def refuse_classes(part, num_classes):
    if part.numel() and (part.min() < 0 or (num_classes != -1 and part.max() >= num_classes)):
        raise RuntimeError(f"Class values must be non-negative and below {num_classes}.")
""",
}
"""What checks of indices are in a script, by the name of the function in a graph."""


class Writer:
    """Writes the step of this rank: `lines`, and what else the script needs."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.groups: list[tuple[int, ...]] = []
        self.checks: list[str] = []
        self.state: dict[str, str] = {}
        """The names of tensors in the state, with their layouts."""
        self._texts: dict[fx.Node, str] = {}
        self._names: dict[str, int] = {}
        self.lines: list[str] = []
        self._effects = _effects_before(graph.recording.seen.graph)
        for each in graph.recording.seen.inputs:
            self._texts[each.node] = self._input(each)
        for node in graph.recording.seen.graph.nodes:
            if node.op == "call_function":
                self._write(node)
        end: Any = next(n for n in reversed(graph.recording.seen.graph.nodes) if n.op == "output")
        pairs = zip(graph.recording.outputs, end.args[0][0], strict=False)  # gradients follow
        made = [self._result(output, nodes) for output, nodes in pairs]
        self.lines.append(f"return {', '.join(made) or None}")

    def _input(self, each: Any) -> str:
        text: str = each.expression
        if text.startswith("flat["):
            return "args" + text.removeprefix("flat").partition(".")[0]
        if ".param_groups[" in text:
            at, _, rest = text.partition(".param_groups[")
            return f"options[{at.removeprefix('O')}][{rest}"
        name = each.label
        whole = each.spec is not None and ".state[" not in text
        self.state[name] = str(each.spec) if whole else ""
        return f"s[{name!r}]"

    def _result(self, output: Any, nodes: Sequence[Any]) -> str:
        if output.expression is not None:
            return "None"
        return self.text(nodes[0]) if nodes else self.text(output.value)

    def text(self, value: Any) -> str:
        """An argument in a script."""
        if isinstance(value, fx.Node):
            return self._texts[value]
        if isinstance(value, (list, tuple)):
            return "[" + ", ".join(map(self.text, value)) + "]"
        if isinstance(value, float) and not math.isfinite(value):
            return f"float({str(value)!r})"
        if isinstance(value, torch.device):
            return f"torch.device({str(value)!r})"
        if isinstance(value, dist.ReduceOp.RedOpType):
            return f"dist.ReduceOp.{value.name}"
        plain = (int, float, bool, str, type(None), torch.dtype, torch.layout, torch.memory_format)
        if not isinstance(value, plain):
            raise CaptureError(f"code: a {type(value).__name__} cannot be written into a script.")
        return str(value) if isinstance(value, plain[5:]) else repr(value)

    def _write(self, node: fx.Node) -> None:
        target: Any = node.target
        if target in INFIX:
            self._texts[node] = f"({infix(target, *map(self.text, node.args))})"
        elif target is operator.getitem:
            self._texts[node] = f"{self.text(node.args[0])}[{node.args[1]}]"
        elif target is finish:
            self.lines.append(f"{self.text(node.args[0])}.wait()")
        elif target.__name__ != "_begin":
            call = self._call(node, target)
            if self._is_inlined(node, call):
                self._texts[node] = call
                return
            self.lines.append(f"{self._variable(node, target)} = {call}" if node.users else call)

    def _is_inlined(self, node: fx.Node, call: str) -> bool:
        """True if a call can stand where its result is used: nothing is written or drawn between
        the two, or it is a view."""
        if len(node.users) != 1 or len(call) > _LONGEST:
            return False
        user = next(iter(node.users))
        at, then = self._effects[node], self._effects.get(user)
        return user.op == "call_function" and (
            is_view(node) or (not has_effects(node) and at == then)
        )

    def _call(self, node: fx.Node, target: Any) -> str:
        if target in COLLECTIVES:
            name = _CALLS.get(target.__name__, target.__name__)
            parts = [*map(self.text, node.args[1:]), self._group(node.args[0])]
            return f"dist.{name}({', '.join(parts)})"
        given: list[str] = [self.text(each) for each in node.args]
        named = {name: each for name, each in node.kwargs.items() if name != "pin_memory" or each}
        given += [f"{name}={self.text(each)}" for name, each in named.items()]
        return f"{self._function(target)}({', '.join(given)})"

    def _function(self, target: Any) -> str:
        if isinstance(target, OpOverload):
            if target is aten.mkldnn_rnn_layer.default:
                raise CaptureError("code: an LSTM cannot be written as operators of no_grad mode.")
            name = str(target).removesuffix(".default")
            return name if target.namespace == "aten" else f"torch.ops.{name}"
        if target.__name__ in _CHECKS:
            if target.__name__ not in self.checks:
                self.checks.append(target.__name__)
            return str(target.__name__).removeprefix("_")
        if target in (torch.get_rng_state, set_random_state):
            return "torch." + ("g" if target is torch.get_rng_state else "s") + "et_rng_state"
        if getattr(target, "__module__", "") in ("math", "builtins", "_operator"):
            return f"{target.__module__.removeprefix('_')}.{target.__name__}"
        raise CaptureError(
            f"code: {target.__name__} is a function of shardwise. Random numbers in counter mode "
            "cannot be written into a script; capture the step in exact mode."
        )

    def _group(self, group: Any) -> str:
        found = getattr(group, "process_group", group)
        if found is None:
            raise CaptureError("code: some ranks talk in pairs, for they have no process group.")
        ranks = tuple(dist.get_process_group_ranks(found))
        if ranks not in self.groups:
            self.groups.append(ranks)
        return f"group=groups[{self.groups.index(ranks)}], async_op=True"

    def _variable(self, node: fx.Node, target: Any) -> str:
        base = target._opname if isinstance(target, OpOverload) else target.__name__
        base = base.strip("_")
        count = self._names[base] = self._names.get(base, -1) + 1
        made = self._texts[node] = f"{base}_{count}"
        return made


def _effects_before(graph: fx.Graph) -> dict[fx.Node, int]:
    """How many nodes with effects come before each node."""
    found, count = {}, 0
    for node in graph.nodes:
        found[node] = count
        count += node.op == "call_function" and has_effects(node)
    return found


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


# --- one file for all ranks ----------------------------------------------------------------------


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
    own = json.dumps([writer.lines, writer.groups])
    world, engine = mesh.world, engine_of(mesh)
    assert world is not None
    world.store.set(world.key("code", world.rank), own)
    engine.check_equal(mesh, 0)
    every = [json.loads(world.store.get(world.key("code", rank))) for rank in range(world.size)]
    engine.check_equal(mesh, 0)
    lines, constants = _merged([each[0] for each in every])
    groups = [sorted({tuple(each) for each in found}) for found in zip(*[e[1] for e in every])]  # noqa: B905
    return _file(writer, lines, constants, groups, world.size)


Entry = tuple[str, dict[int, str]]
"""A line without its numbers, and the line itself by rank."""


def _aligned(every: Sequence[Sequence[str]]) -> list[Entry]:
    """The lines of all ranks: those that stand for each other are one entry."""
    found: list[Entry] = [(_skeleton(line), {0: line}) for line in every[0]]
    for rank, lines in enumerate(every[1:], 1):
        own = [_skeleton(line) for line in lines]
        matcher = SequenceMatcher(None, [each for each, _ in found], own, autojunk=False)
        made: list[Entry] = []
        for kind, a, b, c, d in matcher.get_opcodes():
            if kind == "equal":
                for (text, known), line in zip(found[a:b], lines[c:d], strict=True):
                    made.append((text, {**known, rank: line}))
            else:
                made += found[a:b]
                made += [(_skeleton(line), {rank: line}) for line in lines[c:d]]
        found = made
    return found


def _skeleton(line: str) -> str:
    return _NUMBER.sub("#", line)


def _merged(every: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """The lines of all ranks as one, and the numbers in which the ranks differ, by rank.

    Each rank runs its own lines in their order: what is not for all is for those that have it.
    """
    made, numbers = [], list[tuple[str, ...]]()
    for _, lines in _aligned(every):
        found = {rank: _NUMBER.findall(line) for rank, line in lines.items()}
        count = len(next(iter(found.values())))
        columns = [
            tuple(found[rank][at] if rank in found else "" for rank in range(len(every)))
            for at in range(count)
        ]
        texts = iter([_number(column, numbers) for column in columns])
        first = next(iter(lines.values()))
        line = _NUMBER.sub(lambda _, texts=texts: next(texts), first)  # type: ignore[misc]
        made.append(line if len(found) == len(every) else f"if rank in {tuple(lines)}: {line}")
    return made, [[each or "0" for each in row] for row in zip(*numbers, strict=True)]


def _number(column: tuple[str, ...], numbers: list[tuple[str, ...]]) -> str:
    """A number that may differ by rank, as an entry of the table."""
    given = [each for each in column if each]
    if len(set(given)) == 1:
        return given[0]
    if column not in numbers:
        numbers.append(column)
    return f"c[{numbers.index(column)}]"


def _file(
    writer: Writer, lines: list[str], constants: list[list[str]], groups: Any, world: int
) -> str:
    layouts = "\n".join(f"#   {name}: {layout}" for name, layout in writer.state.items() if layout)
    table = ",\n".join(f"    [{', '.join(row)}]" for row in constants)
    checks = "\n".join(_CHECKS[name] for name in writer.checks)
    body = "\n    ".join(lines)
    return f'''"""A training step, as each rank runs it. Written by shardwise; it does not need it.

    torchrun --nproc-per-node {world} FILE PREFIX

PREFIX.RANK.pt, as `captured.save_inputs` writes it, has the tensors of a rank: `state` by name,
`options` of the optimizers, `random` numbers' state, and `batches`.
"""
# ruff: noqa
import builtins, math, operator, sys

import torch
import torch.distributed as dist

aten = torch.ops.aten
# The whole tensors, of which the state has this rank's part:
{layouts}
GROUPS = {groups!r}  # the ranks that talk, in each kind of group
CONSTANTS = [
{table}
]  # by rank: the numbers in which ranks differ

{checks}
@torch.no_grad()
def step(s, options, groups, rank, args):
    c = CONSTANTS[rank] if CONSTANTS else []
    {body}


def main():
    dist.init_process_group()
    rank = dist.get_rank()
    every = [[dist.new_group(list(ranks)) for ranks in kind] for kind in GROUPS]
    groups = [
        next(group for ranks, group in zip(kind, own) if rank in ranks)
        for kind, own in zip(GROUPS, every)
    ]
    given = torch.load(f"{{sys.argv[1]}}.{{rank}}.pt")
    torch.set_rng_state(given["random"])
    for batch in given["batches"]:
        result = step(given["state"], given["options"], groups, rank, batch)
        shown = result.item().hex() if isinstance(result, torch.Tensor) else result
        print(f"rank {{rank}}: {{shown}}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''
