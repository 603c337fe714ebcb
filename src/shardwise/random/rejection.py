"""Samplers that take an unknown number of draws: round after round, each a stream of its own, until
every position has its number. What a position gets depends on its draws and parameters alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .counter import Draws

__all__ = ["binomial", "gamma", "poisson"]

_FEW = 10.0
"""Below this mean a search from 0 upwards is short."""
_MOST_TERMS = 200

Propose = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""From two numbers and the parameters at some positions: a value, and whether it is accepted."""


def _until_accepted(
    wanted: torch.Tensor,
    draw: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
    params: Sequence[torch.Tensor],
    propose: Propose,
) -> torch.Tensor:
    """The first accepted value at each position that is wanted, 0 elsewhere."""
    result = torch.zeros(wanted.numel(), dtype=torch.float64, device=wanted.device)
    left = wanted.flatten().nonzero().squeeze(1)
    flat = [param.flatten() for param in params]
    round_ = 0
    while left.numel():
        u, v = (drawn.flatten()[left] for drawn in draw(round_))
        value, accepted = propose(u, v, *[param[left] for param in flat])
        result[left[accepted]] = value[accepted]
        left = left[~accepted]
        round_ += 1
    return result.view(wanted.shape)


def _search(
    u: torch.Tensor, wanted: torch.Tensor, first: torch.Tensor, ratio: Callable[[int], torch.Tensor]
) -> torch.Tensor:
    """The number of terms, `first` and on by `ratio`, whose sum does not reach `u`."""
    term = first
    total = torch.where(wanted, first, inf)
    count = torch.zeros_like(u)
    for k in range(1, _MOST_TERMS):
        above = u >= total
        if not bool(above.any()):
            break
        count += above
        term = term * ratio(k)
        total = total + term
    return count


def poisson(draws: Draws, rate: torch.Tensor) -> torch.Tensor:
    """Search for small rates; for others Hormann's transformed rejection (PTRS, 1993)."""
    lam = rate.to(torch.float64)
    if bool((lam < 0).any()):
        raise RuntimeError("invalid Poisson rate, expected rate to be non-negative")
    large = (lam >= _FEW) & (lam < inf)
    low = torch.where(lam < _FEW, lam, 0)
    few = _search(draws.uniform(), lam < _FEW, torch.exp(-low), lambda k: low / k)
    many = _until_accepted(large, draws.pairs, [lam], _ptrs)
    return torch.where(large, many, torch.where(lam < _FEW, few, lam))


def _ptrs(u: torch.Tensor, v: torch.Tensor, lam: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    b = 0.931 + 2.53 * lam.sqrt()
    a = -0.059 + 0.02483 * b
    u = u - 0.5
    us = 0.5 - u.abs()
    k = ((2 * a / us + b) * u + lam + 0.43).floor()
    quick = (us >= 0.07) & (v <= 0.9277 - 3.6224 / (b - 2))
    never = (k < 0) | ((us < 0.013) & (v > us))
    left = (v * (1.1239 + 1.1328 / (b - 3.4)) / (a / (us * us) + b)).log()
    slow = left <= k * lam.log() - lam - torch.lgamma(k + 1)
    return k, quick | (slow & ~never)


def binomial(draws: Draws, count: torch.Tensor, prob: torch.Tensor) -> torch.Tensor:
    """Search for small means; for others Hormann's transformed rejection (BTRS, 1993)."""
    n, p = count.to(torch.float64).floor(), prob.to(torch.float64)
    if bool(((n < 0) | (p < 0) | (p > 1)).any()):
        raise RuntimeError("binomial: counts must be at least 0, and probabilities in [0, 1].")
    less = torch.where(p > 0.5, 1 - p, p)
    large = n * less >= _FEW
    few_n, few_p = (torch.where(large | (n * p).isnan(), 0, x) for x in (n, less))
    odds = few_p / (1 - few_p)
    none = torch.exp(few_n * torch.log1p(-few_p))
    few = _search(draws.uniform(), ~large, none, lambda k: (few_n - k + 1).clamp_(min=0) / k * odds)
    many = _until_accepted(large, draws.pairs, [n, less], _btrs)
    made = torch.where(large, many, few.minimum(few_n))
    return torch.where((n * p).isnan(), torch.nan, torch.where(p > 0.5, n - made, made))


def _btrs(
    u: torch.Tensor, v: torch.Tensor, n: torch.Tensor, p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    spread = (n * p * (1 - p)).sqrt()
    b = 1.15 + 2.53 * spread
    a = -0.0873 + 0.0248 * b + 0.01 * p
    u = u - 0.5
    us = 0.5 - u.abs()
    k = ((2 * a / us + b) * u + n * p + 0.5).floor()
    inside = (k >= 0) & (k <= n)
    quick = (us >= 0.07) & (v <= 0.92 - 4.2 / b)
    left = (v * (2.83 + 5.1 / b) * spread / (a / (us * us) + b)).log()
    middle, at = ((n + 1) * p).floor(), torch.where(inside, k, 0)
    right = torch.lgamma(middle + 1) + torch.lgamma(n - middle + 1)
    right -= torch.lgamma(at + 1) + torch.lgamma(n - at + 1)
    right += (at - middle) * (p / (1 - p)).log()
    return k, inside & (quick | (left <= right))


def gamma(draws: Draws, alpha: torch.Tensor) -> torch.Tensor:
    """Marsaglia and Tsang (2000); shapes below 1 by a power of a uniform number."""
    shape = alpha.to(torch.float64)
    low = shape < 1
    d = torch.where(low, shape + 1, shape) - 1 / 3

    def draw(round_: int) -> tuple[torch.Tensor, torch.Tensor]:
        normal = draws.normal(stream=2 * round_ + 1)
        return normal, draws.uniform(stream=2 * round_ + 2)

    made = _until_accepted(d > 0, draw, [d], _marsaglia_tsang)
    power = (1 - draws.uniform()) ** torch.where(low, 1 / shape, 0)
    return (made * power).to(alpha.dtype).clamp_(min=torch.finfo(alpha.dtype).tiny)


def _marsaglia_tsang(
    x: torch.Tensor, u: torch.Tensor, d: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    v = (1 + x / (3 * d.sqrt())) ** 3
    fits = (1 - u).log() < 0.5 * x * x + d - d * v + d * v.clamp(min=1e-300).log()
    return d * v, (v > 0) & fits
