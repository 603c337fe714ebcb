"""Programs for `torch.compile`, and the question whether it changes what they give."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from shardwise import DTensor, Placement, distribute_tensor

from .compare import numbers

Program = Callable[[Any, Any], Any]


def _attention(x: Any, w: Any) -> Any:
    heads = (x @ w)[None, None]
    return F.scaled_dot_product_attention(heads, heads, heads)


def _written(x: Any, w: Any) -> Any:
    y = x * 1
    y.add_(1)
    y[1:] *= 2
    return y @ w


PROGRAMS: dict[str, Program] = {
    "a product": lambda x, w: (x @ w).relu(),
    "reductions": lambda x, w: (x @ w).amax(0) + (x * 2).sum() - w.std(),
    "softmax": lambda x, w: F.softmax(x @ w, 0).pow(2).mean(),
    "layer norm": lambda x, w: F.layer_norm(x @ w, (5,)),
    "attention": _attention,
    "flipped": lambda x, w: torch.cat([x @ w, (x @ w).flip(0)]).amax(0),
    "an index": lambda x, w: x[torch.tensor([0, 3, 1, 1])] @ w,
    "a scan": lambda x, w: x.cumsum(0).sort(0)[0] @ w,
    "added twice": lambda x, w: (x @ w).relu() + (x * 2) @ w,
    "added once": lambda x, w: x @ w + (x.detach() @ w.detach()).round().sum(0),
    "padded": lambda x, w: F.pad(x.relu(), (0, 0, 0, 3)).cumsum(0)[-1:].tanh() @ w,
    "views": lambda x, w: (x.t().reshape(-1)[3:].sum() * w).tanh(),
    "written": _written,
    "windows": lambda x, w: x.unfold(0, 2, 1).sum(-1) @ w,
    "complex": lambda x, w: torch.view_as_real(torch.complex(x, x + 1) @ (w + 0j)).sum(-1).tanh(),
    "truth": lambda x, w: ((x @ w) > 0).any(0).to(x.dtype) * x.sum(),
    "half": lambda x, w: ((x.bfloat16() @ w.bfloat16()).float().sum(0) * 0 + x.sum(0)[:1]).relu(),
}


def whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def check_compiled(
    name: str,
    mesh: Any,
    places: tuple[Sequence[Placement], Sequence[Placement]],
    *,
    backend: Any = "aot_eager",
    dynamic: bool | None = False,
    calls: int = 3,
    rows: int = 7,
) -> None:
    """Compiled, a program gives at each call, with new values, what plain PyTorch gives: values and
    gradients."""
    program = PROGRAMS[name]
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's, about its own compiler
        compiled = torch.compile(program, backend=backend, dynamic=dynamic)
        for call in range(calls):
            given = numbers(rows, 4, seed=2 * call), numbers(4, 5, seed=2 * call + 1)
            plain = [value.clone().requires_grad_() for value in given]
            pairs = zip(given, places, strict=True)
            ours = [distribute_tensor(value, mesh, at).requires_grad_() for value, at in pairs]
            want, made = program(*plain), compiled(*ours)
            torch.testing.assert_close(whole(made), want)
            weights = numbers(*want.shape, seed=call).to(want.dtype)
            (want * weights).sum().backward()
            (made * weights).sum().backward()
            for a, b in zip(ours, plain, strict=True):
                if b.grad is None:
                    continue
                assert a.grad is not None, f"{name}: a gradient is missing"
                torch.testing.assert_close(whole(a.grad), b.grad)
