"""Work of several ranks on the same files: if it fails on one rank, all raise and say why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ...comm import all_equal
from ...comm.process import broadcast_from
from ...errors import CheckpointError
from ...layout.mesh import Topology, topology
from ...tensor.dtensor import DTensor


class Together:
    """All processes of the program, or this one if there are no others.

    `plain_alone`: without DTensors each process acts by itself.
    """

    def __init__(
        self, what: str, tensors: Iterable[torch.Tensor], plain_alone: bool = False
    ) -> None:
        self.what = what
        meshes = [each._spec.topology for each in tensors if isinstance(each, DTensor)]
        self._mesh: Topology | None = None
        everyone = dist.group.WORLD if dist.is_available() else None
        alone = any(mesh.virtual for mesh in meshes) or (plain_alone and not meshes)
        if everyone is not None and not alone:
            device = meshes[0].device_type if meshes else "cpu"
            self._mesh = topology(DeviceMesh.from_group(everyone, device))
        self.is_first = self._mesh is None or dist.get_rank() == 0

    def told_by_first(self, numbers: Sequence[int]) -> list[int]:
        """The numbers that the first rank gives, on all ranks."""
        if self._mesh is None:
            return list(numbers)
        value = torch.tensor(list(numbers), device=self._mesh.device_type)
        broadcast_from(self._mesh, (0,), value, (0,))
        return value.tolist()

    def check_same(self, description: str) -> None:
        """An error on all ranks if they would do different things."""
        digest = int.from_bytes(blake2b(description.encode(), digest_size=7).digest(), "big")
        if self._mesh is not None and not all_equal(self._mesh, digest):
            raise CheckpointError(
                f"{self.what}: the ranks give states that differ in names, shapes, dtypes or "
                "layouts. All must give the same; nothing was changed."
            )

    @contextmanager
    def step(self, consequence: str) -> Iterator[None]:
        """A block that may fail on one rank alone. At its end all raise if one failed."""
        problem: Exception | None = None
        try:
            yield
        except Exception as error:  # whatever it is, the others must not wait for this rank
            problem = error
        other = self._problem_of_another(problem)
        if problem is not None or other is not None:
            text = other if problem is None else _text(problem)
            raise CheckpointError(f"{self.what}: {text} {consequence}") from problem

    def _problem_of_another(self, problem: Exception | None) -> str | None:
        if self._mesh is None:
            return None
        world = self._mesh.world
        assert world is not None
        key = world.key("problem")
        if problem is not None:
            world.store.set(key, f"rank {world.rank}: {_text(problem)}")
        good = all_equal(self._mesh, 0 if problem is None else 1 + world.rank)
        return None if good and problem is None else str(world.store.get(key).decode())


def _text(problem: Exception) -> str:
    if isinstance(problem, CheckpointError):
        return str(problem)
    return f"{type(problem).__name__}: {problem}."
