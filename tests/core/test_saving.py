"""Saving and loading: pickles, files, arrays, and what has no memory to share."""

from __future__ import annotations

import collections
import copy
import io
import pickle
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from shardwise import Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from shardwise.errors import LayoutError
from shardwise.layout.make_mesh import described
from shardwise.layout.spec import DTensorSpec

from ..compare import numbers, virtual

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
    with pytest.raises(LayoutError, match="full_state_dict" if wrong == "slots" else "shapes"):
        restore(spec, slots, local, *rest)


@pytest.mark.parametrize("places", LAYOUTS, ids=str)
def test_what_is_written_into_an_array_is_not_lost_in_silence(places: Any) -> None:
    x = distribute_tensor(numbers(5, 3), MESH, places)
    for array in (x.numpy(), x.numpy(force=True), numpy.asarray(x), numpy.asarray(x, "float64")):
        assert numpy.array_equal(array, numbers(5, 3).numpy())
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 7
    for copied in (numpy.array(x), numpy.asarray(x, "float32")):
        copied[0] = 7  # a copy is asked for
    assert torch.equal(x.full_tensor(), numbers(5, 3))


@pytest.mark.parametrize("place", [Replicate(), Shard(0)], ids=str)
def test_an_array_of_what_requires_grad_is_an_error_as_on_one_device(place: Any) -> None:
    mesh = init_device_mesh("cpu", (2,))
    plain = numbers(4).requires_grad_()
    for x in (plain, distribute_tensor(plain, mesh, [place])):
        for array in (lambda t: t.numpy(), numpy.asarray):
            with pytest.raises(RuntimeError, match="requires grad"):
                array(x)
            with torch.no_grad():
                assert numpy.array_equal(array(x), numbers(4).numpy())


def loaded(value: Any) -> Any:
    """What `torch.save` and `torch.load` make of a value by default."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


def layers() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    for layer, places in ((model[0], LAYOUTS[1]), (model[2], LAYOUTS[3])):
        for name, value in list(layer.named_parameters()):
            setattr(layer, name, nn.Parameter(distribute_tensor(value.detach(), MESH, places)))
    return model


def test_state_dicts_are_loaded_by_default() -> None:
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    state = loaded({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    other = layers()
    other.load_state_dict(state["model"])
    again = torch.optim.AdamW(other.parameters())
    again.load_state_dict(state["optimizer"])
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert q._spec is p._spec and torch.equal(p.full_tensor(), q.full_tensor())
        for key, value in optimizer.state[p].items():
            assert torch.equal(again.state[q][key], value)


def test_parameters_and_cuts_are_loaded_by_default() -> None:
    mesh = init_device_mesh("cpu", (2,))
    x = nn.Parameter(distribute_tensor(numbers(5, 3), mesh, [Shard(0)], cuts=[(1, 4), None]))
    y = loaded(x)
    assert isinstance(y, nn.Parameter) and y.requires_grad and y._spec is x._spec
    assert torch.equal(y.full_tensor(), numbers(5, 3))
    z = distribute_tensor(numbers(4, 3), mesh, [Shard(0)]).t().reshape(12)
    assert torch.equal(loaded(z).full_tensor(), numbers(4, 3).t().reshape(12))


@pytest.mark.parametrize("places", LAYOUTS, ids=str)
def test_a_shallow_copy_shares_memory(places: Any) -> None:
    """As of a plain tensor; what was reduced of a pending sum before is not taken for its value."""
    x = nn.Parameter(distribute_tensor(numbers(5, 3), MESH, places))
    row, other = x.detach()[1], copy.copy(x)
    assert isinstance(other, nn.Parameter) and other.is_leaf and other.requires_grad
    assert [x.cos().shape, row.cos().shape] == [(5, 3), (3,)]
    with torch.no_grad():
        other.mul_(2)
    torch.testing.assert_close(x.cos().full_tensor(), (numbers(5, 3) * 2).cos())
    torch.testing.assert_close(row.cos().full_tensor(), (numbers(5, 3)[1] * 2).cos())


def test_what_is_no_spec_is_refused() -> None:
    x = distribute_tensor(numbers(5, 3), MESH, [Shard(0), Replicate()])
    restore, (_, *rest) = x.__reduce_ex__(2)
    with pytest.raises(LayoutError, match="damaged"):
        restore(collections.OrderedDict(), *rest)
    with pytest.raises(LayoutError, match="damaged"):
        restore(x._spec, rest[0], ("a", "b"), *rest[2:])
    with pytest.raises(AttributeError, match="immutable"):
        Shard(0).dim = 1


@pytest.mark.parametrize("place", [Replicate(), Shard(0), Partial()], ids=str)
def test_memory_that_is_not_there_is_not_shared(place: Any) -> None:
    x = distribute_tensor(numbers(5, 3), init_device_mesh("cpu", (2,)), [place])
    # What must raise comes before what would read the memory.
    for share in (
        lambda t: t.__dlpack__(),
        lambda t: t.__dlpack__(stream=None),
        torch.from_dlpack,
        numpy.from_dlpack,
        lambda t: t.share_memory_(),
        lambda t: nn.ParameterList([t]).share_memory(),
    ):
        with pytest.raises(LayoutError, match=r"to_local\(\), .* full_tensor\(\)"):
            share(x)
    assert torch.equal(torch.from_dlpack(x.full_tensor()), numbers(5, 3))
    x.full_tensor().share_memory_()


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
