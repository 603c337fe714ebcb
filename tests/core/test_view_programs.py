"""Random programs of views, writes and views in place have the values and gradients of one device.

A program has tensors on a mesh, each beside a plain one. Every step is done on both. What plain
PyTorch refuses is refused; what it does is done alike, or refused with a LayoutError.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from shardwise import Partial, Replicate, Shard
from shardwise.errors import LayoutError

from ..compare import numbers, spread, virtual
from ..tier import quicker

MESHES = [(1,), (2,), (2, 1), (2, 2), (3,)]
SIZES = [(4, 4), (5, 4), (4, 6), (1, 6), (4, 1), (6,), (2, 3, 4), (2, 2, 2)]
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "grad": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}
Step = Callable[[Any], Any]


def view_of(pick: random.Random, x: torch.Tensor) -> tuple[str, Step]:
    """A view that a tensor of this shape has."""
    n, dim = x.numel(), pick.randrange(max(x.ndim, 1))
    size = x.shape[dim] if x.ndim else 0
    kinds = ["detach", "view_as", "unsqueeze", "flat", "squeeze"]
    if x.ndim:
        kinds += ["slice", "slice", "select", "select", "split", "unfold"]
    if x.ndim > 1:
        kinds += ["transpose", "transpose", "diagonal", "permute", "regroup"]
    if x.ndim == 1:
        kinds += ["expand", "regroup"]
    kind = pick.choice(kinds)
    start, at = pick.randrange(size + 1), pick.randrange(max(size, 1))
    if kind == "slice":
        stop, step = pick.randint(start, size), pick.choice([1, 1, 2])
        index = (*[slice(None)] * dim, slice(start, stop, step))
        return f"[{index}]", lambda x: x[index]
    if kind == "select" and size:
        return f"select({dim}, {at})", lambda x: x.select(dim, at)
    if kind == "split" and size:
        length = pick.randint(1, size)
        return f"split({length}, {dim})[-1]", lambda x: x.split(length, dim)[-1]
    if kind == "unfold" and size > 1:
        step = pick.randint(1, 2)
        return f"unfold({dim}, 2, {step})", lambda x: x.unfold(dim, 2, step)
    if kind in ("transpose", "permute"):
        other = pick.randrange(x.ndim)
        return f"transpose({dim}, {other})", lambda x: x.transpose(dim, other)
    if kind == "diagonal":
        return "diagonal()", lambda x: x.diagonal()
    if kind == "regroup" and n and n % 2 == 0:
        return "view(2, -1)", lambda x: x.view(2, -1)
    if kind == "expand":
        return "expand(2, -1)", lambda x: x.expand(2, -1)
    if kind == "flat":
        return "view(-1)", lambda x: x.view(-1)
    if kind == "unsqueeze":
        return f"unsqueeze({dim})", lambda x: x.unsqueeze(dim)
    if kind == "squeeze":
        return "squeeze()", lambda x: x.squeeze()
    if kind == "detach":
        return "detach()", lambda x: x.detach()
    return "view_as()", lambda x: x.view_as(x)


def strided_view_of(pick: random.Random, x: torch.Tensor) -> tuple[str, Step]:
    """A view by strides. Where gradients are compared, it has elements that the tensor has: of
    others PyTorch loses the gradients."""
    if x.requires_grad and not x.is_contiguous():
        return "view_as()", lambda x: x.view_as(x)
    n = x.numel()
    size, stride = (max(n // 2, 1),), (pick.choice([1, 1, 2]),)
    return f"as_strided({size}, {stride})", lambda x: x.as_strided(size, stride)


def in_place_view_of(pick: random.Random, x: torch.Tensor) -> tuple[str, Step]:
    """A view in place. One that leaves out elements is not drawn where gradients are compared: of
    other views PyTorch then loses the gradients of those."""
    dim, other = [pick.randrange(max(x.ndim, 1)) for _ in range(2)]
    kinds = ["unsqueeze_", "squeeze_", "transpose_", "swapaxes_", "as_strided_"]
    kind = pick.choice([*kinds, "t_"] if x.ndim <= 2 else kinds)
    if kind == "t_":
        return "t_()", lambda x: x.t_()
    if kind == "squeeze_":
        return "squeeze_()", lambda x: x.squeeze_()
    if kind == "unsqueeze_":
        return f"unsqueeze_({dim})", lambda x: x.unsqueeze_(dim)
    if kind == "as_strided_" and (x.is_contiguous() or not x.requires_grad):
        n = max(x.numel() if x.requires_grad else x.numel() // 2, 1)
        return f"as_strided_(({n},), (1,))", lambda x: x.as_strided_((n,), (1,))
    name = "transpose_" if kind == "as_strided_" else kind
    return f"{name}({dim}, {other})", lambda x: getattr(x, name)(dim, other)


def write_of(pick: random.Random, x: torch.Tensor, seed: int) -> tuple[str, Step]:
    value = numbers(*x.shape, seed=seed)
    plain: dict[str, Step] = {
        "mul_(-2)": lambda x: x.mul_(-2),
        "add_(value)": lambda x: x.add_(value),
        "copy_(value)": lambda x: x.copy_(value),
        "fill_(3)": lambda x: x.fill_(3.0),
        "zero_()": lambda x: x.zero_(),
        "relu_()": lambda x: x.relu_(),
        "masked_fill_(mask, 9)": lambda x: x.masked_fill_(value > 0, 9.0),
        "mul_(itself)": lambda x: x.mul_(x.detach().clone()),
    }
    if x.ndim:
        plain["[-1] = 5"] = lambda x: x.__setitem__(-1, 5.0) or x
        plain["[..., :1].mul_(3)"] = lambda x: x[..., :1].mul_(3) is x
        plain["cumsum_(0)"] = lambda x: x.cumsum_(0)
        plain["index_fill_"] = lambda x: x.index_fill_(0, torch.tensor([0]), 2.0)
    return pick.choice(list(plain.items()))


def both(step: Step, have: Any, want: Any) -> tuple[Any, Any] | None:
    """A step on both; None if both refuse it."""
    refused, got, made = False, None, None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            made = step(want)
        except (RuntimeError, IndexError, ValueError):
            refused = True
        if refused:
            with pytest.raises((RuntimeError, IndexError, ValueError)):
                step(have)
            return None
        got = step(have)
    return got, made


KINDS = ["view"] * 4 + ["strided"] + ["write"] * 4 + ["mix"] * 2 + ["reshape"] * 2 + ["data"]


class Program:
    """Tensors on a mesh beside plain ones; `told` is what was done to them."""

    def __init__(self, seed: int, mode: str, trained: bool, mesh: Any = None) -> None:
        self.pick = pick = random.Random(seed)
        self.seed, self.mode, self.trained = seed, mode, trained
        mesh = virtual(*pick.choice(MESHES)) if mesh is None else mesh
        size = pick.choice(SIZES)
        kinds = [Replicate(), *map(Shard, range(len(size))), *map(Shard, range(len(size)))]
        kinds += [Partial(pick.choice(["sum", "sum", "avg", "max"]))]
        self.places = [pick.choice(kinds) for _ in range(mesh.ndim)]
        self.mesh, value = mesh, numbers(*size, seed=seed)
        self.told = [f"{mode} seed {seed}: {list(size)} {self.places} on {tuple(mesh.shape)}"]
        self.plain = value.clone().requires_grad_(trained)
        self.leaf = spread(value.clone().requires_grad_(trained), mesh, self.places)
        start: Step = (lambda x: x) if pick.random() < 0.2 else (lambda x: x * 2)
        self.pairs = [(start(self.leaf), start(self.plain))]
        self.refused = 0

    def run(self, steps: int) -> None:
        try:
            for _ in range(steps):
                if not self.step():
                    self.refused += 1
                    return
                self.compare()
            if self.trained:
                self.backward()
        except Exception as error:
            error.add_note("\n  ".join(self.told))
            raise

    def step(self) -> bool:
        """One step; False if it was refused for the layout."""
        pick = self.pick
        at = pick.randrange(len(self.pairs))
        have, want = self.pairs[at]
        kind = pick.choice(KINDS)
        adds = kind in ("view", "strided")
        if kind == "view":
            told, step = view_of(pick, want)
        elif kind == "strided":
            told, step = strided_view_of(pick, want)
        elif kind == "reshape":
            told, step = in_place_view_of(pick, want)
        elif kind == "write":
            told, step = write_of(pick, want, self.seed + len(self.told))
        elif kind == "mix":
            return self.mix(at)
        else:
            return self.data(at)
        lulled = self.mode == "grad" and pick.random() < 0.15
        self.told.append(f"{len(self.pairs) if adds else ''} = {at}: {told}{' no_grad' * lulled}")
        with torch.no_grad() if lulled else nullcontext():
            try:
                made = both(step, have, want)
            except LayoutError:
                return False
        if adds and made is not None:
            self.pairs.append(made)
        return made is not None or kind != "reshape"  # which is announced before it is refused

    def mix(self, at: int) -> bool:
        """A write that reads another tensor, in another layout maybe, but of other memory: one
        device refuses some tensors that overlap, and has no order for the rest."""
        have, want = self.pairs[at]
        memory = want.untyped_storage().data_ptr()
        fits = [
            pair
            for pair in self.pairs
            if pair[1].shape == want.shape and pair[1].untyped_storage().data_ptr() != memory
        ]
        if not fits:
            return True
        source = self.pick.choice(fits)
        name = self.pick.choice(["copy_", "add_", "mul_"])
        self.told.append(f"{at}.{name}({[pair[0] is source[0] for pair in self.pairs]})")
        try:
            pairs = {id(have): source[0], id(want): source[1]}
            return both(lambda x: getattr(x, name)(pairs[id(x)]), have, want) is not None
        except LayoutError:
            return False

    def data(self, at: int) -> bool:
        """The tensor takes the memory of another.

        Where gradients are compared it has the same shape, and the tensor neither is a view nor has
        any: of those PyTorch takes the gradients at the strides of the new memory.
        """
        have, want = self.pairs[at]
        viewed = want._is_view() or any(plain._base is want for _, plain in self.pairs)
        if self.trained and viewed:
            return True
        fits = [p for p in self.pairs if not self.trained or p[1].shape == want.shape]
        source, plain = self.pick.choice(fits)
        if self.pick.random() < 0.4:
            plain = numbers(*want.shape, seed=self.seed + 77)
            places = [Replicate() if self.pick.random() < 0.5 else place for place in self.places]
            fit = all(not isinstance(p, Shard) or p.dim < want.ndim for p in places)
            source = spread(
                plain.clone(), self.mesh, places if fit else [Replicate()] * len(places)
            )
        self.told.append(f"{at}.data = {[p[0] is source for p in self.pairs]}")
        try:
            have.data = source.detach()
        except LayoutError:
            return False
        want.data = plain.detach()
        return True

    def compare(self) -> None:
        for at, (have, want) in enumerate(self.pairs):
            if self.pick.random() < 0.5:
                continue
            assert have.shape == want.shape, f"{at} is {have.shape}, wanted {want.shape}"
            assert have.requires_grad == want.requires_grad, f"{at} requires {have.requires_grad}"
            whole = have.detach().full_tensor()
            torch.testing.assert_close(
                whole, want.detach(), msg=lambda text, at=at: f"{at}: {text}"
            )

    def backward(self) -> None:
        self.told.append("backward")
        tracked = [at for at, (_, want) in enumerate(self.pairs) if want.requires_grad]

        def gradient(which: int) -> Any:
            terms = [self.pairs[at][which] for at in tracked]
            weights = [numbers(*self.pairs[at][1].shape, seed=at) for at in tracked]
            loss = sum([(x * w).sum() for x, w in zip(terms, weights, strict=True)])
            leaf = (self.leaf, self.plain)[which]
            return torch.autograd.grad(loss, leaf, allow_unused=True)[0] if tracked else None

        try:
            want = gradient(1)
        except RuntimeError:
            with pytest.raises(RuntimeError):
                gradient(0)
            return
        have = gradient(0)
        assert (have is None) == (want is None), f"the gradient is {have}, wanted {want}"
        if want is not None:
            torch.testing.assert_close(have.full_tensor(), want)


@pytest.mark.parametrize("mode", MODES)
def test_random_programs(mode: str) -> None:
    count, refused = quicker(1200, 0.2), 0
    for seed in range(count):
        with MODES[mode]():
            program = Program(seed, mode, trained=mode == "grad" and seed % 3 > 0)
            program.run(8)
            refused += program.refused
    assert refused < count / 4, f"{refused} of {count} programs were refused"
