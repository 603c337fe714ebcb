"""The same small programs with Shardwise and with PyTorch's own DTensor, on two gloo processes.

Each program runs once on plain tensors, once with each library. What is printed is whether the
answer was the single-device one, was another one, or did not come. Each pair of processes is new,
so that an error or a hang in one program does not touch the next.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

Put = Callable[..., Any]
Program = Callable[[Put], Any]
PROGRAMS: dict[str, Program] = {}
WORLD = 2
SECONDS = 60.0


def program(text: str) -> Callable[[Program], Program]:
    def add(run: Program) -> Program:
        PROGRAMS[text] = run
        return run

    return add


def rows(count: int, width: int = 4) -> torch.Tensor:
    return torch.arange(1.0, count * width + 1).view(count, width).sin()


@program("x[2:5].zero_(), rows sharded")
def zero_slice(put: Put) -> Any:
    x = put(rows(8), 0)
    x[2:5].zero_()
    return x


@program("x[0:2] = 0., rows sharded")
def set_slice(put: Put) -> Any:
    x = put(rows(8), 0)
    x[0:2] = 0.0
    return x


@program("x[3].copy_(row), rows sharded")
def copy_row(put: Put) -> Any:
    x = put(rows(8), 0)
    x[3].copy_(put(torch.ones(4), None))
    return x


@program("x[:, 1] += 1, columns sharded")
def add_column(put: Put) -> Any:
    x = put(rows(8), 1)
    x[:, 1] += 1
    return x


@program("x.view(-1)[3] = 7, columns sharded")
def set_in_view(put: Put) -> Any:
    x = put(rows(8), 1)
    x.view(-1)[3] = 7.0
    return x


@program("r = x[3]; x.zero_(); r, rows sharded")
def stale_row(put: Put) -> Any:
    x = put(rows(8), 0)
    row = x[3]
    x.zero_()
    return row


@program("x.mean(), 7 rows sharded")
def uneven_mean(put: Put) -> Any:
    return put(rows(7), 0).mean()


@program("mse_loss and gradient, 7 rows sharded")
def uneven_mse(put: Put) -> Any:
    x = put(rows(7).requires_grad_(), 0)
    loss = F.mse_loss(x, put(rows(7).cos(), 0))
    loss.backward()
    return loss, x.grad


@program("mse_loss and gradient, 8 rows sharded")
def even_mse(put: Put) -> Any:
    x = put(rows(8).requires_grad_(), 0)
    loss = F.mse_loss(x, put(rows(8).cos(), 0))
    loss.backward()
    return loss, x.grad


@program("a linear layer, rows sharded, and the gradient of its weight")
def data_parallel(put: Put) -> Any:
    weight = put(rows(4, 4).requires_grad_(), None)
    loss = (put(rows(8), 0) @ weight).square().mean()
    loss.backward()
    return loss, weight.grad


@program("an MLP, columns then rows of the weights sharded")
def tensor_parallel(put: Put) -> Any:
    up, down = put(rows(6, 4).requires_grad_(), 0), put(rows(4, 6).requires_grad_(), 1)
    made = F.linear(F.gelu(F.linear(put(rows(3), None), up)), down)
    made.sum().backward()
    return made, up.grad, down.grad


@program("cross_entropy, 7 rows sharded")
def uneven_cross_entropy(put: Put) -> Any:
    x = put(rows(7).requires_grad_(), 0)
    loss = F.cross_entropy(x, put(torch.arange(7) % 4, 0))
    loss.backward()
    return loss, x.grad


@program("cross_entropy, ignore_index, 8 rows sharded")
def ignored(put: Put) -> Any:
    target = torch.arange(8) % 4
    target[:3] = -100
    x = put(rows(8).requires_grad_(), 0)
    loss = F.cross_entropy(x, put(target, 0))
    loss.backward()
    return loss, x.grad


@program("cross_entropy, class weights, 8 rows sharded")
def weighted(put: Put) -> Any:
    weight = put(torch.tensor([1.0, 2.0, 3.0, 4.0]), None)
    x = put(rows(8).requires_grad_(), 0)
    loss = F.cross_entropy(x, put(torch.arange(8) // 2, 0), weight=weight)
    loss.backward()
    return loss, x.grad


@program("x.max(), 1 row on 2 ranks")
def empty_shard(put: Put) -> Any:
    return put(rows(1), 0).max()


@program("argmax over the sharded dim")
def sharded_argmax(put: Put) -> Any:
    return put(rows(8), 0).argmax(0)


@program("layer_norm over the sharded dim")
def sharded_norm(put: Put) -> Any:
    return F.layer_norm(put(rows(8), 1), (4,))


@program("torch.bernoulli(x), rows sharded, equal seed")
def bernoulli(put: Put) -> Any:
    x = put(rows(8).abs(), 0)
    torch.manual_seed(1)
    return torch.bernoulli(x)


@program("a mask made in forward (plain tensor)")
def plain_mask(put: Put) -> Any:
    x = put(rows(8), 0)
    return x.masked_fill(torch.ones(8, 4).tril().bool(), 0.0)


@program("torch.cdist, which has no rule")
def no_rule(put: Put) -> Any:
    return torch.cdist(put(rows(8), 0), put(rows(8).cos(), 0))


@program("nn.LSTM, input sharded by batch")
def lstm(put: Put) -> Any:
    torch.manual_seed(0)
    net = nn.LSTM(4, 3, batch_first=True)
    for name, value in list(net.named_parameters()):
        net._parameters[name] = nn.Parameter(put(value.data, None))
    return net(put(torch.randn(4, 5, 4), 0))[0]


def run(name: str, lib_name: str, rank: int, store: str, answers: Any) -> None:
    """One program on one rank; the first rank answers."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=20),
    )
    if lib_name == "shardwise":
        import shardwise as lib
    else:
        import torch.distributed.tensor as lib  # type: ignore[no-redef]
    mesh = dist.init_device_mesh("cpu", (WORLD,))

    def put(value: torch.Tensor, dim: int | None) -> Any:
        place = lib.Replicate() if dim is None else lib.Shard(dim)
        return lib.distribute_tensor(value, mesh, [place])

    try:
        answers.put((rank, True, wholes(PROGRAMS[name](put))))
    except BaseException as error:  # whatever it is, it is the answer
        first = " ".join(next(iter(str(error).strip().splitlines()), "").split())
        answers.put((rank, False, f"{type(error).__name__}: {first}"))


