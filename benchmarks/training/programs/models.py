"""Small models that several programs train."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, ROWS, LENGTH, CLASSES, VOCAB = 16, 4, 6, 5, 31


def mlp(inputs: int = WIDTH, outputs: int = CLASSES, hidden: int = 24, dropout: float = 0.0) -> nn.Sequential:
    """Return a perceptron with one hidden layer, [rows, inputs] to [rows, outputs]."""
    middle = [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), *middle, nn.Linear(hidden, outputs))


def cnn(channels: int = 3, outputs: int = CLASSES) -> nn.Sequential:
    """Return a convolutional classifier, [rows, channels, 8, 8] to [rows, outputs]."""
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 12, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(12, outputs),
    )


class Block(nn.Module):
    """Pre-norm transformer block with causal or full attention."""

    def __init__(self, width: int = WIDTH, heads: int = 2, causal: bool = True, dropout: float = 0.0):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.heads, self.causal, self.dropout = heads, causal, dropout

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).reshape(rows, length, width)), self.dropout, self.training)
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """Language model: tokens [rows, length] to logits [rows, length, VOCAB]."""

    def __init__(self, layers: int = 2, dropout: float = 0.0, tied: bool = True):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout=dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Attention(nn.Module):
    """Cross-attention of [rows, n, WIDTH] to a context [rows, m, WIDTH]."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        k, v = self.kv(context).chunk(2, -1)
        return self.out(F.scaled_dot_product_attention(self.q(x), k, v))


def features(rows: int = ROWS, width: int = WIDTH) -> Tensor:
    """Return random inputs [rows, width]."""
    return torch.randn(rows, width)


def labels(rows: int = ROWS, classes: int = CLASSES) -> Tensor:
    """Return random class indices [rows]."""
    return torch.randint(classes, (rows,))


def images(rows: int = ROWS, channels: int = 3, size: int = 8) -> Tensor:
    """Return random images [rows, channels, size, size]."""
    return torch.randn(rows, channels, size, size)


def tokens(rows: int = ROWS, length: int = LENGTH) -> Tensor:
    """Return random tokens [rows, length]."""
    return torch.randint(VOCAB, (rows, length))


def language_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the next-token cross entropy."""
    return F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), targets[:, 1:].reshape(-1))


def descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Take one step against a loss."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
