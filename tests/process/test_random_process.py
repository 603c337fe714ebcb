"""Random numbers on four processes: those of one device, or those of a mesh of one rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import shardwise as sw
from shardwise import Replicate, Shard

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
    processes(4).run(check_all, every(41))  # a tenth: python -m tests.process.test_random_process


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
        made.append(torch.nn.functional.dropout(made[0]))
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


if __name__ == "__main__":
    pool = ProcessPool(4)
    pool.run(check_all, every(10), timeout=600)
    pool.stop()
    print(f"{len(every(10))} layouts on 4 processes: equal in both modes")
