"""Bad input is a clear error: what was asked, why it cannot be, what would work."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardwise
from shardwise import DTensor, Partial, Replicate, Shard, distribute_tensor, per_rank
from shardwise.errors import (
    CommunicationError,
    LayoutError,
    MeshError,
    PlainTensorError,
    ShardwiseError,
)

from ..compare import numbers, spread, virtual

X = numbers(5, 3)


def says(*parts: str) -> str:
    """A pattern: these texts, in this order."""
    return "(?s)" + ".*".join(map(re.escape, parts))


WAYS_IN = {
    "distribute_tensor": lambda mesh, places: distribute_tensor(X, mesh, places),
    "from_local": lambda mesh, places: DTensor.from_local(X, mesh, places),
    "redistribute": lambda mesh, places: distribute_tensor(X, mesh).redistribute(placements=places),
    "to_local": lambda mesh, places: distribute_tensor(X, mesh).to_local(grad_placements=places),
    "full": lambda mesh, places: shardwise.full((5, 3), 0, device_mesh=mesh, placements=places),
    "empty": lambda mesh, places: shardwise.empty(5, 3, device_mesh=mesh, placements=places),
}


@pytest.mark.parametrize("name", WAYS_IN)
def test_wrong_number_of_placements(name: str) -> None:
    with pytest.raises(LayoutError, match=says(f"{name}: 1 placements [S(0)]", "2 axes", "(2x2)")):
        WAYS_IN[name](virtual(2, 2), [Shard(0)])
    with pytest.raises(ValueError, match=says(f"{name}: 0 placements", "Give one per axis")):
        WAYS_IN[name](virtual(2), [])


@pytest.mark.parametrize("name", WAYS_IN)
@pytest.mark.parametrize("dim", [2, -3])
def test_shard_dim_out_of_range(name: str, dim: int) -> None:
    with pytest.raises(
        LayoutError, match=says(f"{name}: S({dim}) of a tensor of 2 dims", "-2 to 1")
    ):
        WAYS_IN[name](virtual(2), [Shard(dim)])


def test_a_number_has_no_dim_to_shard() -> None:
    with pytest.raises(LayoutError, match=says("S(0) of a tensor of 0 dims", "use Replicate()")):
        distribute_tensor(torch.tensor(1.0), virtual(2), [Shard(0)])


@pytest.mark.parametrize("name", WAYS_IN)
def test_placements_that_are_no_placements(name: str) -> None:
    with pytest.raises(LayoutError, match=says(f"{name}: 0 is not a placement", "Shard(dim)")):
        WAYS_IN[name](virtual(2), [0])
    with pytest.raises(LayoutError, match=says("'S(0)' is not a placement")):
        WAYS_IN[name](virtual(2), ["S(0)"])
    with pytest.raises(LayoutError, match=says("must be a list", "Write [Shard(0)]")):
        WAYS_IN[name](virtual(2), Shard(0))
    with pytest.raises(LayoutError, match=says("placements must be a sequence, but got 7")):
        WAYS_IN[name](virtual(2), 7)
    with pytest.raises(LayoutError, match=says("placements must be a sequence, but got 'dp'")):
        WAYS_IN[name](virtual(2), "dp")


def test_parts_of_one_mesh_do_not_mix() -> None:
    """On processes each rank takes the part that it is in: the moves of the ranks would differ."""
    mesh = shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    lone = shardwise.init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp"))
    flat = shardwise.init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    meshes = {"whole": mesh, "dp": mesh["dp"], "tp": mesh["tp"], "flat": flat}
    given = {name: distribute_tensor(X, where, {}) for name, where in meshes.items()}
    for a, b in [("dp", "whole"), ("whole", "dp"), ("dp", "tp"), ("dp", "flat"), ("flat", "tp")]:
        with pytest.raises(MeshError, match=says("redistribute: from mesh", "x.full_tensor()")):
            given[a].redistribute(meshes[b], {})
    with pytest.raises(
        MeshError, match=says("(dp=2) is a part of (dp=2, tp=2)", "{'dp': Shard(0)}")
    ):
        given["dp"] + given["whole"]
    for a, there in [("flat", mesh), ("whole", flat)]:
        assert torch.equal(given[a].redistribute(there, {}).full_tensor(), X)
    moved = distribute_tensor(X, lone["tp"], [Shard(0)]).redistribute(lone, {"tp": Shard(0)})
    assert torch.equal(moved.full_tensor(), X)


def test_a_style_of_pytorch() -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel

    with pytest.raises(
        TypeError, match=says("is a ColwiseParallel", "import that of shardwise.parallel")
    ):
        theirs: Any = ColwiseParallel()
        shardwise.parallel.parallelize_module(torch.nn.Linear(4, 4), virtual(2), theirs)


def test_fully_shard_of_pytorch() -> None:
    import torch.distributed.fsdp

    x = distribute_tensor(X, virtual(2), [Shard(0)])
    with pytest.raises(LayoutError, match=says("PyTorch's fully_shard", "shardwise.fully_shard(")):
        torch.ops.fsdp.all_gather_copy_in([x], torch.empty(99), [X.numel()], X.numel(), 0)


def test_a_class_in_place_of_a_placement() -> None:
    with pytest.raises(LayoutError, match="is not a placement"):
        distribute_tensor(X, virtual(2), [Replicate])


def test_unknown_reduce_op() -> None:
    text = "Partial: unknown reduce op 'mean'. Use one of 'sum', 'avg', 'max', 'min', 'product'"
    with pytest.raises(LayoutError, match=says(text)):
        Partial("mean")
    with pytest.raises(LayoutError, match=says("did you mean 'product'?")):
        Partial("prod")


def test_a_shard_dim_that_is_no_number() -> None:
    with pytest.raises(LayoutError, match=says("Shard: the dim must be an int, but got 'x'")):
        Shard("x")  # type: ignore[arg-type]


@pytest.mark.parametrize("run_check", [False, True])
def test_shapes_that_disagree_between_ranks(run_check: bool) -> None:
    mesh = virtual(2)
    local = per_rank(mesh, lambda coord: torch.zeros(2 + coord[0], 3))
    for place in (Replicate(), Partial(), Shard(1)):
        with pytest.raises(
            LayoutError, match=says("the ranks disagree on the size of dim 0: [2, 3]", "Shard(0)")
        ):
            DTensor.from_local(local, mesh, [place], run_check=run_check)


def test_a_given_shape_that_does_not_fit() -> None:
    mesh = virtual(2)
    with pytest.raises(LayoutError, match=says("holds [5, 3]", "gives it", "run_check=True")):
        DTensor.from_local(X, mesh, [Shard(0)], shape=(9, 3), stride=(3, 1))
    with pytest.raises(LayoutError, match=says("shape [10]", "2 dims")):
        DTensor.from_local(X, mesh, [Shard(0)], shape=(10,), stride=(1,))


def test_an_average_of_integers() -> None:
    with pytest.raises(LayoutError, match=says("P(avg) of torch.int64")):
        DTensor.from_local(torch.ones(2, dtype=torch.int64), virtual(2), [Partial("avg")])


@pytest.mark.parametrize(
    "op",
    [
        lambda a, b: a + b,
        torch.mm,
        lambda a, b: torch.cat([a, b]),
        lambda a, b: a.copy_(b),
        lambda a, b: torch._foreach_add([a], [b]),
        torch.equal,
        lambda a, b: torch.linalg.solve(a, b),
    ],
    ids=["add", "mm", "cat", "copy_", "foreach", "equal", "no rule"],
)
def test_operands_on_different_meshes(op: Any) -> None:
    a = distribute_tensor(torch.eye(4), virtual(2, names=("tp",)), [Shard(0)])
    b = distribute_tensor(torch.eye(4), virtual(2, 2, names=("dp", "tp")), [Shard(0), Shard(1)])
    with pytest.raises(ValueError, match=says("different meshes", "(tp=2)")) as error:
        op(a, b)
    assert isinstance(error.value, ShardwiseError) and "(dp=2, tp=2)" in str(error.value)


def test_local_tensors_of_another_mesh() -> None:
    local = per_rank(virtual(2), lambda coord: X)
    with pytest.raises(
        MeshError, match=says("from_local: the local tensors are of mesh (2), not (3)")
    ):
        DTensor.from_local(local, virtual(3), [Shard(0)])
    with pytest.raises(MeshError, match="different meshes"):
        local + per_rank(virtual(3), lambda coord: X)


def test_no_mesh() -> None:
    with pytest.raises(MeshError, match=says("a device mesh is needed", "device_mesh=")):
        shardwise.zeros(3)
    with pytest.raises(MeshError, match=says("a device mesh is needed, but got str")):
        distribute_tensor(X, "cpu")  # type: ignore[arg-type]


def test_a_dtensor_where_a_plain_tensor_is_needed() -> None:
    x = distribute_tensor(X, virtual(2), [Shard(0)])
    with pytest.raises(LayoutError, match=says("a plain tensor is needed", "redistribute")):
        distribute_tensor(x, virtual(2), [Shard(0)])
    with pytest.raises(LayoutError, match=says("a local tensor is needed", "redistribute")):
        DTensor.from_local(x, virtual(2), [Shard(0)])
    with pytest.raises(LayoutError, match=says("a local tensor is needed, but got int")):
        DTensor.from_local(3, virtual(2), [Shard(0)])  # type: ignore[arg-type]


@pytest.mark.parametrize("cuts", [[(1, 1)], [(2, 2), None], [(6, -1), None], [(1, 2, 2), None]])
def test_cuts_that_cannot_be(cuts: Any) -> None:
    with pytest.raises(LayoutError, match=says("cuts")):
        distribute_tensor(X, virtual(2), [Shard(0)], cuts=cuts)


@pytest.mark.parametrize("place", [Replicate(), Shard(0), Shard(1), Partial()], ids=str)
def test_errors_of_pytorch_are_pytorchs_own(place: Any) -> None:
    """Wrong shapes, dims and dtypes raise what they raise on one device."""
    x = distribute_tensor(X, virtual(2), [place])
    wrong = [
        lambda x: x @ x,
        lambda x: x + torch.ones(4, dtype=torch.float64),
        lambda x: x.sum(5),
        lambda x: x.view(4, 4),
        lambda x: x[9],
        lambda x: x.float() @ torch.ones(3, 3, dtype=torch.float64),
        lambda x: torch.cat([x, torch.ones(2, 2, dtype=torch.float64)]),
        lambda x: x.softmax(4),
        lambda x: x.permute(0, 0),
        lambda x: x.split([1, 1]),
        lambda x: x.item(),
        lambda x: bool(x),
        lambda x: x.expand(4, 4),
        lambda x: x.copy_(torch.ones(7, 7)),
        lambda x: torch.nn.functional.cross_entropy(x, torch.ones(4, dtype=torch.int64)),
    ]
    for f in wrong:
        with pytest.raises(Exception) as plain:  # whatever it is, it is ours too
            f(X.clone())
        with pytest.raises(type(plain.value)):
            f(x)


def test_policies_refuse_what_they_should() -> None:
    x = distribute_tensor(X, virtual(2), [Shard(0)])
    with pytest.raises(CommunicationError, match=says("'sometimes' is none of 'auto'")):
        shardwise.communication("sometimes").__enter__()
    with (
        shardwise.plain_tensors("error"),
        pytest.raises(
            PlainTensorError, match=says("a plain tensor of shape [3]", "distribute_tensor")
        ),
    ):
        x + torch.ones(3)


LONG = torch.zeros(6, dtype=torch.int64)
IMAGE = numbers(2, 4, 6, 6)
REFUSED: dict[str, tuple[Callable[..., Any], Sequence[torch.Tensor]]] = {
    "an index of floats": (lambda x, i: x[i], (numbers(6, 4), numbers(2))),
    "indices that do not go together": (
        lambda x, i: x[i, torch.tensor([1, 2, 3])],
        (numbers(6, 4), torch.tensor([1, 2])),
    ),
    "a mask of another size": (lambda x, m: x[m], (numbers(6, 4), torch.ones(5) > 0)),
    "index_copy of more rows": (
        lambda x, i, rows: x.index_copy(0, i, rows),
        (numbers(6, 4), LONG[:2], numbers(3, 4)),
    ),
    "index_add of longer rows": (
        lambda x, i, rows: x.index_add(-2, i, rows),
        (numbers(6, 4), LONG[:2], numbers(2, 5)),
    ),
    "weights of other classes": (
        lambda x, t, w: F.cross_entropy(x, t, w),
        (numbers(6, 4), LONG, numbers(3)),
    ),
    "weights of other classes, smoothed": (
        lambda x, t, w: F.cross_entropy(x, t, w, label_smoothing=0.1),
        (numbers(6, 4), LONG, numbers(3)),
    ),
    "weights in two dims": (F.nll_loss, (numbers(6, 4), LONG, numbers(4, 4))),
    "two targets of one row": (F.nll_loss, (numbers(4), LONG[:2])),
    "classes of other pixels": (
        F.cross_entropy,
        (numbers(2, 4, 5, 5), torch.zeros(2, 5, 4, dtype=torch.int64)),
    ),
    "embedding in a vector": (lambda w, i: F.embedding(i, w), (numbers(6), LONG)),
    "embedding in a block": (lambda w, i: F.embedding(i, w), (numbers(6, 4, 2), LONG)),
    "convolution of other channels": (F.conv2d, (IMAGE, numbers(5, 3, 3, 3))),
    "convolution with another bias": (F.conv2d, (IMAGE, numbers(5, 4, 3, 3), numbers(4))),
    "transposed convolution": (F.conv_transpose2d, (IMAGE, numbers(3, 5, 3, 3))),
    "transposed convolution with another bias": (
        F.conv_transpose2d,
        (IMAGE, numbers(4, 5, 3, 3), numbers(4)),
    ),
    "a bias of other features": (F.linear, (numbers(6, 4), numbers(5, 4), numbers(3))),
    "layer norm": (lambda x, w: F.layer_norm(x, (4,), w), (numbers(6, 4), numbers(3))),
    "group norm": (lambda x, w: F.group_norm(x, 2, w), (numbers(6, 4, 5), numbers(3))),
    "batch norm": (
        lambda x, mean, var: F.batch_norm(x, mean, var, training=True),
        (numbers(6, 4), numbers(4), numbers(3)),
    ),
    "a grid of three coordinates": (
        lambda x, grid: F.grid_sample(x, grid, align_corners=False),
        (IMAGE, numbers(2, 5, 5, 3)),
    ),
    "bucketize": (lambda x, b: torch.bucketize(x, b), (numbers(6, 4), numbers(5, 4))),
    "clamp of nothing": (lambda x: x.clamp(), (numbers(6, 4),)),
    "argmax of nothing": (lambda x: x.argmax(), (torch.empty(0, 4),)),
    "amax of nothing": (lambda x: x.amax(0), (torch.empty(0, 4),)),
    "one_hot of floats": (lambda x: F.one_hot(x, 2), (torch.ones(6),)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_raises(name: str) -> None:
    """The kind of error is that of one device, or of PyTorch's meta kernel."""
    call, given = REFUSED[name]
    with pytest.raises((RuntimeError, ValueError, IndexError)) as plain:
        call(*given)
    kinds: list[Any] = [plain.type]
    try:
        call(*[tensor.to("meta") for tensor in given])
    except Exception as error:  # some are assertions
        kinds.append(type(error))
    for place, others in itertools.product((Replicate(), Shard(0), Shard(1), Partial()), range(3)):
        with pytest.raises(tuple(kinds)):
            call(*[_laid(t, place, others if at else 1) for at, t in enumerate(given)])


