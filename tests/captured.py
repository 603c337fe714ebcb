"""Steps that are captured, and the same steps run eagerly: all that they leave must be the same
bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.models import moe, others, transformer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise import Shard

from .training import GPT_PLAN, ResNetBlock

STEPS, AFTER = 9, 2
"""Captured steps, of which 4 run eagerly, 2 are recorded and 3 replayed, and eager ones after."""
DATA: dict[str, Any] = {"dp": Shard(0)}
MLP_PLAN: dict[Any, Any] = {"up.*": {"tp": Shard(0)}, "down.weight": {"tp": Shard(1)}}


class MLP(nn.Module):
    def __init__(self, norm: bool = False, recomputed: bool | None = None) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(6, 8), nn.Dropout(0.4), nn.Linear(8, 6)
        self.norm = nn.BatchNorm1d(6) if norm else nn.Identity()
        self.recomputed = recomputed

    def hidden(self, x: Tensor) -> Tensor:
        return self.drop(F.gelu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        if self.recomputed is None:
            return self.norm(self.down(self.hidden(x)))
        x = x + 0 * self.down.bias  # a reentrant one needs an input with gradients
        made = checkpoint(self.hidden, x, use_reentrant=self.recomputed)
        return self.norm(self.down(self.drop(made)))


def adamw(model: nn.Module, **options: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


def sgd(model: nn.Module, **options: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, **options)


@dataclass(frozen=True)
class Scenario:
    """A model on a mesh, trained with an optimizer, in a context."""

    model: Callable[[], nn.Module] = MLP
    plan: Any = field(default_factory=lambda: MLP_PLAN)
    batch: Any = field(default_factory=dict)
    optimizer: Callable[[nn.Module], Any] = adamw
    context: Callable[[], Any] = nullcontext
    step: str = "usual"


def units(model: nn.Module, mesh: Any) -> nn.Module:
    sw.shard_module(model, mesh, {})
    for part in (model.up, model.down):
        sw.fully_shard(part, mesh=mesh["dp"])
    return sw.fully_shard(model, mesh=mesh["dp"])


def hooked() -> nn.Module:
    model = MLP()
    model.up.weight.register_hook(lambda grad: grad * 2)
    return model


SCENARIOS: dict[str, Scenario] = {
    "loop": Scenario(optimizer=lambda m: adamw(m, foreach=False, amsgrad=True)),
    "foreach": Scenario(optimizer=lambda m: adamw(m, foreach=True)),
    "fused": Scenario(optimizer=lambda m: adamw(m, fused=True)),
    "sgd": Scenario(optimizer=sgd),
    "sgd, foreach, nesterov": Scenario(optimizer=lambda m: sgd(m, foreach=True, nesterov=True)),
    "nadam": Scenario(optimizer=lambda m: torch.optim.NAdam(m.parameters())),
    "rmsprop": Scenario(optimizer=lambda m: torch.optim.RMSprop(m.parameters(), momentum=0.5)),
    "data parallel": Scenario(plan={}, batch=DATA),
    "both axes": Scenario(batch=DATA),
    "fully sharded": Scenario(plan=units, batch=DATA),
    "counter mode": Scenario(batch=DATA, context=lambda: sw.random.mode("counter")),
    "batch norm": Scenario(model=lambda: MLP(norm=True), batch=DATA),
    "checkpoint": Scenario(model=lambda: MLP(recomputed=False)),
    "reentrant checkpoint": Scenario(model=lambda: MLP(recomputed=True)),
    "counter mode, checkpoint": Scenario(
        model=lambda: MLP(recomputed=False), context=lambda: sw.random.mode("counter")
    ),
    "autocast": Scenario(context=lambda: torch.autocast("cpu", torch.bfloat16)),
    "clipping": Scenario(step="clipping"),
    "accumulation": Scenario(batch=DATA, step="accumulation"),
    "gradients stay": Scenario(batch=DATA, step="gradients stay"),
    "zeroed in place": Scenario(batch=DATA, step="zeroed in place"),
    "hook": Scenario(model=hooked, batch=DATA),
}
MODELS: dict[str, Scenario] = {
    "gpt": Scenario(lambda: transformer.GPT(layers=1), GPT_PLAN, DATA),
    "gpt, fully sharded": Scenario(
        lambda: transformer.GPT(layers=1), {**GPT_PLAN, "*": {"dp": Shard(0)}}, DATA
    ),
    "gpt, sequence": Scenario(lambda: transformer.GPT(layers=1), GPT_PLAN, {"tp": Shard(1)}),
    "gpt, checkpoint": Scenario(
        lambda: transformer.GPT(layers=2, recompute="yes"), GPT_PLAN, DATA, sgd, step="clipping"
    ),
    "resnet": Scenario(ResNetBlock, {}, DATA),
    "lstm": Scenario(others.LSTM, {"lstm.weight_*": {"tp": Shard(1)}}, DATA),
    "moe": Scenario(
        lambda: transformer.Llama(layers=1, mlp=moe.StackedExperts),
        {"*.o.weight": {"tp": Shard(1)}, "*.up": {"tp": Shard(0)}, "*.down": {"tp": Shard(0)}},
        DATA,
    ),
}


def batches(model: nn.Module, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """No batch twice, so that a value kept from a recording would show."""
    draw = torch.Generator().manual_seed(3)
    for _ in range(count):
        if isinstance(model, MLP):
            x, y = torch.randn(2, 4, 6, generator=draw)
            yield x, y
        elif isinstance(model, ResNetBlock):
            images = torch.randn(4, 3, 8, 8, generator=draw)
            yield images, torch.randint(10, (4,), generator=draw)
        else:
            tokens = torch.randint(1, transformer.VOCAB, (4, 9), generator=draw)
            yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    if isinstance(model, MLP):
        return F.mse_loss(model(x).float(), y)
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def step_of(kind: str, model: nn.Module, optimizer: Any) -> Callable[..., Any]:
    def usual(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        loss.backward()
        if kind == "clipping":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=kind != "zeroed in place")
        return loss

    def accumulation(x: Tensor, y: Tensor) -> Tensor:
        with sw.keep_partial_grads():
            loss_of(model, x, y).backward()
        loss = loss_of(model, y, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def gradients_stay(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        return loss

    return {"accumulation": accumulation, "gradients stay": gradients_stay}.get(kind, usual)


def parts(value: Any) -> list[Tensor]:
    """The local tensors of a tensor."""
    return list(value._locals) if isinstance(value, sw.DTensor) else [value]


def trained(
    scenario: Scenario, mesh: Any, captured: bool, **options: Any
) -> tuple[list[Tensor], Any]:
    """Losses, parameters, buffers, gradients, optimizer state and the next random number after
    `STEPS` steps, captured or not, and `AFTER` eager ones; and the captured step."""
    torch.manual_seed(0)
    model = scenario.model()
    if callable(scenario.plan):
        scenario.plan(model, mesh)
    else:
        sw.shard_module(model, mesh, scenario.plan)
    optimizer = scenario.optimizer(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    eager = step_of(scenario.step, model, optimizer)
    step = sw.capture(eager, **options) if captured else eager
    left: list[Tensor] = []
    for number, pair in enumerate(batches(model, STEPS + AFTER)):
        x, y = (
            sw.distribute_tensor(value, mesh, scenario.batch, src_data_rank=None) for value in pair
        )
        with scenario.context():
            loss = (step if number < STEPS else eager)(x, y)
        left += parts(loss.detach())
        schedule.step()
    for value in model.state_dict().values():
        left += parts(value)
    for parameter in model.parameters():
        left += parts(parameter.grad) if parameter.grad is not None else []
        left += [each for v in optimizer.state[parameter].values() for each in parts(v)]
    return [*left, torch.rand(1)], step


def compare(scenario: Scenario, mesh: Any, passes: Any = None) -> Any:
    """The captured step, which has left the same bits as the eager one."""
    want, _ = trained(scenario, mesh, False)
    have, step = trained(scenario, mesh, True, passes=passes)
    assert step.stats()["replayed"] >= STEPS - 6, step.stats()
    assert len(have) == len(want)
    for one, other in zip(have, want, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    return step
