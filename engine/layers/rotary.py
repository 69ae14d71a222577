"""Rotary position embedding: the frequencies of each scaling rule, a table of them, and their application.

Owns the numbers a position turns into. Knows rope settings and tensors, no model and no file. The table is computed
in float32 on the CPU, so that every device rotates by the same numbers, and kept in the model's dtype as Hugging Face
does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

ROPE_KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rope frequencies are stretched; `kind` is one of ROPE_KINDS, lengths in tokens.

    `attention_factor` multiplies cos and sin (yarn; 1.0 elsewhere). Fields another kind owns keep their defaults.
    """

    kind: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Radians per position of each of the head_dim/2 rotations: float32 [head_dim / 2] on the CPU."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    base = 1.0 / theta**exponents
    if scaling is None or scaling.kind == "default":
        return base
    if scaling.kind == "linear":
        return base / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(base, scaling)
    if scaling.kind == "yarn":
        return _yarn(base, head_dim, theta, scaling)
    raise ValueError(f"rope scaling {scaling.kind!r} is none of {', '.join(ROPE_KINDS)}")


def yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """The factor on cos and sin that keeps attention's entropy where a yarn config states none."""

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if mscale and mscale_all_dim:
        return temperature(mscale) / temperature(mscale_all_dim)
    return temperature(1.0)


def _llama3(base: Tensor, scaling: RopeScaling) -> Tensor:
    """Keep short wavelengths, divide long ones by the factor, blend between."""
    rotations = scaling.original_max_position_embeddings * base / (2 * math.pi)  # rotations within the trained context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((rotations - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * base / scaling.factor + kept * base


def _yarn(base: Tensor, head_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """Stretch dimensions that turn under beta_slow times in the trained context, keep those over beta_fast, blend."""

    def dimension_at(rotations: float) -> float:
        context = scaling.original_max_position_embeddings
        return head_dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension_at(scaling.beta_fast), dimension_at(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001  # a step instead of a division by zero
    interpolation = ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0.0, 1.0)
    return interpolation * base / scaling.factor + (1 - interpolation) * base


class RotaryTable(nn.Module):
    """cos and sin of positions 0..max_len-1, looked up once a step: positions [T] int64 -> two [T, 1, head_dim].

    The first half of sin is negated, which makes rotate_half a plain roll (see `rotate`). A position of max_len or more
    is a caller's error that an index check reports on the CPU and a device assert on CUDA.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        head_dim: int,
        theta: float,
        scaling: RopeScaling | None,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        super().__init__()
        self.max_len = max_len
        angles = torch.outer(torch.arange(max_len, dtype=torch.float32), inverse_frequencies(head_dim, theta, scaling))
        amplitude = 1.0 if scaling is None else scaling.attention_factor
        cos, sin = angles.cos() * amplitude, angles.sin() * amplitude
        for name, halves in (("cos", (cos, cos)), ("sin", (-sin, sin))):
            table = torch.cat(halves, dim=-1).unsqueeze(1).to(device=device, dtype=dtype)
            self.register_buffer(name, table, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads x [T, heads, D] by a table's cos and sin [T, 1, D]: x*cos + rotate_half(x)*sin, a new tensor.

    rotate_half is (-x2, x1); with the minus in the table it is a roll by half: three ops, and q and k go in together.
    """
    return torch.addcmul(x * cos, torch.roll(x, x.shape[-1] // 2, dims=-1), sin)
