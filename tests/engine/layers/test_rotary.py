"""RoPE's application equals its definition bit for bit."""

from __future__ import annotations

import pytest
import torch

from engine.layers.rotary import RotaryTable, rotate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [6, 64, 80])
@pytest.mark.parametrize("tokens", [1, 5])
def test_rotate_equals_the_sum_of_both_products(tokens, head_dim, dtype):
    generator = torch.Generator().manual_seed(head_dim)
    table = RotaryTable(head_dim, 10000.0, None, 64, dtype, torch.device("cpu"))
    cos, sin = table(torch.randint(0, 64, (tokens,), generator=generator))
    x = torch.randn(tokens, 5, head_dim, generator=generator).to(dtype)
    kept = x.clone()
    first, second = x.chunk(2, dim=-1)
    assert torch.equal(rotate(x, cos, sin), torch.addcmul(x * cos, torch.cat((second, first), dim=-1), sin))
    assert torch.equal(x, kept)
