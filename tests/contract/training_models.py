"""Small models, plain training loops and attachment helpers for the training contract tests."""

from __future__ import annotations

import copy
import threading

import torch
import torch.nn.functional as F
from torch import nn

from graph_cache.core.stats import CacheStats
from graph_cache.training.attached import Attachment, Part
from graph_cache.training.capture_context import CaptureContext
from graph_cache.training.iteration import CapturedIteration
from graph_cache.training.modules import TrainingGraphs

WIDTH, LENGTH, ROWS = 32, 8, 4
MANY = 64  # rows for which forwards save more bytes than all gradients have, so half of the gradients are copies


class Recurrent(nn.Module):
    """An LSTM, which keeps a second list of its weights."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.out(self.lstm(x)[0])


class Normed(nn.Module):
    """Batch norm, which writes buffers in its forward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(LENGTH)

    def forward(self, x):
        return self.norm(self.linear(x))


class Shared(nn.Module):
    """Two layers that share a weight; one bias is frozen."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        self.second.bias.requires_grad_(False)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def mlp():
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, WIDTH)) for _ in range(3)]
    )


def encoder():
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, 0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


class SmallGPT(nn.Module):
    """Small language model: causal attention, dropout, residuals."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
            self.drop = nn.Dropout(0.1)

        def forward(self, x):
            rows, length, width = x.shape
            q, k, v = self.qkv(self.norm_1(x)).view(rows, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.drop(self.out(attended.transpose(1, 2).reshape(rows, length, width)))
            return x + self.drop(self.down(F.gelu(self.up(self.norm_2(x)))))

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


MODELS = {
    "gpt": (SmallGPT, ["layers.0", "layers.1"]),
    "mlp": (mlp, ["0", "1", "2"]),
    "mlp_whole": (mlp, [""]),
    "encoder": (encoder, ["layers.0", "layers.1", "layers.2"]),
    "lstm": (Recurrent, ["lstm", "out"]),
    "batch_norm": (Normed, [""]),
    "shared_weight": (Shared, ["first", "second"]),
}


class OtherThread:
    """Runs a call in another thread, which was started before: code that starts or awaits one is not captured."""

    def __init__(self, call):
        self._asked, self._answered = threading.Lock(), threading.Lock()
        self._asked.acquire(), self._answered.acquire()
        threading.Thread(target=self._work, args=(call,), daemon=True).start()

    def _work(self, call):
        while True:
            self._asked.acquire()
            call()
            self._answered.release()

    def run(self):
        self._asked.release()
        self._answered.acquire()


def twins(build, device):
    torch.manual_seed(0)
    model = build().to(device)
    return model, copy.deepcopy(model)


def batches(steps, device, micro=2, rows=ROWS):
    generator = torch.Generator().manual_seed(5)
    return [
        [torch.randn(rows, LENGTH, WIDTH, generator=generator).to(device) for _ in range(micro)] for _ in range(steps)
    ]


def train(model, data, *, outstanding=True):
    """Train with microbatches, accumulation and momentum. Returns every loss and gradient."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    log = []
    for micro in data:
        optimizer.zero_grad()
        losses = []
        for x in micro:
            losses.append(model(x).pow(2).mean())
            if not outstanding:
                losses[-1].backward()
        for loss in losses if outstanding else ():
            loss.backward()
        log.append(
            [loss.detach().clone() for loss in losses]
            + [p.grad.clone() for p in model.parameters() if p.grad is not None]
        )
        optimizer.step()
    return log


def in_place(graphs):
    """Return, for each captured pair, whether its gradients are returned uncopied."""
    return [entry.owner.uncopied is entry.graphs for entry in graphs.recorded_steps[0].entries()]


def assert_same(ours, theirs):
    assert len(ours) == len(theirs)
    for step, (left, right) in enumerate(zip(ours, theirs, strict=True)):
        assert len(left) == len(right)
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            assert torch.equal(one, other), f"step {step}, value {index}"


def attached(model, paths, pool, warmup=2):
    stats = CacheStats()
    generators = [torch.default_generator] if pool.backend.name == "cpu" else []
    graphs = TrainingGraphs(CaptureContext(pool, stats, generators), warmup_rounds=warmup)
    graphs.attach(Attachment([Part(path or "model", model.get_submodule(path)) for path in paths]))
    return graphs, stats


def iteration_of(pool, stats, step):
    generators = [torch.default_generator] if pool.backend.name == "cpu" else []
    return CapturedIteration(step, pool, stats, warmup_steps=2, generators=generators)


def iterate(model, data, wrap, *, clear=True, inside=False, step_inside=False):
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(micro, scale=1.0):
        if inside:
            optimizer.zero_grad()
        losses = []
        for x in micro:
            losses.append(model(x).pow(2).mean() * scale)
            losses[-1].backward()
        if step_inside:
            optimizer.step()
        return [loss.detach() for loss in losses]

    run, log = wrap(step), []
    for index, micro in enumerate(data):
        if clear and not inside and index % 3 != 2:
            optimizer.zero_grad(set_to_none=index % 2 == 0)
        losses = run(micro)
        log.append([loss.clone() for loss in losses] + [p.grad.clone() for p in model.parameters()])
        if not step_inside:
            optimizer.step()
    return log
