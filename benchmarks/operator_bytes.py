"""Bytes that a rank receives for an operator on a sharded dim, here and in PyTorch's own DTensor.

    python benchmarks/operator_bytes.py [--page docs/operator-bytes.md] [words of names ...]

Four gloo processes run each call with both libraries and compare the answer with plain PyTorch's.
A dispatch mode watches the collectives that reach `torch.distributed`, of both libraries alike, and
counts what a rank must receive on n ranks: in an all_gather the shards of the others, in a
reduce_scatter n - 1 times its result, in an all_reduce 2 (n - 1) / n times its operand, in an
all_to_all, a broadcast or a message what comes from others. Each call runs once before, so that
checks which are made once do not count. What is shown is the rank that receives most.

Allowed is what the call cannot do without: the part of the rank's result that it does not hold, in
the layout that the result has here, and one set of statistics from each rank.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.layout.split_dims import held_of

WORLD = 4
SECONDS = 60.0
ROWS, WIDTH = 256, 128


@dataclass(frozen=True)
class Case:
    """A call: its inputs with the dim that is sharded, and how many numbers each rank has to tell.

    With `moves` results are made of elements of the inputs, so that it can be seen which of them a
    rank lacks.
    """

    name: str
    call: Callable[..., Any]
    inputs: tuple[tuple[Callable[[], torch.Tensor], int | None], ...]
    statistics: int = 0
    moves: bool = True
    reduces: bool = False


def _x(rows: int = ROWS, width: int = WIDTH, seed: int = 0) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def _places(count: int, below: int) -> Callable[[], torch.Tensor]:
    return lambda: (torch.arange(count) * 37 + 5) % below


def _wide(rows: int) -> Callable[[], torch.Tensor]:
    return lambda: _places(rows * WIDTH, ROWS)().view(rows, WIDTH)


X, Y, ROW, FEW = (_x(), 0), (_x(seed=1), 0), (_x(1, seed=2), None), (_x(4, seed=3), None)
COLUMNS = (_x(), 1)
HALF = ROWS // 2

CASES = [
    Case("x[3:200]", lambda x: x[3:200], (X,)),
    Case("x[100]", lambda x: x[100] * 1, (X,)),
    Case("x.split(96)", lambda x: [part * 1 for part in x.split(96)], (X,)),
    Case("x.chunk(3)", lambda x: [part * 1 for part in x.chunk(3)], (X,)),
    Case("cat([x, y])", lambda x, y: torch.cat([x, y]), (X, Y)),
    Case("stack([x, y])", lambda x, y: torch.stack([x, y]), (X, Y)),
    Case("x.flip(0)", lambda x: x.flip(0), (X,)),
    Case("x.roll(3, 0)", lambda x: x.roll(3, 0), (X,)),
    Case(
        "slice_scatter",
        lambda x, y: torch.slice_scatter(x, y, 0, 10, 10 + HALF),
        (X, (_x(HALF, seed=1), 0)),
    ),
    Case("select_scatter", lambda x, r: torch.select_scatter(x, r[0], 0, 100), (X, ROW)),
    Case("x.softmax(0)", lambda x: x.softmax(0), (X,), 2 * WIDTH, moves=False),
    Case("x.log_softmax(0)", lambda x: x.log_softmax(0), (X,), 2 * WIDTH, moves=False),
    Case("x.logsumexp(0)", lambda x: x.logsumexp(0), (X,), 2 * WIDTH, moves=False, reduces=True),
    Case("layer_norm", lambda x: F.layer_norm(x, (WIDTH,)), (COLUMNS,), 2 * ROWS, moves=False),
    Case("rms_norm", lambda x: F.rms_norm(x, (WIDTH,)), (COLUMNS,), ROWS, moves=False),
    Case("x.var(0)", lambda x: x.var(0), (X,), 2 * WIDTH, moves=False, reduces=True),
    Case("x.max(0)", lambda x: x.max(0), (X,), 3 * WIDTH, moves=False, reduces=True),
    Case("x.argmax(0)", lambda x: x.argmax(0), (X,), 3 * WIDTH, moves=False, reduces=True),
    Case("x.topk(5, 0)", lambda x: x.topk(5, 0), (X,), 15 * WIDTH, moves=False, reduces=True),
    Case("x.tril()", lambda x: x.tril(), (X,)),
    Case(
        "batch_norm, training",
        lambda x: F.batch_norm(x, None, None, training=True),
        (X,),
        2 * WIDTH,
        moves=False,
    ),
    Case("index_select, 8 rows", lambda x, i: x.index_select(0, i), (X, (_places(8, ROWS), None))),
    Case("x[i], 8 rows", lambda x, i: x[i], (X, (_places(8, ROWS), None))),
    Case("gather, 8 rows", lambda x, i: x.gather(0, i), (X, (_wide(8), None))),
    Case(
        "index_put, 4 rows",
        lambda x, i, v: x.index_put((i,), v),
        (X, (_places(4, ROWS), None), FEW),
    ),
    Case(
        "x.mean(0), 250 rows",
        lambda x: x.mean(0),
        ((_x(250), 0),),
        WIDTH,
        moves=False,
        reduces=True,
    ),
    Case("x.mean(), 250 rows", lambda x: x.mean(), ((_x(250), 0),), 1, moves=False, reduces=True),
]


# --- counting ------------------------------------------------------------------------------------


def _size(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return sum(_size(each) for each in value)
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


class Received(TorchDispatchMode):
    """Counts the bytes that this rank receives in the collectives it takes part in."""

    def __init__(self, kinds: tuple[type, ...]) -> None:
        super().__init__()
        self.kinds = kinds
        self.total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, self.kinds) for kind in types):
            return NotImplemented  # the tensor's own dispatch comes first, with this one watching
        made = func(*args, **(kwargs or {}))
        namespace, name = func._schema.name.split("::")
        if namespace in ("c10d", "_c10d_functional"):
            self.total += _received(name.strip("_"), args, made)
        return made


def _received(name: str, args: Any, made: Any) -> float:
    others, rank = WORLD - 1, dist.get_rank()
    if name.startswith(("allreduce", "all_reduce")):
        return 2 * others / WORLD * _size(args[0])
    if name.startswith(("allgather", "all_gather")):  # (outputs, inputs) or (input, ...) -> output
        in_place = name.startswith("allgather")
        return _size(args[0]) - _size(args[1]) if in_place else _size(made) - _size(args[0])
    if name.startswith("reduce_scatter"):
        return others * _size(made if name.endswith("tensor") else args[0])
    if name == "alltoall_base":
        output, splits = args[0], args[3]
        mine = splits[rank] if splits else output.shape[0] // WORLD
        return _size(output) - mine * prod(output.shape[1:]) * output.element_size()
    if name == "all_to_all_single":
        mine = args[1][rank] * prod(made.shape[1:]) * made.element_size()
        return float(_size(made) - mine)
    if name == "alltoall":
        return _size(args[0]) - _size(args[0][rank])
    if name in ("recv", "recv_any_source", "broadcast", "scatter"):
        return _size(args[0])
    if name in ("send", "barrier", "monitored_barrier", "wait_tensor", "wrap_tensor_autograd"):
        return 0
    raise NotImplementedError(f"how many bytes does a rank receive in {name}?")


# --- one rank ------------------------------------------------------------------------------------


def _library(name: str) -> tuple[Any, Any, tuple[type, ...]]:
    """The mesh, how to put a tensor on it, and the classes of its tensors."""
    if name == "ours":
        import shardwise as lib
        from shardwise.storage.wrapper import Wrapper

        kinds: tuple[type, ...] = (Wrapper,)
    else:
        import torch.distributed.tensor as lib  # type: ignore[no-redef]

        kinds = (lib.DTensor,)
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (WORLD,))

    def put(value: torch.Tensor, dim: int | None) -> Any:
        place = lib.Replicate() if dim is None else lib.Shard(dim)
        return lib.distribute_tensor(value, mesh, [place])

    return mesh, put, kinds


def _flat(made: Any) -> list[Any]:
    return list(made) if isinstance(made, (list, tuple)) else [made]


def _lacking(case: Case, given: list[Any], made: list[Any], coord: Any) -> int:
    """How many elements of a rank's results come from elements that it does not hold."""
    start, ids, held = 1, [], []
    for (build, _), operand in zip(case.inputs, given, strict=True):
        value = build()
        if not value.is_floating_point():
            ids.append(value)
            continue
        numbers = torch.arange(start, start + value.numel()).view(value.shape)
        start += value.numel()
        ids.append(numbers)
        held.append(_part(numbers, operand, coord).flatten())
    known = torch.cat([torch.zeros(1, dtype=torch.int64), *held])
    wanted = [_part(n, m, coord) for n, m in zip(_flat(case.call(*ids)), made, strict=True)]
    return sum(int((~torch.isin(each, known)).sum()) for each in wanted)


