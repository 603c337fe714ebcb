"""A program in which one rank fails, as `sys.argv` says; the others wait for it.

Each rank prints after how many seconds it ended, its own sleep left out. It is started as a process
per rank, with the store in rank 0.
"""

import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist

import shardwise as sw
from shardwise import Replicate, Shard

way, victim = sys.argv[1], int(sys.argv[2])
world = int(os.environ["WORLD_SIZE"])
compared = {"lockstep": True} if way.startswith("flag") else {}
mesh = sw.init_device_mesh("cpu", (world,), **compared)
rank = dist.get_rank()
full = torch.arange(8.0 * world).view(2 * world, 4)
x = sw.distribute_tensor(full, mesh, [Shard(0)])
(x * 2).sum(1)  # what PyTorch loads at first use is loaded now
if way != "kill first":
    x.sum().item()
dist.barrier()
started = time.monotonic()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train_sharded(mine: bool) -> None:
    """Units are gathered ahead, so a rank that dies leaves others in the midst of several moves."""
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(4)])
    for layer in model:
        sw.fully_shard(layer, mesh)
    sw.fully_shard(model, mesh)
    for turn in range(4):
        if mine and turn == 2:
            model[2].register_forward_hook(lambda *_: die())
        model(x).sum().backward()


def attend(mine: bool) -> None:
    """Keys pass in a ring forward and back; a rank dies before it sends gradients."""
    place = Shard(2, split=2)
    for turn in range(3):
        given = [
            sw.randn(1, 1, 4 * world, 4, device_mesh=mesh, placements=[place]).requires_grad_()
            for _ in range(3)
        ]
        out = torch.nn.functional.scaled_dot_product_attention(*given, is_causal=True)
        if mine and turn == 1:
            die()
        out.sum().backward()


def route(mine: bool) -> None:
    """Tokens travel to their experts and back; a rank dies while they are there."""
    index = sw.distribute_tensor(torch.arange(2 * world)[:, None] % world, mesh, [Shard(0)])
    weights = sw.ones(2 * world, 1, device_mesh=mesh, placements=[Shard(0)])
    experts = sw.ones(world, 4, 4, device_mesh=mesh, placements=[Shard(0)])
    for turn in range(3):
        sent = sw.dispatch_tokens(x, index, weights, experts)
        if mine and turn == 1:
            die()
        sent.combine(sent.grouped_mm(sent.tokens, experts))


def run() -> None:
    global started
    mine = rank == victim
    if way == "kill first":
        if mine:
            die()
        x.sum().item()
    elif way == "kill between":
        for turn in range(20):
            assert x.sum().item() == full.sum()
            if mine and turn == 10:
                die()
    elif way == "kill async":
        if mine:
            time.sleep(0.5)
            die()
        x.redistribute(placements=[Replicate()], async_op=True).to_local()
    elif way == "kill fully sharded":
        train_sharded(mine)
    elif way == "kill context":
        attend(mine)
    elif way == "kill experts":
        route(mine)
    elif way == "raise":
        if mine:
            threading.Thread(target=time.sleep, args=(4,)).start()  # the process lives on
            raise ValueError("on purpose")
        x.sum().item()
    elif way == "exit":
        if mine:
            sys.exit(0)
        x.sum().item()
    elif way == "destroy":
        if mine:
            dist.destroy_process_group()
            time.sleep(3)
            return
        x.sum().item()
    elif way == "value":
        places = torch.zeros(world, dtype=torch.int64)
        places[victim] = 99
        index = sw.distribute_tensor(places, mesh, [Shard(0)])
        table = sw.distribute_tensor(torch.arange(8.0), mesh, [Replicate()])
        table.take(index)
        x.sum().item()
    elif way == "late":
        if mine:
            die()
        if rank == world - 1:
            time.sleep(9)  # the others have heard, raised and ended, and so has the store
            started += 9
        x.sum().item()
    elif way == "plain":
        if mine:
            x + torch.ones(4)
        x.sum().item()
    else:
        different()


def different() -> None:
    mine = rank == victim
    if way.startswith("flag"):
        x.mean().item()
        if way == "flag more" and mine:
            x.prod().item()  # one more
        elif way == "flag amax" and mine:
            x.amax().item()  # instead
        elif way == "flag amax":
            x.sum().item()  # instead
        dist.destroy_process_group()  # at the end
        return
    with sw.lockstep():
        x.mean().item()
        if way == "amax":
            value = x.amax() if mine else x.sum()
            value.item()  # amax or sum
        elif way == "order":
            values = [x.sum(), (x * 2).sum()]
            if mine:
                values[0].item()  # first
                values[1].item()
            else:
                values[1].item()  # first
                values[0].item()
        elif way == "more" and mine:
            x.sum().item()  # one more
        elif way == "hook":
            leaves = [
                sw.distribute_tensor(torch.ones(4, 4), mesh, [Replicate()]).requires_grad_()
                for _ in range(3)
            ]
            if mine:
                leaves[1].register_hook(lambda grad: None)
            loss = (x @ leaves[0] @ leaves[1] @ leaves[2]).sum()
            loss.backward()  # a hook on one rank


try:
    run()
finally:
    print(time.monotonic() - started, flush=True)
