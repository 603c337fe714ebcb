"""What this rank asks of `torch.distributed`, and how much memory its tensors hold.

Counted are the operators of c10d that a dispatch mode sees; the sequence numbers of the process
groups must have grown by as many, so none is missed.

Bytes are those that a rank receives under the usual algorithm that receives least. On n ranks:

    all_reduce              2 (n - 1) / n of its operand
    all_gather              (n - 1) / n of its result
    reduce_scatter          (n - 1) / n of its operand
    all_to_all, recv        what comes from other ranks
    broadcast, scatter      the result, on all ranks but the source

Peak bytes are the most that storages made meanwhile have held at one time, seen after each call of
an operator. What was there before does not count, nor what a kernel takes and gives back itself.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


@dataclass(frozen=True)
class Cost:
    """What the step of a program costs the rank that pays most."""

    collectives: int
    bytes: int
    peak: int


class Watch(TorchDispatchMode):
    """Counts the collectives and the bytes that this rank receives, and the memory of tensors.

    Collectives run on copies and are waited for: else the time when gloo's thread lets go of a
    tensor would decide how much memory is in use at one time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.collectives = 0
        self.received = 0.0
        self.peak = 0
        self._held = 0
        self._storages: dict[int, int] = {}

    def cost(self) -> Cost:
        return Cost(self.collectives, round(self.received), self.peak)

    def __enter__(self) -> Watch:
        gc.collect()  # the memory of cycles is freed here and not at some time in the step
        gc.disable()
        self._asked = _asked_of_groups()
        self._patch = patch.object(torch.UntypedStorage, "resize_", _watched_resize(self))
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.stop()
        gc.enable()
        asked = _asked_of_groups() - self._asked
        if error[0] is None and asked != self.collectives:
            raise AssertionError(f"counted {self.collectives} collectives, but {asked} were run")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **(kwargs or {}))  # asked for shapes alone
        if any(kind is not Tensor for kind in types):
            return NotImplemented  # a subclass: what it does with its local tensors comes here
        if func.namespace == "c10d":
            return self._communicate(func, args, kwargs or {})
        assert func.namespace != "_c10d_functional", f"{func} is not counted yet"
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, Tensor) and not each.is_meta:
                self._hold(each.untyped_storage())
        self.peak = max(self.peak, self._held)
        return made

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._storages:
            self._storages[key] = 0
            weakref.finalize(storage, self._resized, key, None)
            self._resized(key, storage.nbytes())

    def _resized(self, key: int, nbytes: int | None) -> None:
        self._held += (nbytes or 0) - self._storages.pop(key)
        if nbytes is not None:
            self._storages[key] = nbytes

    def resized(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._storages:
            self._resized(storage._cdata, storage.nbytes())
            self.peak = max(self.peak, self._held)

    def _communicate(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func._schema.name.removeprefix("c10d::").strip("_")
        self.collectives += 1
        self.received += _received(name, args)
        if name in ("send", "recv", "recv_any_source"):
            return func(*args, **kwargs)  # the peer may wait for another message first
        given = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
        copies = {id(each): each.clone() for each in given}
        made = func(*tree_map_only(Tensor, lambda each: copies[id(each)], args), **kwargs)
        works = [each for each in tree_leaves(made) if isinstance(each, torch.ScriptObject)]
        for work in works:
            work.wait()
        for each in given:
            each.data.copy_(copies[id(each)])  # no write that autograd, or anybody, counts
        back = {id(copies[id(each)]): each for each in given}
        return tree_map_only(Tensor, lambda each: back.get(id(each), each), made)


def _watched_resize(watch: Watch) -> Callable[..., Any]:
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, *args: Any) -> Any:
        made = resize(storage, *args)
        watch.resized(storage)
        return made

    return resize_


def _asked_of_groups() -> int:
    """How many collectives and messages the process groups have been asked for."""
    groups = dist.distributed_c10d._world.pg_map
    return sum(group._get_sequence_number_for_group() for group in groups)


def _received(name: str, args: Any) -> float:
    group = next(
        dist.ProcessGroup.unbox(each)
        for each in args
        if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type())
    )
    others, size, rank = (group.size() - 1) / group.size(), _nbytes(args[0]), group.rank()
    if name == "allreduce":
        return 2 * others * size
    if name.startswith("allgather"):
        return others * size
    if name.startswith("reduce_scatter"):
        return others * _nbytes(args[1])
    if name == "alltoall_base":
        output, splits = args[0], args[3]
        mine = splits[rank] if splits else output.shape[0] // group.size()
        return size - mine * prod(output.shape[1:]) * output.element_size()
    if name == "alltoall":
        return size - _nbytes(args[0][rank])
    if name in ("broadcast", "scatter"):
        root = args[2] if name == "broadcast" else args[3]
        return 0 if root == rank else size
    if name in ("recv", "recv_any_source"):
        return size
    if name in ("send", "barrier"):
        return 0
    raise NotImplementedError(f"how many bytes does a rank receive in {name}?")


def _nbytes(value: Any) -> int:
    return sum(each.numel() * each.element_size() for each in tree_leaves(value))