def _part(whole: torch.Tensor, like: Any, coord: Any) -> torch.Tensor:
    """The region of a whole tensor that the rank at `coord` holds of `like`."""
    for dim, pieces in enumerate(held_of(like._spec, coord)):
        whole = torch.cat([whole.narrow(dim, a, b - a) for a, b in pieces], dim)
    return whole


def allowed(case: Case, given: list[Any], made: list[Any], coord: Any) -> int:
    """The bytes that the rank at `coord` may receive."""
    lacking = 0
    if case.moves:
        lacking = _lacking(case, given, made, coord) * 4
    elif case.reduces:
        lacking = sum(prod(m._spec.local_shape(coord)) * m.dtype.itemsize for m in made)
    return lacking + WORLD * case.statistics * 4


def _one(case: Case, library: str, put: Any, kinds: tuple[type, ...]) -> dict[str, Any]:
    plain = _flat(case.call(*[build() for build, _ in case.inputs]))
    given = [put(build(), dim) for build, dim in case.inputs]
    case.call(*given)
    with Received(kinds) as received:
        made = _flat(case.call(*given))
    with Received(kinds) as later:
        for each in made:
            if each.placements[0].is_partial():
                each.full_tensor()
    layout = ", ".join(dict.fromkeys(str(each.placements[0]) for each in made))
    close = all(
        torch.allclose(a.full_tensor(), b, rtol=1e-4, atol=1e-5)
        for a, b in zip(made, plain, strict=True)
    )
    found: dict[str, Any] = {"bytes": received.total, "later": later.total, "right": close}
    found["layout"] = layout
    if library == "ours":
        found["allowed"] = allowed(case, given, made, (dist.get_rank(),))
    return found


