"""What training steps and the like cost, by layout, beside the same programs on one device.

    python benchmarks/programs.py [--only GLOB] [--engine virtual] [--write]

Each program of `models/` runs two steps on a virtual mesh and on four gloo processes; results,
gradients, parameters and buffers at the end must be those of plain PyTorch, dropout included. The
second step is measured (`measure.py` says how): collectives, bytes received and peak local bytes of
the rank that has most. `--write` makes the result the golden table (`programs.json`, and
`programs.md` to read). Without it the exit code is 1 if a program is wrong or dearer than that; if
one is cheaper the table says so, and is written anew.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, astuple
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from benchmarks.models import moe, others, transformer, vision  # noqa: E402
from benchmarks.running import (  # noqa: E402
    WORLD,
    Found,
    Layout,
    Program,
    Values,
    on_processes,
    on_virtual_mesh,
)

import shardwise as sw  # noqa: E402
from shardwise import Shard  # noqa: E402

# --- batches -------------------------------------------------------------------------------------


def _draw() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def text(batch: int = 4, length: int = transformer.LENGTH) -> Values:
    """Tokens and the next tokens."""
    tokens = torch.randint(1, transformer.VOCAB, (batch, length + 1), generator=_draw())
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def padded_text() -> Values:
    """Texts of several lengths; a target of -100 is none."""
    values = text(8)
    length = torch.arange(transformer.LENGTH - 7, transformer.LENGTH + 1)
    beyond = torch.arange(transformer.LENGTH) >= length[:, None]
    asked = torch.rand(8, transformer.LENGTH, generator=_draw()) < 0.5
    tokens = values["tokens"].masked_fill(beyond, 0)
    return {"tokens": tokens, "targets": tokens.masked_fill(beyond | ~asked, -100)}


def small_texts() -> Values:
    """Four batches, one after the other."""
    return {name: value.view(4, 4, -1) for name, value in text(16).items()}


def prompt() -> Values:
    return {"tokens": text(8, 6)["tokens"]}


def images(batch: int = 8) -> Values:
    draw, side = _draw(), vision.IMAGE
    return {
        "images": torch.randn(batch, 3, side, side, generator=draw),
        "labels": torch.randint(vision.CLASSES, (batch,), generator=draw),
    }


def noisy_images() -> Values:
    draw = _draw()
    values = images()
    noise = torch.randn(values["images"].shape, generator=draw)
    return {**values, "noise": noise, "time": torch.randint(20, (8,), generator=draw)}


def pairs() -> Values:
    return {"images": images()["images"], "tokens": text(8, 8)["tokens"]}


def clicks(batch: int = 16) -> Values:
    draw = _draw()
    return {
        "dense": torch.randn(batch, 8, generator=draw),
        "categories": torch.randint(64, (batch, 4, 3), generator=draw),
        "clicked": torch.randint(2, (batch,), generator=draw).float(),
    }


def carts() -> Values:
    return {"state": torch.randn(16, 2, generator=_draw())}


def graph(nodes: int = 32, edges: int = 128) -> Values:
    draw = _draw()
    return {
        "nodes": torch.randn(nodes, 8, generator=draw),
        "source": torch.randint(nodes, (edges,), generator=draw),
        "target": torch.randint(nodes, (edges,), generator=draw),
        "labels": torch.randint(5, (nodes,), generator=draw),
    }


# --- losses and steps ----------------------------------------------------------------------------

Loss = Callable[[nn.Module, Values], Tensor]


def next_token(model: nn.Module, batch: Values) -> Tensor:
    logits = model(batch["tokens"])
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def masked_token(model: nn.Module, batch: Values) -> Tensor:
    logits, targets = model(batch["tokens"]), batch["targets"]
    return F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=-100, label_smoothing=0.1
    )


def image_class(model: nn.Module, batch: Values) -> Tensor:
    return F.cross_entropy(model(batch["images"]), batch["labels"], label_smoothing=0.1)


def denoise(model: nn.Module, batch: Values) -> Tensor:
    share = torch.cos(batch["time"] / 20)[:, None, None, None]
    noisy = share * batch["images"] + (1 - share**2).sqrt() * batch["noise"]
    return F.mse_loss(model(noisy, batch["time"], batch["labels"]), batch["noise"])


def contrast(model: nn.Module, batch: Values) -> Tensor:
    return model(batch["images"], batch["tokens"])


def click(model: nn.Module, batch: Values) -> Tensor:
    logits = model(batch["dense"], batch["categories"])
    return F.binary_cross_entropy_with_logits(logits, batch["clicked"])


def node_class(model: nn.Module, batch: Values) -> Tensor:
    logits = model(batch["nodes"], batch["source"], batch["target"])
    return F.cross_entropy(logits, batch["labels"])


def actor_critic(model: nn.Module, batch: Values) -> Tensor:
    return others.policy_loss(model, *others.rollout(model, batch["state"], 5))


def train(
    loss_of: Loss, model: nn.Module, optimizer: Any, batch: Values, foreach: bool | None = None
) -> Values:
    """A training step with clipped gradients."""
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)
    optimizer.step()
    return {"loss": loss, "norm": norm}


def train_with_average(loss_of: Loss, model: nn.Module, optimizer: Any, batch: Values) -> Values:
    """A training step, and a moving average of the parameters, which is kept by the optimizer."""
    results = train(loss_of, model, optimizer, batch)
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        if "average" not in state:
            state["average"] = parameter.detach().clone()
        state["average"].lerp_(parameter.detach(), 0.1)
        results[f"average {name}"] = state["average"]
    return results


def accumulate(pending: bool, model: nn.Module, optimizer: Any, batch: Values) -> Values:
    """Four small batches and one step; with `pending` the last one reduces the gradients of all."""
    optimizer.zero_grad()
    total = 0.0
    parts = list(zip(batch["tokens"], batch["targets"], strict=True))
    for index, (tokens, targets) in enumerate(parts):
        with sw.keep_partial_grads() if pending and index + 1 < len(parts) else nullcontext():
            loss = next_token(model, {"tokens": tokens, "targets": targets}) / 4
            loss.backward()
        total = total + loss.detach()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return {"loss": total, "norm": norm}


def train_by_closure(loss_of: Loss, model: nn.Module, optimizer: Any, batch: Values) -> Values:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return loss

    return {"loss": optimizer.step(closure)}


def generate(sample: bool, model: nn.Module, optimizer: Any, batch: Values) -> Values:
    return {"tokens": transformer.generate(model.eval(), batch["tokens"], 4, sample)}


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-5)


def momentum(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


# --- layouts -------------------------------------------------------------------------------------

DP, TP, DP_TP = {"dp": 4}, {"tp": 4}, {"dp": 2, "tp": 2}

WHOLE: Layout = {}
DIM0: Layout = {"*": {"dp": Shard(0)}}
"""Of inputs: data parallelism. Of parameters: fully sharded training."""
SEQUENCE: Layout = {"*": {"tp": Shard(1)}}
CONTEXT: Layout = {"*": {"cp": Shard(1, split=2)}}
DATA_AND_SEQUENCE: Layout = {"*": {"dp": Shard(0), "tp": Shard(1)}}

GPT_TP: Layout = {
    "embed.weight": {"tp": Shard(0)},  # the head is the same parameter
    "*.qkv.*": {"tp": Shard(0)},
    "*.out.weight": {"tp": Shard(1)},
    "*.mlp.0.*": {"tp": Shard(0)},
    "*.mlp.2.weight": {"tp": Shard(1)},
}
BERT_TP: Layout = {**GPT_TP, "head.*": {"tp": Shard(0)}}
LLAMA_TP: Layout = {
    "embed.weight": {"tp": Shard(0)},
    "head.weight": {"tp": Shard(0)},
    "*.[qkv].weight": {"tp": Shard(0)},
    "*.o.weight": {"tp": Shard(1)},
    "*.gate.weight": {"tp": Shard(0)},
    "*.up.weight": {"tp": Shard(0)},
    "*.down.weight": {"tp": Shard(1)},
}
LORA_TP: Layout = {
    **{glob.replace(".weight", ".base.weight"): LLAMA_TP[glob] for glob in LLAMA_TP},
    "embed.weight": {"tp": Shard(0)},
    "head.weight": {"tp": Shard(0)},
    "*.[qkv].b": {"tp": Shard(1)},
    "*.gate.b": {"tp": Shard(1)},
    "*.up.b": {"tp": Shard(1)},
    "*.o.a": {"tp": Shard(0)},
    "*.down.a": {"tp": Shard(0)},
}
EXPERTS: Layout = {"*.mlp.up": {"ep": Shard(0)}, "*.mlp.down": {"ep": Shard(0)}}
GATED_EXPERTS: Layout = {**EXPERTS, "*.mlp.gate": {"ep": Shard(0)}}
VIT_TP: Layout = {
    "*.qkv.*": {"tp": Shard(0, split=3)},  # queries, keys and values one after the other
    "*.proj.weight": {"tp": Shard(1)},
    "*.up.*": {"tp": Shard(0)},
    "*.down.weight": {"tp": Shard(1)},
}
CHANNELS: Layout = {
    "stem.weight": {"tp": Shard(0)},
    "*conv1.weight": {"tp": Shard(0)},
    "*norm1.*": {"tp": Shard(0)},
    "*conv2.weight": {"tp": Shard(1)},
}
TABLES: Layout = {"tables.*": {"dp": Shard(0)}}


def fully_sharded(layout: Layout) -> Layout:
    """The same, and all parameters on dim 0 over the data axis."""
    return {
        **{glob: {"dp": Shard(0), **by_axis} for glob, by_axis in layout.items()},
        "*": {"dp": Shard(0)},
    }


# --- programs ------------------------------------------------------------------------------------


def _transformers() -> Iterator[Program]:
    many = partial(text, 128)  # fully sharded models have more activations than parameters
    few = partial(text, 4)
    gpt = partial(
        Program, model=transformer.GPT, batch=text, step=partial(train, next_token), optimizer=adamw
    )
    yield gpt("gpt, tensor parallel", mesh=TP, inputs=WHOLE, parameters=GPT_TP)
    yield gpt("gpt, data parallel", mesh=DP, inputs=DIM0)
    yield gpt("gpt, fully sharded", batch=many, mesh=DP, inputs=DIM0, parameters=DIM0)
    yield gpt("gpt, sequence parallel", mesh=TP, inputs=SEQUENCE, parameters=GPT_TP)
    yield gpt(
        "gpt, sequence parallel as in Megatron",
        mesh=TP,
        inputs=WHOLE,
        parameters=GPT_TP,
        moved={
            "dropout": {"tp": Shard(1)},
            "*.norm[12]": {},
            "*.attention": {"tp": Shard(1)},
            "*.mlp": {"tp": Shard(1)},
            "norm": {},
        },
    )
    yield gpt("gpt, context parallel", mesh=TP, inputs=SEQUENCE)
    yield gpt("gpt, data x tensor", mesh=DP_TP, inputs=DIM0, parameters=GPT_TP)
    yield gpt("gpt, data x sequence", mesh=DP_TP, inputs=DATA_AND_SEQUENCE, parameters=GPT_TP)
    yield gpt(
        "gpt, fully sharded x tensor",
        batch=many,
        mesh=DP_TP,
        inputs=DIM0,
        parameters=fully_sharded(GPT_TP),
    )
    for kind in ("reentrant", "not reentrant"):
        yield gpt(
            f"gpt, checkpoint ({kind})",
            model=partial(transformer.GPT, recompute=kind),
            mesh=TP,
            inputs=WHOLE,
            parameters=GPT_TP,
        )
    for pending in (False, True):
        yield gpt(
            "gpt, accumulated" + (" pending" if pending else "") + " gradients",
            batch=small_texts,
            step=partial(accumulate, pending),
            mesh=DP,
            inputs={"*": {"dp": Shard(1)}},
        )
    bert = partial(
        gpt, model=transformer.BERT, batch=padded_text, step=partial(train, masked_token)
    )
    yield bert("bert, tensor parallel", mesh=TP, inputs=WHOLE, parameters=BERT_TP)
    yield bert("bert, data parallel", mesh=DP, inputs=DIM0)
    llama = partial(gpt, model=transformer.Llama)
    yield llama("llama, tensor parallel", mesh=TP, inputs=WHOLE, parameters=LLAMA_TP)
    yield llama("llama, fully sharded", batch=many, mesh=DP, inputs=DIM0, parameters=DIM0)
    yield llama(
        "llama, sequence parallel", batch=few, mesh=TP, inputs=SEQUENCE, parameters=LLAMA_TP
    )
    yield llama("llama, context parallel", batch=few, mesh={"cp": 4}, inputs=CONTEXT)
    yield llama(
        "llama, context x tensor",
        batch=few,
        mesh={"cp": 2, "tp": 2},
        inputs=CONTEXT,
        parameters=LLAMA_TP,
    )
    yield llama(
        "llama, LoRA, tensor parallel",
        model=lambda: transformer.lora(transformer.Llama()),
        mesh=TP,
        inputs=WHOLE,
        parameters=LORA_TP,
    )
    for sample in (False, True):
        yield llama(
            f"llama, generation ({'sampled' if sample else 'greedy'})",
            batch=prompt,
            step=partial(generate, sample),
            optimizer=None,
            mesh=DP_TP,
            inputs=DIM0,
            parameters=LLAMA_TP,
        )


def _experts() -> Iterator[Program]:
    def model(mlp: Any) -> Callable[[], nn.Module]:
        return lambda: transformer.Llama(layers=1, mlp=mlp)

    llama = partial(Program, batch=text, step=partial(train, next_token), optimizer=adamw)
    top2, top8 = model(moe.LoopedExperts), model(moe.SharedAndRoutedExperts)
    stacked = model(moe.StackedExperts)
    yield llama("moe top 2, tensor parallel", top2, mesh=TP, inputs=WHOLE, parameters=LLAMA_TP)
    yield llama("moe top 2, data x tensor", top2, mesh=DP_TP, inputs=DIM0, parameters=LLAMA_TP)
    yield llama("moe top 8, tensor parallel", top8, mesh=TP, inputs=WHOLE, parameters=LLAMA_TP)
    yield llama(
        "moe top 2, expert parallel", stacked, mesh={"ep": 4}, inputs=WHOLE, parameters=EXPERTS
    )
    sent = partial(llama, model=model(moe.DispatchedExperts), parameters=GATED_EXPERTS)
    yield sent("moe dispatched, expert parallel", mesh={"ep": 4}, inputs={"*": {"ep": Shard(0)}})
    yield sent("moe dispatched, whole tokens", mesh={"ep": 4}, inputs=WHOLE)
    yield sent(
        "moe dispatched, data x expert",
        mesh={"dp": 2, "ep": 2},
        inputs={"*": {"dp": Shard(0), "ep": Shard(0)}},
    )


def _images() -> Iterator[Program]:
    resnet = partial(
        Program,
        model=vision.ResNet,
        batch=images,
        step=partial(train, image_class),
        optimizer=momentum,
    )
    planes = {"images": {"tp": Shard(2)}, "noise": {"tp": Shard(2)}}
    yield resnet("resnet, batch", mesh=DP, inputs=DIM0)
    yield resnet("resnet, channels", mesh=TP, inputs=WHOLE, parameters=CHANNELS)
    yield resnet("resnet, height", mesh=TP, inputs=planes)
    vit = partial(resnet, model=vision.ViT, optimizer=adamw)
    yield vit("vit with LayerScale, batch", mesh=DP, inputs=DIM0)
    yield vit("vit with LayerScale, tensor parallel", mesh=TP, inputs=WHOLE, parameters=VIT_TP)
    yield vit("vit with LayerScale, height", mesh=TP, inputs=planes)
    dit = partial(
        vit, model=vision.DiT, batch=noisy_images, step=partial(train_with_average, denoise)
    )
    yield dit("dit with gates, tensor parallel", mesh=TP, inputs=WHOLE, parameters=VIT_TP)
    yield dit("dit with gates, data x tensor", mesh=DP_TP, inputs=DIM0, parameters=VIT_TP)
    unet = partial(dit, model=vision.UNet)
    yield unet("u-net and EMA, batch", mesh=DP, inputs=DIM0)
    yield unet("u-net and EMA, height", mesh=TP, inputs=planes)
    yield vit(
        "clip, batch",
        model=vision.CLIP,
        batch=pairs,
        step=partial(train, contrast),
        mesh=DP,
        inputs=DIM0,
    )


def _others() -> Iterator[Program]:
    made = partial(Program, optimizer=adamw, mesh=DP, inputs=DIM0)
    dlrm = partial(made, model=others.DLRM, batch=clicks, step=partial(train, click))
    yield dlrm("dlrm, batch and rows of tables", parameters=TABLES)
    yield made("lstm, batch", model=others.LSTM, batch=text, step=partial(train, next_token))
    yield made(
        "rollout and policy gradient, batch",
        model=others.Policy,
        batch=carts,
        step=partial(train, actor_critic),
    )
    yield made(
        "graph, nodes and edges", model=others.GCN, batch=graph, step=partial(train, node_class)
    )


class MuonAndAdamW:
    """Muon for the matrices, AdamW for the rest."""

    def __init__(self, parameters: list[Any]) -> None:
        self.parts = [
            torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=1e-3),
            adamw([p for p in parameters if p.ndim != 2]),
        ]

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()

    def step(self) -> None:
        for part in self.parts:
            part.step()


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01),
    "SGD with momentum": momentum,
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-3, eps=1e-5),
    "AdamW, loop": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-5, foreach=False),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-5, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-5, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-3),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, eps=1e-5, momentum=0.9),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-3),
}


def _optimizers() -> Iterator[Program]:
    llama = partial(
        Program,
        model=partial(transformer.Llama, layers=1),
        batch=partial(text, 4, 4),  # few, so that the memory of the optimizer is seen
        step=partial(train, next_token),
        mesh=DP_TP,
        inputs=DIM0,
        parameters=fully_sharded(LLAMA_TP),
    )
    for name, optimizer in OPTIMIZERS.items():
        step = partial(train, next_token, foreach="foreach" in name or "fused" in name)
        yield llama(f"optimizer: {name}", optimizer=optimizer, step=step)
    yield llama(
        "optimizer: Muon and AdamW",
        batch=text,
        optimizer=MuonAndAdamW,
        atol=2e-4,  # Muon multiplies in bfloat16, and each shard of a sum rounds once more
    )
    yield llama(
        "optimizer: LBFGS",
        model=lambda: transformer.Llama(layers=1).double(),  # it divides by small differences
        step=partial(train_by_closure, next_token),
        optimizer=lambda p: torch.optim.LBFGS(p, max_iter=3, history_size=3),
    )


PROGRAMS = {
    each.name: each
    for each in (*_transformers(), *_experts(), *_images(), *_others(), *_optimizers())
}


# --- the table -----------------------------------------------------------------------------------

GOLDEN, PAGE = HERE / "programs.json", HERE / "programs.md"
PEAK_TOLERANCE = 0.01
SHOWN = 5
HEAD = f"""# Programs

