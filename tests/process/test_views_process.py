"""Views, writes and redistributed tensors on processes, as on one device."""

from __future__ import annotations

from collections.abc import Callable

from shardwise import init_device_mesh

from ..core import test_redistribute_aliasing, test_view_programs
from .harness import ProcessPool

Pools = Callable[[int], ProcessPool]


def programs_of_views() -> None:
    for shape in ((2,), (2, 1)):
        mesh = init_device_mesh("cpu", shape)
        for mode, enter in test_view_programs.MODES.items():
            for seed in range(40):
                with enter():
                    trained = mode == "grad" and seed % 3 > 0
                    test_view_programs.Program(seed, mode, trained, mesh).run(8)


def programs_of_redistributions() -> None:
    for mode in test_redistribute_aliasing.MODES.values():
        for seed in range(40):
            with mode():
                test_redistribute_aliasing.Program(seed, [(2,), (2, 1), (1, 2)]).run(8)


def test_programs_of_views(processes: Pools) -> None:
    processes(2).run(programs_of_views, timeout=120)


def test_programs_of_redistributions(processes: Pools) -> None:
    processes(2).run(programs_of_redistributions, timeout=120)
