"""The rotary embedding of a config.json: both layouts, every scaling, partial rotation, and settings by layer type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from engine.errors import ModelError
from engine.layers.rotary import ROPE_KINDS, RopeScaling, longrope_attention_factor, yarn_attention_factor
from engine.models.fields import Fields

SLIDING, FULL = "sliding_attention", "full_attention"
ALIASES = {"su": "longrope"}
"""Older names of kinds of scaling."""


class Rope(NamedTuple):
    """A rotary embedding: its base, its scaling (None: unscaled), and how many elements of a head it rotates."""

    theta: float
    scaling: RopeScaling | None
    dims: int


def read_rope(
    values: Mapping[str, Any],
    max_positions: int,
    head_dim: int,
    where: str,
    *,
    partial: bool = False,
    aliases: Mapping[str, str] = ALIASES,
    kinds: Sequence[str] = ROPE_KINDS,
) -> Rope:
    """Read `rope_parameters`, or `rope_theta` and `rope_scaling`.

    `partial`: the family can rotate a part of each head. `aliases`: other names of kinds of scaling. `kinds`: the
    supported kinds. Raises ModelError for a missing, invalid or unsupported value.
    """
    key = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    settings = values.get(key) or {}
    if not isinstance(settings, Mapping):
        raise Fields(values, where).error(key, "an object")
    if any(isinstance(value, Mapping) for value in settings.values()):
        raise ModelError(f"{where}: {key!r} differs by layer type ({', '.join(settings)}), which is not supported")
    fields = Fields(settings, f"{where}, {key}")
    has_factor = settings.get("partial_rotary_factor") is not None
    dims = _rotated(fields if has_factor else Fields(values, where), head_dim, partial)
    theta = fields.number("rope_theta", Fields(values, where).number("rope_theta", 10000.0))
    if theta <= 1.0:
        raise ModelError(f"{where}: rope_theta {theta} must be above 1: each dimension needs its own frequency")
    kind = settings.get("rope_type", settings.get("type", "default"))
    kind = aliases.get(kind, kind) if isinstance(kind, str) else kind
    if kind not in kinds:
        raise ModelError(f"{where}: rope scaling {kind!r} is not supported; supported are {', '.join(kinds)}")
    if kind == "default":
        return Rope(theta, None, dims)
    original_length = Fields(values, where).integer(
        "original_max_position_embeddings", fields.integer("original_max_position_embeddings", max_positions)
    )
    return Rope(theta, _scaling(kind, fields, original_length, max_positions, dims), dims)


def read_layer_rope(
    fields: Fields,
    layer_type: str,
    max_positions: int,
    head_dim: int,
    *,
    theta_key: str,
    default_theta: float,
    kinds: Sequence[str] = ROPE_KINDS,
) -> Rope:
    """Read the rotary embedding of FULL or SLIDING layers, of a family in which they differ.

    Reads transformers 5's `rope_parameters`, an object per layer type, or `theta_key` and, for full attention layers,
    `rope_scaling`.
    """
    values = fields.values
    settings = values.get("rope_parameters") or {}
    if not isinstance(settings, Mapping) or any(not isinstance(value, Mapping | None) for value in settings.values()):
        raise fields.error("rope_parameters", f"an object with the objects {FULL!r} and {SLIDING!r}")
    own = dict(settings.get(layer_type) or {})
    scaling = values.get("rope_scaling")
    if layer_type == FULL and scaling is not None:
        if not isinstance(scaling, Mapping):
            raise fields.error("rope_scaling", "an object")
        own |= scaling
    one = {"rope_theta": fields.number(theta_key, default_theta), "rope_parameters": own}
    return read_rope(one, max_positions, head_dim, f"{fields.where}, {layer_type}", kinds=kinds)


def _rotated(fields: Fields, head_dim: int, partial: bool) -> int:
    """Return the number of rotated elements of a head."""
    key = "partial_rotary_factor"
    factor = fields.number(key, 1.0)
    if factor == 1.0:
        return head_dim
    if not partial:
        raise fields.error(key, "1.0 (rotation of whole heads)")
    dims = int(head_dim * factor)
    if factor > 1.0 or dims < 2 or dims % 2:
        raise fields.error(key, f"at most 1, and an even number of the {head_dim} elements of a head")
    return dims


def _scaling(kind: str, fields: Fields, original_length: int, max_positions: int, dims: int) -> RopeScaling:
    """Return the scaling of one kind; `original_length` is the context length before scaling."""
    if kind == "linear":
        # Only GGUF files have a factor on cos and sin here.
        attention = fields.number("gguf_attn_factor", 1.0)
        return RopeScaling(kind=kind, factor=fields.number("factor"), attention_factor=attention)
    if kind == "dynamic":
        return RopeScaling(kind=kind, factor=fields.number("factor"))
    if kind == "llama3":
        low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
        if high <= low:
            raise fields.error("high_freq_factor", f"above low_freq_factor ({low})")
        return RopeScaling(
            kind=kind,
            factor=fields.number("factor"),
            original_max_position_embeddings=original_length,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    factor = fields.number("factor", max_positions / original_length)
    if kind == "longrope":
        return RopeScaling(
            kind=kind,
            factor=factor,
            original_max_position_embeddings=original_length,
            attention_factor=fields.number("attention_factor", longrope_attention_factor(factor, original_length)),
            short_factor=fields.numbers("short_factor", dims // 2),
            long_factor=fields.numbers("long_factor", dims // 2),
        )
    mscale = fields.number("mscale") if fields.values.get("mscale") else None
    mscale_all = fields.number("mscale_all_dim") if fields.values.get("mscale_all_dim") else None
    return RopeScaling(
        kind=kind,
        factor=factor,
        original_max_position_embeddings=original_length,
        beta_fast=fields.number("beta_fast", 32.0),
        beta_slow=fields.number("beta_slow", 1.0),
        truncate=fields.flag("truncate", True),
        attention_factor=fields.number("attention_factor", yarn_attention_factor(factor, mscale, mscale_all)),
    )
