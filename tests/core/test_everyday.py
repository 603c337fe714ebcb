"""What training programs do with tensors and modules works as on one device."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, jvp, vmap
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise import DTensor, Replicate, Shard, distribute_tensor
from shardwise.errors import LayoutError

from ..compare import numbers, virtual


class Block(nn.Module):
    """A norm, a column-sharded and a row-sharded layer, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)
        self.register_buffer("scale", torch.full((6,), 1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)))) * self.scale


def by_features(name: str, module: nn.Module, mesh: Any) -> None:
    """Shard the features between the two layers."""
    for part, dims in (("up", (0, 0)), ("down", (1, None))):
        if name == part:
            for parameter, dim in zip(("weight", "bias"), dims, strict=True):
                places = [Replicate() if dim is None else Shard(dim)]
                made = distribute_tensor(getattr(module, parameter), mesh, places)
                module.register_parameter(parameter, nn.Parameter(made))


def both() -> tuple[Block, Block]:
    """The same module, plain and on a mesh."""
    torch.manual_seed(0)
    plain = Block().double()
    return plain, sw.distribute_module(copy.deepcopy(plain), virtual(2), by_features)


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def assert_equal(got: Any, want: Any) -> None:
    torch.testing.assert_close(whole(got), want)


def assert_same_parameters(got: nn.Module, want: nn.Module) -> None:
    for (name, a), (_, b) in zip(got.named_parameters(), want.named_parameters(), strict=True):
        torch.testing.assert_close(whole(a), b, msg=name)
        if b.grad is not None:
            torch.testing.assert_close(whole(a.grad), b.grad, msg=name)


X = numbers(5, 6)


def test_a_module_changes_its_dtype() -> None:
    plain, laid = both()
    layouts = [p.placements for p in laid.parameters()]
    for dtype in (torch.float32, torch.bfloat16):
        plain, laid = plain.to(dtype), laid.to(dtype)
        assert [p.placements for p in laid.parameters()] == layouts
        assert all(isinstance(p, nn.Parameter) and p.dtype is dtype for p in laid.parameters())
    assert_same_parameters(laid, plain)


def test_deepcopy_has_memory_of_its_own() -> None:
    plain, laid = both()
    twin = copy.deepcopy(laid)
    with torch.no_grad():
        laid.up.weight.zero_()
    assert_same_parameters(twin, plain)
    assert twin.up.weight.placements == laid.up.weight.placements


def test_an_average_of_weights_by_lerp() -> None:
    plain, laid = both()
    slow, fast = copy.deepcopy(plain), copy.deepcopy(laid)
    with torch.no_grad():
        for module, average in ((plain, slow), (laid, fast)):
            for p, q in zip(module.parameters(), average.parameters(), strict=True):
                p.mul_(3)
                q.lerp_(p, 0.25)
    assert_same_parameters(fast, slow)


