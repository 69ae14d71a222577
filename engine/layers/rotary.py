"""Rotary position embedding (RoPE): frequencies of each scaling rule, the cos/sin table, and its application.

The table is computed in float32 on the CPU, so that all devices use the same values, and stored in the model's dtype
as in Hugging Face.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

ROPE_KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """RoPE scaling settings. `kind` is one of ROPE_KINDS; lengths are in tokens.

    `attention_factor` multiplies cos and sin (yarn; 1.0 otherwise). Fields of other kinds keep their defaults.
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
    """Return the rotation frequencies in radians per position: float32 [head_dim / 2] on the CPU."""
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
    raise ValueError(f"rope scaling {scaling.kind!r} is not one of {', '.join(ROPE_KINDS)}")


def yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """Return yarn's default factor on cos and sin, which preserves the entropy of attention."""

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if mscale and mscale_all_dim:
        return temperature(mscale) / temperature(mscale_all_dim)
    return temperature(1.0)


def _llama3(base: Tensor, scaling: RopeScaling) -> Tensor:
    """Keep high frequencies, divide low ones by the factor, interpolate between."""
    rotations = scaling.original_max_position_embeddings * base / (2 * math.pi)  # within the trained context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((rotations - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * base / scaling.factor + kept * base


def _yarn(base: Tensor, head_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """Interpolate between two bounds, in rotations within the trained context.

    Frequencies below beta_slow are divided by the factor, those above beta_fast are kept.
    """

    def dimension_at(rotations: float) -> float:
        context = scaling.original_max_position_embeddings
        return head_dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension_at(scaling.beta_fast), dimension_at(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001  # avoid a division by zero
    interpolation = ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0.0, 1.0)
    return interpolation * base / scaling.factor + (1 - interpolation) * base


class RotaryTable(nn.Module):
    """Table of cos and sin for positions 0..max_len-1: positions [T] int64 -> two tensors [T, 1, head_dim].

    Looked up once per step. The first half of sin is negated, so that rotate_half only swaps halves (see `rotate`). A
    position of max_len or more raises an index error on the CPU and a device assert on CUDA.
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
    """Apply RoPE to heads x [T, heads, D] with cos and sin [T, 1, D]: return x*cos + rotate_half(x)*sin.

    rotate_half is (-x2, x1). With the sign in the table it swaps the halves, which are added one by one: this takes
    three ops for q and k together. A roll by D/2 gives the same bits, and takes twice as long on a CPU.
    """
    half, out = x.shape[-1] // 2, x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half])
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out
