"""Train a small language model with and without graphs, and compare every loss and the time of a step.

    python examples/train_graphed.py                             # under a minute on a CPU
    python examples/train_graphed.py --rows 8 --length 48 --steps 200

The results are equal. On a CPU, a step with graphs is about a tenth slower: a replay checks and copies a layer's
inputs, which takes longer than the Python and dispatch that it saves. On a GPU, kernels wait for the host, and small
steps gain; docs/benchmarks.md has the figures.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn

from engine import Engine, EngineConfig

TEXT = "the quick brown fox jumps over the lazy dog and runs away from the slow brown bear. " * 40
LETTERS = sorted(set(TEXT))
TOKENS = torch.tensor([LETTERS.index(letter) for letter in TEXT])
WIDTH, HEADS, LAYERS = 64, 4, 4
WARM = 5  # steps that are not timed: warm-up and capture are among them


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

    def __init__(self, length: int):
        super().__init__()
        self.embed, self.places = nn.Embedding(len(LETTERS), WIDTH), nn.Embedding(length, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, len(LETTERS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.places.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Training:
    """Plain training code. `losses` and `seconds` have an entry per step."""

    def __init__(self, model: nn.Module, rows: int, length: int):
        self.model, self.rows, self.length = model, rows, length
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self) -> None:
        started = time.process_time()  # of this process, whatever else the machine does
        torch.manual_seed(len(self.losses))  # the same batch and dropout in both runs
        starts = torch.randint(len(TOKENS) - self.length - 1, (self.rows,))
        batch = torch.stack([TOKENS[start : start + self.length + 1] for start in starts])
        loss = F.cross_entropy(self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())
        self.seconds.append(time.process_time() - started)

    @property
    def step_ms(self) -> float:
        """Median CPU time of a step."""
        return 1000 * statistics.median(self.seconds[WARM:])


def main(steps: int, rows: int, length: int) -> None:
    torch.manual_seed(0)
    model = CharModel(length)
    eager, graphed = Training(model, rows, length), Training(copy.deepcopy(model), rows, length)
    engine = Engine(EngineConfig(mode="training", cuda_graph_impl="local", cuda_graph_warmup_steps=3))
    engine.attach(graphed.model, modules=[f"layers.{index}" for index in range(LAYERS)])
    for step in range(1, steps + 1):  # in turns, so that other processes disturb both alike
        eager.step()
        graphed.step()
        if step % max(1, steps // 6) == 0:
            print(f"step {step} of {steps}: loss {graphed.losses[-1]:.3f}", flush=True)
    rows_of_table = engine.graphs()
    engine.detach()

    print("\nmodule     replays  eager calls        operations")
    for row in rows_of_table:
        print(f"{row['module']:10} {row['replays']:7}  {str(row['eager']):18} {row['nodes']:10}")
    same = eager.losses == graphed.losses
    print("\n                     eager   with graphs")
    print(f"CPU time/step  {eager.step_ms:8.1f} ms  {graphed.step_ms:9.1f} ms")
    print(f"first loss     {eager.losses[0]:11.4f}  {graphed.losses[0]:12.4f}")
    print(f"last loss      {eager.losses[-1]:11.4f}  {graphed.losses[-1]:12.4f}")
    print(f"every loss the same: {'yes' if same else 'no'}")
    extra_ms = graphed.step_ms - eager.step_ms
    if extra_ms > 0:
        print(
            f"graphs are slower on this CPU: checks and copies of {LAYERS} layers take {extra_ms:.1f} ms longer than "
            "the Python and dispatch that the replays save"
        )
    if not same or graphed.losses[-1] > 0.7 * graphed.losses[0]:
        raise SystemExit("the runs differ, or the loss did not decrease")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="at least 20 (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=4, help="sequences per batch (default: %(default)s)")
    parser.add_argument("--length", type=int, default=16, help="tokens per sequence (default: %(default)s)")
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="small operations gain nothing from more (default: 1)",
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    main(options.steps, options.rows, options.length)
