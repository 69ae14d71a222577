"""Train a small language model with and without graphs, and compare every loss.

`python examples/train_graphed.py` takes under a minute on a CPU.
"""

from __future__ import annotations

import copy
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn

from engine import Engine, EngineConfig

TEXT = "the quick brown fox jumps over the lazy dog and runs away from the slow brown bear. " * 40
WIDTH, HEADS, LAYERS, LENGTH, ROWS, STEPS = 64, 4, 4, 48, 8, 60
WARM = 10  # steps that are not timed: warm-up and capture are among them


class Layer(nn.Module):
    """A decoder layer with dropout."""

    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(rows, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.drop(self.out(attended))
        return x + self.drop(self.down(F.gelu(self.up(self.norm_2(x)))))


class CharModel(nn.Module):
    """Predicts the next character."""

    def __init__(self, vocabulary: int):
        super().__init__()
        self.embed, self.places = nn.Embedding(vocabulary, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.places.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def train(model: nn.Module, tokens: torch.Tensor) -> tuple[list[float], float]:
    """Train with plain code. Return the losses, and the median time of a step in ms."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator, losses, seconds = torch.Generator().manual_seed(2), [], []
    for _ in range(STEPS):
        started = time.perf_counter()
        starts = torch.randint(len(tokens) - LENGTH - 1, (ROWS,), generator=generator)
        batch = torch.stack([tokens[start : start + LENGTH + 1] for start in starts])
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - started)
    return losses, 1000 * statistics.median(seconds[WARM:])


def main() -> None:
    letters = sorted(set(TEXT))
    tokens = torch.tensor([letters.index(letter) for letter in TEXT])
    torch.manual_seed(0)
    plain = CharModel(len(letters))
    graphed = copy.deepcopy(plain)

    expected, eager_ms = train(plain, tokens)
    engine = Engine(EngineConfig(mode="training", cuda_graph_impl="local", cuda_graph_warmup_steps=3))
    engine.attach(graphed, modules=[f"layers.{index}" for index in range(LAYERS)])
    losses, graph_ms = train(graphed, tokens)
    for row in engine.graphs():
        print(row)
    engine.detach()

    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; the same with graphs on and off: {losses == expected}")
    print(f"a step: eager {eager_ms:.1f} ms, with graphs {graph_ms:.1f} ms")
    if losses != expected or losses[-1] > 0.7 * losses[0]:
        raise SystemExit("the runs differ, or the loss did not decrease")


if __name__ == "__main__":
    main()
