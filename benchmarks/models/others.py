"""Recommendation, recurrent networks, reinforcement learning, graphs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DLRM(nn.Module):
    """Bags of categories and dense features, which meet in products of all pairs."""

    def __init__(self, rows: int = 64, tables: int = 4, width: int = 16, dense: int = 8) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(dense, 32), nn.ReLU(), nn.Linear(32, width))
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        x = self.bottom(dense)
        bags = [table(categories[:, index]) for index, table in enumerate(self.tables)]
        features = torch.stack([x, *bags], 1)
        products = features @ features.transpose(1, 2)
        row, column = torch.tril_indices(products.shape[1], products.shape[2], -1)
        return self.top(torch.cat([x, products[:, row, column]], 1)).squeeze(1)


class LSTM(nn.Module):
    """A language model with two recurrent layers."""

    def __init__(self, vocab: int = 512, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(tokens))[0])


class Policy(nn.Module):
    """An actor and a critic for a cart that has to stay in the middle."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()
        )
        self.actor, self.critic = nn.Linear(width, 3), nn.Linear(width, 1)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(state)
        return self.actor(x), self.critic(x).squeeze(-1)


@torch.no_grad()
def rollout(policy: nn.Module, state: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """States, the actions that were drawn in them, and the discounted rewards from there on."""
    states, actions, rewards = [], [], []
    for _ in range(steps):
        action = torch.distributions.Categorical(logits=policy(state)[0]).sample()
        speed = state[:, 1] + 0.1 * (action - 1)
        states.append(state)
        actions.append(action)
        state = torch.stack([state[:, 0] + 0.1 * speed, speed], 1)
        rewards.append(-state[:, 0].abs())
    returns = [rewards[-1]]
    for reward in reversed(rewards[:-1]):
        returns.insert(0, reward + 0.9 * returns[0])
    return torch.stack(states), torch.stack(actions), torch.stack(returns)


def policy_loss(policy: nn.Module, states: Tensor, actions: Tensor, returns: Tensor) -> Tensor:
    """Advantage actor-critic, with a bonus for entropy."""
    logits, values = policy(states)
    chosen = torch.distributions.Categorical(logits=logits)
    advantage = returns - values.detach()
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-5)
    actor = -(chosen.log_prob(actions) * advantage).mean()
    return actor + 0.5 * F.mse_loss(values, returns) - 0.01 * chosen.entropy().mean()


class GCN(nn.Module):
    """A graph network: each node adds up what its neighbours send along the edges."""

    def __init__(self, width: int = 16, classes: int = 5) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, width), nn.Linear(width, classes)

    def forward(self, nodes: Tensor, source: Tensor, target: Tensor) -> Tensor:
        def gather(x: Tensor) -> Tensor:
            return torch.zeros_like(x).index_add(0, target, x[source])

        x = F.relu(gather(self.first(nodes)))
        return gather(self.second(x))
