"""Random numbers of every kind in attached layers equal eager's, with several graphs between forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from tests.contract.training_models import WIDTH, assert_same, attached, batches, train, twins

LAYERS, HEADS = 3, 4


class Applied(nn.Module):
    """A linear layer and a function of its result."""

    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x):
        return self.function(self.linear(x))


class Recurrent(nn.Module):
    """Two recurrent layers with dropout between them: a library may keep a generator's state in memory."""

    def __init__(self, kind):
        super().__init__()
        self.recurrent = kind(WIDTH, WIDTH, num_layers=2, dropout=0.3, batch_first=True)

    def forward(self, x):
        return self.recurrent(x)[0]


class Attention(nn.Module):
    """Attention with dropout, by one of PyTorch's kernels."""

    def __init__(self, backend, dtype=torch.float32):
        super().__init__()
        self.qkv, self.backend, self.dtype = nn.Linear(WIDTH, 3 * WIDTH), backend, dtype

    def forward(self, x):
        rows, length, width = x.shape
        q, k, v = self.qkv(x).to(self.dtype).view(rows, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(self.backend):
            found = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)
        return x + found.transpose(1, 2).reshape(rows, length, width).to(x.dtype)


class Both(nn.Module):
    """Dropout inside of a checkpoint, before and after it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3))

    def forward(self, x):
        return F.dropout(checkpoint(self.inner, F.dropout(x, 0.2), use_reentrant=False), 0.2)


def inverse(x):
    return x * torch.empty_like(x).exponential_().clamp(max=4)


KINDS = {
    "dropout": lambda: Applied(lambda x: F.dropout(x, 0.3)),
    "alpha_dropout": lambda: Applied(lambda x: F.alpha_dropout(x, 0.3, training=True)),
    "channel_dropout": lambda: Applied(lambda x: F.dropout1d(x, 0.3)),
    "rrelu": lambda: Applied(lambda x: F.rrelu(x, training=True)),
    "gumbel_softmax": lambda: Applied(lambda x: F.gumbel_softmax(x, hard=True)),
    "bernoulli": lambda: Applied(lambda x: x * torch.bernoulli(torch.full_like(x, 0.7))),
    "normal": lambda: Applied(lambda x: x + torch.randn_like(x) * x.detach().std()),
    "exponential": lambda: Applied(inverse),
    "permutation": lambda: Applied(lambda x: x[:, torch.randperm(x.shape[1], device=x.device)]),
    "multinomial": lambda: Applied(lambda x: x * (1 + torch.multinomial(torch.ones(9, device=x.device), 2).sum() / 9)),
    "rows": lambda: Applied(lambda x: x * (torch.rand(len(x), 1, 1, device=x.device) < 0.7) / 0.7),
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "attention_math": lambda: Attention(SDPBackend.MATH),
    "attention_efficient": lambda: Attention(SDPBackend.EFFICIENT_ATTENTION),
    "attention_flash": lambda: Attention(SDPBackend.FLASH_ATTENTION, torch.bfloat16),
    "encoder_layer": lambda: nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, 0.2, batch_first=True),
    "checkpoint_and_dropout": Both,
}
GPU_ONLY = {"attention_efficient", "attention_flash"}
ALWAYS = {"dropout", "rows", "checkpoint_and_dropout"}
CPU_ONLY = {"lstm", "gru"}  # cuDNN restarts their dropout whenever a generator's state is restored


@pytest.mark.parametrize(
    "kind", [kind if kind in ALWAYS else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
@pytest.mark.parametrize("way", ["layers", "whole"])
def test_three_layers_with_two_outstanding_microbatches_equal_eager(pool, device, kind, way):
    if kind in GPU_ONLY and device.type != "cuda":
        pytest.skip("a kernel of GPUs")
    if kind in CPU_ONLY and device.type != "cpu":
        pytest.skip("documented: docs/refusals.md")
    eager, graphed = twins(lambda: nn.Sequential(*[KINDS[kind]() for _ in range(LAYERS)]), device)
    graphs, stats = attached(graphed, [str(index) for index in range(LAYERS)] if way == "layers" else [""], pool)
    data = batches(6, device, micro=2)
    expected = train(eager, data)
    after = torch.rand(4, device=device)
    assert_same(train(graphed, data), expected)
    assert torch.equal(torch.rand(4, device=device), after), "the generator is elsewhere"
    assert stats.replays or stats.failed_captures
    graphs.detach()
