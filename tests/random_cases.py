"""Every random operator, as a function of a tensor that may be plain or on a mesh."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from shardwise import Partial, Placement, Replicate, Shard
from shardwise.layout.mesh import VirtualMesh
from shardwise.random import tiles

from .compare import numbers

X, UNEVEN = numbers(8, 12), numbers(7, 5)
IMAGE = numbers(5, 3, 4)
QUERY = numbers(4, 3, 5, 2)
ONE = [Replicate(), Shard(0), Shard(1), Partial()]
MESHES = [(1,), (2,), (4,), (3,), (2, 2)]


def _in_place(name: str, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    def call(x: Any) -> Any:
        y = x * 1
        assert getattr(y, name)(*args, **kwargs) is y
        return y

    return call


def _init(name: str, *args: Any) -> Callable[[Any], Any]:
    return lambda x: getattr(nn.init, name)((x * 1).detach(), *args)


def _with_generator(f: Callable[..., Any]) -> Callable[[Any], Any]:
    """Two calls with a generator of its own, and where they leave it."""

    def call(x: Any) -> Any:
        g = torch.Generator().manual_seed(2**40 + 3)
        return [f(x, g), f(x, g), torch.rand(2, generator=g)]

    return call


FILLS = {
    "uniform_": _in_place("uniform_", -1, 3),
    "normal_": _in_place("normal_", 1, 2),
    "exponential_": _in_place("exponential_", 2.0),
    "log_normal_": _in_place("log_normal_", 0.5, 0.25),
    "cauchy_": _in_place("cauchy_", 1, 2),
    "geometric_": _in_place("geometric_", 0.3),
    "random_": _in_place("random_"),
    "random_ to": _in_place("random_", 9),
    "random_ from to": _in_place("random_", -4, 9),
    "bernoulli_": _in_place("bernoulli_", 0.3),
    "bernoulli_ by a tensor": lambda x: (x * 1).bernoulli_(x.sigmoid()),
    "bernoulli_ by a number": lambda x: (x * 1).bernoulli_(torch.tensor(0.3)),
    "of integers": lambda x: [(x * 4).long().random_(7), x.int().geometric_(0.4)],
    "of a slice": lambda x: [y := x * 1, y[2:5].normal_(), y[:, 1:3].uniform_()][0],
    "of a row": lambda x: [y := x * 1, y[1].uniform_(), y.view(-1)[3:9].normal_()][0],
    "of halves": lambda x: [x.to(t).normal_() for t in (torch.bfloat16, torch.float16)],
    "of a transposed": lambda x: (x * 1).t().normal_(),
    "one after another": lambda x: [(x * 1).uniform_(), torch.rand(3), (x * 1).uniform_()],
}
NEW = {
    "rand_like": torch.rand_like,
    "rand_like of a dtype": lambda x: torch.rand_like(x, dtype=torch.float32),
    "randn_like": lambda x: [torch.randn_like(x), torch.randn_like(x)],
    "randn_like complex": lambda x: torch.randn_like(x, dtype=torch.complex64),
    "randint_like": lambda x: torch.randint_like(x, 9),
    "randint_like low": lambda x: torch.randint_like(x, -3, 9, dtype=torch.int32),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli with p": lambda x: torch.bernoulli(x.detach(), 0.3),
    "normal by tensors": lambda x: torch.normal(x, x.abs()),
    "normal by a mean": lambda x: torch.normal(x, 2.0),
    "normal by a std": lambda x: torch.normal(2.0, x.abs()),
    "normal by a row": lambda x: torch.normal(x[0], x.abs()),
    "poisson": lambda x: torch.poisson(x.abs() * 9),
    "poisson of nothing": lambda x: torch.poisson(x.clamp(min=0)),
    "binomial": lambda x: torch.binomial((x.abs() * 30).floor(), x.sigmoid()),
    "gamma": lambda x: torch._standard_gamma(x.detach().exp()),
    "dirichlet": lambda x: torch.distributions.Dirichlet(x.detach().exp()).sample(),
    "multinomial": lambda x: x.softmax(1).multinomial(2),
    "multinomial once": lambda x: x.softmax(1).multinomial(1),
    "multinomial with replacement": lambda x: x.exp().multinomial(9, True),
    "multinomial of a row": lambda x: x.exp()[0].multinomial(4, True),
    "randperm": lambda x: x[torch.randperm(7)],
}
LAYERS = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout in place": lambda x: F.dropout(x * 1, 0.3, inplace=True),
    "dropout of nothing": lambda x: [
        F.dropout(x, 0.0),
        F.dropout(x, 1.0),
        F.dropout(x, 0.5, False),
    ],
    "dropout of a transposed": lambda x: F.dropout(x.t(), 0.5),
    "native_dropout": lambda x: list(torch.native_dropout(x, 0.3, True)),
    "native_dropout at rest": lambda x: list(torch.native_dropout(x, 0.3, False)),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, True),
    "dropout1d": lambda x: F.dropout1d(x, 0.5),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "rrelu at rest": lambda x: F.rrelu(x, training=False),
    "rrelu in place": lambda x: F.rrelu_(x * 1, training=True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
    "gumbel_softmax hard": lambda x: F.gumbel_softmax(x, 0.5, hard=True),
}
LAYERS_3D = {
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.5, True),
    "dropout1d of images": lambda x: F.dropout1d(x, 0.5),
    "dropout2d": lambda x: F.dropout2d(x.unsqueeze(-1), 0.5),
    "dropout3d": lambda x: F.dropout3d(x.unsqueeze(-1).unsqueeze(-1), 0.5),
}
ATTENTION = {
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.4),
    "causal attention": lambda x: F.scaled_dot_product_attention(
        x, x, x, dropout_p=0.4, is_causal=True
    ),
}
INIT = {
    "init uniform": _init("uniform_", -1, 2),
    "init normal": _init("normal_", 1, 2),
    "init trunc_normal": _init("trunc_normal_"),
    "init xavier_uniform": _init("xavier_uniform_"),
    "init xavier_normal": _init("xavier_normal_"),
    "init kaiming_uniform": _init("kaiming_uniform_"),
    "init kaiming_normal": _init("kaiming_normal_"),
    "init orthogonal": _init("orthogonal_"),
    "init sparse": _init("sparse_", 0.4),
    "init eye": _init("eye_"),
    "init constant": _init("constant_", 3.0),
}
GIVEN = {
    "generator uniform_": _with_generator(lambda x, g: (x * 1).uniform_(generator=g)),
    "generator bernoulli": _with_generator(lambda x, g: torch.bernoulli(x.sigmoid(), generator=g)),
    "generator normal": _with_generator(lambda x, g: torch.normal(x, x.abs(), generator=g)),
    "generator multinomial": _with_generator(
        lambda x, g: x.exp().multinomial(3, True, generator=g)
    ),
    "generator rand_like": _with_generator(lambda x, g: torch.rand_like(x, generator=g)),
    "generator poisson": _with_generator(lambda x, g: torch.poisson(x.exp(), generator=g)),
}


def _out(f: Callable[..., Any], dtype: torch.dtype = torch.float64) -> Callable[[Any], Any]:
    """A factory that writes into a tensor with the layout of `x`."""

    def call(x: Any) -> Any:
        out = torch.empty_like(x, dtype=dtype)
        assert f(tuple(x.shape), out=out) is out
        return out

    return call


OUT = {
    "rand out": _out(torch.rand),
    "randn out": _out(torch.randn),
    "randint out": _out(lambda size, out: torch.randint(9, size, out=out)),
    "randint low out": _out(lambda size, out: torch.randint(-3, 9, size, out=out), torch.int64),
    "normal out": _out(lambda size, out: torch.normal(1.0, 2.0, size, out=out)),
    "full out": _out(lambda size, out: torch.full(size, 3.0, out=out)),
    "randperm out": lambda x: torch.randperm(5, out=(x[:5, 0] * 0).long()),
}
FLAT = OUT | FILLS | NEW | LAYERS | INIT | GIVEN
CASES: dict[str, tuple[Callable[[Any], Any], tuple[torch.Tensor, ...]]] = {
    **{name: (f, (X, UNEVEN)) for name, f in FLAT.items()},
    **{name: (f, (IMAGE,)) for name, f in LAYERS_3D.items()},
    **{name: (f, (QUERY,)) for name, f in ATTENTION.items()},
}


@dataclass(frozen=True)
class Setting:
    """A random operator on an input in one layout."""

    name: str
    index: int
    mesh: tuple[int, ...]
    placements: tuple[Placement, ...]

    def function(self) -> Callable[[Any], Any]:
        return CASES[self.name][0]

    def plain(self) -> torch.Tensor:
        return CASES[self.name][1][self.index]

    def laid_out(self, mesh: Any) -> Any:
        return sw.distribute_tensor(self.plain(), mesh, self.placements)


def settings(name: str, meshes: Sequence[tuple[int, ...]] = MESHES) -> list[Setting]:
    """Every layout of every input of a case."""
    return [
        Setting(name, index, mesh, placements)
        for index in range(len(CASES[name][1]))
        for mesh in meshes
        for placements in itertools.product(ONE, repeat=len(mesh))
    ]


def drawn(f: Callable[[Any], Any], x: Any, seed: int = 5) -> list[torch.Tensor]:
    """What a function of `x` gives with a seed, whole, and where it leaves the generator."""
    torch.manual_seed(seed)
    made = f(x)
    made = list(made) if isinstance(made, (list, tuple)) else [made]
    after = torch.get_rng_state()
    return [*(v.full_tensor() if isinstance(v, sw.DTensor) else v for v in made), after]


def assert_same(got: list[torch.Tensor], want: list[torch.Tensor], why: object) -> None:
    """Equal bit for bit, but for arithmetic on the numbers in another order."""
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype, why
        same = torch.equal(a, b) or torch.allclose(a, b, rtol=1e-12, atol=1e-12, equal_nan=True)
        assert same, f"{why}: {a} is not {b}"


def check_exact(setting: Setting, mesh: Any) -> None:
    """Exact mode gives what plain PyTorch gives, and leaves the generator where PyTorch does."""
    f = setting.function()
    assert_same(drawn(f, setting.laid_out(mesh)), drawn(f, setting.plain()), setting)


def check_counter(setting: Setting, mesh: Any) -> None:
    """Counter mode gives what it gives on a mesh of one rank."""
    f = setting.function()
    one = VirtualMesh("cpu", [0])
    with sw.random.mode("counter"):
        want = drawn(f, sw.distribute_tensor(setting.plain(), one, [Replicate()]))
        assert_same(drawn(f, setting.laid_out(mesh)), want, setting)


@contextmanager
def small_tiles(most: int = 8) -> Iterator[None]:
    """Tiles of so few numbers that small tensors have many."""
    before, tiles.MOST = tiles.MOST, most
    tiles.tile_sides.cache_clear()
    try:
        yield
    finally:
        tiles.MOST = before
        tiles.tile_sides.cache_clear()
