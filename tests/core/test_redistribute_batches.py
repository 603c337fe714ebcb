"""Redistribution beyond one tensor on one mesh: two meshes, batches, buffers, links."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise import Link, Partial, Replicate, Shard
from shardwise.__main__ import main
from shardwise.comm.all_to_all import chunks
from shardwise.comm.native import prefers_own
from shardwise.errors import CommunicationError, LayoutError, MeshError
from shardwise.layout.cost import PRESETS, links_of
from shardwise.layout.geometry import all_coords, box_numel, box_shape, intersect
from shardwise.layout.mesh import VirtualMesh
from shardwise.redistribute.execute import Run, redistribute_locals, run_all
from shardwise.redistribute.prepare import prepared, steps_between
from shardwise.tools.calibrate import calibrate

from ..layouts import assert_holds, by_coord, layouts_of, scatter, spec_of, stored, whole_numbers

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()

# --- the least bytes ------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 3), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("size", [(12, 12), (7, 5)], ids=str)
def test_nobody_receives_what_it_has(mesh_shape: tuple[int, ...], size: tuple[int, int]) -> None:
    mesh = sw.init_device_mesh("cpu", mesh_shape)
    specs = [spec_of(mesh, each, size) for each in layouts_of(len(mesh_shape), [R, S0, S1])]
    for src, dst in itertools.product(specs, repeat=2):
        steps = steps_between(src, dst)
        for coord in all_coords(mesh_shape):
            new = dst.box(coord)
            lacks = box_numel(new) - box_numel(intersect(src.box(coord), new))
            assert sum(step.received(coord) for step in steps) == lacks, (src, dst, coord)


def test_pending_sums_end_in_any_shards_at_once() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 4))
    big = (1024, 1024)

    def kinds(src: Any, dst: Any) -> list[str]:
        return [
            step.kind for step in steps_between(spec_of(mesh, src, big), spec_of(mesh, dst, big))
        ]

    assert kinds([P, P], [S0, S0]) == ["reduce_scatter"]
    assert kinds([P, P], [S1, S0]) == ["reduce_scatter"]
    assert kinds([P, P], [R, R]) == ["all_reduce"]
    assert kinds([P, R], [S0, S0]) == ["reduce_scatter"]  # and only the shard that is kept
    assert kinds([P, S0], [S0, S0]) == ["reduce_exchange"]


def test_bytes_sent_are_bytes_received() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 3))
    specs = [spec_of(mesh, each, (7, 5)) for each in layouts_of(2, [R, S0, S1, P])]
    for src, dst in itertools.product(specs, repeat=2):
        for step in steps_between(src, dst):
            if step.kind not in ("all_reduce", "reduce_scatter"):
                coords = all_coords((2, 3))
                assert sum(map(step.sent, coords)) == sum(map(step.received, coords)), (src, dst)


# --- links ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh_shape", [(2, 2), (2, 3, 2)], ids=str)
def test_every_way_is_exact(mesh_shape: tuple[int, ...]) -> None:
    links = [Link(1e-6, 10.0 ** (6 + 2 * axis)) for axis in range(len(mesh_shape))]
    mesh = sw.init_device_mesh("cpu", mesh_shape, links=links)
    full = whole_numbers((7, 5))
    every = layouts_of(len(mesh_shape), [R, S0, S1, P])
    specs = [spec_of(mesh, each, (7, 5)) for each in every]
    for src, dst in list(itertools.product(specs, repeat=2))[:: 1 if len(mesh_shape) == 2 else 23]:
        after = redistribute_locals(src, dst, tuple(stored(src, scatter(src, full))))
        assert_holds(dst, by_coord(dst, after), full, f"from {src}")


@pytest.mark.parametrize("mesh_shape", [(2, 2), (3, 2)], ids=str)
def test_shards_become_partial_in_kinds_that_do_not_commute(mesh_shape: tuple[int, int]) -> None:
    mesh = sw.init_device_mesh("cpu", mesh_shape)
    x = -torch.arange(1, 16, dtype=torch.int32).view(5, 3)  # where identities add up it shows
    kinds = [Partial(op) for op in ("sum", "max", "min", "product", "avg")]
    for src in layouts_of(2, [R, S0, S1]):
        whole = sw.distribute_tensor(x, mesh, src)
        for dst in itertools.product(kinds[:4], repeat=2):
            assert torch.equal(whole.redistribute(placements=dst).full_tensor(), x), (src, dst)
        for dst in itertools.product(kinds, repeat=2):
            real = sw.distribute_tensor(x.double(), mesh, src).redistribute(placements=dst)
            assert torch.equal(real.full_tensor(), x.double()), (src, dst)


def test_links_are_a_part_of_what_a_mesh_is() -> None:
    a = sw.init_device_mesh("cpu", (2,), links="ethernet")
    b = sw.init_device_mesh("cpu", (2,))
    assert a != b and a == sw.init_device_mesh("cpu", (2,), links=[PRESETS["ethernet"]])
    named = sw.init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=("a", "b"), links=["ethernet", "pcie"]
    )
    assert named["b"] == VirtualMesh("cpu", [0, 1], mesh_dim_names=("b",), links="pcie")


def test_links_that_cannot_be_are_refused() -> None:
    with pytest.raises(MeshError, match="none of the presets"):
        links_of("carrier pigeon", 1)
    with pytest.raises(MeshError, match="2 links were given for a mesh of 1 axes"):
        sw.init_device_mesh("cpu", (2,), links=["pcie", "pcie"])
    with pytest.raises(MeshError, match="bytes per second"):
        Link(latency=-1, bandwidth=1e9)


def test_links_are_read_from_a_file(tmp_path: Any) -> None:
    file = tmp_path / "links.json"
    file.write_text("[[1e-5, 1e9], [2e-5, 2e9]]")
    mesh = sw.init_device_mesh("cpu", (2, 2), links=file)
    assert mesh.links == (Link(1e-5, 1e9), Link(2e-5, 2e9))
    with pytest.raises(MeshError, match="2 links were given for a mesh of 1 axes"):
        sw.init_device_mesh("cpu", (2,), links=file)
    for text in ("[[1, 2, 3]]", "[[-1, 1e9]]", "{", "4"):
        file.write_text(text)
        with pytest.raises(MeshError, match=r"calibrate|latency is in"):
            sw.init_device_mesh("cpu", (2,), links=file)
    with pytest.raises(MeshError, match="No such file"):
        sw.init_device_mesh("cpu", (2,), links=tmp_path / "none.json")


def test_calibration_needs_processes(capsys: Any, tmp_path: Any) -> None:
    with pytest.raises(MeshError, match="torchrun"):
        calibrate("cpu", (2, 2), tmp_path / "links.json")
    for arguments, said in (
        (["calibrate", "--mesh", "2,2"], "torchrun --nproc-per-node 4"),
        (["calibrate", "--mesh", "2,x"], "'2,x' is no shape"),
        ([], "required: command"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert said in capsys.readouterr().err


# --- buffers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 2, 3, 5, 24, 100])
def test_chunks_make_up_the_box(most: int) -> None:
    box = ((1, 3), (0, 4), (2, 5))
    seen = torch.zeros(3, 4, 5)
    for chunk in chunks(box, most):
        assert 0 < box_numel(chunk) <= most
        seen[tuple(slice(a, b) for a, b in chunk)] += 1
    inside = seen[1:3, 0:4, 2:5]
    assert bool((inside == 1).all()) and seen.sum() == inside.sum()
    assert chunks(((0, 0), (0, 3)), most) == []


def test_gloo_is_known_however_it_was_asked_for(monkeypatch: Any) -> None:
    config = {"cpu:gloo": False, "cpu:gloo,cuda:gloo": False, "cpu:mpi,cuda:gloo": True}
    for text, own in {**config, "cpu:gloo,cuda:nccl": False}.items():
        monkeypatch.setattr(torch.distributed, "get_backend_config", lambda _, text=text: text)
        assert prefers_own(None, "cpu") is own
    assert prefers_own(None, "cuda")


def test_a_buffer_has_a_size() -> None:
    with pytest.raises(CommunicationError, match="positive number of bytes"), sw.exchange_buffer(0):
        pass


# --- explanations ---------------------------------------------------------------------------------


def test_an_explanation_says_what_each_rank_moves() -> None:
    mesh = sw.init_device_mesh("cpu", (3,))
    told = sw.explain_redistribute(spec_of(mesh, [S0], (5, 2)), spec_of(mesh, [R], (5, 2)))
    (step,) = told.steps
    assert step.received == {0: 24, 1: 24, 2: 32} and step.sent == {0: 32, 1: 32, 2: 16}
    assert (told.received, told.sent) == (32, 32)
    assert "all_gather" in str(told) and "24..32" in str(told)
    same = spec_of(mesh, [S0], (5, 2))
    assert sw.explain_redistribute(same, same).received == 0
    x = sw.distribute_tensor(torch.ones(5, 2), mesh, [S0])
    assert sw.explain_redistribute(x, x.redistribute(placements=[R])).received == 32
    assert sw.explain_redistribute(x, placements=[R]).received == 32
    assert sw.explain_redistribute(x._spec, [S1]).dst.placements == (S1,)
    other = VirtualMesh("cpu", [2, 3])
    assert [step.kind for step in sw.explain_redistribute(x, other, [R]).steps] == ["transfer"]
    for wrong in ((x,), (x, other), (torch.ones(2), [R]), (x, [R, R]), (x, None, [S0, R])):
        with pytest.raises(LayoutError):
            sw.explain_redistribute(*wrong)


@pytest.mark.parametrize("size", [(64, 64), (67, 41)], ids=str)
@pytest.mark.parametrize("room", [4096, 1024])
def test_what_lies_between_two_collectives_fits_the_buffer(
    size: tuple[int, int], room: int
) -> None:
    mesh = sw.init_device_mesh("cpu", (2, 4))
    full = whole_numbers(size)
    specs = [spec_of(mesh, each, size) for each in layouts_of(2, [R, S0, S1, P])]
    with sw.exchange_buffer(room):
        for src, dst in list(itertools.product(specs, repeat=2))[::3]:
            told = sw.explain_redistribute(src, dst)
            for step in told.steps:
                for coord in all_coords((2, 4)):
                    shards = 4 * (box_numel(src.box(coord)) + box_numel(dst.box(coord)))
                    rank = coord[0] * 4 + coord[1]
                    assert step.held[rank] <= shards + 2 * room, (told, coord)
            after = redistribute_locals(src, dst, tuple(stored(src, scatter(src, full))))
            assert_holds(dst, by_coord(dst, after), full, f"from {src}")


@pytest.mark.parametrize("at", [[S0, R], [S1, S0], [R, S1]], ids=str)
def test_the_same_layout_is_the_same_with_dims_of_size_one(at: list[Any]) -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2))
    x = sw.distribute_tensor(torch.ones(1, 1, requires_grad=True), mesh, at)
    for same in (x.redistribute(placements=at), sw.redistribute_all([x], at)[0]):
        assert same.placements == tuple(at)
        same.sum().backward()
    assert x.grad.full_tensor().item() == 2


# --- two meshes -----------------------------------------------------------------------------------

MESHES = {
    "same ranks, other shape": ([[0, 1], [2, 3]], [0, 1, 2, 3]),
    "overlapping": ([0, 1, 2], [2, 3]),
    "apart": ([0, 1], [[2, 3], [4, 5]]),
    "a part of it": ([[0, 1], [2, 3]], [1, 3]),
    "more of it": ([2], [[0, 1, 2], [3, 4, 5]]),
}


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("size", [(8, 6), (3, 5), (1, 1), (0, 2)], ids=str)
def test_every_pair_of_layouts_on_two_meshes(name: str, size: tuple[int, int]) -> None:
    a, b = (VirtualMesh("cpu", ranks) for ranks in MESHES[name])
    full = whole_numbers(size)
    for src in (spec_of(a, each, size) for each in layouts_of(a.ndim, [R, S0, S1, P])):
        before = stored(src, scatter(src, full))
        for dst in (spec_of(b, each, size) for each in layouts_of(b.ndim, [R, S0, S1, P])):
            after = redistribute_locals(src, dst, tuple(before), fresh=True)
            assert_holds(dst, by_coord(dst, after), full, f"from {src}")


def test_a_rank_on_both_meshes_keeps_what_it_has() -> None:
    a, b = VirtualMesh("cpu", [0, 1, 2, 3]), VirtualMesh("cpu", [[0, 1], [2, 3]])
    (step,) = steps_between(spec_of(a, [S0], (8, 4)), spec_of(b, [S0, S0], (8, 4)))
    assert step.bytes_received(1) == 0
    (step,) = steps_between(spec_of(a, [R], (8, 4)), spec_of(b, [S1, S0], (8, 4)))
    assert step.bytes_received(1) == 0


def test_gradients_go_back_to_the_other_mesh() -> None:
    full = torch.randn(6, 4, dtype=torch.float64)
    a, b = VirtualMesh("cpu", [0, 1, 2]), VirtualMesh("cpu", [[2, 3], [4, 5]])
    x = sw.distribute_tensor(full, a, [S0]).requires_grad_()
    y = x.redistribute(b, [S1, S0])
    assert y.device_mesh == b
    (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    assert first.device_mesh == a
    (second,) = torch.autograd.grad((first**2).sum(), x)
    torch.testing.assert_close(first.full_tensor(), 3 * full**2)
    torch.testing.assert_close(second.full_tensor(), 36 * full**3)
    assert second.placements == (S0,)


def test_meshes_of_other_kinds_are_refused() -> None:
    x = sw.distribute_tensor(torch.ones(4), VirtualMesh("cpu", [0, 1]), [S0])
    with pytest.raises(MeshError, match="both must be of one device type"):
        x.redistribute(VirtualMesh("meta", [0, 1]), [S0])


# --- many at once ---------------------------------------------------------------------------------


def test_a_batch_is_what_each_alone_is() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2))
    sides = layouts_of(2, [R, S0, S1, P])
    sizes = [(7, 5), (1, 3), (0, 2), (4, 4)]
    pairs = list(zip(itertools.cycle(sides), reversed(sides), itertools.cycle(sizes), strict=False))
    specs = [(spec_of(mesh, a, size), spec_of(mesh, b, size)) for a, b, size in pairs]
    full = [whole_numbers(src.shape) for src, _ in specs]
    runs = [
        Run(prepared(src, dst), tuple(stored(src, scatter(src, whole))))
        for (src, dst), whole in zip(specs, full, strict=True)
    ]
    for (src, dst), whole, ready in zip(specs, full, run_all(runs), strict=True):
        assert_holds(dst, by_coord(dst, ready()), whole, f"from {src}")


def test_a_batch_goes_out_in_few_collectives() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2))
    tensors = [sw.distribute_tensor(torch.ones(n, 4), mesh, [S0, R]) for n in range(1, 9)]
    others = [sw.distribute_tensor(torch.ones(n, 4), mesh, [R, S1]) for n in range(1, 4)]
    with sw.CommDebugMode() as comm:
        made = sw.redistribute_all([*tensors, *others], [R, R])
    assert comm.get_comm_counts() == {"all_gather": 2}
    for old, new in zip([*tensors, *others], made, strict=True):
        assert new.placements == (R, R)
        assert torch.equal(new.full_tensor(), old.full_tensor())


def test_a_batch_holds_no_more_between_its_steps_than_the_buffer() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2))
    full = whole_numbers((8, 8))
    spec, goal = spec_of(mesh, [P, S0], (8, 8)), spec_of(mesh, [R, S1], (8, 8))
    local = stored(spec, scatter(spec, full))
    assert [step.kind for step in steps_between(spec, goal)] == ["all_reduce", "exchange"]

    def counts(buffer: int) -> dict[str, int]:
        with sw.exchange_buffer(buffer), sw.CommDebugMode() as comm:
            runs = [Run(prepared(spec, goal), tuple(local)) for _ in range(6)]
            for ready in run_all(runs):
                assert_holds(goal, by_coord(goal, ready()), full, f"with {buffer}")
        return comm.get_comm_counts()

    assert counts(1 << 20) == {"all_reduce": 1, "exchange": 1}
    # Each packs and holds 512 bytes at most: three, then three.
    assert counts(1600) == {"all_reduce": 2, "exchange": 2}


def test_a_batch_has_gradients_of_gradients() -> None:
    mesh = sw.init_device_mesh("cpu", (3,))
    full = [torch.randn(n, 4, dtype=torch.float64) for n in (2, 5, 3)]
    leaves = [sw.distribute_tensor(each, mesh, [S0]).requires_grad_() for each in full]
    unused, a, b = sw.redistribute_all(leaves, [[S1], [R], [S0]])
    loss = (a**3).sum() + (b**4).sum()
    grads = torch.autograd.grad(loss, leaves[1:], create_graph=True)
    torch.testing.assert_close(grads[0].full_tensor(), 3 * full[1] ** 2)
    seconds = torch.autograd.grad(grads[0].sum() + grads[1].sum(), leaves[1:])
    torch.testing.assert_close(seconds[0].full_tensor(), 6 * full[1])
    torch.testing.assert_close(seconds[1].full_tensor(), 12 * full[2] ** 2)
    assert unused.placements == (S1,) and sw.redistribute_all([], [S0]) == []


def test_a_batch_that_cannot_be_is_refused() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    x = sw.distribute_tensor(torch.ones(2), mesh, [S0])
    with pytest.raises(LayoutError, match="2 lists of placements were given for 1 tensors"):
        sw.redistribute_all([x], [[S0], [R]])
    with pytest.raises(LayoutError, match="a DTensor is needed"):
        sw.redistribute_all([torch.ones(2)], [R])  # type: ignore[list-item]


def test_list_operators_move_their_operands_together() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    parts = sw.per_rank(mesh, lambda rank: torch.full((4, 2), float(1)))
    grads = [sw.DTensor.from_local(parts, mesh, [P]) for _ in range(6)]
    params = [sw.distribute_tensor(torch.zeros(4, 2), mesh, [S0]) for _ in range(6)]
    with sw.CommDebugMode() as comm:
        torch._foreach_add_(params, grads, alpha=0.5)
    assert comm.get_total_counts() == 1
    assert all(torch.equal(p.full_tensor(), torch.ones(4, 2)) for p in params)


def test_async_is_ready_when_used() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    x = sw.distribute_tensor(torch.arange(6.0), mesh, [S0]).requires_grad_()
    y = x.redistribute(placements=[R], async_op=True)
    (y * 2).sum().backward()
    assert x.grad is not None and torch.equal(x.grad.full_tensor(), torch.full((6,), 2.0))


def test_shapes_of_pieces_fit_their_boxes() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2))
    src, dst = spec_of(mesh, [S0, S1], (5, 3)), spec_of(mesh, [S1, S0], (5, 3))
    (step,) = steps_between(src, dst)
    for target in all_coords((2, 2)):
        pieces = [step.piece(source, target) for source in step.sources(target)]
        assert sum(map(box_numel, pieces)) == box_numel(dst.box(target))
        assert all(0 not in box_shape(piece) for piece in pieces)
