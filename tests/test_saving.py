"""Saving and loading: pickles, files, arrays, and what has no memory to share."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from shardwise import Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from shardwise.errors import LayoutError
from shardwise.spec import DTensorSpec

from .compare import numbers

MESH = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
LAYOUTS = [
    [Replicate(), Replicate()],
    [Shard(0), Shard(0)],
    [Shard(1), Partial()],
    [Replicate(), Shard(0)],
]


@pytest.mark.parametrize("places", LAYOUTS, ids=str)
def test_a_pickle_on_a_virtual_mesh_is_the_tensor(places: Any) -> None:
    x = distribute_tensor(numbers(5, 3), MESH, places)
    y = pickle.loads(pickle.dumps(x))
    assert y._spec is x._spec and torch.equal(y.full_tensor(), numbers(5, 3))


def test_links_and_sub_meshes_are_pickled() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"), links=["nvlink", "ethernet"])
    for where in (mesh, mesh["b"]):
        spec = distribute_tensor(torch.ones(4), where)._spec
        assert pickle.loads(pickle.dumps(spec)) is spec and copy.deepcopy(spec) is spec
    bare = DTensorSpec(mesh, [Shard(0), Replicate()])
    assert pickle.loads(pickle.dumps(bare)) is bare


@pytest.mark.parametrize("wrong", ["slots", "shapes"])
def test_local_tensors_of_other_places_are_refused(wrong: str) -> None:
    x = distribute_tensor(numbers(5, 3), MESH, [Shard(0), Replicate()])
    restore, (spec, slots, local, *rest) = x.__reduce_ex__(2)
    assert torch.equal(restore(spec, slots, local, *rest), x)
    if wrong == "slots":
        slots = slots[::-1]
    else:
        local = local[::-1]
    with pytest.raises(LayoutError, match="full_tensor" if wrong == "slots" else "shapes"):
        restore(spec, slots, local, *rest)
