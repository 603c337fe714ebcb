"""`fully_shard`: the numbers of one device, one gather and one reduce-scatter a unit."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise import CommDebugMode, Partial, Replicate, Shard, distribute_tensor, fully_shard
from shardwise.errors import LayoutError, MeshError
from shardwise.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from ..compare import virtual

VOCABULARY, WIDTH, LENGTH = 19, 12, 5


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, 2, WIDTH // 2)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """A small language model; the embedding and the head share their weight."""

    def __init__(self, layers: int = 2, dropout: float = 0.1, recompute: Any = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.recompute = recompute

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x) if self.recompute is None else self.recompute(block, x)
        return self.head(self.norm(x))


def tokens(rows: int) -> torch.Tensor:
    return torch.arange(rows * LENGTH).view(rows, LENGTH) * 7 % VOCABULARY


def steps(model: nn.Module, lay_out: Callable[[torch.Tensor], Any], count: int = 3) -> list[float]:
    """The losses of some steps of AdamW with clipping; the last batch is shorter."""
    torch.manual_seed(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(count):
        batch = lay_out(tokens(8 if step < count - 1 else 7) + step)
        batch = batch % VOCABULARY
        logits = model(batch)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.roll(-1, 1).flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def sharded(model: GPT, mesh: Any, **options: Any) -> GPT:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def by_batch(mesh: Any) -> Callable[[torch.Tensor], Any]:
    axes = {name: Shard(0) for name in mesh.mesh_dim_names if name != "tp"}
    return lambda batch: distribute_tensor(batch, mesh, axes)


def check_training(model: GPT, made: GPT, mesh: Any, count: int = 3) -> None:
    expected, found = steps(model, lambda batch: batch, count), steps(made, by_batch(mesh), count)
    torch.testing.assert_close(found, expected)
    for name, parameter in model.named_parameters():
        value: Any = dict(made.named_parameters())[name]
        torch.testing.assert_close(value.full_tensor(), parameter.detach())


def gpt(**options: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(**options).double()  # the gradient of a key's bias is zero: Adam would scale noise


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("reshard", [None, True, False])
def test_training_is_that_of_one_device(count: int, reshard: bool | None) -> None:
    mesh, model = virtual(count, names=("dp",)), gpt()
    made = sharded(copy.deepcopy(model), mesh, reshard_after_forward=reshard)
    assert made.embed.weight is made.head.weight
    assert all(type(p) is sw.DTensor for p in made.parameters())
    assert made.blocks[0].up.weight.placements == (Shard(0),)
    check_training(model, made, mesh, 30 if count == 4 and reshard is None else 3)


def test_hybrid_sharding() -> None:
    mesh, model = virtual(2, 2, names=("nodes", "dp")), gpt()
    made = sharded(copy.deepcopy(model), mesh)
    assert made.blocks[0].up.weight.placements == (Replicate(), Shard(0))
    check_training(model, made, mesh, 30)


def test_beside_tensor_parallelism() -> None:
    mesh, model = virtual(2, 2, names=("dp", "tp")), gpt()
    plan: Any = {
        "*.up.*": {"tp": Shard(0)},
        "*.down.weight": {"tp": Shard(1)},
        "embed.weight": {"tp": Shard(0)},
    }
    made = sharded(sw.shard_module(copy.deepcopy(model), mesh, plan), mesh["dp"])
    with CommDebugMode() as comm:
        made.blocks[0](distribute_tensor(torch.ones(4, LENGTH, WIDTH).double(), mesh))
    assert comm.by_axis["dp"] == {"all_gather": 1}
    assert made.blocks[0].up.weight.placements == (Shard(1), Shard(0))
    assert made.blocks[0].down.weight.placements == (Shard(0), Shard(1))
    assert made.blocks[0].up.bias.placements == (Shard(0, split=2), Shard(0))
    assert made.blocks[0].norm1.weight.placements == (Shard(0), Replicate())
    check_training(model, made, mesh, 30)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints(reentrant: bool) -> None:
    def recompute(block: nn.Module, x: torch.Tensor) -> Any:
        return checkpoint(block, x, use_reentrant=reentrant)

    mesh, model = virtual(2, names=("dp",)), gpt(recompute=recompute)
    check_training(model, sharded(copy.deepcopy(model), mesh), mesh)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_inside_of_one_unit(reentrant: bool) -> None:
    def recompute(block: nn.Module, x: torch.Tensor) -> Any:
        return checkpoint(block, x, use_reentrant=reentrant)

    mesh, model = virtual(2, names=("dp",)), gpt(recompute=recompute)
    check_training(model, fully_shard(copy.deepcopy(model), mesh=mesh), mesh)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("reshard", [None, True])
def test_a_checkpointed_unit_is_gathered_once_each_way(
    reshard: bool | None, reentrant: bool
) -> None:
    def recompute(block: nn.Module, x: torch.Tensor) -> Any:
        return checkpoint(block, x, use_reentrant=reentrant)

    mesh = virtual(2, names=("dp",))
    made = gpt(recompute=recompute)
    for block in made.blocks:
        fully_shard(block, mesh, reshard_after_forward=reshard)
    fully_shard(made, mesh)
    for _ in range(2):
        loss = made(by_batch(mesh)(tokens(8))).square().mean()
        loss.item()
        with CommDebugMode() as comm:
            loss.backward()
        assert comm.get_comm_counts() == {"all_gather": 2, "reduce_scatter": 3}


class Looped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in [*self.layers, *self.layers]:
            x = layer(x).tanh()
        return x


def test_units_that_run_twice_are_gathered_as_often() -> None:
    mesh, model, x = virtual(2, names=("dp",)), Looped(), torch.randn(4, 4)
    made: Any = copy.deepcopy(model)
    for layer in made.layers:
        fully_shard(layer, mesh)
    fully_shard(made, mesh)
    for _ in range(3):
        with CommDebugMode() as comm:
            out = made(distribute_tensor(x, mesh, [Shard(0)]))
        assert comm.get_comm_counts() == {"all_gather": 4}
        assert all(layer._unit._started is None for layer in made.layers)
    out.sum().backward()
    model(x).sum().backward()
    for own, parameter in zip(made.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(own.grad.full_tensor(), parameter.grad)


def test_one_gather_each_way_and_one_reduce_scatter_for_each_unit() -> None:
    mesh = virtual(4, names=("dp",))
    made = sharded(gpt(layers=3), mesh)
    batch = by_batch(mesh)(tokens(8))
    for _ in range(2):
        with CommDebugMode() as forward:
            loss = F.cross_entropy(made(batch).flatten(0, 1), batch.flatten())
        assert forward.get_comm_counts()["all_gather"] == 4  # three blocks and the rest
        loss.item()
        with CommDebugMode() as backward:
            loss.backward()
        # the outermost unit has kept its parameters
        assert backward.get_comm_counts() == {"all_gather": 3, "reduce_scatter": 4}
        made.zero_grad()


def test_no_gathered_parameter_outlives_its_use() -> None:
    mesh = virtual(2, names=("dp",))
    made = sharded(gpt(layers=3), mesh, reshard_after_forward=True)
    batch = by_batch(mesh)(tokens(8))
    loss = F.cross_entropy(made(batch).flatten(0, 1), batch.flatten())
    units = [made._unit, *[block._unit for block in made.blocks]]  # type: ignore[union-attr]
    assert all(unit._whole is None and unit._live is None for unit in units)
    loss.backward()
    assert all(unit._whole is None and unit._live is None for unit in units)
    assert all(unit._started is None for unit in units)


def test_accumulation_without_communication() -> None:
    mesh, model = virtual(2, names=("dp",)), gpt(dropout=0.0)
    made = sharded(copy.deepcopy(model), mesh)
    parts = [tokens(4), tokens(6) * 3 % VOCABULARY, tokens(2) * 5 % VOCABULARY]
    for part in parts:
        F.cross_entropy(model(part).flatten(0, 1), part.flatten()).backward()
    for part in parts[:-1]:
        batch = by_batch(mesh)(part)
        loss = F.cross_entropy(made(batch).flatten(0, 1), batch.flatten())
        with CommDebugMode() as comm, sw.keep_partial_grads():
            loss.backward()
        assert "reduce_scatter" not in comm.get_comm_counts()
        assert made.norm.weight.grad.placements == (Partial(),)  # type: ignore[union-attr]
    batch = by_batch(mesh)(parts[-1])
    F.cross_entropy(made(batch).flatten(0, 1), batch.flatten()).backward()
    for name, parameter in model.named_parameters():
        found: Any = dict(made.named_parameters())[name].grad
        assert found.placements == (Shard(0),)
        torch.testing.assert_close(found.full_tensor(), parameter.grad)


def test_frozen_parameters_and_units() -> None:
    mesh, model = virtual(2, names=("dp",)), gpt(dropout=0.0)
    for each in model.blocks[0].parameters():
        each.requires_grad_(False)
    model.blocks[1].up.weight.requires_grad_(False)
    made = sharded(copy.deepcopy(model), mesh)
    batch = tokens(8)
    F.cross_entropy(model(batch).flatten(0, 1), batch.flatten()).backward()
    given = by_batch(mesh)(batch)
    F.cross_entropy(made(given).flatten(0, 1), given.flatten()).backward()
    for (name, plain), own in zip(model.named_parameters(), made.parameters(), strict=True):
        assert (plain.grad is None) == (own.grad is None), name
        if plain.grad is not None:
            torch.testing.assert_close(own.grad.full_tensor(), plain.grad)  # type: ignore
    assert all(block._unit._whole is None for block in made.blocks)  # type: ignore[union-attr]


def test_mixed_precision() -> None:
    mesh, model = virtual(2, names=("dp",)), gpt(dropout=0.0).float()
    half = sw.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    made = copy.deepcopy(model)
    for block in made.blocks:
        fully_shard(block, mesh=mesh, mp_policy=half)
    fully_shard(made, mesh=mesh, mp_policy=replace(half, output_dtype=torch.float32))
    assert made.blocks[0].norm1.weight.dtype is torch.float32
    batch = by_batch(mesh)(tokens(8))
    logits = made(batch)
    assert logits.dtype is torch.float32
    F.cross_entropy(logits.flatten(0, 1), batch.flatten()).backward()
    plain = tokens(8)
    F.cross_entropy(model(plain).flatten(0, 1), plain.flatten()).backward()
    for own, parameter in zip(made.parameters(), model.parameters(), strict=True):
        assert own.dtype is own.grad.dtype is torch.float32  # type: ignore[union-attr]
        torch.testing.assert_close(
            own.grad.full_tensor(),  # type: ignore[union-attr]
            parameter.grad,
            rtol=0.1,
            atol=0.02,
        )


@pytest.mark.parametrize("param", [None, torch.float16, torch.bfloat16])
def test_gradients_are_reduced_in_another_dtype(param: torch.dtype | None) -> None:
    mesh, model = virtual(2, names=("dp",)), gpt(dropout=0.0).float()
    policy = sw.MixedPrecisionPolicy(param, torch.bfloat16)
    made = sharded(copy.deepcopy(model), mesh, mp_policy=policy)
    batch, plain = by_batch(mesh)(tokens(8)), tokens(8)
    loss = F.cross_entropy(made(batch).flatten(0, 1).float(), batch.flatten())
    loss.item()
    with CommDebugMode() as comm:
        loss.backward()
    assert comm.get_comm_counts() == {"all_gather": 2, "reduce_scatter": 3}
    elements = sum(parameter.numel() for parameter in model.parameters())
    assert comm.bytes["reduce_scatter"] < 2 * 0.6 * elements
    F.cross_entropy(model(plain).flatten(0, 1), plain.flatten()).backward()
    for own, parameter in zip(made.parameters(), model.parameters(), strict=True):
        assert own.grad.dtype is torch.float32  # type: ignore[union-attr]
        found = own.grad.full_tensor()  # type: ignore[union-attr]
        torch.testing.assert_close(found, parameter.grad, rtol=0.1, atol=0.02)


def test_evaluation_and_new_values_are_seen() -> None:
    mesh, model = virtual(2, names=("dp",)), gpt(dropout=0.0)
    made, batch = sharded(copy.deepcopy(model), mesh), tokens(4)
    given = by_batch(mesh)(batch)
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(made(given).full_tensor(), model(batch))
            for parameter in [*made.parameters(), *model.parameters()]:
                parameter.mul_(0.5)
    with torch.inference_mode():
        torch.testing.assert_close(made(given).full_tensor(), model(batch).clone())
    made.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})
    assert made.state_dict()["embed.weight"].placements == (Shard(0),)


def test_second_derivatives() -> None:
    mesh = virtual(2, names=("dp",))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    made = copy.deepcopy(model)
    for layer in made:
        fully_shard(layer, mesh=mesh)
    fully_shard(made, mesh=mesh)
    x = torch.randn(6, 4)
    given = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
    x.requires_grad_()
    for net, at in ((model, x), (made, given)):
        (slope,) = torch.autograd.grad(net(at).sum(), at, create_graph=True)
        slope.square().sum().backward()
    for own, parameter in zip(made.parameters(), model.parameters(), strict=True):
        if parameter.grad is not None:
            torch.testing.assert_close(own.grad.full_tensor(), parameter.grad)  # type: ignore


def test_an_error_in_a_forward_leaves_everything_usable() -> None:
    mesh, model = virtual(2, names=("dp",)), gpt(dropout=0.0)
    made, batch = sharded(copy.deepcopy(model), mesh), tokens(4)
    with pytest.raises(IndexError):
        made(by_batch(mesh)(batch + VOCABULARY))
    torch.testing.assert_close(made(by_batch(mesh)(batch)).full_tensor(), model(batch))


def test_errors_say_what_to_do() -> None:
    mesh = virtual(2, 2, 2, names=("a", "b", "c"))
    with pytest.raises(MeshError, match=r"has 3 axes.*mesh\[\"dp\"\]"):
        fully_shard(nn.Linear(2, 2), mesh=mesh)
    with pytest.raises(LayoutError, match="a module is needed, but got str"):
        fully_shard("model", mesh=mesh["a"])  # type: ignore[type-var]
    with pytest.raises(LayoutError, match="fully sharded already"):
        fully_shard(fully_shard(nn.Linear(2, 2), mesh=mesh["a"]), mesh=mesh["a"])
    placed = sw.shard_module(nn.Linear(2, 2), mesh["a"], {"*": {"a": Shard(0)}})
    with pytest.raises(LayoutError, match="must replicate it"):
        fully_shard(placed, mesh=mesh["a"])
    other = virtual(2, names=("z",))
    with pytest.raises(MeshError, match=r"on mesh \(a=2\), and \(z=2\) is no part of that mesh"):
        fully_shard(placed, mesh=other)
    with pytest.raises(LayoutError, match="shards stay on their device"):
        fully_shard(nn.Linear(2, 2), mesh=mesh["a"], offload_policy="cpu")  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="must be True, False or None"):
        fully_shard(nn.Linear(2, 2), mesh=mesh["a"], reshard_after_forward=2)
    with pytest.raises(LayoutError, match="cannot be copied"):
        copy.deepcopy(fully_shard(nn.Linear(2, 2), mesh=mesh["a"]))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"ignored_params": torch.relu}, "ignored_params: a list of parameters is needed"),
        ({"ignored_params": nn.Parameter(torch.ones(2))}, "a list of parameters is needed"),
        ({"mp_policy": torch.bfloat16}, "mp_policy: a MixedPrecisionPolicy is needed"),
        ({"shard_placement_fn": Shard(0)}, "shard_placement_fn: a function is needed"),
        ({"shard_placement_fn": lambda p: 0}, "a Shard or None as result is needed"),
        ({"shard_placement_fn": lambda p: Shard(1)}, r"S\(1\) of a tensor of 1 dims"),
    ]
    for given, text in wrong:
        layer = nn.Linear(2, 2)
        with pytest.raises(LayoutError, match=text):
            fully_shard(layer, mesh=mesh["a"], **given)
        assert type(layer.weight) is nn.Parameter


def test_ignored_parameters_and_chosen_dims() -> None:
    mesh = virtual(2, names=("dp",))
    layer = nn.Linear(4, 6)
    fully_shard(
        layer, mesh=mesh, ignored_params=[layer.bias], shard_placement_fn=lambda p: Shard(1)
    )
    assert layer.weight.placements == (Shard(1),)
    assert type(layer.bias) is nn.Parameter
    batch = torch.ones(4, 4)
    assert layer(distribute_tensor(batch, mesh, [Shard(0)])).placements == (Shard(0),)


class Gated(nn.Module):
    """A residual block; the output of `up` may be a local tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def recipe(model: nn.Module, mesh: Any, local: bool) -> nn.Module:
    """PyTorch's: styles over tp, then `fully_shard` over dp."""
    for block in model[:2]:  # type: ignore[index]
        styles: Any = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(use_local_output=local),
            "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
        parallelize_module(block, mesh["tp"], styles)
    head = ColwiseParallel(output_layouts=Replicate(), use_local_output=False)
    parallelize_module(model, mesh["tp"], {"3": head})
    for block in model[:2]:  # type: ignore[index]
        fully_shard(block, mesh["dp"])
    fully_shard([model[2], model[3]], mesh["dp"])  # type: ignore[index]
    return fully_shard(model, mesh["dp"])


