"""Kinds of networks: recurrent, convolutional, attention, experts, graphs, and parts that people write themselves."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from benchmarks.training.programs.models import (
    CLASSES,
    GPT,
    LENGTH,
    ROWS,
    VOCAB,
    WIDTH,
    Attention,
    Block,
    cnn,
    descend,
    features,
    images,
    labels,
    language_loss,
    mlp,
    tokens,
)
from benchmarks.training.programs.registry import Run, program


def train(run: Run, model: nn.Module, inputs, loss_of, modules=None, **options: Any) -> Any:
    """Train a model in the plainest loop: `inputs()` gives the arguments, `loss_of(result)` the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.attach(model, modules, **options)
    for _ in run.steps():
        loss = loss_of(model(*inputs()))
        descend(optimizer, loss)
        run.log(loss)
    return model, optimizer


def class_loss(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels(len(logits)))


def square(result: Tensor) -> Tensor:
    return result.square().mean()


@program()
def convolutional(run: Run) -> Any:
    return train(run, cnn(), lambda: (images(),), class_loss)


@program()
def residual(run: Run) -> Any:
    class Residual(nn.Module):
        def __init__(self, channels):
            super().__init__()
            self.conv_1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
            self.conv_2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
            self.norm_1, self.norm_2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x):
            out = self.relu(self.norm_1(self.conv_1(x)))
            out = self.norm_2(self.conv_2(out))
            out += x
            return self.relu(out)

    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), Residual(8), Residual(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    )
    return train(run, model, lambda: (images(),), class_loss)


@program()
def residual_layer_by_layer(run: Run) -> Any:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.GELU(), nn.Linear(WIDTH, WIDTH)), mlp())
    return train(run, model, lambda: (features(),), class_loss, ["0", "1", "2"])


@program()
def u_net(run: Run) -> Any:
    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.down = nn.ModuleList([nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 16, 3, 2, 1)])
            self.up = nn.ModuleList([nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.ConvTranspose2d(16, 3, 4, 2, 1)])

        def forward(self, x):
            skips = []
            for layer in self.down:
                x = F.silu(layer(x))
                skips.append(x)
            x = F.silu(self.up[0](skips.pop()))
            return self.up[1](torch.cat([x, skips.pop()], 1))

    return train(run, UNet(), lambda: (images(),), square)


@program()
def vision_transformer(run: Run) -> Any:
    class ViT(nn.Module):
        def __init__(self):
            super().__init__()
            self.patches = nn.Conv2d(3, WIDTH, 4, 4)
            self.cls, self.positions = nn.Parameter(torch.zeros(1, 1, WIDTH)), nn.Parameter(torch.zeros(1, 5, WIDTH))
            self.blocks = nn.Sequential(*[Block(causal=False) for _ in range(2)])
            self.head = nn.Linear(WIDTH, CLASSES)

        def forward(self, x):
            x = self.patches(x).flatten(2).transpose(1, 2)
            x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.positions
            return self.head(self.blocks(x)[:, 0])

    return train(run, ViT(), lambda: (images(),), class_loss)


@program()
def language_model(run: Run) -> Any:
    model = GPT(dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters())
    run.attach(model)
    for _ in run.steps():
        batch = tokens()
        loss = language_loss(model(batch), batch)
        descend(optimizer, loss)
        run.log(loss)
    return model


@program()
def language_model_by_block(run: Run) -> Any:
    model = GPT(3)
    optimizer = torch.optim.AdamW(model.parameters())
    run.attach(model, [f"blocks.{index}" for index in range(3)])
    for _ in run.steps():
        batch = tokens()
        loss = language_loss(model(batch), batch)
        descend(optimizer, loss)
        run.log(loss)
    return model


@program()
def changing_lengths(run: Run) -> Any:
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters())
    run.attach(model)
    for step in run.steps():
        batch = tokens(length=4 + 2 * (step % 2))
        loss = language_loss(model(batch), batch)
        descend(optimizer, loss)
        run.log(loss)
    return model


