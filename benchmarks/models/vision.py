"""Images: ResNet, ViT with LayerScale, DiT with gates, a diffusion U-Net, CLIP."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IMAGE, CLASSES = 16, 10


class Residual(nn.Module):
    """Two convolutions with batch norm, and a way around them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.skip = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.skip(x))


class ResNet(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.layers = nn.Sequential(Residual(width, width, 1), Residual(width, 2 * width, 2))
        self.head = nn.Linear(2 * width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.pool(F.relu(self.norm(self.stem(images))))
        return self.head(self.layers(x).mean((2, 3)))


class Attention(nn.Module):
    """As in timm: one projection that is queries, keys and values one after the other."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).reshape(batch, length, width))


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class ViTBlock(nn.Module):
    """LayerScale: each branch is multiplied by a learned vector before it is added."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width, heads), MLP(width, 4 * width)
        self.scale1 = nn.Parameter(torch.full((width,), 0.1))
        self.scale2 = nn.Parameter(torch.full((width,), 0.1))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.scale1 * self.attention(self.norm1(x)))
        return x + self.dropout(self.scale2 * self.mlp(self.norm2(x)))


class ViT(nn.Module):
    def __init__(self, width: int = 32, heads: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, 1 + (IMAGE // 4) ** 2, width) * 0.02)
        self.blocks = nn.Sequential(*[ViTBlock(width, heads, dropout) for _ in range(2)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def features(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1) + self.position
        return self.norm(self.blocks(x))[:, 0]

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))


def waves(time: Tensor, width: int) -> Tensor:
    """The time of a diffusion step as sines and cosines."""
    rates = torch.exp(-torch.arange(width // 2, device=time.device) / 2)
    angles = time[:, None].float() * rates
    return torch.cat([angles.sin(), angles.cos()], -1)


class DiTBlock(nn.Module):
    """The condition shifts and scales each norm, and is the gate of each branch."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.attention, self.mlp = Attention(width, heads), MLP(width, 4 * width)
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        parts = self.modulation(F.silu(condition))[:, None].chunk(6, -1)
        shift1, scale1, gate1, shift2, scale2, gate2 = parts
        x = x + gate1 * self.attention(self.norm(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm(x) * (1 + scale2) + shift2)


class DiT(nn.Module):
    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.width = width
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.position = nn.Parameter(torch.randn(1, (IMAGE // 4) ** 2, width) * 0.02)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.label = nn.Embedding(CLASSES, width)
        self.blocks = nn.ModuleList(DiTBlock(width, heads) for _ in range(2))
        self.out = nn.Linear(width, 3 * 4 * 4)

    def forward(self, images: Tensor, time: Tensor, labels: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.position
        condition = self.time(waves(time, self.width)) + self.label(labels)
        for block in self.blocks:
            x = block(x, condition)
        side = IMAGE // 4
        y = self.out(x).view(-1, side, side, 4, 4, 3)
        return y.permute(0, 5, 1, 3, 2, 4).reshape(-1, 3, IMAGE, IMAGE)


class UNetBlock(nn.Module):
    def __init__(self, before: int, after: int, time: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, before), nn.GroupNorm(4, after)
        self.conv1 = nn.Conv2d(before, after, 3, padding=1)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1)
        self.time = nn.Linear(time, after)
        self.skip = nn.Conv2d(before, after, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(y)))


class UNet(nn.Module):
    """Down, attention at the lowest resolution, and up again beside what was there on the way."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.width = width
        self.time = nn.Linear(width, width)
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down = UNetBlock(width, width, width)
        self.shrink = nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.middle = UNetBlock(2 * width, 2 * width, width)
        self.norm = nn.GroupNorm(4, 2 * width)
        self.attention = Attention(2 * width, 4)
        self.grow = nn.Conv2d(2 * width, width, 3, padding=1)
        self.up = UNetBlock(2 * width, width, width)
        self.last = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, images: Tensor, time: Tensor, labels: Tensor) -> Tensor:
        condition = self.time(waves(time, self.width))
        first = self.down(self.first(images), condition)
        x = self.middle(self.shrink(first), condition)
        tokens = self.norm(x).flatten(2).transpose(1, 2)
        x = x + self.attention(tokens).transpose(1, 2).reshape(x.shape)
        x = self.grow(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return self.last(self.up(torch.cat([x, first], 1), condition))


class CLIP(nn.Module):
    """Images and texts of a pair point the same way; the loss compares all pairs of the batch."""

    def __init__(self, vocab: int = 512, width: int = 32) -> None:
        super().__init__()
        self.image = ViT(width, dropout=0.0)
        self.embed = nn.Embedding(vocab, width)
        self.text = nn.Sequential(*[ViTBlock(width, 4, 0.0) for _ in range(2)])
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, images: Tensor, tokens: Tensor) -> Tensor:
        image = F.normalize(self.image.features(images), dim=-1)
        text = F.normalize(self.text(self.embed(tokens))[:, -1], dim=-1)
        logits = self.temperature.exp() * image @ text.t()
        labels = torch.arange(logits.shape[0], device=logits.device)
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
