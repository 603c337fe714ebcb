"""Files of DTensors that cannot be true are refused when they are read."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from shardwise import Shard, distribute_tensor
from shardwise.errors import LayoutError
from shardwise.layout.make_mesh import described

from ..compare import numbers, virtual


class Forged:
    """Pickles as the tensor that its parts make."""

    def __init__(self, restore: Any, parts: tuple[Any, ...]) -> None:
        self.made = restore, parts

    def __reduce__(self) -> Any:
        return self.made


class ForgedSpec(Forged):
    pass


def parts_of(x: Any) -> tuple[Any, list[Any], Any, list[Any]]:
    restore, parts = x.__reduce_ex__(2)
    rebuild, spec = parts[0].__reduce__()
    return restore, list(parts), rebuild, list(spec)


def load(restore: Any, parts: Any, weights_only: bool) -> Any:
    buffer = io.BytesIO()
    torch.save(Forged(restore, tuple(parts)), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=weights_only)


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize(
    ("meta", "says"),
    [
        (((-4, 3), (3, 1), torch.float64), "which no tensor has"),
        (((4, -3), (-3, 1), torch.float64), "which no tensor has"),
        (((4, 3), (3,), torch.float64), "which no tensor has"),
        (((4.0, 3), (3, 1), torch.float64), "which no tensor has"),
        (((4, 3), (3, 1), "float64"), "which no tensor has"),
        (((4, 3), (3, 1), torch.float32), "local tensors of"),
        (((4, 3), (3, 1), torch.int64), "local tensors of"),
        (((4, 2), (2, 1), torch.float64), "local tensors of shapes"),
        (None, "it is damaged"),
    ],
)
def test_specs_that_do_not_tell_the_truth(meta: Any, says: str, weights_only: bool) -> None:
    x = distribute_tensor(numbers(4, 3), virtual(2), [Shard(0)])
    restore, parts, rebuild, spec = parts_of(x)
    spec[2] = meta
    parts[0] = ForgedSpec(rebuild, tuple(spec))
    with pytest.raises((LayoutError, Exception), match=says) as error:
        load(restore, parts, weights_only)
    assert isinstance(error.value, LayoutError) or "LayoutError" in repr(error.value.__cause__)


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("name", ["full_tensor", "__deepcopy__", "placements", "add_", "dtype"])
def test_attributes_that_hide_those_of_the_class(name: str, weights_only: bool) -> None:
    x = distribute_tensor(numbers(4, 3), virtual(2), [Shard(0)])
    restore, parts, *_ = parts_of(x)
    parts[4] = {"tag": 1, name: 3}
    with pytest.raises(LayoutError, match=rf"attributes \['{name}'\], which would hide"):
        restore(*parts)
    with pytest.raises(Exception, match="would hide"):
        load(restore, parts, weights_only)
    parts[4] = {"tag": 1}
    y = load(restore, parts, weights_only)
    assert y.tag == 1 and torch.equal(y.full_tensor(), numbers(4, 3))


@pytest.mark.parametrize("slots", [((0, 0), (1, 0)), (0, 1), ((), ())], ids=str)
def test_places_that_the_mesh_does_not_have(slots: Any) -> None:
    x = distribute_tensor(numbers(4, 3), virtual(2), [Shard(0)])
    restore, parts, *_ = parts_of(x)
    parts[1] = slots
    with pytest.raises(LayoutError, match="it is damaged"):
        restore(*parts)


def test_local_tensors_that_are_DTensors() -> None:
    x = distribute_tensor(numbers(4, 3), virtual(2), [Shard(0)])
    half = distribute_tensor(numbers(2, 3), virtual(2))
    restore, parts, *_ = parts_of(x)
    parts[2] = (half, half)
    with pytest.raises(LayoutError, match="plain tensors"):
        restore(*parts)
    assert described(x._spec.topology)[0]  # virtual: the mesh is made of what was saved
