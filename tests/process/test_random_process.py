"""Random numbers on four processes: those of one device, or those of a mesh of one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise import Replicate, Shard

from ..compare import numbers
from ..random_cases import CASES, Setting, check_counter, check_exact, settings, small_tiles
from .harness import ProcessPool

Pools = Callable[[int], ProcessPool]
MESHES = [(4,), (2, 2)]


def check_all(sample: list[Setting]) -> None:
    meshes = {shape: sw.init_device_mesh("cpu", shape) for shape in MESHES}
    for setting in sample:
        check_exact(setting, meshes[setting.mesh])
        with small_tiles():
            check_counter(setting, meshes[setting.mesh])


def every(step: int) -> list[Setting]:
    return [setting for name in CASES for setting in settings(name, MESHES)][::step]


def test_a_sample_of_all_layouts(processes: Pools) -> None:
    processes(4).run(check_all, every(20), timeout=200)


def draw_on_each(seeds: list[int] | None, mode: str) -> list[torch.Tensor]:
    """Numbers on every rank after the ranks were seeded apart before a mesh was made."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(100 + rank)
    mesh = sw.init_device_mesh("cpu", (4,))
    with sw.random.mode(mode):
        made = [sw.rand(3, 2, device_mesh=mesh)]
        if seeds is not None:
            torch.manual_seed(seeds[rank])
        made.append(sw.randn(3, 2, device_mesh=mesh))
        made.append(F.dropout(made[0]))
    return [x.to_local() for x in made]


@pytest.mark.parametrize("mode", ["exact", "counter"])
def test_ranks_take_the_first_ones_state_when_a_mesh_is_made(processes: Pools, mode: str) -> None:
    first, *others = processes(4).run(draw_on_each, None, mode)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("mode", ["exact", "counter"])
def test_ranks_that_are_seeded_apart_are_found_out(processes: Pools, mode: str) -> None:
    for answer in processes(4).run(refused, mode):
        assert "different random states" in answer and "manual_seed" in answer


def refused(mode: str) -> str:
    with pytest.raises(sw.errors.CommunicationError) as caught:
        draw_on_each([1, 1, 2, 1], mode)
    return str(caught.value)


def drift(mode: str) -> list[str]:
    """One rank draws a number of its own, from the default generator and from one that is given."""
    mesh = sw.init_device_mesh("cpu", (2, 2))
    generator = torch.Generator().manual_seed(1)
    found = []
    with sw.random.mode(mode):
        for given in (None, generator):
            for _ in range(5):
                sw.rand(3, device_mesh=mesh, generator=given)
            if torch.distributed.get_rank() == 3:
                torch.rand(1, generator=given)
            with pytest.raises(sw.errors.CommunicationError) as caught:
                sw.rand(3, device_mesh=mesh, generator=given)
            found.append(str(caught.value))
            sw.manual_seed(0, mesh)
            sw.rand(3, device_mesh=mesh)  # all is well again
    return found


@pytest.mark.parametrize("mode", ["exact", "counter"])
def test_a_rank_that_draws_for_itself_is_found_out(processes: Pools, mode: str) -> None:
    for default, given in processes(4).run(drift, mode):
        assert "different random states" in default
        assert "different states of the generator given" in given


def in_two_modes() -> str:
    mesh = sw.init_device_mesh("cpu", (4,))
    with (
        sw.random.mode("counter" if torch.distributed.get_rank() else "exact"),
        pytest.raises(sw.errors.CommunicationError) as caught,
    ):
        sw.rand(3, device_mesh=mesh)
    return str(caught.value)


def test_ranks_in_different_modes_are_found_out(processes: Pools) -> None:
    first, *others = processes(4).run(in_two_modes)
    assert "not all are in exact mode" in first
    assert all("not all are in counter mode" in other for other in others)


def counted(check: bool) -> tuple[int, int]:
    mesh = sw.init_device_mesh("cpu", (4,))
    x = sw.distribute_tensor(torch.full((8, 6), 0.5), mesh, [Shard(0)])
    with sw.random.mode("counter", check=check), sw.CommDebugMode() as comm:
        torch.rand_like(x)
        F.dropout(x, 0.5)
        torch.randn_like(x)
    return comm.get_total_counts(), comm.checks


def test_counter_mode_only_compares_states(processes: Pools) -> None:
    assert processes(4).run(counted, False) == [(0, 0)] * 4
    assert processes(4).run(counted, True) == [(0, 3)] * 4


def checkpointed(mode: str, reentrant: bool | None) -> list[torch.Tensor]:
    mesh = sw.init_device_mesh("cpu", (2, 2))
    return gradients(mesh, mode, reentrant)


def gradients(mesh: Any, mode: str, reentrant: bool | None) -> list[torch.Tensor]:
    def noisy(x: Any, weight: Any) -> Any:
        return F.dropout(F.dropout(x @ weight, 0.4).sin(), 0.3)

    torch.manual_seed(4)
    x = sw.distribute_tensor(numbers(6, 4), mesh, [Shard(0), Replicate()]).requires_grad_()
    weight = sw.distribute_tensor(numbers(4, 5, seed=1), mesh, [Replicate(), Shard(1)])
    weight.requires_grad_()
    with sw.random.mode(mode):
        if reentrant is None:
            y = noisy(x, weight)
        else:
            y = checkpoint(noisy, x, weight, use_reentrant=reentrant)
        y.square().sum().backward()
    return [x.grad.full_tensor(), weight.grad.full_tensor()]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("mode", ["exact", "counter"])
def test_checkpointing_draws_the_same_again(processes: Pools, mode: str, reentrant: bool) -> None:
    want = gradients(sw.init_device_mesh("cpu", (2, 2)), mode, None)
    for got in processes(4).run(checkpointed, mode, reentrant):
        torch.testing.assert_close(got, want)


def seeded(mode: str) -> list[torch.Tensor]:
    mesh = sw.init_device_mesh("cpu", (2, 2))
    sw.manual_seed(3 + torch.distributed.get_rank(), mesh)
    with sw.random.mode(mode):
        return [sw.rand(5, 2, device_mesh=mesh, placements=[Shard(0), Replicate()]).full_tensor()]


@pytest.mark.parametrize("mode", ["exact", "counter"])
def test_manual_seed_takes_the_first_ranks_seed(processes: Pools, mode: str) -> None:
    torch.manual_seed(3)
    with sw.random.mode(mode):
        want = sw.rand(5, 2, device_mesh=sw.init_device_mesh("cpu", (1,))).full_tensor()
    for (got,) in processes(4).run(seeded, mode):
        assert torch.equal(got, want)
