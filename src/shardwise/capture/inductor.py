"""The local parts of a graph through inductor: stretches between collectives, writes and draws."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .._torch import OpOverload, inductor
from ..errors import CaptureError
from .passes import has_effects, is_view, root_of, written_roots

aten = torch.ops.aten
RECURRENT = aten.mkldnn_rnn_layer.default
"""It gives other results where gradients are not enabled, as nowhere in compiled code."""
_FEWEST = 2
"""Fewer operations that compute are not worth a call."""
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""How much compiled results may differ, beside the largest of their values."""


@dataclass
class Stretch:
    """Operations without effects, one after another, that run as one compiled function."""

    nodes: list[fx.Node]
    inputs: list[fx.Node]
    outputs: list[fx.Node]
    plain: Callable[..., Sequence[torch.Tensor]]
    run: Callable[..., Sequence[torch.Tensor]]

    def compared(self, differences: list[str]) -> Callable[..., Sequence[torch.Tensor]]:
        """A function that runs both ways, and notes in which results they differ."""

        def run(*given: torch.Tensor) -> Sequence[torch.Tensor]:
            want, have = self.plain(*given), self.run(*given)
            for node, one, other in zip(self.outputs, want, have, strict=True):
                if not _close(one, other):
                    differences.append(f"inductor gives another {node.name}")
            return have

        return run


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype is not other.dtype or _steps(one) != _steps(other):
        return False
    if one.dtype not in _TOLERANCE:
        return torch.equal(one, other)
    finite = one[one.isfinite()]
    largest = finite.abs().max().item() if finite.numel() else 0.0
    least = _TOLERANCE[one.dtype]
    return torch.allclose(one, other, rtol=least, atol=least * largest, equal_nan=True)


def _steps(tensor: torch.Tensor) -> list[int]:
    """The strides that matter: a dim of one element may have any."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return [step for size, step in pairs if size > 1 and tensor.numel()]


def stretches(graph: fx.Graph) -> list[Stretch]:
    """The stretches of a graph, compiled; those that are alike are compiled once."""
    compiled: dict[Any, Any] = {}
    made = []
    for nodes in _runs(graph):
        own = set(nodes)
        inputs = list(dict.fromkeys(i for n in nodes for i in n.all_input_nodes if i not in own))
        outputs = [n for n in nodes if "val" in n.meta and any(u not in own for u in n.users)]
        if not outputs:  # nobody uses them, and a pass that drops them was left out
            continue
        module = _module(nodes, inputs, outputs)
        layouts = tuple([(*node.meta["val"], node.meta["device"]) for node in inputs])
        key = str(module.graph), layouts
        if key not in compiled:
            compiled[key] = _compiled(module, layouts)
        made.append(Stretch(nodes, inputs, outputs, module.forward, compiled[key]))
    return made


def _compiled(module: fx.GraphModule, layouts: Sequence[Any]) -> Any:
    try:
        return inductor(module, layouts)
    except Exception as error:  # whatever a compiler says
        raise CaptureError(
            f"capture: backend='inductor' cannot compile a part of the step: {error}. It needs a "
            "C++ compiler. Leave the backend out to replay with PyTorch's own kernels."
        ) from error


def _runs(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Operations one after another that inductor can take."""
    end = next(node for node in reversed(graph.nodes) if node.op == "output")
    # Inductor may give two results one memory: not those that are written or that a user gets.
    written = written_roots(graph) | set(map(root_of, end.all_input_nodes))
    run: list[fx.Node] = []
    for node in (*graph.nodes, None):
        if node in run:
            continue
        if node is not None and _fits(node, written):
            # The results of a tuple come along, wherever they are taken out of it.
            run += [node] if "val" in node.meta else [node, *node.users]
            continue
        if sum(isinstance(n.target, OpOverload) and not is_view(n) for n in run) >= _FEWEST:
            yield run
        run = []


def _fits(node: fx.Node, written: set[fx.Node]) -> bool:
    """True if a node computes tensors of tensors, in memory that nobody writes or gets."""
    return (
        isinstance(node.target, OpOverload)
        and root_of(node) not in written
        and not has_effects(node)
        and node.target is not RECURRENT
        and torch.Tag.data_dependent_output not in node.target.tags
        and torch.Tag.dynamic_output_shape not in node.target.tags
        and all("val" in each.meta for each in node.all_input_nodes)
        and _tensors_only(node)
    )


def _tensors_only(node: fx.Node) -> bool:
    """False for a node that gives a number, such as `item`."""
    return "val" in node.meta or all(user.target is operator.getitem for user in node.users)


def _module(
    nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> fx.GraphModule:
    graph = fx.Graph()
    known = {node: graph.placeholder(f"given_{place}") for place, node in enumerate(inputs)}
    for node in nodes:
        made = graph.call_function(
            node.target,  # type: ignore[arg-type]
            fx.map_arg(node.args, known.__getitem__),
            fx.map_arg(node.kwargs, known.__getitem__),
        )
        known[node] = made
    graph.output(tuple([known[node] for node in outputs]))
    return fx.GraphModule(torch.nn.Module(), graph)