@program()
def padding_mask(run: Run) -> Any:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 24, 0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters())
    run.attach(model)
    for _ in run.steps():
        mask = torch.arange(LENGTH) >= torch.randint(2, LENGTH + 1, (ROWS, 1))
        out = model(torch.randn(ROWS, LENGTH, WIDTH), src_key_padding_mask=mask)
        loss = (out * ~mask[..., None]).square().mean()
        descend(optimizer, loss)
        run.log(loss)
    return model


@program()
def sequence_to_sequence(run: Run) -> Any:
    model = nn.Transformer(WIDTH, 2, 1, 1, 24, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
    optimizer = torch.optim.AdamW(model.parameters())
    run.attach(model)
    for _ in run.steps():
        source, target = torch.randn(ROWS, LENGTH + 1, WIDTH), torch.randn(ROWS, LENGTH, WIDTH)
        loss = (model(source, target, tgt_mask=mask, tgt_is_causal=True) - target).square().mean()
        descend(optimizer, loss)
        run.log(loss)
    return model


@program()
def checkpointed_blocks(run: Run) -> Any:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block(dropout=0.1) for _ in range(2))

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    return train(run, Model(), lambda: (torch.randn(ROWS, LENGTH, WIDTH),), square)


@program()
def checkpoint_around_attached(run: Run) -> Any:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
            return x

    return train(run, Model(), lambda: (torch.randn(ROWS, LENGTH, WIDTH),), square)


