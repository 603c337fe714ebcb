"""One training step of a model on a mesh and on one device: loss, gradients, parameters."""

from __future__ import annotations

import contextlib
import copy
import io
import time
import traceback
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import shardwise as sw
from shardwise import Shard

from .cases import Case, make_case

Step = dict[str, Tensor | None]
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
RATE = 1e-3


def check(name: str) -> dict[str, Any]:
    """The verdict on a model. What one device cannot do either is not counted."""
    try:
        case = make_case(name)
        alone = one_step(case, copy.deepcopy(case.model), case.batch)
        _reject_unusable(alone, one_step(case, copy.deepcopy(case.model), case.batch))
    except Exception as error:
        return {"verdict": "not on one device", "why": said(error)}
    row: dict[str, Any] = {"class": type(case.model).__name__, "plan": _plan_name(case)}
    start = time.perf_counter()
    try:
        row |= _on_mesh(case, alone, torch.float32)
        if row["verdict"] == "wrong":
            wide = _in_float64(case)
            row |= {"float32": row["why"]}
            row |= {key: wide[key] for key in ("verdict", "why", "dtype") if key in wide}
    except Exception as error:
        row |= {"verdict": "error", "why": said(error), "trace": traceback.format_exc()[-4000:]}
    return row | {"seconds": round(time.perf_counter() - start, 1)}


def _in_float64(case: Case) -> dict[str, Any]:
    """Whether a difference was rounding: float64 tells, where one device has it."""
    torch.set_default_dtype(torch.float64)  # each model has a process of its own
    case.model.double()
    case.batch = {k: v.double() if v.is_floating_point() else v for k, v in case.batch.items()}
    with _OnlyFloat64():
        try:
            alone = one_step(case, copy.deepcopy(case.model), case.batch)
        except Exception:
            return {}
        return _on_mesh(case, alone, torch.float64)


class _OnlyFloat64(TorchFunctionMode):
    """Where a model asks for float32, as many do in norms and softmax, it gets float64."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        wide = [torch.float64 if each is torch.float32 else each for each in args]
        named = {
            k: torch.float64 if each is torch.float32 else each
            for k, each in (kwargs or {}).items()
        }
        return func(*wide, **named)


def _on_mesh(case: Case, alone: Step, dtype: torch.dtype) -> dict[str, Any]:
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = copy.deepcopy(case.model)
    with contextlib.redirect_stdout(io.StringIO()):  # the plan
        sw.shard_module(model, mesh, case.plan)
    parameters = list(model.parameters())
    sharded = sum(p.numel() for p in parameters if any(e.is_shard() for e in p.placements))
    batch = {k: sw.distribute_tensor(v, mesh, {"dp": Shard(0)}) for k, v in case.batch.items()}
    with sw.CommDebugMode() as comm:
        made = one_step(case, model, batch)
    found = differences(made, alone, TOLERANCE[dtype])
    return {
        "verdict": "wrong" if found else "right",
        "why": "; ".join(found[:4]) + (f"; {len(found)} in all" if len(found) > 4 else ""),
        "dtype": str(dtype).removeprefix("torch."),
        "sharded": sharded / sum(p.numel() for p in parameters),
        "collectives": comm.get_total_counts(),
        "bytes": sum(comm.bytes.values()),
    }


def one_step(case: Case, model: nn.Module, batch: dict[str, Tensor]) -> Step:
    """Loss, gradients, and parameters and buffers after a step of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, eps=1e-6)
    torch.manual_seed(1)
    inputs = batch if "x" not in batch else {"x": batch["x"]}
    loss = case.loss(model(**inputs), batch)
    loss.backward()
    found: Step = {"loss": loss.detach()}
    found |= {f"gradient {n}": _kept(p.grad) for n, p in model.named_parameters()}
    optimizer.step()
    found |= {f"updated {n}": t.detach() for n, t in model.state_dict().items()}
    return found


def _kept(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.detach().clone()


def _reject_unusable(one: Step, again: Step) -> None:
    for name, value in one.items():
        if value is not None and value.is_floating_point() and not value.isfinite().all():
            raise ValueError(f"one device gives numbers that are not finite: {name}")
        other = again[name]
        if value is not None and (other is None or not torch.equal(value, other)):
            raise ValueError(f"one device does not repeat itself with the same seed: {name}")


def differences(made: Step, alone: Step, tolerance: float) -> list[str]:
    """What differs by more than rounding."""
    grads = [g.abs().max() for n, g in alone.items() if n.startswith("gradient") and g is not None]
    largest = float(max(grads, default=torch.zeros(())))
    found = []
    for name, want in alone.items():
        have = made[name]
        have = have.full_tensor() if isinstance(have, sw.DTensor) else have
        if want is None or have is None:
            if want is not have:
                found.append(f"{name} is {'there' if want is None else 'missing'}")
            continue
        if have.shape != want.shape or have.dtype != want.dtype:
            found.append(f"{name}: {have.dtype} {list(have.shape)}")
            continue
        scale = float(want.abs().max()) if want.numel() else 0.0
        # Gradients that are zero in exact arithmetic are rounding, measured by the largest one.
        close = tolerance * scale + 0.01 * tolerance * largest
        if name.startswith("updated"):
            close = max(tolerance * scale, 0.02 * RATE)
        off = float((have.double() - want.double()).abs().max()) if want.numel() else 0.0
        if not off <= close:
            found.append(f"{name}: {off:.2g} of {scale:.2g}")
    return found


def _plan_name(case: Case) -> str:
    return "auto" if case.plan == "auto" else "all by dim 0"


def said(error: Exception) -> str:
    """An error in one line; where it was raised, if it says nothing."""
    text = (
        " ".join(str(error).split()) or f"in {traceback.extract_tb(error.__traceback__)[-1].name}"
    )
    return f"{type(error).__name__}: {text[:300]}"
