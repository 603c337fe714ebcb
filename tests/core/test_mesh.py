"""Virtual meshes have the interface of PyTorch's."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import pytest
import torch

from shardwise.errors import MeshError
from shardwise.layout.make_mesh import DeviceMesh, init_device_mesh
from shardwise.layout.mesh import VirtualMesh, topology


def test_a_virtual_mesh_has_the_interface_of_pytorchs() -> None:
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
    assert isinstance(mesh, DeviceMesh) and isinstance(mesh, VirtualMesh)
    assert (mesh.shape, mesh.ndim, mesh.size(), mesh.size(1)) == ((2, 3), 2, 6, 3)
    assert mesh.mesh.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert mesh.mesh_dim_names == ("dp", "tp") and mesh.device_type == "cpu"
    assert repr(mesh) == "VirtualMesh('cpu', dp=2, tp=3)"
    assert repr(init_device_mesh("cpu", (2, 3))) == "VirtualMesh('cpu', 2x3)"


def test_meshes_that_are_the_same_are_equal_and_have_one_topology() -> None:
    a, b = (init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")) for _ in range(2))
    assert a == b and hash(a) == hash(b) and topology(a) is topology(b)
    assert a["tp"] == b["tp"] and topology(a["tp"]) is topology(b["tp"])
    others = [
        init_device_mesh("cpu", (2, 2)),
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp")),
        init_device_mesh("cpu", (4,)),
        DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("dp", "tp")),
        init_device_mesh("meta", (2, 2), mesh_dim_names=("dp", "tp")),
    ]
    assert all(a != other and topology(a) is not topology(other) for other in others)
    again = pickle.loads(pickle.dumps(a))
    assert again == a and topology(again) is topology(a)


def test_submeshes_by_name() -> None:
    mesh = init_device_mesh("cpu", (2, 3, 2), mesh_dim_names=("pp", "dp", "tp"))
    assert mesh["dp"].mesh.tolist() == [0, 2, 4]
    assert mesh["pp", "tp"].mesh.tolist() == [[0, 1], [6, 7]]
    assert mesh["pp", "tp"].mesh_dim_names == ("pp", "tp")
    with pytest.raises(MeshError, match="the axes of this mesh are \\('pp', 'dp', 'tp'\\)"):
        mesh["xx"]
    with pytest.raises(MeshError, match="name each axis once, in the mesh's order"):
        mesh["tp", "pp"]
    with pytest.raises(MeshError, match="not named"):
        init_device_mesh("cpu", (2,))["dp"]


def test_ranks_and_coordinates() -> None:
    where = topology(DeviceMesh("cpu", [[3, 1], [0, 2]]))
    assert [where.rank_of(c) for c in ((0, 0), (0, 1), (1, 0), (1, 1))] == [3, 1, 0, 2]
    assert list(where.group_coords((1, 0), (0,))) == [(0, 0), (1, 0)]
    assert list(where.group_coords((1, 0), (0, 1))) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert list(where.group_coords((1, 0), ())) == [(1, 0)]


def test_a_virtual_mesh_stores_once_what_does_not_vary() -> None:
    where = topology(init_device_mesh("cpu", (2, 3)))
    assert where.coords_here(()) == ((0, 0),)
    assert where.coords_here((1,)) == ((0, 0), (0, 1), (0, 2))
    assert len(where.coords_here((0, 1))) == 6


@pytest.mark.parametrize("shape", [(), (0,), (2, -1), (2.0,), ("2",)], ids=repr)
def test_a_shape_that_is_no_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(MeshError, match="mesh_shape must hold positive ints"):
        init_device_mesh("cpu", shape)


def test_meshes_that_cannot_be() -> None:
    with pytest.raises(MeshError, match="a rank appears twice"):
        DeviceMesh("cpu", [0, 1, 1])
    with pytest.raises(MeshError, match="needs at least one rank"):
        DeviceMesh("cpu", torch.empty(0))
    with pytest.raises(MeshError, match="2 different names are needed"):
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp",))
    with pytest.raises(MeshError, match="2 different names are needed"):
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "dp"))
    with pytest.raises(MeshError, match="a device mesh is needed, but got int"):
        topology(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["get_rank", "get_local_rank", "get_coordinate"])
def test_questions_without_one_answer_name_the_way_out(method: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(MeshError, match="this process is every rank"):
        getattr(mesh, method)()
    with pytest.raises(MeshError, match="no process groups; run under torchrun"):
        mesh.get_group()


def test_under_torchruns_environment_the_mesh_is_pytorchs() -> None:
    script = (
        "import torch.distributed as dist\n"
        "from shardwise import init_device_mesh\n"
        "mesh = init_device_mesh('cpu', (1,)); print(type(mesh).__module__)\n"
        "dist.destroy_process_group()"
    )
    torchrun = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **torchrun},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == "torch.distributed.device_mesh", done.stderr
