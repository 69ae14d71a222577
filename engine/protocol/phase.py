"""The phases of a row in a step: how many tokens it computes, and how many it may append."""

from __future__ import annotations

import enum


class Phase(enum.StrEnum):
    """What a row of a batch does. Part of the key of the graph that runs it; never inferred from shapes.

    - PREFILL: computes a chunk of known tokens; appends one token if the chunk ends them.
    - DECODE: computes the newest token; appends one.
    - VERIFY: computes the newest token and k draft tokens; appends 1 to k + 1, the drafts that sampling confirms and
      the token after them.
    """

    PREFILL = "prefill"
    DECODE = "decode"
    VERIFY = "verify"
