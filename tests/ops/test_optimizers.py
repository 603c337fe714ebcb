"""Every optimizer of PyTorch steps DTensors to the values of one device."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from shardwise import DTensor, Partial, Replicate, Shard, distribute_tensor
from shardwise.errors import MeshError

from ..compare import numbers, spread, virtual

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
STEPS = 3

SINGLE: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "Adadelta": (optim.Adadelta, {"weight_decay": 0.1}),
    "Adadelta maximize": (optim.Adadelta, {"maximize": True}),
    "Adagrad": (optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    "Adam": (optim.Adam, {"weight_decay": 0.1}),
    "Adam amsgrad": (optim.Adam, {"amsgrad": True, "maximize": True}),
    "Adam decoupled": (optim.Adam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "Adamax": (optim.Adamax, {"weight_decay": 0.1}),
    "AdamW": (optim.AdamW, {}),
    "AdamW amsgrad": (optim.AdamW, {"amsgrad": True}),
    "AdamW tensor lr": (optim.AdamW, {"lr": torch.tensor(0.01, dtype=torch.float64)}),
    "ASGD": (optim.ASGD, {"t0": 1, "weight_decay": 0.1}),
    "NAdam": (optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "RAdam": (optim.RAdam, {"weight_decay": 0.1}),
    "RMSprop": (optim.RMSprop, {"centered": True, "momentum": 0.9}),
    "Rprop": (optim.Rprop, {"maximize": True}),
    "SGD": (optim.SGD, {"lr": 0.1}),
    "SGD nesterov": (optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "SGD maximize": (optim.SGD, {"momentum": 0.9, "dampening": 0.5, "maximize": True}),
}


def _variants() -> dict[str, Callable[[Any], optim.Optimizer]]:
    """Each optimizer as a loop, with lists and fused, wherever it has these forms."""
    found: dict[str, Callable[[Any], optim.Optimizer]] = {}
    for name, (kind, options) in SINGLE.items():
        known = inspect.signature(kind).parameters
        forms = [form for form in ("foreach", "fused") if form in known]
        plain = {"foreach": False} if "foreach" in known else {}
        if isinstance(options.get("lr"), torch.Tensor):
            forms.remove("foreach")  # PyTorch wants it capturable, which the CPU is not
        for label, chosen in (("loop", plain), *((form, {form: True}) for form in forms)):
            found[f"{name}, {label}"] = lambda p, k=kind, o={**options, **chosen}: k(p, **o)
    found["Adafactor"] = lambda p: optim.Adafactor(p, lr=0.1, weight_decay=0.1)
    return found


VARIANTS = _variants()
VALUES = [
    numbers(5, 3),
    numbers(1, 4, seed=1),
    numbers(7, seed=2),
    numbers(4, 2, seed=3),
    numbers(3, 3, seed=4),
    numbers(6, 5, seed=5),
    numbers(2, 3, 2, seed=6),
]


def places(mesh: Any) -> list[Any]:
    """On a mesh of two axes, on one of them, and on none."""
    sub = mesh[mesh.mesh_dim_names[1]]
    return [
        (mesh, (S0, R)),  # uneven
        (mesh, (S0, S0)),  # one row on four ranks
        (mesh, (S0, S0)),
        (mesh, (R, R)),
        None,  # a plain parameter
        (sub, (S1,)),
        (mesh, (Shard(2), S0)),
    ]


def parameters(values: list[torch.Tensor], where: list[Any]) -> list[nn.Parameter]:
    made = [
        v.clone() if at is None else distribute_tensor(v.clone(), *at, src_data_rank=None)
        for v, at in zip(values, where, strict=True)
    ]
    return [nn.Parameter(each) for each in made]


def gradient(step: int, p: Any) -> Any:
    """A gradient in the layout of its parameter, with zeros in it."""
    value = numbers(*p.shape, seed=100 * step + p.numel()).to(p.dtype)
    value = value * (value.abs() > 0.3)
    at = getattr(p, "placements", None)
    return value if at is None else distribute_tensor(value, p.device_mesh, at, src_data_rank=None)


def train(make: Callable[[Any], optim.Optimizer], params: list[nn.Parameter]) -> optim.Optimizer:
    optimizer = make(params)
    for step in range(STEPS):
        for p in params:
            p.grad = gradient(step, p)
        optimizer.step()
    return optimizer


def same(ours: list[Any], plain: list[torch.Tensor], tolerance: float = 1e-9) -> None:
    for a, b in zip(ours, plain, strict=True):
        whole = a.full_tensor() if isinstance(a, DTensor) else a
        torch.testing.assert_close(whole, b, rtol=tolerance, atol=tolerance)


def check_optimizer(name: str, mesh: Any) -> None:
    plain = parameters(VALUES, [None] * len(VALUES))
    ours = parameters(VALUES, places(mesh))
    theirs, mine = (train(VARIANTS[name], params) for params in (plain, ours))
    same(ours, plain)
    for p, q in zip(ours, plain, strict=True):
        for key, state in mine.state[p].items():
            if isinstance(state, DTensor) and state.shape == p.shape:
                assert state.placements == p.placements, key
            same([state], [theirs.state[q][key]])


@pytest.mark.parametrize("name", VARIANTS)
def test_every_optimizer(name: str) -> None:
    check_optimizer(name, virtual(2, 2, names=("dp", "tp")))


def _matrices() -> list[torch.Tensor]:
    return [v for v in VALUES if v.ndim == 2]


def check_muon(mesh: Any) -> None:
    where = [at for v, at in zip(VALUES, places(mesh), strict=True) if v.ndim == 2]
    plain, ours = parameters(_matrices(), [None] * 5), parameters(_matrices(), where)
    for params in (plain, ours):
        train(lambda p: optim.Muon(p, lr=0.1), params)
    same(ours, plain, 0.02)


def test_muon() -> None:
    check_muon(virtual(2, 2, names=("a", "b")))


@pytest.mark.parametrize("shape", [(32, 48), (48, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_muon_of_any_layout(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """It multiplies in bfloat16, where sums in another order differ by a few percent."""
    torch.manual_seed(0)
    mesh, grad = virtual(2, 2), torch.randn(shape).to(dtype)
    for places in ((S0, S0), (S1, S1), (S0, S1), (S1, S0), (R, S1), (S0, R), (P, S0), (R, R)):
        made = []
        for own in (grad, distribute_tensor(grad, mesh, places)):
            param = nn.Parameter(torch.zeros_like(own))
            param.grad = own.clone()
            optim.Muon([param], momentum=0.9, weight_decay=0.1, lr=1.0).step()
            made.append(param.detach())
        assert isinstance(made[1], DTensor)
        error = (made[1].full_tensor() - made[0]).norm() / made[0].norm()
        assert error < 0.1, f"{error} with {places}"


def check_lbfgs(where: list[Any], search: str | None) -> None:
    results = []
    for at in ([None] * len(where), where):
        params = parameters(VALUES[: len(where)], at)
        optimizer = optim.LBFGS(params, max_iter=5, history_size=3, line_search_fn=search)

        def closure(params: list[Any] = params, optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            loss = sum(((p - 1) ** 2 * (i + 1)).sum() + (p**4).sum() for i, p in enumerate(params))
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
        results.append(params)
        assert [getattr(p, "placements", None) for p in params] == [p and p[1] for p in at]
    same(results[1], results[0], 1e-6)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs(search: str | None) -> None:
    """It puts all parameters into one vector."""
    mesh = virtual(2, 2, names=("a", "b"))
    check_lbfgs([(mesh, (S0, R)), (mesh, (S0, S0)), (mesh, (R, S0)), None], search)


def test_lbfgs_on_several_meshes_is_refused() -> None:
    where = [(virtual(2, names=("x",)), (S0,)), (virtual(3, names=("x",)), (S0,))]
    with pytest.raises(MeshError, match=r"cat.*different meshes"):
        check_lbfgs(where, None)


def check_clipping(mesh: Any, norm_type: float, foreach: bool | None) -> None:
    norms, sides = [], []
    for where in ([None] * len(VALUES), places(mesh)):
        params: list[Any] = parameters(VALUES, where)
        for p in params:
            p.grad = gradient(0, p)
        before = nn.utils.get_total_norm([p.grad for p in params], norm_type, foreach=foreach)
        norms.append((before, nn.utils.clip_grad_norm_(params, 0.5, norm_type, foreach=foreach)))
        sides.append([p.grad for p in params])
    same(list(norms[1]), list(norms[0]))
    same(sides[1], sides[0])
    for p in params:
        assert getattr(p.grad, "placements", None) == getattr(p, "placements", None)


@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_clipping_over_several_meshes(norm_type: float, foreach: bool | None) -> None:
    check_clipping(virtual(2, 2, names=("dp", "tp")), norm_type, foreach)


@pytest.mark.parametrize("foreach", [None, False, True])
def test_clipping_values(foreach: bool | None) -> None:
    sides = []
    for where in ([None] * len(VALUES), places(virtual(2, 2, names=("dp", "tp")))):
        params = parameters(VALUES, where)
        for p in params:
            p.grad = gradient(0, p)
        nn.utils.clip_grad_value_(params, 0.4, foreach=foreach)
        sides.append([p.grad for p in params])
    same(sides[1], sides[0])


def test_clipping_pending_gradients() -> None:
    """A gradient that is not reduced yet counts with its reduced value."""
    mesh, value = virtual(2), numbers(5, 3)
    for foreach in (False, True):
        plain, ours = nn.Parameter(value.clone()), parameters([value], [(mesh, (R,))])[0]
        plain.grad = numbers(5, 3, seed=1)
        ours.grad = spread(numbers(5, 3, seed=1), mesh, [Partial()])
        total = [nn.utils.clip_grad_norm_([p], 0.5, foreach=foreach) for p in (plain, ours)]
        same([total[1], ours.grad], [total[0], plain.grad])
        assert ours.grad.placements == (Partial(),)


def check_scaled(mesh: Any, name: str, bad: bool) -> None:
    sides, scales = [], []
    for where in ([None] * len(VALUES), places(mesh)):
        params: list[Any] = parameters([v.float() for v in VALUES], where)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
        optimizer = VARIANTS[name](params)
        for step in range(2):
            scaler.scale(torch.ones(()))
            for p in params:
                p.grad = gradient(step, p) * 8.0
            if bad and step == 1:
                params[1].grad[0, 2] = float("inf")
            if "fused" not in name:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(params, 1.0)
            scaler.step(optimizer)
            scaler.update()
        sides.append(params)
        scales.append(scaler.get_scale())
    same(sides[1], [p.detach() for p in sides[0]], 1e-5)
    assert scales[0] == scales[1] == (8.0 if bad else 32.0)


@pytest.mark.parametrize("name", ["SGD nesterov, fused", "Adam, fused", "Adagrad, foreach"])
@pytest.mark.parametrize("bad", [False, True])
def test_a_scaled_step(name: str, bad: bool) -> None:
    """`GradScaler`: one infinity on one rank, and no rank steps."""
    check_scaled(virtual(2, 2, names=("dp", "tp")), name, bad)
