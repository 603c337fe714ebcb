"""What is picked by index from a sharded dim comes straight from the rank that has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwise import Replicate, Shard, distribute_tensor

from ..compare import ints, numbers, virtual

R, S0, S1 = Replicate(), Shard(0), Shard(1)
X = numbers(9, 4, 3)
X[2, 0, 0] = -0.0
ROWS = torch.tensor([7, 2, 2, 0, 8, 5, 2])
PICKS: dict[str, tuple[Callable[[Any, Any], Any], torch.Tensor]] = {
    "index_select": (lambda x, i: x.index_select(0, i), ROWS),
    "last dim": (lambda x, i: x.transpose(0, 2).contiguous().index_select(-1, i), ROWS),
    "index": (lambda x, i: x[i], ROWS),
    "index of two dims": (lambda x, i: x[i], ROWS[:6].view(2, 3) - 9),
    "index of a number": (lambda x, i: torch.ops.aten.index.Tensor(x, [i]), torch.tensor(4)),
    "embedding of a number": (lambda x, i: F.embedding(i, x[:, :, 0]), torch.tensor(4)),
    "two indices": (lambda x, i: x[i, i % 4], ROWS),
    "a column and a row": (lambda x, i: x[i.view(-1, 1), i[:3] % 4], ROWS - 9),
    "a row and a column": (lambda x, i: x[i, (i % 4).view(-1, 1)], ROWS),
    "indices that are no neighbours": (lambda x, i: x[i, :, i % 3], ROWS),
    "a number and an index": (lambda x, i: x.transpose(0, 1).contiguous()[i[0] % 4, i], ROWS),
    "inner index": (lambda x, i: x.transpose(0, 1).contiguous()[:, i], ROWS - 9),
    "gather": (lambda x, i: x.gather(0, i), ints(5, 4, 3, high=9)),
    "embedding": (lambda x, i: F.embedding(i, x[:, :, 0].contiguous()), ROWS[:6].view(3, 2)),
    "nothing": (lambda x, i: x.index_select(0, i), ROWS[:0]),
    "all from one": (lambda x, i: x[i], torch.tensor([8, 8])),
    "integers": (lambda x, i: (x * 100).long()[i], ROWS),
}


def check_picks(mesh: Any, places: Any, names: Any = PICKS) -> None:
    for name in names:
        pick, index = PICKS[name]
        wanted = pick(X, index)
        x = distribute_tensor(X, mesh, places, src_data_rank=None)
        i = distribute_tensor(index, mesh, [R] * mesh.ndim, src_data_rank=None)
        assert torch.equal(pick(x, i).full_tensor(), wanted), name
        for dim in range(wanted.ndim):
            cut = pick(x, i).redistribute(placements=[Shard(dim)] * mesh.ndim)
            assert torch.equal(cut.full_tensor(), wanted), name
        made = pick(x, i)
        torch.testing.assert_close((made * 2).exp().full_tensor(), (wanted * 2).exp())
        torch.testing.assert_close(made.exp().full_tensor(), wanted.exp())


@pytest.mark.parametrize("name", PICKS)
def test_values(name: str) -> None:
    check_picks(virtual(4), (S0,), [name])
    check_picks(virtual(2, 2), (S0, S1), [name])
    check_picks(virtual(2, 2), (S0, S0), [name])


def test_writes_after_the_call() -> None:
    """Into the source, the index and the result: what was picked stays, what is written counts."""
    mesh = virtual(2)
    for written in ("source", "index", "result", "view of the result"):
        x, i = distribute_tensor(X.clone(), mesh, [S0]), distribute_tensor(ROWS.clone(), mesh, [R])
        wanted, made = X[ROWS], x[i]
        if written == "source":
            x.zero_()
        elif written == "index":
            i.zero_()
        elif written == "result":
            made.mul_(2)
            wanted = wanted * 2
        else:
            made[1].zero_()
            wanted[1] = 0
        torch.testing.assert_close(made.full_tensor(), wanted)


def test_gradients() -> None:
    mesh = virtual(2, 2)
    plain = X.clone().requires_grad_()
    x = distribute_tensor(X, mesh, [S0, S1]).requires_grad_()
    i = distribute_tensor(ROWS, mesh, [R, R])
    for each, index in ((plain, ROWS), (x, i)):
        (each[index].exp().sum() + each.index_select(0, index).sum()).backward()
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad)
    assert x.grad.placements == (S0, S1)