def _laid(tensor: torch.Tensor, place: Any, how: int) -> torch.Tensor:
    """A tensor as it is, laid out like the first if it can be, or whole on all ranks."""
    if how == 0:
        return tensor
    fits = place.dim < tensor.ndim if isinstance(place, Shard) else tensor.is_floating_point()
    return spread(tensor.clone(), virtual(2), [place if fits and how == 1 else Replicate()])


def test_every_error_is_also_a_builtin_one() -> None:
    for cls in (LayoutError, MeshError, PlainTensorError):
        assert issubclass(cls, ShardwiseError) and issubclass(cls, ValueError)
    assert issubclass(CommunicationError, RuntimeError)


def test_sparse_tensors_among_dtensors_are_refused() -> None:
    x = distribute_tensor(torch.eye(4), virtual(2), [Shard(0)])
    with pytest.raises(LayoutError, match=r"torch.sparse_coo, but only dense.*to_dense"):
        torch.eye(4).to_sparse() @ x
    table = x.detach().requires_grad_()
    with pytest.raises(LayoutError, match=r"only dense.*sparse=False"):
        torch.nn.functional.embedding(torch.tensor([1, 2]), table, sparse=True).sum().backward()


def test_sparse_tensors_are_not_laid_out() -> None:
    mesh = virtual(2)
    sparse = torch.eye(4).to_sparse()
    for use in (
        lambda: distribute_tensor(sparse, mesh, [Shard(0)]),
        lambda: DTensor.from_local(sparse, mesh, [Shard(0)]),
    ):
        with pytest.raises(LayoutError, match=r"torch.sparse_coo, but only dense.*to_dense"):
            use()


