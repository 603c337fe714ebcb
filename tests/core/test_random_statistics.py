"""Counter mode draws from the algorithm it names, and what it draws is uniform and independent."""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Callable
from math import sqrt
from typing import Any

import pytest
import torch
from torch import distributions

import shardwise as sw
from shardwise.random import tiles

from ..compare import virtual

SIGMAS = 5.0
"""How far from the expected a statistic may lie: a fair generator fails once in a million."""


def mesh() -> Any:
    return virtual(2)


def uniform(*size: int, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    with sw.random.mode("counter"):
        return sw.rand(*size, device_mesh=mesh(), placements=[sw.Shard(0)]).full_tensor()


def assert_chi_square(counts: torch.Tensor, expected: torch.Tensor) -> None:
    """The counts are what multinomial draws of the expected give."""
    keep = expected >= 5
    rest = torch.stack([(~keep * counts).sum(), (~keep * expected).sum()]).double()
    statistic = ((counts[keep] - expected[keep]) ** 2 / expected[keep]).sum()
    free = int(keep.sum()) - 1
    if rest[1] >= 5:
        statistic += (rest[0] - rest[1]) ** 2 / rest[1]
        free += 1
    above = torch.special.gammaincc(torch.tensor(free / 2.0).double(), statistic / 2)
    assert above > 1e-6, f"chi-square {statistic:.1f} with {free} degrees of freedom"
    assert free < 9 or above < 1 - 1e-6, f"too good: {statistic:.1f} with {free}"


def assert_uncorrelated(a: torch.Tensor, b: torch.Tensor) -> None:
    a, b = a.flatten().double(), b.flatten().double()
    far = torch.corrcoef(torch.stack([a, b]))[0, 1] * sqrt(a.numel())
    assert abs(far) < SIGMAS, f"correlated: {far:.1f} sigmas"


# --- known answers ---------------------------------------------------------------------------


def words_of(key: bytes, tile: int) -> tuple[int, ...]:
    raw = hashlib.shake_128(b"shardwise" + key + struct.pack("<qq", 0, tile)).digest(2496)
    return struct.unpack("<624I", raw)


def test_a_tile_is_a_mersenne_twister_whose_state_is_shake_of_key_and_tile() -> None:
    key = bytes(range(16))
    local = torch.empty(3 * tiles.MOST, dtype=torch.int32)
    size = local.numel()
    tiles.draw_held(local, [[(0, size)]], (size,), key, lambda t, g: t.random_(generator=g))
    sides = tiles.tile_sides((size,))
    for tile, part in enumerate(local.split(sides[0])):
        known = random.Random()  # Python's own Mersenne twister
        known.setstate((3, (*words_of(key, tile), 624), None))
        want = [known.getrandbits(32) & 0x7FFFFFFF for _ in range(part.numel())]
        assert part.tolist() == want


def test_shake_128_gives_the_published_answer() -> None:
    # FIPS 202, SHAKE128 of the empty message
    assert hashlib.shake_128(b"").hexdigest(16) == "7f9c2ba4e88f827d616045507605853e"


def test_the_numbers_of_a_seed_never_change() -> None:
    torch.manual_seed(0)
    with sw.random.mode("counter"):
        x = sw.rand(4, device_mesh=mesh()).full_tensor()
        y = sw.randint(1000, (4,), device_mesh=mesh()).full_tensor()
    torch.testing.assert_close(x, torch.tensor(KNOWN[0]), rtol=0, atol=5e-5)
    assert y.tolist() == KNOWN[1]


KNOWN: list[Any] = [[0.86207, 0.88131, 0.07131, 0.58106], [639, 919, 374, 729], [2, 5, 0, 4, 1, 3]]


# --- uniform and independent -----------------------------------------------------------------


def test_uniform_numbers_are_uniform() -> None:
    x = uniform(512, 512).double()
    counts = torch.histc(x, 256, 0, 1)
    assert_chi_square(counts, torch.full_like(counts, x.numel() / 256))


def test_neighbours_are_independent() -> None:
    x = uniform(512, 512)
    for dim in (0, 1):  # within tiles and over their edges
        for step in (1, 2, *tiles.tile_sides((512, 512))):
            assert_uncorrelated(x.narrow(dim, 0, 512 - step), x.narrow(dim, step, 512 - step))
    pairs = (x[:, :-1:2] * 32).long() * 32 + (x[:, 1::2] * 32).long()
    counts = torch.bincount(pairs.flatten(), minlength=1024).double()
    assert_chi_square(counts, torch.full_like(counts, pairs.numel() / 1024))


def test_the_low_bits_are_independent_too() -> None:
    bits = (uniform(512, 512).double() * 2**24).long() & 1
    runs = bits.flatten().double()
    assert abs(runs.mean() - 0.5) * 2 * sqrt(runs.numel()) < SIGMAS
    assert_uncorrelated(runs[:-1], runs[1:])


def test_calls_and_seeds_are_independent() -> None:
    with sw.random.mode("counter"):
        torch.manual_seed(0)
        calls = [sw.rand(300, 70, device_mesh=mesh()).full_tensor() for _ in range(6)]
    seeds = [uniform(300, 70, seed=seed) for seed in (0, 1, 2, 3, 2**32, 2**40 + 1)]
    for group in (calls, seeds):
        for i, a in enumerate(group):
            for b in group[:i]:
                assert_uncorrelated(a, b)


def test_seeds_that_agree_in_32_bits_are_different_seeds() -> None:
    one, other = (torch.Generator().manual_seed(seed) for seed in (1, 1 + 2**32))
    assert torch.equal(torch.rand(4, generator=one), torch.rand(4, generator=other))  # PyTorch's
    assert_uncorrelated(uniform(300, 70, seed=1), uniform(300, 70, seed=1 + 2**32))


def test_no_tile_is_repeated() -> None:
    keys = [struct.pack("<2q", i, j) for i in range(4) for j in range(4)]
    labels = [(key, tile) for key in keys for tile in range(240)]
    starts = {tiles.generator_state(*label)[:16] for label in labels}
    assert len(starts) == len(labels)
    torch.manual_seed(0)
    assert len({tiles.new_key() for _ in range(5000)}) == 5000


# --- distributions ---------------------------------------------------------------------------

COUNT = 40_000


def draw(f: Callable[[Any], Any], like: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(1)
    with sw.random.mode("counter"):
        made = f(sw.distribute_tensor(like, mesh(), [sw.Shard(0)]))
    return made.full_tensor().double()  # type: ignore[no-any-return]


def assert_follows(x: torch.Tensor, cdf: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Kolmogorov and Smirnov: the largest distance from the distribution function."""
    x = x.flatten().sort()[0]
    steps = torch.arange(1, x.numel() + 1) / x.numel()
    far = (cdf(x) - steps).abs().max() * sqrt(x.numel())
    assert far < 2.5, f"{far:.2f}"  # 1 in 100,000


E = torch.empty(COUNT)
CONTINUOUS: dict[str, tuple[Callable[[Any], Any], torch.Tensor, Any]] = {
    "uniform": (lambda x: x.uniform_(-1, 3), E, distributions.Uniform(-1.0, 3.0)),
    "normal": (lambda x: x.normal_(1, 2), E, distributions.Normal(1.0, 2.0)),
    "exponential": (lambda x: x.exponential_(3.0), E, distributions.Exponential(3.0)),
    "cauchy": (lambda x: x.cauchy_(1, 2), E, distributions.Cauchy(1.0, 2.0)),
    "log_normal": (lambda x: x.log_normal_(0.5, 0.3), E, distributions.LogNormal(0.5, 0.3)),
    "normal by tensors": (
        lambda x: torch.normal(x, x),
        torch.full((COUNT,), 2.0),
        distributions.Normal(2.0, 2.0),
    ),
    "gamma": (torch._standard_gamma, torch.full((COUNT,), 3.5), distributions.Gamma(3.5, 1.0)),
    "gamma of little": (
        torch._standard_gamma,
        torch.full((COUNT,), 0.4),
        distributions.Gamma(0.4, 1.0),
    ),
}


@pytest.mark.parametrize("name", CONTINUOUS)
def test_a_continuous_distribution(name: str) -> None:
    f, like, known = CONTINUOUS[name]
    assert_follows(draw(f, like.clone()), known.cdf)


def rates(value: float) -> torch.Tensor:
    return torch.full((COUNT,), value)


DISCRETE: dict[str, tuple[Callable[[Any], Any], torch.Tensor, Any]] = {
    "bernoulli": (lambda x: x.bernoulli_(0.3), E, distributions.Bernoulli(0.3)),
    "bernoulli by a tensor": (torch.bernoulli, rates(0.7), distributions.Bernoulli(0.7)),
    "geometric": (lambda x: x.geometric_(0.2).sub_(1), E, distributions.Geometric(0.2)),
    "random": (lambda x: x.random_(7), E, distributions.Categorical(torch.ones(7))),
    **{
        f"poisson of {rate}": (torch.poisson, rates(rate), distributions.Poisson(rate))
        for rate in (0.3, 4.0, 9.9, 10.0, 35.0, 1000.0)
    },
    **{
        f"binomial of {n} and {p}": (
            lambda x, p=p: torch.binomial(x, torch.full_like(x, p)),
            rates(float(n)),
            distributions.Binomial(n, torch.tensor(p)),
        )
        for n, p in ((1, 0.3), (12, 0.5), (30, 0.9), (60, 0.4), (500, 0.75))
    },
}


@pytest.mark.parametrize("name", DISCRETE)
def test_a_discrete_distribution(name: str) -> None:
    f, like, known = DISCRETE[name]
    x = draw(f, like.clone()).long()
    low, high = int(x.min()), int(x.max())
    counts = torch.bincount(x - low).double()
    values = torch.arange(low, high + 1)
    assert_chi_square(counts, known.log_prob(values.float()).double().exp() * COUNT)


WEIGHTS = torch.tensor([0.1, 0.0, 0.4, 0.2, 0.3])


@pytest.mark.parametrize("replacement", [True, False])
def test_multinomial_takes_each_place_as_often_as_its_weight(replacement: bool) -> None:
    rows = WEIGHTS.expand(COUNT // 2, 5).clone()
    x = draw(lambda p: p.multinomial(2, replacement), rows).long()
    first = torch.bincount(x[:, 0], minlength=5).double()
    assert first[1] == 0
    assert_chi_square(first, WEIGHTS * len(x))
    after = WEIGHTS[None].expand(5, 5).clone()
    if not replacement:
        after = after.fill_diagonal_(0)
        after /= after.sum(1, keepdim=True)
    pairs = torch.bincount(x[:, 0] * 5 + x[:, 1], minlength=25).double()
    assert_chi_square(pairs, (WEIGHTS[:, None] * after).flatten() * len(x))


def assert_all_as_likely(rows: torch.Tensor, values: int) -> None:
    counts = torch.bincount(rows.flatten(), minlength=values).double()
    assert_chi_square(counts, torch.full_like(counts, rows.numel() / values))


def test_every_small_permutation_is_as_likely() -> None:
    torch.manual_seed(0)
    with sw.random.mode("counter"):
        made = [sw.randperm(4, device_mesh=virtual(1)).to_local() for _ in range(600)]
    codes = torch.stack([x.parts[0] for x in made]) @ torch.tensor([64, 16, 4, 1])
    counts = codes.unique(return_counts=True)[1].double()
    assert len(counts) == 24
    assert_chi_square(counts, torch.full_like(counts, 600 / 24))


def randperm(n: int) -> torch.Tensor:
    return sw.randperm(n, device_mesh=mesh(), placements=[sw.Shard(0)]).full_tensor()


def test_a_large_permutation_has_no_pattern() -> None:
    n = 40_001
    torch.manual_seed(0)
    with sw.random.mode("counter"):
        x, y = (randperm(n) for _ in range(2))
    assert torch.equal(x.sort()[0], torch.arange(n))
    assert_uncorrelated(x, torch.arange(n))
    assert_uncorrelated(x, y)
    for step in (1, 2, 200, 201):
        assert_uncorrelated(x[:-step], x[step:])
        gaps = (x[step:] - x[:-step]) % n
        counts = torch.histc(gaps.double(), 64, 0, n)
        assert_chi_square(counts, torch.full_like(counts, (n - step) / 64))
