from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from .harness import ProcessPool

collect_ignore = [
    "capture_script.py",
    "fault_script.py",
    "save_script.py",
]  # read sys.argv
_USUAL = 4


@pytest.fixture(scope="session")
def processes() -> Iterator[Callable[[int], ProcessPool]]:
    """`processes(n)` is a pool of n gloo processes, started when first used."""
    pools: dict[int, ProcessPool] = {}

    def pool(world: int) -> ProcessPool:
        for size in [size for size in pools if size > _USUAL and size != world]:
            pools.pop(size).stop()  # used once or twice, and its idle groups wake up all the time
        return pools.setdefault(world, ProcessPool(world))

    yield pool
    for each in pools.values():
        each.stop()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """First what starts processes of its own: the groups of an idle pool wake up all the time."""
    items.sort(key=lambda item: "processes" in getattr(item, "fixturenames", ()))