def stack() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(Gated(), Gated(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)).double()


def regression(model: nn.Module, lay_out: Callable[[torch.Tensor], Any]) -> list[float]:
    torch.manual_seed(4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for rows in (6, 6, 5):
        x = lay_out(torch.randn(rows, 4, WIDTH).double())
        loss = F.mse_loss(model(x), lay_out(torch.ones(rows, 4, 5).double()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("local", [False, True])
def test_parallel_styles_then_fully_shard(local: bool) -> None:
    mesh = virtual(2, 2, names=("dp", "tp"))
    model, made = stack(), recipe(stack(), mesh, local)
    assert made[0].up.weight._spec.topology.names == ("dp", "tp")  # type: ignore[index,union-attr]
    assert made[0].up.weight.placements == (Shard(1), Shard(0))  # type: ignore[index,union-attr]
    assert made[2].weight.placements == (Shard(0), Replicate())  # type: ignore[index,union-attr]
    expected = regression(model, lambda x: x)
    torch.testing.assert_close(regression(made, by_batch(mesh)), expected)
    for own, parameter in zip(made.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(own.full_tensor(), parameter.detach())  # type: ignore[operator]


def test_several_modules_are_one_unit() -> None:
    mesh, model = virtual(2, names=("dp",)), gpt(dropout=0.0)
    made = copy.deepcopy(model)
    fully_shard([made.blocks[0], made.blocks[1]], mesh)
    fully_shard(made, mesh)
    batch = by_batch(mesh)(tokens(8))
    for _ in range(2):
        with CommDebugMode() as comm:
            loss = F.cross_entropy(made(batch).flatten(0, 1), batch.flatten())
        loss.item()
        assert comm.get_comm_counts()["all_gather"] == 2
        assert made.blocks[0]._unit._whole is None  # type: ignore[union-attr]
        with CommDebugMode() as comm:
            loss.backward()
        assert comm.get_comm_counts() == {"all_gather": 1, "reduce_scatter": 2}
        made.zero_grad()
    check_training(model, made, mesh)


@pytest.mark.parametrize("rows", [2, 3, 64])
def test_weights_are_gathered_and_activations_never(rows: int) -> None:
    mesh = virtual(4, names=("dp",))
    made = sharded(gpt(), mesh)
    batch = by_batch(mesh)(tokens(rows))
    with CommDebugMode() as comm:
        logits = made(batch)
        logits.backward(torch.ones_like(logits))
    assert comm.get_comm_counts() == {"all_gather": 5, "reduce_scatter": 3}
    assert logits.placements == (Shard(0),)


def test_hybrid_beside_tensor_parallelism() -> None:
    mesh, model = virtual(2, 2, 2, names=("nodes", "dp", "tp")), gpt()
    plan: Any = {"*.up.*": {"tp": Shard(0)}, "*.down.weight": {"tp": Shard(1)}}
    made = sharded(sw.shard_module(copy.deepcopy(model), mesh, plan), mesh["nodes", "dp"])
    assert made.blocks[0].up.weight.placements == (Replicate(), Shard(1), Shard(0))
    check_training(model, made, mesh)


def test_gradient_sync_is_switched_off_and_on() -> None:
    mesh, model = virtual(2, names=("dp",)), gpt(dropout=0.0)
    made = sharded(copy.deepcopy(model), mesh)
    for step, sync in enumerate([False, False, True]):
        part = tokens(4) * (step + 2) % VOCABULARY
        F.cross_entropy(model(part).flatten(0, 1), part.flatten()).backward()
        made.set_requires_gradient_sync(sync)  # type: ignore[operator]
        batch = by_batch(mesh)(part)
        loss = F.cross_entropy(made(batch).flatten(0, 1), batch.flatten())
        with CommDebugMode() as comm:
            loss.backward()
        assert ("reduce_scatter" in comm.get_comm_counts()) == sync
    for own, parameter in zip(made.parameters(), model.parameters(), strict=True):
        assert own.grad.placements == own.placements  # type: ignore[union-attr]
        torch.testing.assert_close(own.grad.full_tensor(), parameter.grad)  # type: ignore


def test_unshard_and_reshard() -> None:
    mesh = virtual(2, names=("dp",))
    made: Any = sharded(gpt(), mesh)
    handle = made.blocks[0].unshard(async_op=True)
    handle.wait()
    assert made.blocks[0]._unit._whole is not None
    made.blocks[0].reshard()
    assert made.blocks[0]._unit._whole is None
    made.set_reshard_after_forward(False)
    made(by_batch(mesh)(tokens(4)))
    assert all(block._unit._whole is not None for block in made.blocks)


def test_calls_that_choose_what_is_prefetched_are_taken() -> None:
    """Scripts of PyTorch's `fully_shard` have them; one unit is gathered ahead anyhow."""
    mesh, layers = virtual(2), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    want = copy.deepcopy(layers)
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    model: Any = fully_shard(layers, mesh=mesh)
    model[0].set_modules_to_forward_prefetch([model[1], model[2]])
    model[2].set_modules_to_backward_prefetch([model[1], model[0]])
    x = torch.randn(6, 4)
    torch.testing.assert_close(model(distribute_tensor(x, mesh, [Shard(0)])).full_tensor(), want(x))
    with pytest.raises(LayoutError, match="set_modules_to_forward_prefetch"):
        model[0].set_modules_to_forward_prefetch([nn.Linear(4, 4)])
    with pytest.raises(LayoutError, match="set_modules_to_backward_prefetch"):
        model[0].set_modules_to_backward_prefetch(model[1])


def test_no_memory_of_gathered_parameters_is_left() -> None:
    mesh = virtual(2, names=("dp",))
    made: Any = sharded(gpt(dropout=0.0), mesh, reshard_after_forward=True)
    seen: list[Any] = []
    for block in made.blocks:
        block.up.register_forward_hook(
            lambda module, *_: seen.extend(weakref.ref(part) for part in module.weight._locals)
        )
    batch = by_batch(mesh)(tokens(8))
    loss = F.cross_entropy(made(batch).flatten(0, 1), batch.flatten())
    assert len(seen) == 2 and all(each() is None for each in seen)
    loss.backward()


def test_parts_of_a_larger_mesh_come_to_their_common_part() -> None:
    mesh = virtual(2, 2, 2, names=("pp", "dp", "tp"))
    layer = parallelize_module(nn.Linear(4, 6), mesh["tp"], ColwiseParallel(use_local_output=False))
    fully_shard(layer, mesh["dp"])
    assert layer.weight._spec.topology.names == ("dp", "tp")  # type: ignore[union-attr]
    x = distribute_tensor(torch.ones(3, 4), mesh["dp", "tp"], {"dp": Shard(0)})
    expected = F.linear(torch.ones(3, 4), layer.weight.full_tensor(), layer.bias.full_tensor())  # type: ignore[operator]
    torch.testing.assert_close(layer(x).full_tensor(), expected)