def _rank(rank: int, library: str, store: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=SECONDS),
    )
    _, put, kinds = _library(library)
    pipe.send("ready")
    while (index := pipe.recv()) is not None:
        try:
            pipe.send(_one(CASES[index], library, put, kinds))
        except Exception as error:
            pipe.send({"error": f"{type(error).__name__}: {error}".splitlines()[0]})
    dist.destroy_process_group()


# --- all ranks -----------------------------------------------------------------------------------


class Pool:
    """Four processes that run cases one after another; new ones after an error."""

    def __init__(self, library: str) -> None:
        self.library = library
        context = multiprocessing.get_context("spawn")
        store = tempfile.mktemp(prefix="operator_bytes_")
        self.pipes, self.workers = [], []
        for rank in range(WORLD):
            mine, theirs = context.Pipe()
            worker = context.Process(target=_rank, args=(rank, library, store, theirs), daemon=True)
            worker.start()
            self.pipes.append(mine)
            self.workers.append(worker)
        for pipe in self.pipes:
            if not pipe.poll(5 * SECONDS):
                raise TimeoutError("operator_bytes: the processes did not start")
            pipe.recv()

    def run(self, index: int) -> list[dict[str, Any]]:
        for pipe in self.pipes:
            pipe.send(index)
        return [
            pipe.recv() if pipe.poll(SECONDS) else {"error": "no answer"} for pipe in self.pipes
        ]

    def stop(self, *, kindly: bool) -> None:
        for pipe, worker in zip(self.pipes, self.workers, strict=True):
            if kindly:
                pipe.send(None)
                worker.join(10)
            worker.kill()


def measure(library: str, chosen: list[int]) -> dict[int, list[dict[str, Any]]]:
    """What every rank saw of every case."""
    found, pool = {}, Pool(library)
    for index in chosen:
        found[index] = pool.run(index)
        if any("error" in each for each in found[index]):
            pool.stop(kindly=False)
            pool = Pool(library)
        print(f"{library:6} {CASES[index].name}", file=sys.stderr, flush=True)
    pool.stop(kindly=True)
    return found


def _cell(seen: list[dict[str, Any]]) -> str:
    error = next((each["error"] for each in seen if "error" in each), None)
    if error is not None:
        return f"raises {error.split(':')[0]}"
    most = max(each["bytes"] for each in seen)
    later = max(each["later"] for each in seen)
    wrong = "" if all(each["right"] for each in seen) else ", **wrong**"
    pending = f", {later:,.0f} to reduce" if later else ""
    return f"{most:,.0f}{wrong} ({seen[0]['layout']}{pending})"


def row(case: Case, ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> str:
    """One line of the table."""
    if any("error" in each for each in ours):
        return f"| {case.name} | {_cell(ours)} | | | {_cell(theirs)} |"
    within = all(each["bytes"] <= each["allowed"] for each in ours)
    allowed = max(each["allowed"] for each in ours)
    said = "yes" if within else "**no**"
    return f"| {case.name} | {_cell(ours)} | {allowed:,} | {said} | {_cell(theirs)} |"


HEAD = f"""# Bytes received

Generated by `python benchmarks/operator_bytes.py`. What the rank that receives most receives for
one call, and the layout of the result. `x` is float32[{ROWS}, {WIDTH}], {ROWS * WIDTH * 4:,} bytes,
on {WORLD} gloo processes, sharded on the dim that the operator works on.

Allowed is the part of a rank's result that it does not hold, and one set of statistics from each
rank. A result that is left pending costs more once somebody needs it whole: that is named apart.
Both libraries are counted by the same observer of `torch.distributed`, in one run, with PyTorch
{torch.__version__.split("+")[0]}. On gloo PyTorch's DTensor gathers where it would exchange
elsewhere: its rows that end in another shard would be {ROWS * WIDTH * 3 // WORLD:,} with NCCL.

| call | Shardwise | allowed | within | torch.distributed.tensor |
|---|---|---|---|---|
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--page", type=Path, help="write the table here")
    parser.add_argument("names", nargs="*", help="only calls that have one of these words")
    options = parser.parse_args()
    chosen = [
        index
        for index, case in enumerate(CASES)
        if not options.names or any(name in case.name for name in options.names)
    ]
    ours, theirs = measure("ours", chosen), measure("theirs", chosen)
    table = "\n".join(row(CASES[index], ours[index], theirs[index]) for index in chosen)
    print(HEAD + table)
    for index in chosen:
        for seen in (ours[index], theirs[index]):
            error = next((each["error"] for each in seen if "error" in each), None)
            if error is not None:
                print(f"{CASES[index].name}: {error}", file=sys.stderr)
    if options.page is not None:
        options.page.write_text(HEAD + table + "\n")


if __name__ == "__main__":
    main()
