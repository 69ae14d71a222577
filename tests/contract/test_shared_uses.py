"""Tensors with several gradients in one backward: captured calls add them in eager's order, to the last bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.contract.training_models import attached

WIDTH, TOKENS, STEPS = 16, 50, 5


class Tied(nn.Module):
    """A language model with one weight for the embedding and the head."""

    def __init__(self):
        super().__init__()
        self.embedding, self.linear = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.linear(self.embedding(tokens))))


class Repeated(nn.Module):
    """One layer, run several times in a row."""

    def __init__(self, times):
        super().__init__()
        self.linear, self.times = nn.Linear(WIDTH, WIDTH), times

    def forward(self, x):
        for _ in range(self.times):
            x = torch.tanh(self.linear(x))
        return x


class CrossLayer(nn.Module):
    """A decoder layer, which uses the encoder's result for keys and values."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, encoded):
        return x + F.scaled_dot_product_attention(self.query(x), self.key(encoded), self.value(encoded))


class EncoderDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([CrossLayer() for _ in range(3)])

    def forward(self, x):
        encoded = torch.tanh(self.encoder(x))
        for layer in self.layers:
            x = layer(x, encoded)
        return x, encoded


def draw(step, number):
    return torch.randn(4, 6, WIDTH, generator=torch.Generator().manual_seed(10 * step + number))


def preference(model, step, device):
    generator = torch.Generator().manual_seed(step)
    chosen, rejected = (
        model(torch.randint(0, TOKENS, (4, 6), generator=generator).to(device)).log_softmax(-1)[..., 1].sum(-1)
        for _ in range(2)
    )
    return -F.logsigmoid(chosen - rejected).mean()


def triplet(model, step, device):
    return F.triplet_margin_loss(*[model(draw(step, number).to(device)) for number in range(3)])


def sequence(model, step, device):
    out, encoded = model(draw(step, 0).to(device))
    return out.pow(2).mean() + encoded.abs().mean()  # the loss uses the encoder's result too


CASES = {
    "tied embedding in DPO": (Tied, preference, [""]),
    "tied embedding in DPO, in parts": (Tied, preference, ["embedding", "linear", "head"]),
    "siamese": (lambda: Repeated(3), triplet, [""]),
    "siamese in parts": (lambda: nn.Sequential(Repeated(2), Repeated(2)), triplet, ["0", "1"]),
    "decoder": (EncoderDecoder, sequence, ["layers.0", "layers.1", "layers.2"]),
    "encoder and decoder": (EncoderDecoder, sequence, ["encoder", "layers.0", "layers.1", "layers.2"]),
}


def gradients(build, loss_of, paths, pool, device):
    """Return the gradients of all steps, and the counters if paths are given."""
    torch.manual_seed(0)
    model, stats, log = build().to(device), None, []
    if paths is not None:
        graphs, stats = attached(model, paths, pool)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, device).backward()
        log += [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
    if paths is not None:
        graphs.detach()
    return log, stats


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_several_uses_are_added_in_eagers_order(name, pool, device):
    build, loss_of, paths = CASES[name]
    found, stats = gradients(build, loss_of, paths, pool, device)
    wanted, _ = gradients(build, loss_of, None, pool, device)
    assert all(map(torch.equal, found, wanted))
    assert sum(stats.replays.values()) >= len(paths) * (STEPS - 2)


def test_more_uses_than_gradients_are_kept_for_run_eager_with_a_reason(pool, device):
    found, stats = gradients(lambda: Repeated(20), triplet, [""], pool, device)
    wanted, _ = gradients(lambda: Repeated(20), triplet, None, pool, device)
    assert all(map(torch.equal, found, wanted))
    assert "uses a parameter 20 times" in stats.failures["model"] and not sum(stats.replays.values())


def test_decoders_of_transformers_have_eagers_gradients(pool, device):
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=60,
        d_model=WIDTH,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_decoder_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )

    def loss_of(model, step, device):
        generator = torch.Generator().manual_seed(step)
        tokens, labels = (torch.randint(4, 60, (2, size), generator=generator).to(device) for size in (9, 7))
        return model(input_ids=tokens, labels=labels, use_cache=False).loss

    def build():
        return transformers.T5ForConditionalGeneration(config).train()

    found, stats = gradients(build, loss_of, ["decoder.block.0", "decoder.block.1"], pool, device)
    wanted, _ = gradients(build, loss_of, None, pool, device)
    assert all(map(torch.equal, found, wanted)) and sum(stats.replays.values())
