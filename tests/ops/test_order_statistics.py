"""Medians, quantiles, modes, sets and places in sorted sequences are those of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ..compare import MESHES, check, ints, numbers, virtual

NAN, INF = float("nan"), float("inf")
ODD = torch.tensor([2.0, -0.0, NAN, 0.0, INF, -5.5, 2.0, -INF, NAN, 0.0, 1.25]).double()
TIES = ints(7, 5, low=-3, high=3)
DISTINCT = numbers(7, 5)
SEQUENCE = ints(17, low=-3, high=4).sort().values
ROWS = numbers(3, 11).sort().values
ASKED = torch.tensor([[-9, -3, -2], [-1, 0, 1], [2, 3, 4], [9, 0, -3]])
PLACES = torch.tensor([2, 0, 3, 1])

CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "median": (torch.median, (ODD,)),
    "nanmedian": (torch.nanmedian, (ODD,)),
    "median of a dim": (lambda x: x.median(0), (DISTINCT,)),
    "median of the last dim": (lambda x: x.median(-1, keepdim=True), (DISTINCT,)),
    "nanmedian of a dim": (lambda x: x.nanmedian(1), (DISTINCT,)),
    "kthvalue": (lambda x: x.kthvalue(3, 0), (DISTINCT,)),
    "kthvalue of ties": (lambda x: x.kthvalue(4, 0).values, (TIES,)),
    "quantile": (lambda x: x.quantile(0.3, 0), (DISTINCT,)),
    "quantile of all": (lambda x: x.quantile(torch.tensor([0.0, 0.5, 1.0]).double()), (DISTINCT,)),
    "nanquantile": (lambda x: x.nanquantile(0.77, interpolation="nearest"), (ODD.unique(),)),
    "mode": (lambda x: x.mode(0).values, (TIES,)),
    "mode of the last dim": (lambda x: x.mode(-1, keepdim=True).values, (TIES,)),
    "isin": (torch.isin, (TIES, torch.tensor([2, -3, 7]))),
    "isin, inverted": (
        lambda x, y: torch.isin(x, y, invert=True),
        (ODD, ODD[2:4]),
    ),
    "searchsorted": (torch.searchsorted, (SEQUENCE, ASKED)),
    "searchsorted of rows": (torch.searchsorted, (ROWS, numbers(3, 4, seed=1))),
    "searchsorted, right": (
        lambda s, v: torch.searchsorted(s, v, side="right", out_int32=True),
        (SEQUENCE.double(), ODD.double()),
    ),
    "searchsorted by order": (
        lambda s, v, o: torch.searchsorted(s, v, sorter=o),
        (torch.tensor([3.0, 9.0, -1.0, 4.0]), torch.tensor([3.5, -2.0]), PLACES),
    ),
    "bucketize": (torch.bucketize, (ASKED, SEQUENCE)),
    "cdist": (torch.cdist, (numbers(5, 3), numbers(4, 3, seed=1))),
    "pdist": (torch.pdist, (numbers(5, 3),)),
}


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str, shape: tuple[int, ...]) -> None:
    run, inputs = CASES[name]
    finite = all(bool(x.isfinite().all()) for x in inputs)
    check(run, *inputs, mesh=virtual(*shape), ops=("sum",) if finite else ())