Generated by `python benchmarks/programs.py --write`: what the second step of each program costs on
{WORLD} gloo processes with PyTorch {torch.__version__.split("+")[0]}. Collectives are those that
`torch.distributed` was asked for; bytes are what a rank receives under the usual algorithm that
receives least; peak is the most that tensors made in the step hold at one time. Each number is of
the rank that has most. The last column has the collectives of the first step, in which plain
tensors are checked. All values are those of plain PyTorch.

| program | mesh | collectives | bytes | peak | first step |
|---|---|---|---|---|---|
"""
TRADES = """
## Trades

Programs that a change made dearer in one respect, each with its reason. The table above has what
they cost now.

Clipping reduces the norms of all parameters in one collective. It receives up to 144 bytes more in
a step than for the norms of sharded parameters alone; this is not listed for each program.

| program | collectives, bytes, peak before | reason |
|---|---|---|
"""


def named(name: str) -> Program:
    return PROGRAMS[name]


def compared(name: str, found: Found, golden: dict[str, Any]) -> list[str]:
    """What is wrong with a program, or dearer than in the golden table."""
    if found.cost is None:
        return found.wrong
    if name not in golden:
        return [*found.wrong, "not in the golden table: add it with --write"]
    have, want = asdict(found.cost), golden[name]
    allowed = {**want, "peak": want["peak"] * (1 + PEAK_TOLERANCE)}
    return found.wrong + [
        f"{key}: {have[key]:,} instead of {want[key]:,}" for key in have if have[key] > allowed[key]
    ]


def _is_cheaper(found: Found, golden: dict[str, int] | None) -> bool:
    have = {} if found.cost is None or golden is None else asdict(found.cost)
    return any(value < golden[key] for key, value in have.items())


def page(costs: dict[str, Any]) -> str:
    rows = [
        f"| {name} | {_mesh(PROGRAMS[name])} | {cost['collectives']:,} | {cost['bytes']:,} "
        f"| {cost['peak']:,} | {cost['first']:,} |"
        for name, cost in costs.items()
    ]
    trades = [
        f"| {name} | {_listed(cost['before'])} | {cost['reason']} |"
        for name, cost in costs.items()
        if "reason" in cost
    ]
    return HEAD + "\n".join(rows) + "\n" + (TRADES + "\n".join(trades) + "\n" if trades else "")


def _listed(cost: dict[str, int]) -> str:
    return ", ".join(f"{cost[key]:,}" for key in ("collectives", "bytes", "peak"))


def _mesh(program: Program) -> str:
    return " ".join(f"{axis}={size}" for axis, size in program.mesh.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="*", metavar="GLOB", help="programs with such names")
    parser.add_argument("--engine", choices=["virtual", "all"], default="all")
    parser.add_argument("--write", action="store_true", help="make this the golden table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    chosen = [name for name in PROGRAMS if fnmatchcase(name, options.only)]
    failures: dict[str, list[str]] = {}
    start = time.monotonic()
    print(f"{'':38}{'collectives':>12}{'bytes':>12}{'peak':>12}{'in first':>10}")
    for name in chosen:
        wrong = [f"virtual mesh: {text}" for text in on_virtual_mesh(PROGRAMS[name])]
        cost = note = ""
        if options.engine == "all":
            found = on_processes(named, name)
            if found.cost is not None and found.first is not None:
                extra = found.first.collectives - found.cost.collectives
                cost = "".join(f"{each:12,}" for each in astuple(found.cost)) + f"{extra:+10}"
                if options.write:
                    golden[name] = {
                        **golden.get(name, {}),
                        **asdict(found.cost),
                        "first": found.first.collectives,
                    }
            wrong += compared(name, found, golden)
            note = "cheaper" if _is_cheaper(found, golden.get(name)) else ""
        print(f"{name:38}{cost}  {'WRONG OR DEARER' if wrong else note}", flush=True)
        if wrong:
            failures[name] = wrong
    print(f"{len(chosen)} programs in {time.monotonic() - start:.0f} s")
    for name, wrong in failures.items():
        print(f"\n{name}\n  " + "\n  ".join(wrong[:SHOWN]))
        if len(wrong) > SHOWN:
            print(f"  and {len(wrong) - SHOWN} more")
    if options.write:
        golden = {name: golden[name] for name in PROGRAMS if name in golden}
        lines = [f"  {json.dumps(name)}: {json.dumps(golden[name])}" for name in golden]
        GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        PAGE.write_text(page(golden))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
