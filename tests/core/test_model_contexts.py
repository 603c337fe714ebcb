"""A sharded model under PyTorch's contexts and helpers does what it does on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad_and_value
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shardwise import DTensor, Shard, distribute_tensor, full_state_dict, shard_module

from ..compare import ints, virtual

WORDS, WIDTH, HEADS = 20, 16, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            # The gradient of a bias of keys is zero but for rounding, which AdamW makes large.
            setattr(self, name, nn.Linear(WIDTH, WIDTH, bias=name != "k_proj"))
        self.cache: list[torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def heads(value: torch.Tensor) -> torch.Tensor:
            return value.unflatten(-1, (HEADS, -1)).transpose(1, 2)

        q, k, v = (heads(part(x)) for part in (self.q_proj, self.k_proj, self.v_proj))
        causal = True
        if self.cache is not None:
            causal = not self.cache  # of one new token all the others are the past
            if self.cache:
                k, v = torch.cat([self.cache[0], k], 2), torch.cat([self.cache[1], v], 2)
            self.cache[:] = [k, v]
        found = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        made: torch.Tensor = self.o_proj(found.transpose(1, 2).flatten(2))
        return made


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.first(x)))
        found: torch.Tensor = x + self.dropout(self.down(F.gelu(self.up(self.second(x)))))
        return found


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.recompute: bool | None = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            if self.recompute is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recompute)
        found: torch.Tensor = self.head(x)
        return found


PLANS: dict[str, Any] = {
    "tensor": {
        "*.[qkv]_proj.*": {"tp": Shard(0)},
        "*.o_proj.weight": {"tp": Shard(1)},
        "*.up.*": {"tp": Shard(0)},
        "*.down.weight": {"tp": Shard(1)},
        "embed.weight": {"tp": Shard(0)},
    },
    "everything": {"*": {"dp": Shard(0)}},
}


def gpt(plan: str | None, mesh: Any = None) -> Gpt:
    torch.manual_seed(0)
    model = Gpt()
    if plan is not None:
        shard_module(model, mesh or virtual(2, 2, names=("dp", "tp")), PLANS[plan])
    return model


def batch(model: Gpt, step: int) -> torch.Tensor:
    """Tokens, sharded over `dp` if the model is on a mesh."""
    tokens = ints(4, 7, high=WORDS, seed=step)
    weight: Any = model.embed.weight
    if not isinstance(weight, DTensor):
        return tokens
    return distribute_tensor(tokens, weight.device_mesh, {"dp": Shard(0)})


def loss_of(model: Gpt, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def plain_steps(model: Gpt) -> list[float]:
    return steps(model, lambda tokens: loss_of(model, tokens))


def steps(model: Gpt, loss: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(1)
    losses = []
    for step in range(4):
        value = loss(batch(model, step))
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


def recomputed(model: Gpt) -> list[float]:
    model.recompute = False
    return plain_steps(model)


def recomputed_reentrant(model: Gpt) -> list[float]:
    model.recompute = True
    return plain_steps(model)


def autocast(model: Gpt) -> list[float]:
    def loss(tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(tokens[:, :-1])
        assert logits.dtype is torch.bfloat16
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    return steps(model, loss)


def scaled(model: Gpt) -> list[float]:
    """An infinite gradient in the second step, which is left out."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
    torch.manual_seed(1)
    losses = []
    for step in range(4):
        loss = loss_of(model, batch(model, step)) * (float("inf") if step == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses += [loss.item(), scaler.get_scale()]
    return losses


def functional(model: Gpt) -> list[float]:
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    torch.manual_seed(1)
    losses = []
    for step in range(3):
        tokens = batch(model, step)

        def loss(given: dict[str, Any], tokens: torch.Tensor = tokens) -> torch.Tensor:
            logits = functional_call(model, given, (tokens[:, :-1],))
            return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

        gradients, value = grad_and_value(loss)(parameters)
        parameters = {name: parameters[name] - 0.1 * gradients[name] for name in parameters}
        losses.append(value.item())
    return losses


WAYS = [recomputed, recomputed_reentrant, autocast, scaled, functional]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_the_losses_of_one_device(way: Callable[[Gpt], list[float]], plan: str) -> None:
    tolerance = 2e-2 if way is autocast else 1e-5
    plain, model = gpt(None), gpt(plan)
    assert way(model) == pytest.approx(way(plain), rel=tolerance)
    if way is not autocast:
        state = full_state_dict(model)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-4)


def generated(model: Gpt, count: int) -> torch.Tensor:
    """Tokens chosen one by one, with a cache of keys and values."""
    model.eval()
    tokens = ints(2, 3, high=WORDS, seed=9)
    for block in model.blocks:
        block.attention.cache = []  # type: ignore[union-attr]
    new: Any = tokens
    with torch.inference_mode():
        for _ in range(count):
            new = model(new)[:, -1:].argmax(-1)
            new = new.full_tensor() if isinstance(new, DTensor) else new
            tokens = torch.cat([tokens, new], 1)
    return tokens


@pytest.mark.parametrize("plan", PLANS)
def test_generation_with_a_cache(plan: str) -> None:
    expected = generated(gpt(None), 8)
    assert torch.equal(generated(gpt(plan), 8), expected)
    assert len(set(expected[0].tolist())) > 2
