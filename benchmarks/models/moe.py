"""Mixtures of experts: a loop over experts, all experts at once, experts with a capacity, and
tokens that travel to their experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw

from .transformer import WIDTH, GatedMLP


class LoopedExperts(nn.Module):
    """As in Mixtral: each expert takes the tokens that chose it and adds its share to their sum."""

    def __init__(self, experts: int = 4, top: int = 2) -> None:
        super().__init__()
        self.top = top
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.experts = nn.ModuleList(GatedMLP(WIDTH, 2 * WIDTH) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.router(flat).softmax(-1).topk(self.top, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        total = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            token, rank = torch.where(chosen == index)
            total.index_add_(0, token, expert(flat[token]) * weights[token, rank, None])
        return total.view(x.shape)


class SharedAndRoutedExperts(nn.Module):
    """As in DeepSeek: an expert for all tokens, and many small ones, of which half are chosen.

    Every expert sees every token, with weight 0 where it was not chosen.
    """

    def __init__(self, experts: int = 16, top: int = 8) -> None:
        super().__init__()
        self.top = top
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.shared = GatedMLP(WIDTH, 2 * WIDTH)
        self.experts = nn.ModuleList(GatedMLP(WIDTH, WIDTH // 2) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x)
        best, chosen = scores.topk(self.top, dim=-1)
        weights = torch.zeros_like(scores).scatter(-1, chosen, best.softmax(-1))
        total = self.shared(x)
        for index, expert in enumerate(self.experts):
            total = total + weights[..., index, None] * expert(x)
        return total


class StackedExperts(nn.Module):
    """As in Switch and GShard: one weight for all experts, each with room for so many tokens."""

    def __init__(self, experts: int = 8, top: int = 2, spare: float = 1.5) -> None:
        super().__init__()
        self.experts, self.top, self.spare = experts, top, spare
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, WIDTH, 2 * WIDTH) * 0.1)
        self.down = nn.Parameter(torch.randn(experts, 2 * WIDTH, WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        room = int(self.spare * flat.shape[0] * self.top / self.experts)
        weights, chosen = self.router(flat).softmax(-1).topk(self.top, dim=-1)
        taken = F.one_hot(chosen, self.experts).view(-1, self.experts)
        place = ((taken.cumsum(0) - 1) * taken).sum(-1)  # its turn with the expert it chose
        slots = (place[:, None] == torch.arange(room, device=x.device)).float()  # late: none
        sent = torch.einsum("te,ts->tes", taken.float(), slots)
        sent = sent.view(-1, self.top, self.experts, room)
        tokens = torch.einsum("tkes,td->esd", sent, flat)
        made = torch.bmm(F.gelu(torch.bmm(tokens, self.up)), self.down)
        back = torch.einsum("tkes,tk->tes", sent, weights)
        return torch.einsum("tes,esd->td", back, made).view(x.shape)


class DispatchedExperts(nn.Module):
    """As in Mixtral and DeepSeek: gated experts in stacked weights, to which tokens are sent."""

    def __init__(self, experts: int = 8, top: int = 2, capacity: int | None = None) -> None:
        super().__init__()
        self.top, self.capacity = top, capacity
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.gate, self.up, self.down = (
            nn.Parameter(torch.randn(experts, *shape) * 0.1)
            for shape in [(WIDTH, 2 * WIDTH), (WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH)]
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.router(flat).softmax(-1).topk(self.top, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        sent = sw.dispatch_tokens(flat, chosen, weights, self.up, capacity=self.capacity)
        hidden = F.silu(sent.grouped_mm(sent.tokens, self.gate))
        hidden = hidden * sent.grouped_mm(sent.tokens, self.up)
        return sent.combine(sent.grouped_mm(hidden, self.down)).view(x.shape)
