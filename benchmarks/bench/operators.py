"""Warm calls: single operators, operators of lists, optimizers, clipping."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.bench.sides import Side
from benchmarks.bench.timing import Job, Settings, timed
from torch import nn
from torch.nn.utils import clip_grad_norm_

Call = Callable[[], Any]


def operators(side: Side) -> dict[str, Call]:
    """Operators on small tensors, in layouts in which nothing has to move."""
    put = side.put
    x, y, z = (put(torch.randn(32, 16), 0) for _ in range(3))
    w, b = put(torch.randn(16, 16)), put(torch.randn(16))
    target = put(torch.randint(0, 16, (32,)), 0)
    p = put(torch.randn(32, 16), 0).requires_grad_()
    cube = put(torch.randn(32, 4, 4), 0)
    return {
        "add": lambda: x + y,
        "mul": lambda: x * y,
        "mul by a number": lambda: x * 2.0,
        "add_": lambda: z.add_(y),
        "relu": lambda: torch.relu(x),
        "gelu": lambda: F.gelu(x),
        "exp": lambda: x.exp(),
        "where": lambda: torch.where(x > 0, x, y),
        "mm": lambda: x @ w,
        "addmm": lambda: torch.addmm(b, x, w),
        "linear": lambda: F.linear(x, w, b),
        "bmm": lambda: torch.bmm(cube, cube),
        "sum": lambda: x.sum(),
        "sum of a dim": lambda: x.sum(1),
        "mean of a dim": lambda: x.mean(-1),
        "softmax": lambda: x.softmax(-1),
        "layer_norm": lambda: F.layer_norm(x, (16,), b, b),
        "t": lambda: x.t(),
        "view": lambda: x.view(32, 4, 4),
        "transpose": lambda: cube.transpose(1, 2),
        "slice": lambda: x[:, 2:8],
        "cat": lambda: torch.cat([x, y], 1),
        "split": lambda: x.split(8, 1),
        "clone": lambda: x.clone(),
        "add with grad": lambda: p + y,
        "zeros_like": lambda: torch.zeros_like(x),
        "nll_loss": lambda: F.nll_loss(x, target, reduction="sum"),
    }


def operator_jobs(settings: Settings) -> dict[str, Job]:
    return {
        name: timed("operator", name, lambda side, name=name: operators(side)[name], number=20)
        for name in operators(Side("plain"))
    }


def lists(side: Side) -> dict[str, Call]:
    """Operators of 50 sharded tensors."""
    xs, ys, zs = ([side.put(torch.randn(32, 16), 0) for _ in range(50)] for _ in range(3))
    return {
        "_foreach_add_": lambda: torch._foreach_add_(zs, ys),
        "_foreach_add": lambda: torch._foreach_add(xs, ys),
        "_foreach_norm": lambda: torch._foreach_norm(xs),
    }


def parameters(side: Side, count: int) -> list[nn.Parameter]:
    """Sharded parameters that have a gradient."""
    made = [nn.Parameter(side.put(torch.randn(32, 16), 0)) for _ in range(count)]
    for each in made:
        each.grad = side.put(torch.randn(32, 16), 0)
    return made


def optimizer_step(side: Side, kind: Any, way: dict[str, bool], count: int) -> Call:
    given = parameters(side, count)
    optimizer = kind(given, lr=1e-3, **way)

    def step() -> Any:
        optimizer.step()
        return given

    return step


def clipping(side: Side, count: int) -> Call:
    """`clip_grad_norm_` as it is called: without arguments that choose how."""
    given = parameters(side, count)
    return lambda: (clip_grad_norm_(given, 1.0), [each.grad for each in given])


KINDS = {"AdamW": torch.optim.AdamW, "SGD": partial(torch.optim.SGD, momentum=0.9)}
WAYS = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def list_jobs(settings: Settings) -> dict[str, Job]:
    found = {
        name: timed("list", f"{name} of 50", lambda side, name=name: lists(side)[name])
        for name in lists(Side("plain"))
    }
    for count in (80,) if settings.quick else (80, 200):
        make = partial(clipping, count=count)
        name = f"clip_grad_norm_ of {count}"
        found[name] = timed("list", name, make)
    return found


def optimizer_jobs(settings: Settings) -> dict[str, Job]:
    found = {}
    for count in (80,) if settings.quick else (80, 200):
        for kind, optimizer in KINDS.items():
            for way, given in WAYS.items():
                name = f"{kind} {way} of {count} parameters"
                make = partial(optimizer_step, kind=optimizer, way=given, count=count)
                found[name] = timed("optimizer", name, make)
    return found
