"""The GPT of the training benchmark made parallel by PyTorch's styles, and by hand.

Everything here is over all processes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.models.gpt import GPT
from torch import nn
from torch.func import functional_call


def with_styles(model: GPT, mesh: Any, sequence: bool) -> GPT:
    """Tensor parallel by PyTorch's DTensor styles, as its tutorials do it."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    rows: Any = RowwiseParallel(output_layouts=Shard(1)) if sequence else RowwiseParallel()
    plan: dict[str, Any] = {
        **{f"attention.{name}": ColwiseParallel() for name in ("queries", "keys", "values")},
        "attention.out": rows,
        "mlp.up": ColwiseParallel(),
        "mlp.down": rows,
    }
    if sequence:
        gather = PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True
        )
        norm = SequenceParallel(use_local_output=True)
        plan |= {"norm1": norm, "norm2": norm, "attention": gather, "mlp": gather}
        cut = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
        head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
        parallelize_module(
            model,
            mesh,
            {"embed": cut, "norm": SequenceParallel(use_local_output=True), "head": head},
        )
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return model


# --- collectives that autograd knows --------------------------------------------------------------


def _summed(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous().clone()
    dist.all_reduce(x)
    return x


def part(x: torch.Tensor) -> torch.Tensor:
    return x.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()


def _gathered(x: torch.Tensor) -> torch.Tensor:
    rows = x.new_empty(dist.get_world_size(), *x.shape)
    dist.all_gather_single(rows.flatten(0, 1), x.contiguous())
    return torch.cat(rows.unbind(), 1)


def _scattered(x: torch.Tensor) -> torch.Tensor:
    rows = torch.stack(x.chunk(dist.get_world_size(), 1))
    total = torch.empty_like(rows[0])
    dist.reduce_scatter_single(total, rows.flatten(0, 1))
    return total


def _pair(there: Callable[..., Any], back: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose gradient is another function of the gradient."""

    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = there(x)
            return made.view_as(x) if made is x else made

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = back(grad)
            return made

    return Pair.apply  # type: ignore[no-any-return]


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


copy_in, reduce_out = _pair(_same, _summed), _pair(_summed, _same)
gather_in, scatter_out = _pair(_gathered, _scattered), _pair(_scattered, _gathered)
cut_in, gather_out = _pair(part, _gathered), _pair(_gathered, part)


# --- tensor parallel -----------------------------------------------------------------------------


def tensor_parallel(model: GPT, sequence: bool) -> GPT:
    """Megatron's: columns, then rows; with `sequence` the rest is on parts of the sequence."""
    into, out = (gather_in, scatter_out) if sequence else (copy_in, reduce_out)
    for block in model.blocks:
        parts: Any = block
        for layer in (parts.attention.queries, parts.attention.keys, parts.attention.values):
            _columns(layer)
        _columns(parts.mlp.up)
        for layer in (parts.attention.out, parts.mlp.down):
            _rows(layer, out)
        for module in (parts.attention, parts.mlp):
            module.register_forward_pre_hook(lambda _, given: (into(given[0]),))
    if sequence:
        model.embed.register_forward_hook(lambda _, __, found: cut_in(found))
        model.norm.register_forward_hook(lambda _, __, found: gather_out(found))
    return model


def _columns(layer: nn.Linear) -> None:
    for parameter in (layer.weight, layer.bias):
        parameter.data = parameter.data.chunk(dist.get_world_size())[dist.get_rank()].clone()


def _rows(layer: nn.Linear, out: Callable[..., Any]) -> None:
    layer.weight.data = part(layer.weight.data)
    bias = layer.bias

    def forward(x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = out(nn.functional.linear(x, layer.weight)) + bias
        return made

    layer.forward = forward  # type: ignore[method-assign]


def reduce_replicated(model: Any) -> None:
    """Sum the gradients of parameters that each rank used on its part of the sequence."""
    used = [model.norm, *[norm for block in model.blocks for norm in (block.norm1, block.norm2)]]
    rows = [layer for block in model.blocks for layer in (block.attention.out, block.mlp.down)]
    parameters = [p for norm in used for p in norm.parameters()] + [layer.bias for layer in rows]
    _reduce_together([parameter.grad for parameter in parameters])


# --- context parallel ----------------------------------------------------------------------------


def with_places(model: GPT, places: torch.Tensor) -> GPT:
    """The positions of a part of the sequence, which a plain tensor does not know."""
    embed = model.embed
    embed.forward = lambda tokens: embed.words(tokens) + embed.places(places)  # type: ignore[method-assign]
    return model


def context_parallel(model: GPT) -> GPT:
    """Consecutive parts of the sequence; keys and values are gathered in every block.

    All ranks do the work of whole rows of scores and mask some, so it is shared evenly.
    """
    places = torch.arange(model.embed.places.num_embeddings)
    mine = places.chunk(dist.get_world_size())[dist.get_rank()]
    seen = mine[:, None] >= places
    for block in model.blocks:
        attention: Any = block.attention
        attention.forward = partial(_attention, attention, seen)
    return with_places(model, mine)


def _attention(layers: Any, seen: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    both = gather_in(torch.cat([layers.keys(x), layers.values(x)], -1)).chunk(2, -1)
    queries, keys, values = (
        each.unflatten(-1, (-1, layers.of_head)).transpose(1, 2)
        for each in (layers.queries(x), *both)
    )
    mixed = nn.functional.scaled_dot_product_attention(queries, keys, values, seen)
    found: torch.Tensor = layers.out(mixed.transpose(1, 2).flatten(2))
    return found


# --- data parallel -------------------------------------------------------------------------------


def _reduce_together(grads: list[torch.Tensor]) -> None:
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat)
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))


def mean_gradients(model: Any) -> None:
    grads = [parameter.grad for parameter in model.parameters()]
    _reduce_together(grads)
    torch._foreach_div_(grads, dist.get_world_size())


class FullySharded(nn.Module):
    """A flat shard for each block and for the rest, gathered before use; what is gathered is kept
    for the backward."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self._model = [model]  # not a submodule: its parameters are in the shards
        self._parts: list[nn.Module] = [*model.blocks]
        self.shards = nn.ParameterList([self._shard(part) for part in self._parts])
        blocks, model.blocks = model.blocks, nn.ModuleList()
        self.rest = nn.Parameter(self._shard(model))
        model.blocks = blocks

    @staticmethod
    def _shard(part: nn.Module) -> torch.Tensor:
        flat = torch.cat([parameter.detach().flatten() for parameter in part.parameters()])
        world = dist.get_world_size()
        flat = torch.cat([flat, flat.new_zeros(-flat.numel() % world)])
        return flat.chunk(world)[dist.get_rank()].clone()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        model = self._model[0]
        blocks, model.blocks = model.blocks, nn.ModuleList()
        values = _values(model, self.rest)
        model.blocks = blocks
        embed, norm, head = (
            {name.split(".", 1)[1]: v for name, v in values.items() if name.startswith(part)}
            for part in ("embed.", "norm.", "head.")
        )
        x = functional_call(model.embed, embed, (tokens,))
        for part, shard in zip(self._parts, self.shards, strict=True):
            x = functional_call(part, _values(part, shard), (x,))
        x = functional_call(model.norm, norm, (x,))
        found: torch.Tensor = functional_call(model.head, head, (x,))
        return found


def _gathered_flat(shard: torch.Tensor) -> torch.Tensor:
    whole = shard.new_empty(shard.numel() * dist.get_world_size())
    dist.all_gather_single(whole, shard.contiguous())
    return whole


def _mean_scattered(grad: torch.Tensor) -> torch.Tensor:
    total = grad.new_empty(grad.numel() // dist.get_world_size())
    dist.reduce_scatter_single(total, grad.contiguous())
    return total / dist.get_world_size()


_gather_flat = _pair(_gathered_flat, _mean_scattered)


def _values(part: nn.Module, shard: torch.Tensor) -> dict[str, torch.Tensor]:
    """The parameters of a module by name, as views of the gathered shard."""
    named = dict(part.named_parameters())
    sizes = [parameter.numel() for parameter in named.values()]
    whole = _gather_flat(shard)[: sum(sizes)].split(sizes)
    pairs = zip(named.items(), whole, strict=True)
    return {name: flat.view(parameter.shape) for (name, parameter), flat in pairs}
