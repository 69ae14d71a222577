"""The identity of a graph: everything that would be baked into it.

Owns GraphKey and Plan, two frozen values. Knows no tensors: a plan is made from a batch size alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Variant = tuple[tuple[str, int | float | bool | str | None], ...]

# Why a batch runs eager. A fixed vocabulary: these are the values of the `reason` label in the metrics.
GRAPHS_OFF = "graphs_off"
ABOVE_MAX = "above_largest_bucket"
NOT_CAPTURED = "not_captured"
UNKNOWN_VARIANT = "unknown_variant"
CAPTURE_FAILED = "capture_failed"
STALE = "stale_address"
EVICTED = "evicted"
REASONS = (GRAPHS_OFF, ABOVE_MAX, NOT_CAPTURED, UNKNOWN_VARIANT, CAPTURE_FAILED, STALE, EVICTED)


@dataclass(frozen=True, slots=True)
class GraphKey:
    """One graph: its site, scope and phase, the padded batch size, and every Python value that capture bakes in."""

    site: str
    scope: str
    phase: str
    bucket: int
    variant: Variant = ()
    _spelled: str = field(init=False, repr=False)  # tells 1, 1.0 and True apart, which Python takes for equal

    def __post_init__(self) -> None:
        object.__setattr__(self, "_spelled", repr(self.variant))

    @property
    def statics(self) -> Variant:
        """Alias of `variant`."""
        return self.variant

    def __str__(self) -> str:
        values = "".join(f",{name}={value}" for name, value in self.variant)
        return f"{self.site}[{self.scope},{self.phase},{self.bucket}{values}]"


@dataclass(frozen=True, slots=True)
class Plan:
    """What `GraphCache.plan` answers: a graph to replay, or eager and why.

    `bucket` is the padded batch size, also for an eager run that pads (so that warming up changes no rounding);
    None means that no bucket holds the batch and the callable runs on the tensors as they are. `variant` are the
    keyword values that were asked for.
    """

    site: str
    rows: int
    bucket: int | None
    key: GraphKey | None
    reason: str | None
    variant: Variant = ()

    @property
    def statics(self) -> Variant:
        """Alias of `variant`."""
        return self.variant

    @property
    def is_graph(self) -> bool:
        """True when this plan replays a graph."""
        return self.reason is None


def freeze_variant(variant: dict) -> Variant:
    """Sort keyword values into the hashable form that keys use."""
    return tuple(sorted(variant.items()))