def test_torch_load_of_weights_only() -> None:
    plain, laid = both()
    file = io.BytesIO()
    torch.save(laid.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    fresh = sw.distribute_module(Block().double(), virtual(2), by_features)
    fresh.load_state_dict(state)
    assert_same_parameters(fresh, plain)


@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts_from_plain_and_to_plain(assign: bool) -> None:
    plain, laid = both()
    fresh = sw.distribute_module(Block().double(), virtual(2), by_features)
    fresh.load_state_dict(plain.state_dict(), assign=assign)
    assert_same_parameters(fresh, plain)
    assert fresh.up.weight.placements == (Shard(0),)
    back = Block().double()
    back.load_state_dict({name: whole(value) for name, value in laid.state_dict().items()})
    assert_same_parameters(back, plain)


WAYS = [{"foreach": False}, {"foreach": True}, {"fused": True}]


def steps(module: nn.Module, optimizer: torch.optim.Optimizer, count: int = 2) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        module(X).square().mean().backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()


@pytest.mark.parametrize("way", WAYS, ids=lambda way: next(iter(way)) + str(*way.values()))
def test_adamw_and_its_state_dict(way: dict[str, bool]) -> None:
    plain, laid = both()
    one, other = (torch.optim.AdamW(m.parameters(), lr=0.1, **way) for m in (plain, laid))
    steps(plain, one)
    steps(laid, other)
    assert_same_parameters(laid, plain)
    resumed = torch.optim.AdamW(laid.parameters(), lr=0.1, **way)
    resumed.load_state_dict(copy.deepcopy(other.state_dict()))
    steps(plain, one)
    steps(laid, resumed)
    assert_same_parameters(laid, plain)


def test_functional_call() -> None:
    plain, laid = both()
    doubled = {name: p.detach() * 2 for name, p in plain.named_parameters()}
    given = {name: p.detach() * 2 for name, p in laid.named_parameters()}
    assert_equal(functional_call(laid, given, (X,)), functional_call(plain, doubled, (X,)))


@pytest.mark.parametrize("poison", [False, True])
def test_a_grad_scaler(poison: bool) -> None:
    plain, laid = both()
    found = []
    for module in (plain, laid):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        scaler.scale(module(X).square().mean()).backward()
        if poison:
            module.up.weight.grad[7, 2] = torch.inf
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        found.append(scaler.get_scale())
    assert found[0] == found[1] == (32.0 if poison else 64.0)
    for p, q in zip(laid.parameters(), plain.parameters(), strict=True):
        assert_equal(p, q)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    plain, laid = both()

    def forward(module: nn.Module, x: torch.Tensor) -> Any:
        return F.dropout(module(x), 0.3)

    for module in (plain, laid):
        torch.manual_seed(1)
        x = X.clone().requires_grad_()
        checkpoint(forward, module, x, use_reentrant=reentrant).sum().backward()
    assert_same_parameters(laid, plain)


def test_lora() -> None:
    weight, a, b = numbers(6, 8), numbers(6, 2, seed=1), numbers(2, 8, seed=2)
    mesh = virtual(2)

    def run(x: Any, w: Any, a: Any, b: Any) -> list[Any]:
        a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
        out = x @ w + (x @ a) @ b
        out.square().sum().backward()
        return [out, a.grad, b.grad]

    laid = [
        distribute_tensor(weight, mesh, [Shard(1)]),
        distribute_tensor(a, mesh, [Replicate()]),
        distribute_tensor(b, mesh, [Shard(1)]),
    ]
    for got, want in zip(run(X, *laid), run(X, weight, a, b), strict=True):
        assert_equal(got, want)


def test_generation_with_a_cache() -> None:
    torch.manual_seed(0)
    table, mix = numbers(12, 6), numbers(6, 6, seed=1)

    def generate(table: Any, mix: Any, tokens: torch.Tensor, count: int) -> torch.Tensor:
        cache = torch.zeros_like(table)[:0]
        with torch.inference_mode():
            for _ in range(count):
                new = F.embedding(tokens[-1:], table) @ mix
                cache = torch.cat([cache, new])
                scores = F.scaled_dot_product_attention(new, cache, cache) @ table.t()
                tokens = torch.cat([tokens, whole(scores.argmax(-1))])
        return tokens

    first = torch.tensor([3])
    want = generate(table, mix, first, 6)
    mesh = virtual(2)
    for places in ([Shard(0)], [Shard(1)]):
        laid = distribute_tensor(table, mesh, places)
        got = generate(laid, distribute_tensor(mix, mesh, [Replicate()]), first, 6)
        assert torch.equal(got, want)


def test_vmap_of_grad() -> None:
    w = numbers(6)
    laid = distribute_tensor(w, virtual(2), [Shard(0)])
    rows = distribute_tensor(X, virtual(2), [Shard(0)])

    def loss(w: Any, x: Any) -> Any:
        return (x * w).sum().tanh()

    want = vmap(grad(loss), in_dims=(None, 0))(w, X)
    assert_equal(vmap(grad(loss), in_dims=(None, 0))(laid, rows), want)


def test_jvp() -> None:
    x, t = numbers(5, 6), numbers(5, 6, seed=1)
    mesh = virtual(2)
    want = jvp(lambda x: F.softmax(x, 1).square(), (x,), (t,))
    laid = [distribute_tensor(each, mesh, [Shard(1)]) for each in (x, t)]
    got = jvp(lambda x: F.softmax(x, 1).square(), (laid[0],), (laid[1],))
    for a, b in zip(got, want, strict=True):
        assert_equal(a, b)


def test_forward_under_inference_mode() -> None:
    plain, laid = both()
    with torch.inference_mode():
        assert_equal(laid(X), plain(X))
        made = laid(X)
        made[0] += 1
        want = plain(X)
        want[0] += 1
        assert_equal(made, want)
    steps(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    steps(laid, torch.optim.SGD(laid.parameters(), lr=0.1))
    assert_same_parameters(laid, plain)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "Adam by foreach": lambda p: torch.optim.Adam(p, lr=0.1, foreach=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_on_several_meshes_and_plain_ones(name: str) -> None:
    """The norm of all gradients is a number, which may be used on every mesh."""
    values = [numbers(6, 4, seed=seed) for seed in range(4)]
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain = [nn.Parameter(value.clone()) for value in values]
    laid = [
        nn.Parameter(distribute_tensor(values[0], mesh, [Shard(0), Replicate()])),
        nn.Parameter(distribute_tensor(values[1], mesh["dp"], [Shard(1)])),
        nn.Parameter(distribute_tensor(values[2], mesh["tp"], [Replicate()])),
        nn.Parameter(values[3].clone()),
    ]
    norms = []
    for parameters in (plain, laid):
        optimizer = OPTIMIZERS[name](parameters)
        for _ in range(2):
            optimizer.zero_grad()
            for p in parameters:
                whole((p.sin() * p).sum()).backward()
            norms.append(whole(nn.utils.clip_grad_norm_(parameters, 0.5)))
            optimizer.step()
    torch.testing.assert_close(norms[:2], norms[2:])
    for p, q in zip(laid, plain, strict=True):
        assert_equal(p, q)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_distributed_checkpoint(tmp_path: Any) -> None:
    """A checkpoint of one layout is loaded into another."""
    plain, laid = both()
    dcp.save(laid.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    fresh = sw.distribute_module(Block().double(), virtual(3))
    state = fresh.state_dict()
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    fresh.load_state_dict(state)
    assert_same_parameters(fresh, plain)


def test_views_in_place_and_writes_into_views() -> None:
    for places in ([Shard(0)], [Shard(1)], [Replicate()]):
        x, y = X.clone(), distribute_tensor(X, virtual(2), places)
        for each in (x, y):
            row = each[1]
            each[:, 2:4].mul_(2)
            each[0] += 1
            each.t_()
            each[3].zero_()
            row.add_(5)
            each.unsqueeze_(0)
        assert_equal(y, x)


def test_a_write_into_a_conjugate_is_not_lost() -> None:
    """It raises, says what to write instead, and changes nothing."""
    z = torch.complex(X, X + 1)
    laid = distribute_tensor(z, virtual(2), [Shard(0)])
    assert_equal(laid.conj() * 2, z.conj() * 2)
    assert_equal(laid.mH @ laid, z.mH @ z)
    copied = laid.conj().resolve_conj()
    copied[0] = 0
    assert_equal(laid, z)
    with pytest.raises(LayoutError, match=r"resolve_conj\(\)"):
        laid.conj().mul_(3)
    assert_equal(laid, z)
