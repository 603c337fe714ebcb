"""Views in place (`t_`, `unsqueeze_`, ...), `set_` and `.data =` on tensors that have views.

A view belongs to the memory that it was made of, whatever becomes of its base.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardwise import Partial, Replicate, Shard
from shardwise.errors import LayoutError

from ..compare import numbers, spread, virtual
from ..tier import some

PLACES = [Replicate(), Shard(0), Shard(1), Partial(), Shard(0, 2)]
X = numbers(4, 4)
W = numbers(4, 4, seed=1)
CHANGES: dict[str, Callable[[Any], Any]] = {
    "t_": lambda x: x.t_(),
    "transpose_": lambda x: x.transpose_(0, 1),
    "swapaxes_": lambda x: x.swapaxes_(0, 1),
    "swapdims_": lambda x: x.swapdims_(-1, 0),
    "unsqueeze_": lambda x: x.unsqueeze_(1),
    "unsqueeze_, squeeze_": lambda x: x.unsqueeze_(0).squeeze_(0),
    "as_strided_": lambda x: x.as_strided_((4, 4), (1, 4)),
    "as_strided_ of a few": lambda x: x.as_strided_((2, 3), (4, 1)),
}
VIEWS: dict[str, Callable[[Any], Any]] = {
    "a row": lambda x: x[1],
    "rows": lambda x: x[1:3],
    "columns": lambda x: x[:, 1:],
    "regrouped": lambda x: x.view(2, 8),
    "turned": lambda x: x.t(),
    "a row of a view": lambda x: x.view(8, 2)[3],
    "the diagonal": lambda x: x.diagonal(),
    "windows": lambda x: x.unfold(0, 2, 2),
}


def on_both(
    place: Any, run: Callable[[Any, str], Any], name: str, *, trained: bool = False
) -> None:
    """What a function makes of a tensor and a view is what it makes of a plain one."""
    for view in some(list(VIEWS), 0.4, (place, name)):
        wanted = run(X.clone().requires_grad_(trained), view)
        for mesh in (virtual(2), virtual(3)):
            made = run(spread(X.clone().requires_grad_(trained), mesh, [place]), view)
            for have, want in zip(made, wanted, strict=True):
                torch.testing.assert_close(
                    have.full_tensor(), want, msg=lambda text, view=view: f"{view}: {text}"
                )


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_a_view_made_before_shares_memory(change: str, place: Any) -> None:
    def run(x: Any, view: str) -> list[Any]:
        v = VIEWS[view](x)
        CHANGES[change](x)
        after = x.clone()
        v.mul_(3)
        written = x.clone()
        x.add_(1)
        return [after, written, v.clone(), v * 2, x.clone()]

    on_both(place, run, change)


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("change", list(CHANGES)[:-1])
def test_gradients_through_a_view_made_before(change: str, place: Any) -> None:
    def run(x: Any, view: str) -> list[Any]:
        grads = []
        for write in ("nothing", "into the view", "into the tensor"):
            y = x * 2
            v = VIEWS[view](y)
            CHANGES[change](y)
            if write != "nothing":
                (v if write == "into the view" else y).mul_(-3)
            loss = (y * W.view(y.shape)).sum() + (v * numbers(*v.shape, seed=2)).sum()
            grads += torch.autograd.grad(loss, x)
        return grads

    on_both(place, run, change, trained=True)


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_view_changes_its_own_shape(place: Any) -> None:
    """One whose elements live on other ranks too."""

    def run(x: Any, view: str) -> list[Any]:
        y = x * 2
        v = VIEWS[view](y)
        v.unsqueeze_(0).transpose_(0, -1)
        v.mul_(numbers(*v.shape, seed=2))
        grads = torch.autograd.grad((y * W).sum() + v.sum(), x)
        return [v.detach(), y.detach(), *grads]

    on_both(place, run, "view", trained=True)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_view_stays_with_its_memory(place: Any, mode: Any) -> None:
    """`x.data = y` and `x.set_(y)` give `x` other memory, and the view keeps the old."""
    for take in ("data", "set_"):

        def run(x: Any, view: str, take: str = take) -> list[Any]:
            with mode():
                x = x * 1
                other = (x + 1)[1:]
                v = VIEWS[view](x)
                if take == "data":
                    x.data = other
                else:
                    x.set_(other)
                x.mul_(2)
                v.add_(1)
                return [v.clone(), x.clone(), other.clone()]

        on_both(place, run, take)


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_data_of_a_view_is_the_memory_of_the_view(place: Any) -> None:
    """Also that of a view of elements that live on other ranks, and of one that becomes another."""

    def run(x: Any, view: str) -> list[Any]:
        a, row = x * 2, x[2]
        a.data = VIEWS[view](x)
        a.mul_(3)
        row.data = x[1]
        row.sub_(5)
        return [x.clone(), a.clone(), row.clone()]

    on_both(place, run, "data")


def test_a_leaf_changes_its_shape_before_backward() -> None:
    """Its gradient has the shape that the leaf has when the gradient arrives."""
    for place in (Replicate(), Shard(1)):
        plain, leaf = [numbers(1, 7).requires_grad_() for _ in range(2)]
        ours = spread(leaf, virtual(2), [place])
        for x in (plain, ours):
            s = (x * 2).sum()
            with torch.no_grad():
                x.unsqueeze_(0)
            s.backward()
        assert ours.grad.shape == plain.grad.shape
        torch.testing.assert_close(ours.grad.full_tensor(), plain.grad)
        for x in (plain, ours):
            (x.squeeze() * numbers(7, seed=1)).sum().backward()
        torch.testing.assert_close(ours.grad.full_tensor(), plain.grad)


def test_a_leaf_that_has_views_is_refused_without_grad_mode() -> None:
    """Autograd would make the views again of another shape."""
    leaf = spread(X.clone().requires_grad_(), virtual(2), [Shard(0)])
    row = leaf[1]
    with torch.no_grad(), pytest.raises(LayoutError, match=r"t_: .* has views.*returns a new view"):
        leaf.t_()
    row.sum().backward()
    assert torch.equal(leaf.grad.full_tensor()[1], torch.ones(4, dtype=X.dtype))
    del row
    with torch.no_grad():
        leaf.t_()
    torch.testing.assert_close(leaf.full_tensor(), X.t())


def test_what_autograd_refuses_is_refused() -> None:
    leaf = spread(X.clone().requires_grad_(), virtual(2), [Shard(0)])
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        leaf.t_()
    with pytest.raises(RuntimeError, match="a view of a leaf Variable"):
        leaf[1:].t_()
    with pytest.raises(RuntimeError, match="multiple views"):
        (leaf * 1).unbind()[0].unsqueeze_(0)
    y = leaf * 1
    loss = (y * y).sum()
    y.t_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with pytest.raises(IndexError, match="Dimension out of range"):
        y.unsqueeze_(5)


def test_the_tensor_stays_the_same_object() -> None:
    x = spread(X.clone(), virtual(2), [Shard(0)])
    x.tag = "mine"
    row = x[1]
    assert x.t_() is x and x.tag == "mine" and x.placements == (Shard(1),)
    for twin in (copy.copy(x), copy.deepcopy(x)):
        torch.testing.assert_close(twin.full_tensor(), X.t())
    y = spread(X.clone().requires_grad_(), virtual(2), [Shard(0)]) * 2
    y.retain_grad()
    with pytest.raises(LayoutError, match=r"t_: .* retain_grad\(\).*returns a new view"):
        y.t_()
    (y * W).sum().backward()
    torch.testing.assert_close(y.grad.full_tensor(), W)
    torch.testing.assert_close(row.full_tensor(), X[1])


def test_a_tensor_with_views_is_not_resized_past_them() -> None:
    """On one device the views would see the same memory."""
    for place in (Replicate(), Shard(0), Shard(1)):
        x = spread(X.clone(), virtual(2), [place])
        row, plain = x[1], X.clone()
        plain_row = plain[1]
        for each in (x, plain):
            each.resize_(2, 3)
            each.zero_()
        torch.testing.assert_close(row.full_tensor(), plain_row)
        with pytest.raises(LayoutError, match=r"resize_.* may share memory"):
            x.resize_(5, 5)


def test_what_is_read_of_a_pending_view_keeps_its_layout() -> None:
    """A view by strides is made again of a sum that was reduced since."""
    x, plain = spread(X.clone(), virtual(2, 2), [Partial(), Shard(0)]) * 2, X * 2
    strided, wanted = x.as_strided((8,), (1,)), plain.as_strided((8,), (1,))
    for each in (x, plain):
        each.relu_()
    torch.testing.assert_close(strided.detach().full_tensor(), wanted)


def test_strides_of_a_view_of_other_ranks_are_not_those_of_its_copy() -> None:
    for place in (Replicate(), Shard(0), Shard(1)):
        x, plain = spread(X.clone(), virtual(2), [place]), X.clone()
        column, wanted = x[:, 1], plain[:, 1]
        torch.testing.assert_close(
            column.as_strided((2,), (8,)).full_tensor(), wanted.as_strided((2,), (8,))
        )
        if place != Replicate():
            with pytest.raises(LayoutError, match="only the memory of its own elements"):
                column.as_strided((2,), (1,))
