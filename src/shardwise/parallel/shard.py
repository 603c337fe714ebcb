"""`shard_module`: a whole model on a mesh by one dict."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import nn

from ..comm import engine_of
from ..errors import LayoutError, public
from ..layout.mesh import AnyMesh, topology
from ..tensor.per_rank import is_first_rank
from .context import check_axis, shard_sequences
from .experts import route_experts
from .in_place import Layout, convert_module
from .plan import Plan, Rules, make_plan
from .saving.pretrained import gather_in_save_pretrained

M = TypeVar("M", bound=nn.Module)


@public
def shard_module(
    model: M,
    mesh: AnyMesh,
    plan: Rules | Plan | str,
    *,
    optimizers: Iterable[torch.optim.Optimizer] = (),
    context_parallel: str | None = None,
) -> M:
    """Put a model on a mesh, in place: the plan says where parameters live.

    `plan` is a dict from globs (or compiled regexes) of parameter names to placements by axis name,
    a `Plan`, or `"auto"`.

    - A pattern matches the whole name; `*` matches dots too. All names of a tied parameter count.
    - Patterns merge by axis. It is an error if two give a parameter different placements on an
      axis, unless one is `"*"`, which counts where no other pattern does.
    - Parameters that no pattern names are replicated. Buffers are replicated, unless a pattern
      matches them and no parameter.
    - `"auto"` takes the plan of a Hugging Face model, or else shards the linear layers and
      embeddings that it recognises over the axis `tp`; it prints the dict that it made.
    - With `context_parallel="cp"` inputs are sharded along their sequence, dim 1, over that axis,
      in blocks that share causal work evenly. Attention then runs without gathering keys.
    - Modules of stacked experts of Hugging Face models whose dim 0 is sharded send tokens to the
      ranks that hold the experts, with `dispatch_tokens`.

    Everything is checked before anything is changed. Every parameter stays the same object: ties,
    hooks, attributes, gradients and optimizers go on. State that an optimizer has already gets the
    layout of its parameter if the optimizer is named in `optimizers`.

    >>> import torch, shardwise
    >>> from shardwise import Shard
    >>> mesh = shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Linear(16, 4))
    >>> plan = {"0.*": {"tp": Shard(0)}, "1.weight": {"tp": Shard(1)}}
    >>> model = shardwise.shard_module(model, mesh, plan)
    >>> model[1].weight.placements
    (R, S(1))
    >>> batch = shardwise.distribute_tensor(torch.ones(8, 4), mesh, {"dp": Shard(0)})
    >>> model(batch).placements
    (S(0), P(sum))
    """
    where = topology(mesh)
    if context_parallel is not None:
        check_axis(mesh, context_parallel)
    try:
        made = make_plan(model, mesh, plan)
    except LayoutError:
        engine_of(where).check_equal(where, -1)  # if other ranks have no error, they get one
        raise
    if plan == "auto" and is_first_rank():
        print(made.as_code())
    layouts: dict[str, Layout] = {e.names[0]: e.spec.placements for e in made.entries}
    convert_module("shard_module", model, mesh, lambda names, _: layouts[names[0]], optimizers)
    route_experts(model)
    if context_parallel is not None:
        shard_sequences(model, mesh, context_parallel)
    gather_in_save_pretrained(model)
    return model
