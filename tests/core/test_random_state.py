"""Seeds, states, modes and checkpoints mean on a mesh what they mean in PyTorch."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.random import tiles
from shardwise.tools.comm_debug import CommDebugMode

from ..compare import numbers, virtual

MODES = ("exact", "counter")


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> Any:
    with sw.random.mode(request.param):
        yield request.param


def laid_out(x: torch.Tensor, *placements: Any) -> Any:
    return sw.distribute_tensor(x, virtual(*[2] * len(placements)), placements)


# --- modes -----------------------------------------------------------------------------------


def rand() -> torch.Tensor:
    torch.manual_seed(0)
    return sw.rand(6, device_mesh=virtual(2), placements=[Shard(0)]).full_tensor()


def test_exact_is_the_default() -> None:
    torch.manual_seed(0)
    assert torch.equal(torch.rand(6), rand())


def test_a_mode_is_set_for_a_block() -> None:
    exact = rand()
    with sw.random.mode("counter"):
        counter = rand()
        with sw.random.mode("exact"):
            assert torch.equal(rand(), exact)
        assert torch.equal(rand(), counter) and not torch.equal(counter, exact)
    assert torch.equal(rand(), exact)


def test_an_unknown_mode_is_an_error() -> None:
    with pytest.raises(ValueError, match="'fast' is none of 'exact', 'counter'"):
        sw.random.mode("fast")


# --- states ----------------------------------------------------------------------------------


def test_states_are_pytorchs_own(mode: str) -> None:
    x = laid_out(numbers(6, 4), Shard(1))
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first = torch.rand_like(x).full_tensor()
    with torch.random.fork_rng():
        inside = torch.rand_like(x).full_tensor()
    again = torch.rand_like(x).full_tensor()
    assert torch.equal(inside, again) and not torch.equal(first, again)
    torch.set_rng_state(state)
    assert torch.equal(torch.rand_like(x).full_tensor(), first)
    sw.manual_seed(3)
    assert torch.equal(torch.rand_like(x).full_tensor(), first)


def test_a_generator_is_used_and_advanced_and_the_default_one_is_not(mode: str) -> None:
    x = laid_out(numbers(6, 4), Shard(1))
    g = torch.Generator().manual_seed(1)
    before = torch.get_rng_state()
    first, second = (torch.empty_like(x).normal_(generator=g).full_tensor() for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before) and not torch.equal(first, second)
    saved = g.get_state()
    third = sw.rand(4, device_mesh=virtual(2), generator=g).full_tensor()
    g.set_state(saved)
    assert torch.equal(sw.rand(4, device_mesh=virtual(2), generator=g).full_tensor(), third)


def test_a_saved_state_goes_on_on_another_mesh(mode: str) -> None:
    def step(x: Any) -> torch.Tensor:
        return F.dropout(x, 0.5).full_tensor()  # type: ignore[no-any-return]

    x = numbers(7, 5)
    torch.manual_seed(5)
    step(laid_out(x, Shard(0)))
    file = io.BytesIO()
    torch.save({"random": torch.get_rng_state()}, file)
    want = [step(laid_out(x, Shard(0))) for _ in range(2)]
    file.seek(0)
    torch.set_rng_state(torch.load(file)["random"])
    got = [step(laid_out(x, Shard(1), Replicate())) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


# --- activation checkpointing ----------------------------------------------------------------


def noisy(x: Any, weight: Any) -> Any:
    y = F.dropout(x @ weight, 0.4)
    return F.alpha_dropout(F.dropout(y, 0.2).sin(), 0.3, True) * torch.randn_like(y)


def gradients(run: Callable[[Any, Any], Any], leave: bool, mode: str) -> list[torch.Tensor]:
    """Forward in a mode, backward in it or after it was left."""
    torch.manual_seed(4)
    x = laid_out(numbers(6, 4), Shard(0), Replicate()).requires_grad_()
    weight = laid_out(numbers(4, 5, seed=1), Replicate(), Shard(1)).requires_grad_()
    with sw.random.mode(mode):
        loss = run(x, weight).square().sum()
        if not leave:
            loss.backward()
    if leave:
        loss.backward()
    after = sw.rand(3, device_mesh=virtual(2)).full_tensor()
    return [loss.full_tensor(), x.grad.full_tensor(), weight.grad.full_tensor(), after]


@pytest.mark.parametrize("leave", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_checkpointing_draws_the_same_again(mode: str, reentrant: bool, leave: bool) -> None:
    with sw.random.mode("exact" if mode == "counter" else "counter"):  # outside is the other mode
        want = gradients(noisy, leave, mode)
        got = gradients(lambda *a: checkpoint(noisy, *a, use_reentrant=reentrant), leave, mode)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_outside_of_blocks_after_a_block_from_the_same_seed(reentrant: bool) -> None:
    def gradient(run: Callable[[Any, Any], Any]) -> torch.Tensor:
        torch.manual_seed(4)
        x = laid_out(numbers(6, 4), Shard(0), Replicate()).requires_grad_()
        weight = laid_out(numbers(4, 5, seed=1), Replicate(), Shard(1))
        run(x, weight).square().sum().backward()
        return x.grad.full_tensor()

    want = gradient(noisy)
    gradients(noisy, False, "counter")
    got = gradient(lambda *a: checkpoint(noisy, *a, use_reentrant=reentrant))
    torch.testing.assert_close(got, want)


# --- what counter mode costs -----------------------------------------------------------------

SILENT: dict[str, Callable[[Any], Any]] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "normal_": lambda x: (x * 1).normal_(),
    "rand_like": torch.rand_like,
    "randperm": lambda x: sw.randperm(9, device_mesh=x.device_mesh, placements=x.placements),
    "init": lambda x: torch.nn.init.kaiming_uniform_(x * 1),
}


@pytest.mark.parametrize("name", SILENT)
def test_counter_mode_moves_nothing_and_keeps_the_layout(name: str) -> None:
    x = laid_out(numbers(9, 4), Shard(0), Shard(0))
    comm = CommDebugMode()
    with sw.random.mode("counter"), sw.communication("error", fallback="error"), comm:
        made = SILENT[name](x)
    assert comm.get_total_counts() == 0
    assert made.placements == x.placements


@pytest.mark.parametrize("dim", [0, 1])
def test_a_rank_draws_the_tiles_that_its_box_meets(
    dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    state = tiles.generator_state
    monkeypatch.setattr(
        tiles, "generator_state", lambda *label: asked.append(label[1]) or state(*label)
    )
    with sw.random.mode("counter"):
        sw.rand(512, 512, device_mesh=virtual(4), placements=[Shard(dim)])
    assert len(asked) == len(set(asked)) == 512 * 512 // tiles.MOST  # each once in all


def test_a_pending_sum_is_reduced_first() -> None:
    chances = laid_out(numbers(6, 4).sigmoid(), Partial())
    with sw.random.mode("counter"):
        torch.manual_seed(0)
        want = torch.bernoulli(laid_out(numbers(6, 4).sigmoid(), Replicate())).full_tensor()
        with sw.communication("error"), pytest.raises(RuntimeError, match="all_reduce"):
            torch.bernoulli(chances)
        torch.manual_seed(0)
        assert torch.equal(torch.bernoulli(chances).full_tensor(), want)


def test_a_mesh_of_no_memory_takes_the_calls_too(mode: str) -> None:
    mesh = sw.init_device_mesh("meta", (2,))
    x = sw.empty(6, 4, device_mesh=mesh, placements=[Shard(0)])
    assert torch.nn.init.kaiming_normal_(x).to_local().parts[0].is_meta
    assert F.dropout(x, 0.5).placements == (Shard(0),)


# --- certain values --------------------------------------------------------------------------

CERTAIN: dict[str, tuple[Callable[[Any], Any], float]] = {
    "bernoulli_ of 1": (lambda x: (x * 1).bernoulli_(1.0), 1),
    "bernoulli_ of 0": (lambda x: (x * 1).bernoulli_(0.0), 0),
    "bernoulli of ones": (torch.bernoulli, 1),
    "bernoulli of zeros": (lambda x: torch.bernoulli(x * 0), 0),
    "dropout of none": (lambda x: F.dropout(x, 0.0), 1),
    "dropout of all": (lambda x: F.dropout(x, 1.0), 0),
    "native_dropout of none": (lambda x: torch.native_dropout(x, 0.0, True)[0], 1),
    "native_dropout of all": (lambda x: torch.native_dropout(x, 1.0, True)[0], 0),
    "native_dropout at rest": (lambda x: torch.native_dropout(x, 0.5, False)[0], 1),
    "uniform_ of one value": (lambda x: (x * 1).uniform_(3, 3), 3),
    "normal_ of one value": (lambda x: (x * 1).normal_(3, 0), 3),
    "random_ of one value": (lambda x: (x * 1).random_(4, 5), 4),
    "poisson of 0": (lambda x: torch.poisson(x * 0), 0),
    "binomial of probability 1": (lambda x: torch.binomial(x * 50, x), 50),
    "binomial of probability 0": (lambda x: torch.binomial(x * 50, x * 0), 0),
    "binomial of nothing": (lambda x: torch.binomial(x * 0, x / 2), 0),
    "rrelu of one slope": (lambda x: F.rrelu(-x, 0.25, 0.25, training=True), -0.25),
    "multinomial of one place": (lambda x: (x[:, :1] * 2).multinomial(3, True), 0),
}


@pytest.mark.parametrize("name", CERTAIN)
def test_what_is_certain_is_so(name: str, mode: str) -> None:
    f, value = CERTAIN[name]
    made = f(laid_out(torch.ones(6, 5), Shard(0))).full_tensor()
    assert torch.equal(made, torch.full_like(made, value))


# --- odd calls -------------------------------------------------------------------------------

BAD: dict[str, Callable[[Any], Any]] = {
    "uniform_": lambda x: x.uniform_(3, 1),
    "normal_": lambda x: x.normal_(0, -1),
    "bernoulli_": lambda x: x.bernoulli_(1.5),
    "exponential_": lambda x: x.exponential_(-1.0),
    "geometric_": lambda x: x.geometric_(0.0),
    "random_": lambda x: x.random_(3, 3),
    "bernoulli": lambda x: torch.bernoulli(x - 5),
    "normal": lambda x: torch.normal(x, x - 50),
    "poisson": lambda x: torch.poisson(x - 50),
    "binomial of integers": lambda x: torch.binomial(x.long(), x),
    "multinomial of too many": lambda x: (x * x).multinomial(9),
    "multinomial of less than nothing": lambda x: (x - 50).multinomial(2),
    "multinomial of nothing": lambda x: (x * 0).multinomial(2),
    "dropout": lambda x: F.dropout(x, 1.5),
    "uniform_ of integers": lambda x: x.long().uniform_(),
    "cauchy_ of integers": lambda x: x.long().cauchy_(),
    "uniform_ of one row seen often": lambda x: x[:1].expand(4, 4).uniform_(),
    "rand_like of integers": lambda x: torch.rand_like(x.long()),
}


@pytest.mark.parametrize("name", BAD)
def test_what_pytorch_refuses_is_refused(name: str, mode: str) -> None:
    x = numbers(5, 4).abs() + 0.1
    with pytest.raises((RuntimeError, ValueError, NotImplementedError)) as plain:
        BAD[name](x.clone())
    with pytest.raises(type(plain.value)):
        BAD[name](laid_out(x, Shard(0)))


ODD: dict[str, Callable[[], Any]] = {
    "no dims": lambda: laid_out(torch.tensor(2.0), Replicate()).normal_(),
    "nothing": lambda: F.dropout(laid_out(torch.ones(0, 3), Shard(0))),
    "fewer rows than ranks": lambda: torch.rand_like(
        sw.distribute_tensor(torch.ones(1, 3), virtual(4), [Shard(0)])
    ),
    "out=": lambda: torch.bernoulli(
        laid_out(torch.full((4, 4), 0.5), Shard(0)), out=laid_out(torch.empty(4, 4), Shard(1))
    ),
    "out of normal": lambda: torch.normal(
        laid_out(torch.ones(4, 4), Shard(0)), 1.0, out=laid_out(torch.empty(4, 4), Shard(1))
    ),
    "ragged cuts": lambda: laid_out(torch.ones(7, 3), Shard(0))[1:6].normal_(),
    "complex": lambda: sw.randn(5, 2, device_mesh=virtual(2), dtype=torch.complex128),
    "int8": lambda: sw.randint(-100, 100, (5,), device_mesh=virtual(2), dtype=torch.int8),
    "bool": lambda: laid_out(torch.ones(9, dtype=torch.bool), Shard(0)).bernoulli_(0.4),
    "partial": lambda: sw.rand(5, 2, device_mesh=virtual(2), placements=[Partial()]),
    "partial randperm": lambda: sw.randperm(5, device_mesh=virtual(2), placements=[Partial()]),
    "empty randperm": lambda: sw.randperm(0, device_mesh=virtual(2), placements=[Shard(0)]),
    "a plain mean": lambda: torch.normal(torch.ones(4), laid_out(torch.ones(4, 4), Shard(0))),
    "a plain count": lambda: torch.binomial(
        torch.full((4, 4), 5.0), laid_out(torch.full((4, 4), 0.5), Shard(0))
    ),
    "a rate of nothing": lambda: torch.poisson(laid_out(torch.tensor([0.0, 1.0]), Shard(0))),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_calls(name: str, mode: str) -> None:
    torch.manual_seed(0)
    first = ODD[name]().full_tensor()
    torch.manual_seed(0)
    again = ODD[name]().full_tensor()
    assert torch.equal(first, again)