def wholes(made: Any) -> list[list[float]]:
    values = made if isinstance(made, tuple) else (made,)
    whole = [v.full_tensor() if hasattr(v, "full_tensor") else v for v in values]
    return [[float(n) for n in v.detach().flatten()] for v in whole]


def outcome(name: str, lib: str) -> str:
    """What a library makes of a program, in a few words."""
    context = multiprocessing.get_context("spawn")
    expected = wholes(PROGRAMS[name](lambda value, dim: value))
    got: dict[int, tuple[bool, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        answers = context.SimpleQueue()
        given = (str(Path(folder) / "store"), answers)
        workers = [
            context.Process(target=run, args=(name, lib, rank, *given)) for rank in range(WORLD)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(SECONDS)
        hung = [worker for worker in workers if worker.is_alive()]
        for worker in hung:
            worker.kill()
            worker.join()
        while not answers.empty():
            rank, good, value = answers.get()
            got[rank] = (good, value)
    return judged(expected, got, bool(hung))


def judged(expected: list[list[float]], got: dict[int, tuple[bool, Any]], hung: bool) -> str:
    if hung or len(got) < WORLD:
        return "hangs" if hung else "ends without an answer"
    bad = {rank: value for rank, (good, value) in got.items() if not good}
    if bad:
        same = len(bad) == WORLD and len(set(bad.values())) == 1
        where = "every rank" if same else f"rank {next(iter(bad))} first"
        return f"error on {where}: {next(iter(bad.values()))}"
    wrong = [rank for rank, (_, value) in got.items() if not close(expected, value)]
    return "WRONG VALUES, no error" if wrong else "equal"


def close(expected: list[list[float]], got: list[list[float]]) -> bool:
    return len(expected) == len(got) and all(
        len(a) == len(b) and torch.allclose(torch.tensor(a), torch.tensor(b), atol=1e-5)
        for a, b in zip(expected, got, strict=True)
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("only", nargs="?", default="", help="programs whose name holds this")
    options = parser.parse_args()
    libs = ("shardwise", "torch.distributed.tensor")
    counts = dict.fromkeys(libs, 0)
    chosen = [name for name in PROGRAMS if options.only in name]
    for name in chosen:
        print(name)
        for lib in libs:
            text = outcome(name, lib)
            counts[lib] += text == "equal"
            print(f"  {lib:25} {text[:160]}")
            sys.stdout.flush()
    for lib in libs:
        print(f"{lib}: {counts[lib]} of {len(chosen)} equal to one device")


if __name__ == "__main__":
    main()
