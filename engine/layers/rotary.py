"""Rotary position embedding (RoPE): frequencies of each scaling rule, the cos/sin table, and its application.

The table is computed in float32 on the CPU, so that all devices use the same values, and stored in the model's dtype
as in Hugging Face.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.kernels import cpu_library

ROPE_KINDS = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """RoPE scaling settings. `kind` is one of ROPE_KINDS; lengths are in tokens.

    `attention_factor` multiplies cos and sin (yarn, longrope; 1.0 otherwise). `short_factor` and `long_factor` divide
    each frequency (longrope). Fields of other kinds keep their defaults.
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
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def is_long(self, max_len: int) -> bool:
        """Whether longrope uses `long_factor` for contexts of up to `max_len` tokens."""
        return self.kind == "longrope" and max_len > self.original_max_position_embeddings


def inverse_frequencies(dims: int, theta: float, scaling: RopeScaling | None, max_len: int = 0) -> Tensor:
    """Return the rotation frequencies in radians per position: float32 [dims / 2] on the CPU, for `dims` rotated.

    With longrope they depend on `max_len`, the longest context of the model as it is served: keys in the cache were
    rotated once, so all contexts use one set of factors.
    """
    exponents = torch.arange(0, dims, 2, dtype=torch.float32) / dims
    base = 1.0 / theta**exponents
    if scaling is None or scaling.kind in ("default", "dynamic"):  # dynamic changes nothing up to the trained context
        return base
    if scaling.kind == "longrope":
        factors = scaling.long_factor if scaling.is_long(max_len) else scaling.short_factor
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * theta**exponents)
    if scaling.kind == "linear":
        return base / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(base, scaling)
    if scaling.kind == "yarn":
        return _yarn(base, dims, theta, scaling)
    raise ValueError(f"rope scaling {scaling.kind!r} is not one of {', '.join(ROPE_KINDS)}")


def yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """Return yarn's default factor on cos and sin, which preserves the entropy of attention."""

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if mscale and mscale_all_dim:
        return temperature(mscale) / temperature(mscale_all_dim)
    return temperature(1.0)


def longrope_attention_factor(factor: float, original_length: int) -> float:
    """Return longrope's default factor on cos and sin."""
    return math.sqrt(1 + math.log(factor) / math.log(original_length)) if factor > 1 and original_length > 1 else 1.0


def _llama3(base: Tensor, scaling: RopeScaling) -> Tensor:
    """Keep high frequencies, divide low ones by the factor, interpolate between."""
    rotations = scaling.original_max_position_embeddings * base / (2 * math.pi)  # within the trained context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((rotations - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * base / scaling.factor + kept * base


def _yarn(base: Tensor, dims: int, theta: float, scaling: RopeScaling) -> Tensor:
    """Interpolate between two bounds, in rotations within the trained context.

    Frequencies below beta_slow are divided by the factor, those above beta_fast are kept.
    """

    def dimension_at(rotations: float) -> float:
        context = scaling.original_max_position_embeddings
        return dims * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension_at(scaling.beta_fast), dimension_at(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dims - 1)
    if first == last:
        last += 0.001  # avoid a division by zero
    interpolation = ((torch.arange(dims // 2, dtype=torch.float32) - first) / (last - first)).clamp(0.0, 1.0)
    return interpolation * base / scaling.factor + (1 - interpolation) * base


class RotaryTable(nn.Module):
    """Table of cos and sin for positions 0..max_len-1: positions [T] int64 -> two tensors [T, 1, dims].

    Looked up once per step. `dims` is the rotated part of a head. Pairs of dimensions rotate together: i and
    i + dims / 2, or neighbours if `interleaved`. The sine of a pair's first dimension is negated, so that `rotate` only
    swaps pairs. A position of max_len or more raises an index error on the CPU and a device assert on CUDA.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        dims: int,
        theta: float,
        scaling: RopeScaling | None,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        interleaved: bool = False,
    ):
        super().__init__()
        self.max_len = max_len
        frequencies = inverse_frequencies(dims, theta, scaling, max_len)
        angles = torch.outer(torch.arange(max_len, dtype=torch.float32), frequencies)
        amplitude = 1.0 if scaling is None else scaling.attention_factor
        cos, sin = angles.cos() * amplitude, angles.sin() * amplitude
        for name, pair in (("cos", (cos, cos)), ("sin", (-sin, sin))):
            table = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
            table = table.unsqueeze(1).to(device=device, dtype=dtype)
            self.register_buffer(name, table, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Apply RoPE to heads x [T, heads, D] with cos and sin [T, 1, dims]: return x*cos + rotate_half(x)*sin.

    Only the first `dims` elements of a head are rotated; the others are returned as they are. rotate_half is (-x2, x1),
    of the halves x1 and x2, or of the even and odd elements if `interleaved`. With the sign in the table it swaps them,
    and they are added one by one: this takes three ops for q and k together. A roll by D/2 gives the same bits, and
    takes twice as long on a CPU. The compiled kernel of a CPU gives the same bits in bfloat16.
    """
    if cpu_library.computes_bfloat16(x):
        return cpu_library.rotate(x, cos, sin, interleaved=interleaved)
    dims = cos.shape[-1]
    if dims < x.shape[-1]:
        return torch.cat((rotate(x[..., :dims], cos, sin, interleaved=interleaved), x[..., dims:]), dim=-1)
    first, second = (
        (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(dims // 2), slice(dims // 2, dims))
    )
    out = x * cos
    out[..., first].addcmul_(x[..., second], sin[..., first])
    out[..., second].addcmul_(x[..., first], sin[..., second])
    return out
