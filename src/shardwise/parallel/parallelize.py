"""`parallelize_module`: modules and their styles, by name."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import Any, TypeVar

from torch import nn

from ..errors import ArgumentError, MeshError, need, public
from ..layout.mesh import AnyMesh, Topology, topology
from ..layout.user_line import warn_user
from .saving.pretrained import gather_in_save_pretrained
from .style import ParallelStyle

M = TypeVar("M", bound=nn.Module)


@public
def parallelize_module(
    module: M,
    device_mesh: AnyMesh | None = None,
    parallelize_plan: ParallelStyle | dict[str, ParallelStyle] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> M:
    """Put a module on a mesh of one axis, in place: a style for it, or styles by submodule name.

    A name may have wildcards: `"layers.*.attn"` matches one name between the dots. `""` is the
    module itself. A name that matches nothing is warned of. All ranks take the parameters of rank
    `src_data_rank` of the mesh; with None each keeps its own. Without `device_mesh` it is the mesh
    of the innermost `with mesh:`.

    >>> import torch, shardwise
    >>> from shardwise.parallel import ColwiseParallel, RowwiseParallel
    >>> mesh = shardwise.init_device_mesh("cpu", (2,))
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    >>> model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    >>> model[0].weight.placements, model[2].weight.placements
    ((S(0),), (S(1),))
    >>> model(torch.ones(3, 4)).shape
    torch.Size([3, 4])
    """
    need("parallelize_module", module, nn.Module, "a module")
    where = _one_axis(topology(device_mesh))
    if parallelize_plan is None:
        warn_user("parallelize_module: no parallelize_plan is given, so nothing is done.")
        return module
    pairs: list[tuple[nn.Module, ParallelStyle]] = []
    if isinstance(parallelize_plan, dict):
        for name, style in parallelize_plan.items():
            _check_style(style, f"of {name!r} ")
            found = _matching(module, name)
            if not found:
                _warn_of_no_match(module, name)
            pairs += [(part, style) for part in found]
    else:
        _check_style(parallelize_plan, "")
        pairs = [(module, parallelize_plan)]
    for part, style in pairs:
        style._check(part)
    for part, style in pairs:
        style.src_data_rank = src_data_rank
        style._apply(part, where.mesh)
    gather_in_save_pretrained(module)
    return module


def _one_axis(mesh: Topology) -> Topology:
    if mesh.ndim == 1:
        return mesh
    names = [f"mesh[{name!r}]" for name in mesh.mesh.mesh_dim_names or ()]
    raise MeshError(
        f"parallelize_module: a mesh of one axis is needed, but mesh {mesh} has {mesh.ndim}. Give "
        f"{' or '.join(names) or 'a mesh with named axes and take one of them, mesh[name]'}; or "
        "use shardwise.shard_module, whose plan says the placements on all axes."
    )


def _check_style(style: Any, where: str) -> None:
    if not isinstance(style, ParallelStyle):
        theirs = type(style).__module__.startswith("torch.")
        hint = " It is PyTorch's class: import that of shardwise.parallel." if theirs else ""
        raise ArgumentError(
            f"parallelize_module: the plan {where}is a {type(style).__name__}. Give a "
            "ParallelStyle, such as ColwiseParallel(), or a dict from module names to styles."
            f"{hint}"
        )


def _matching(module: nn.Module, name: str) -> list[nn.Module]:
    """The submodules that a name with wildcards stands for."""
    found = [module]
    for token in name.split(".") if name else []:
        found = [
            child for part in found for key, child in part.named_children() if fnmatch(key, token)
        ]
    return found


def _warn_of_no_match(module: nn.Module, name: str) -> None:
    tokens = name.split(".")
    known = next(
        n for n in range(len(tokens) - 1, -1, -1) if _matching(module, ".".join(tokens[:n]))
    )
    parent = ".".join(tokens[:known])
    children = {key for part in _matching(module, parent) for key, _ in part.named_children()}
    warn_user(
        f"parallelize_module: no submodule matches {name!r}: "
        f"{parent or 'the module'} has no child {tokens[known]!r}, but "
        f"{', '.join(sorted(children)) or 'none at all'}."
    )