def test_what_is_no_tensor_no_mesh_and_no_placement_of_ours() -> None:
    with pytest.raises(LayoutError, match=says("a plain tensor is needed, but got list")):
        distribute_tensor([1, 2], virtual(2), [Shard(0)])  # type: ignore[arg-type]
    with pytest.raises(MeshError, match=says("one size per axis, but got 2", "Write (2,)")):
        shardwise.init_device_mesh("cpu", 2)  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match=says("picture: a DTensor", "but got Tensor")):
        shardwise.picture(X)  # type: ignore[arg-type]
    x = distribute_tensor(X, virtual(2), [Shard(0)])
    with pytest.raises(MeshError, match=says("but got list", "placements=[R]")):
        x.redistribute([Replicate()])  # type: ignore[arg-type]
    from torch.distributed.tensor import Shard as Theirs

    with pytest.raises(LayoutError, match=says("is not a placement", "It is PyTorch's class")):
        distribute_tensor(X, virtual(2), [Theirs(0)])  # type: ignore[list-item]


# --- everyday mistakes ----------------------------------------------------------------------------


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(MeshError, match=says("'cuda'", 'Use "cpu"')):
        shardwise.init_device_mesh("cuda", (2,))
    with pytest.raises(MeshError, match=says("'tpu?'")):
        shardwise.init_device_mesh("tpu?", (2,))


