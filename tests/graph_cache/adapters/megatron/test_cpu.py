"""A Megatron-Core GPTModel on a CPU."""

from __future__ import annotations

import pytest
import torch

from graph_cache.errors import GraphConfigError
from tests.support.megatron_models import gpt, loss_of, tokens


def test_a_model_trains_on_a_cpu():
    model = gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(5):
        loss = loss_of(model, *tokens(0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.1


def test_attention_is_causal():
    model = gpt().eval()
    ids, positions = tokens(0)
    changed = ids.clone()
    changed[:, -1] = (ids[:, -1] + 1) % 96
    with torch.no_grad():
        a, b = (model(one, positions, None) for one in (ids, changed))
    assert torch.equal(a[:, :-1], b[:, :-1]) and not torch.equal(a[:, -1], b[:, -1])


def test_an_explicit_attention_mask_is_refused():
    ids, positions = tokens(0)
    with pytest.raises(GraphConfigError, match="attention_mask"):
        gpt()(ids, positions, torch.zeros(1, 1, 12, 12, dtype=torch.bool))