class Recurrent(nn.Module):
    """An LSTM over tokens, which returns logits and its state."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, dropout=0.1)

    def forward(self, x, state=None):
        hidden, state = self.lstm(self.embed(x), state)
        return self.out(hidden), state


@program()
def lstm(run: Run) -> Any:
    return train(run, Recurrent(), lambda: (tokens(),), lambda result: square(result[0]))


@program()
def truncated_backpropagation(run: Run) -> Any:
    model, state = Recurrent(), None
    optimizer = torch.optim.Adam(model.parameters())
    run.attach(model)
    for _ in run.steps():
        batch = tokens()
        logits, state = model(batch, state)
        state = tuple(one.detach() for one in state)
        loss = language_loss(logits, batch)
        descend(optimizer, loss)
        run.log(loss)
    return model, state


@program()
def packed_lengths(run: Run) -> Any:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
            self.out = nn.Linear(WIDTH, CLASSES)

        def forward(self, x, lengths):
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return self.out(self.gru(packed)[1][0])

    return train(
        run, Model(), lambda: (torch.randn(ROWS, LENGTH, WIDTH), torch.randint(2, LENGTH, (ROWS,))), class_loss
    )


@program()
def cell_in_a_loop(run: Run) -> Any:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.out = nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

        def forward(self, x):
            h = x.new_zeros(x.shape[0], WIDTH)
            for t in range(x.shape[1]):
                h = self.cell(x[:, t], h)
            return self.out(h)

    return train(run, Model(), lambda: (torch.randn(ROWS, LENGTH, WIDTH),), class_loss)


@program()
def scheduled_sampling(run: Run) -> Any:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.out = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
            self.cell = nn.GRUCell(WIDTH, WIDTH)

        def forward(self, batch):
            h, token, logits = batch.new_zeros(len(batch), WIDTH).float(), batch[:, 0], []
            for t in range(1, batch.shape[1]):
                h = self.cell(self.embed(token), h)
                logits.append(self.out(h))
                use_own = torch.rand(len(batch)) < 0.5
                token = torch.where(use_own, logits[-1].argmax(-1), batch[:, t])
            return torch.stack(logits, 1)

    return train(run, Model(), lambda: (tokens(),), square)


@program()
def state_inside_the_module(run: Run) -> Any:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.GRUCell(WIDTH, WIDTH)
            self.register_buffer("memory", torch.zeros(ROWS, WIDTH))

        def forward(self, x):
            h = self.cell(x, self.memory)
            self.memory = h.detach()
            return h

    return train(run, Model(), lambda: (features(),), square)


@program()
def state_space_scan(run: Run) -> Any:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.decay, self.inputs = nn.Parameter(torch.rand(WIDTH)), nn.Linear(WIDTH, WIDTH)
            self.out = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            h, states, a = torch.zeros_like(x[:, 0]), [], torch.sigmoid(self.decay)
            for value in self.inputs(x).unbind(1):
                h = a * h + (1 - a) * value
                states.append(h)
            return self.out(torch.stack(states, 1))

    return train(run, Model(), lambda: (torch.randn(ROWS, LENGTH, WIDTH),), square)


@program()
def dilated_convolutions(run: Run) -> Any:
    layers = [nn.Conv1d(WIDTH, WIDTH, 3, padding=2**n, dilation=2**n) for n in range(3)]
    model = nn.Sequential(*[part for layer in layers for part in (layer, nn.LeakyReLU(0.1))])
    return train(run, model, lambda: (torch.randn(ROWS, WIDTH, 12),), square)


class Experts(nn.Module):
    """Top-2 experts with a loss that balances them; every expert computes all rows."""

    def __init__(self, dense: bool = True):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(mlp(outputs=WIDTH) for _ in range(4))
        self.dense = dense

    def forward(self, x):
        scores = self.gate(x).softmax(-1)
        values, chosen = scores.topk(2)
        weights = torch.zeros_like(scores).scatter(1, chosen, values)
        if self.dense:
            out = sum(weights[:, index : index + 1] * expert(x) for index, expert in enumerate(self.experts))
        else:
            out = torch.zeros_like(x)
            for index, expert in enumerate(self.experts):
                rows = (chosen == index).any(-1).nonzero().squeeze(1)
                out = out.index_add(0, rows, weights[rows, index, None] * expert(x[rows]))
        balance = 4 * (scores.mean(0) * (weights > 0).float().mean(0)).sum()
        return out, balance


@program()
def experts(run: Run) -> Any:
    return train(run, Experts(), lambda: (features(),), lambda result: square(result[0]) + 0.01 * result[1])


@program()
def experts_that_gather(run: Run) -> Any:
    return train(run, Experts(False), lambda: (features(),), lambda result: square(result[0]) + 0.01 * result[1])


@program()
def experts_with_loss_in_an_attribute(run: Run) -> Any:
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.aux_loss = Experts(), None

        def forward(self, x):
            out, self.aux_loss = self.inner(x)
            return out

    model = nn.Sequential(Layer(), Layer())
    optimizer = torch.optim.Adam(model.parameters())
    run.attach(model)
    for _ in run.steps():
        loss = square(model(features())) + 0.01 * sum(layer.aux_loss for layer in model)
        descend(optimizer, loss)
        run.log(loss)
    return model


@program()
def counts_of_experts_in_a_buffer(run: Run) -> Any:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Experts()
            self.register_buffer("load", torch.zeros(4))

        def forward(self, x):
            out, balance = self.inner(x)
            with torch.no_grad():
                self.load += self.inner.gate(x).softmax(-1).mean(0)
            return out + balance

    return train(run, Model(), lambda: (features(),), square)


@program()
def stochastic_depth(run: Run) -> Any:
    class Layer(nn.Module):
        def __init__(self, rate):
            super().__init__()
            self.inner, self.rate = nn.Linear(WIDTH, WIDTH), rate

        def forward(self, x):
            keep = (torch.rand(x.shape[0], 1) >= self.rate).to(x.dtype)
            return x + self.inner(x) * keep / (1 - self.rate) if self.training else x + self.inner(x)

    return train(run, nn.Sequential(Layer(0.1), Layer(0.2), mlp()), lambda: (features(),), class_loss)


@program()
def layer_drop(run: Run) -> Any:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                if not self.training or torch.rand(()).item() > 0.2:
                    x = x + layer(x)
            return x

    return train(run, Model(), lambda: (features(),), square)


@program()
def weight_norm(run: Run) -> Any:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(WIDTH, 24)), nn.ReLU(), nn.Linear(24, CLASSES))
    return train(run, model, lambda: (features(),), class_loss)


@program()
def spectral_norm(run: Run) -> Any:
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(WIDTH, 24)), nn.ReLU(), nn.Linear(24, CLASSES))
    return train(run, model, lambda: (features(),), class_loss)


@program()
def orthogonal(run: Run) -> Any:
    model = nn.Sequential(parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)), nn.ReLU(), nn.Linear(WIDTH, CLASSES))
    return train(run, model, lambda: (features(),), class_loss)


@program()
def old_spectral_norm(run: Run) -> Any:
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(WIDTH, 24)), nn.ReLU(), nn.Linear(24, CLASSES))
    return train(run, model, lambda: (features(),), class_loss)


@program()
def symmetric_weight(run: Run) -> Any:
    class Symmetric(nn.Module):
        def forward(self, weight):
            return weight.triu() + weight.triu(1).mT

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    return train(run, model, lambda: (features(),), class_loss)


@program()
def adapters_by_hand(run: Run) -> Any:
    class LoRA(nn.Module):
        def __init__(self, base: nn.Linear, rank: int = 2, alpha: float = 4.0):
            super().__init__()
            self.base, self.scale = base.requires_grad_(False), alpha / rank
            self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.01)
            self.b = nn.Parameter(torch.zeros(base.out_features, rank))

        def forward(self, x):
            return self.base(x) + (x @ self.a.T @ self.b.T) * self.scale

    model = nn.Sequential(LoRA(nn.Linear(WIDTH, 24)), nn.GELU(), LoRA(nn.Linear(24, CLASSES)))
    return train(run, model, lambda: (features(),), class_loss)


@program()
def custom_function(run: Run) -> Any:
    class Sign(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sign()

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * (x.abs() <= 1)

    class Binary(nn.Linear):
        def forward(self, x):
            return F.linear(x, Sign.apply(self.weight), self.bias)

    return train(run, nn.Sequential(Binary(WIDTH, 24), nn.Hardtanh(), nn.Linear(24, CLASSES)), lambda: (features(),),
                 class_loss)  # fmt: skip


@program()
def reversed_gradient(run: Run) -> Any:
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, scale):
            ctx.scale = scale
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            return -ctx.scale * grad, None

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.features, self.label, self.domain = nn.Linear(WIDTH, 24), nn.Linear(24, CLASSES), nn.Linear(24, 2)

        def forward(self, x, scale):
            h = torch.relu(self.features(x))
            return self.label(h), self.domain(Reverse.apply(h, scale))

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(model)
    for step in run.steps():
        scale = 2 / (1 + math.exp(-step)) - 1
        label, domain = model(features(), scale)
        loss = F.cross_entropy(label, labels()) + F.cross_entropy(domain, labels(classes=2))
        descend(optimizer, loss)
        run.log(loss)
    return model


@program()
def straight_through_quantisation(run: Run) -> Any:
    class Quantised(nn.Linear):
        def forward(self, x):
            scale = self.weight.detach().abs().amax() / 127
            rounded = (self.weight / scale).round().clamp(-128, 127) * scale
            return F.linear(x, self.weight + (rounded - self.weight).detach(), self.bias)

    return train(run, nn.Sequential(Quantised(WIDTH, 24), nn.ReLU(), Quantised(24, CLASSES)), lambda: (features(),),
                 class_loss)  # fmt: skip


@program()
def gumbel_softmax(run: Run) -> Any:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.choice, self.values = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)

        def forward(self, x, tau: float = 1.0):
            return self.values(F.gumbel_softmax(self.choice(x), tau=tau, hard=True))

    return train(run, Model(), lambda: (features(),), class_loss)


@program()
def gumbel_with_annealed_temperature(run: Run) -> Any:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.choice, self.values, self.tau = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES), 1.0

        def forward(self, x):
            return self.values(F.gumbel_softmax(self.choice(x), tau=self.tau))

    model = Model()
    optimizer = torch.optim.Adam(model.parameters())
    run.attach(model)
    for _ in run.steps():
        loss = F.cross_entropy(model(features()), labels())
        descend(optimizer, loss)
        model.tau = max(0.5, model.tau * 0.95)
        run.log(loss)
    return model


@program()
def message_passing(run: Run) -> Any:
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.message, self.update = nn.Linear(2 * WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH)

        def forward(self, x, source, target):
            messages = torch.relu(self.message(torch.cat([x[source], x[target]], -1)))
            return self.update(torch.zeros_like(x).index_add_(0, target, messages), x)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.out = nn.ModuleList([Layer(), Layer()]), nn.Linear(WIDTH, CLASSES)

        def forward(self, x, edges):
            for layer in self.layers:
                x = layer(x, edges[0], edges[1])
            return self.out(x)

    return train(run, Model(), lambda: (features(10), torch.randint(10, (2, 20))), class_loss)


@program()
def graph_with_masked_loss(run: Run) -> Any:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x, adjacency, mask, y):
            return F.cross_entropy(self.net(adjacency @ x)[mask], y[mask])

    x, adjacency, y = features(12), torch.rand(12, 12).softmax(-1), labels(12)
    mask = torch.arange(12) < 7
    return train(run, Model(), lambda: (x, adjacency, mask, y), lambda loss: loss)


@program()
def sets_of_points(run: Run) -> Any:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.each, self.all = mlp(3, WIDTH), mlp()

        def forward(self, x):
            return self.all(self.each(x).amax(1))

    return train(run, Model(), lambda: (torch.randn(ROWS, 10, 3),), class_loss)


@program()
def perceiver(run: Run) -> Any:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.latents, self.cross = nn.Parameter(torch.randn(3, WIDTH)), Attention()
            self.own, self.out = Attention(), nn.Linear(WIDTH, CLASSES)

        def forward(self, x):
            z = self.cross(self.latents.expand(len(x), -1, -1), x)
            for _ in range(2):
                z = z + self.own(z, z)
            return self.out(z.mean(1))

    return train(run, Model(), lambda: (torch.randn(ROWS, LENGTH, WIDTH),), class_loss)


@program()
def linear_attention(run: Run) -> Any:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            q, k = F.elu(q) + 1, F.elu(k) + 1
            kv = torch.einsum("bnd,bne->bnde", k, v).cumsum(1)
            norm = torch.einsum("bnd,bnd->bn", q, k.cumsum(1))
            return self.out(torch.einsum("bnd,bnde->bne", q, kv) / norm[..., None])

    return train(run, Model(), lambda: (torch.randn(ROWS, LENGTH, WIDTH),), square)


@program()
def rotary_with_cached_tables(run: Run) -> Any:
    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.length, self.table = 0, None

        def forward(self, x):
            if x.shape[1] > self.length:
                self.length = x.shape[1]
                angles = torch.arange(self.length)[:, None] / 10000 ** (torch.arange(WIDTH // 2) * 2 / WIDTH)
                self.table = angles.cos(), angles.sin()
            cos, sin = self.table[0][: x.shape[1]], self.table[1][: x.shape[1]]
            one, two = x.chunk(2, -1)
            return torch.cat([one * cos - two * sin, one * sin + two * cos], -1)

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Rotary(), nn.Linear(WIDTH, WIDTH))
    return train(run, model, lambda: (torch.randn(ROWS, LENGTH, WIDTH),), square)


@program()
def mask_cached_in_a_dictionary(run: Run) -> Any:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.masks = nn.MultiheadAttention(WIDTH, 2, batch_first=True), {}

        def forward(self, x):
            length = x.shape[1]
            if length not in self.masks:
                self.masks[length] = torch.triu(torch.full((length, length), float("-inf")), 1)
            return self.attention(x, x, x, attn_mask=self.masks[length], need_weights=False)[0]

    return train(run, Model(), lambda: (torch.randn(ROWS, LENGTH, WIDTH),), square)


@program()
def equilibrium(run: Run) -> Any:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

        def forward(self, x):
            with torch.no_grad():
                z = torch.zeros_like(x)
                for _ in range(6):
                    z = torch.tanh(self.inner(z) + x)
            return self.out(torch.tanh(self.inner(z) + x))

    return train(run, Model(), lambda: (features(),), class_loss)


@program()
def fixed_point_until_converged(run: Run) -> Any:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

        def forward(self, x):
            z = torch.zeros_like(x)
            for _ in range(20):
                following = torch.tanh(0.3 * self.inner(z) + x)
                if (following - z).abs().max() < 1e-3:
                    break
                z = following
            return self.out(z)

    return train(run, Model(), lambda: (features(),), class_loss)


@program()
def neural_ode(run: Run) -> Any:
    class Model(nn.Module):
        def __init__(self, steps: int = 4):
            super().__init__()
            self.field, self.steps = mlp(WIDTH + 1, WIDTH), steps

        def forward(self, x):
            for index in range(self.steps):
                t = torch.full((len(x), 1), index / self.steps)
                x = x + self.field(torch.cat([x, t], 1)) / self.steps
            return x

    return train(run, Model(), lambda: (features(),), square)


@program()
def hypernetwork(run: Run) -> Any:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.hyper, self.shapes = nn.Linear(4, WIDTH * CLASSES), (CLASSES, WIDTH)

        def forward(self, x, task):
            return F.linear(x, self.hyper(task).view(self.shapes))

    return train(run, Model(), lambda: (features(), torch.randn(4)), class_loss)


@program()
def implicit_field(run: Run) -> Any:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("bands", 2.0 ** torch.arange(4))
            self.net = mlp(3 * 8, 4)

        def forward(self, points, direction):
            angles = (points[..., None] * self.bands).flatten(-2)
            out = self.net(torch.cat([angles.sin(), angles.cos()], -1))
            alpha = 1 - torch.exp(-F.relu(out[..., 3]) * 0.1)
            through = torch.cumprod(1 - alpha + 1e-10, -1)
            return (out[..., :3].sigmoid() * (alpha * through)[..., None]).sum(1) + 0 * direction

    return train(run, Model(), lambda: (torch.rand(ROWS, 8, 3), torch.randn(ROWS, 3)), square)


@program()
def feature_modulation(run: Run) -> Any:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.film = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(WIDTH, 16)
            self.norm, self.squeeze = nn.GroupNorm(2, 8), nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 8))

        def forward(self, x, condition):
            gamma, beta = self.film(condition)[..., None, None].chunk(2, 1)
            h = self.norm(self.conv(x)) * (1 + gamma) + beta
            return h * self.squeeze(h.mean((2, 3))).sigmoid()[..., None, None]

    return train(run, Model(), lambda: (images(), features()), square)


@program()
def two_towers(run: Run) -> Any:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.users, self.items = nn.EmbeddingBag(50, WIDTH), nn.Embedding(50, WIDTH)
            self.deep = mlp(2 * WIDTH, 1)

        def forward(self, history, item):
            user, item = self.users(history), self.items(item)
            return self.deep(torch.cat([user, item], -1)).squeeze(-1) + (user * item).sum(-1)

    return train(
        run,
        Model(),
        lambda: (torch.randint(50, (ROWS, 3)), torch.randint(50, (ROWS,))),
        lambda scores: F.binary_cross_entropy_with_logits(scores, torch.rand(ROWS)),
    )


@program()
def speech_with_ctc(run: Run) -> Any:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.out = nn.GRU(8, WIDTH, bidirectional=True, batch_first=True), nn.Linear(2 * WIDTH, 10)

        def forward(self, x):
            return self.out(self.rnn(x)[0]).log_softmax(-1)

    model = Model()
    optimizer = torch.optim.Adam(model.parameters())
    run.attach(model)
    for _ in run.steps():
        log_p = model(torch.randn(ROWS, 12, 8)).transpose(0, 1)
        targets = torch.randint(1, 10, (ROWS, 4))
        loss = F.ctc_loss(log_p, targets, torch.full((ROWS,), 12), torch.randint(2, 5, (ROWS,)))
        descend(optimizer, loss)
        run.log(loss)
    return model


@dataclass
class Output:
    """The result of a model as a dataclass."""

    logits: Tensor
    hidden: Tensor
    loss: Tensor | None = None


class Named(NamedTuple):
    """The result of a model as a named tuple."""

    logits: Tensor
    loss: Tensor


@program()
def result_as_dataclass(run: Run) -> Any:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, 24), nn.Linear(24, CLASSES)

        def forward(self, x, y=None):
            hidden = torch.relu(self.first(x))
            logits = self.second(hidden)
            return Output(logits, hidden, None if y is None else F.cross_entropy(logits, y))

    return train(run, Model(), lambda: (features(), labels()), lambda result: result.loss)


@program()
def result_as_named_tuple(run: Run) -> Any:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x, y):
            logits = self.net(x)
            return Named(logits, F.cross_entropy(logits, y))

    return train(run, Model(), lambda: (features(), labels()), lambda result: result.loss)


@program()
def result_as_dictionary(run: Run) -> Any:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, batch):
            logits = self.net(batch["x"])
            return {"logits": logits, "loss": F.cross_entropy(logits, batch["y"]), "name": "head"}

    return train(run, Model(), lambda: ({"x": features(), "y": labels()},), lambda result: result["loss"])


@program()
def result_as_distribution(run: Run) -> Any:
    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x):
            return torch.distributions.Categorical(logits=self.net(x))

    def loss_of(policy):
        action = policy.sample()
        return -(policy.log_prob(action) * torch.randn(ROWS)).mean() - 0.01 * policy.entropy().mean()

    return train(run, Policy(), lambda: (features(),), loss_of)


@program()
def batch_as_dataclass(run: Run) -> Any:
    @dataclass
    class Batch:
        x: Tensor
        y: Tensor

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, batch):
            return F.cross_entropy(self.net(batch.x), batch.y)

    return train(run, Model(), lambda: (Batch(features(), labels()),), lambda loss: loss)


@program()
def metrics_in_a_dictionary_of_the_module(run: Run) -> Any:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.metrics = mlp(), {}

        def forward(self, x, y):
            logits = self.net(x)
            loss = F.cross_entropy(logits, y)
            self.metrics["accuracy"] = (logits.argmax(-1) == y).float().mean()
            self.metrics["loss"] = loss.detach()
            return loss

    model = Model()
    optimizer = torch.optim.Adam(model.parameters())
    run.attach(model)
    for _ in run.steps():
        loss = model(features(), labels())
        descend(optimizer, loss)
        run.log(loss, model.metrics)
    return model


@program()
def metrics_read_on_the_host(run: Run) -> Any:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x, y):
            logits = self.net(x)
            loss = F.cross_entropy(logits, y)
            return loss, {"loss": loss.item(), "accuracy": (logits.argmax(-1) == y).float().mean().item()}

    return train(run, Model(), lambda: (features(), labels()), lambda result: result[0])


@program()
def counter_in_the_forward(run: Run) -> Any:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.calls = mlp(), 0

        def forward(self, x):
            self.calls += 1
            return self.net(x)

    return train(run, Model(), lambda: (features(),), class_loss)


@program()
def running_statistics(run: Run) -> Any:
    class Normalise(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(WIDTH))
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            if self.training:
                with torch.no_grad():
                    self.count += 1
                    self.mean += (x.mean(0) - self.mean) / self.count
            return x - self.mean

    return train(run, nn.Sequential(Normalise(), mlp()), lambda: (features(),), class_loss)


@program()
def running_statistics_replaced(run: Run) -> Any:
    class Normalise(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(WIDTH))

        def forward(self, x):
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return x - self.mean

    return train(run, nn.Sequential(Normalise(), mlp()), lambda: (features(),), class_loss)


@program()
def compiled_loss(run: Run) -> Any:
    model = mlp()
    return train(run, torch.compile(model, backend="aot_eager"), lambda: (features(),), class_loss)
