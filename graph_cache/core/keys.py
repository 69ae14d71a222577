"""Identity of a graph: every value that a capture bakes in.

Defines two frozen values, GraphKey and Plan. A plan depends on the batch size and keyword values, not on tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Variant = tuple[tuple[str, int | float | bool | str | None], ...]

# Reasons why a batch runs eager. A fixed set: these are the values of the `reason` label in the metrics.
GRAPHS_OFF = "graphs_off"
ABOVE_MAX = "above_largest_bucket"
NOT_CAPTURED = "not_captured"
UNKNOWN_VARIANT = "unknown_variant"
CAPTURE_FAILED = "capture_failed"
STALE = "stale_address"
EVICTED = "evicted"
WARMING_UP = "warming_up"  # training only
OTHER_MODES = "other_modes"
REPEATED = "repeated_tensor"
UNCHECKED_ROWS = "unchecked_rows"
OTHER_THREAD = "other_thread"  # training only
REASONS = (
    GRAPHS_OFF,
    ABOVE_MAX,
    NOT_CAPTURED,
    UNKNOWN_VARIANT,
    CAPTURE_FAILED,
    STALE,
    EVICTED,
    WARMING_UP,
    OTHER_MODES,
    REPEATED,
    UNCHECKED_ROWS,
)


@dataclass(frozen=True, slots=True)
class GraphKey:
    """Identity of one graph: site, scope, phase, padded batch size, and every Python value that capture bakes in."""

    site: str
    scope: str
    phase: str
    bucket: int
    variant: Variant = ()
    _spelled: str = field(init=False, repr=False)  # distinguishes 1, 1.0 and True, which compare equal

    def __post_init__(self) -> None:
        object.__setattr__(self, "_spelled", repr(self.variant))

    @property
    def statics(self) -> Variant:
        """The earlier name of `variant`."""
        return self.variant

    def __str__(self) -> str:
        values = "".join(f",{name}={value}" for name, value in self.variant)
        return f"{self.site}[{self.scope},{self.phase},{self.bucket}{values}]"


@dataclass(frozen=True, slots=True)
class Plan:
    """Result of `GraphCache.plan`: a graph to replay, or eager with a reason.

    `bucket` is the padded batch size, also for an eager run that pads, so that warming up does not change any rounding.
    None means that no bucket holds the batch and the callable runs on the tensors without padding. `variant` holds the
    requested keyword values.
    """

    site: str
    rows: int
    bucket: int | None
    key: GraphKey | None
    reason: str | None
    variant: Variant = ()

    @property
    def statics(self) -> Variant:
        """The earlier name of `variant`."""
        return self.variant

    @property
    def is_graph(self) -> bool:
        """True if this plan replays a graph."""
        return self.reason is None


def freeze_variant(variant: dict) -> Variant:
    """Sort keyword values into the hashable form used by keys."""
    return tuple(sorted(variant.items()))