def test_a_local_tensor_among_dtensors() -> None:
    x = distribute_tensor(torch.ones(4, 4), virtual(2), [Shard(0)])
    for mixed in (lambda: x + x.to_local(), lambda: x.to_local() + x):
        with pytest.raises(LayoutError, match=says("one rank's part", "DTensor.from_local")):
            mixed()
    whole = x.redistribute(placements=[Replicate()])
    assert (whole.to_local() + whole).placements == (Replicate(),)  # one value for all ranks


@pytest.mark.parametrize("name", ["zeros", "rand", "eye", "arange", "randperm"])
def test_a_misspelled_keyword_of_a_factory(name: str) -> None:
    mesh = shardwise.init_device_mesh("cpu", (2,))
    with pytest.raises(TypeError, match="argument 'placement': a factory takes device_mesh, plac"):
        getattr(shardwise, name)(4, device_mesh=mesh, placement=[Shard(0)])


def test_placements_by_name_for_many_tensors() -> None:
    mesh = shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Replicate()])
    (made,) = shardwise.redistribute_all([x], {"tp": Shard(1)})  # type: ignore[arg-type]
    assert made.placements == (Replicate(), Shard(1))
    with pytest.raises(LayoutError, match="a list of DTensors is needed, but got 3"):
        shardwise.redistribute_all(3, [Shard(0)])  # type: ignore[arg-type]
