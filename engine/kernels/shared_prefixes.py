"""Which rows of a decode step share their first pages, as attention reads it from device memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class SharedPrefixes(NamedTuple):
    """Groups of rows whose first pages are the same, for cascade attention. All int64 on the device.

    - keys [at least b]: the number of leading keys that a row shares with its group, whole pages and at most the row's
      position; 0 for a row without a group. Members of a group have equal `keys`.
    - members [G, M]: row + 1 of the members of each group, packed to the left, 0 for none. Every row with keys is among
      them. M is that of `prefix_members` in paged_decode.py.
    - num_groups [1]: the number of groups with members, which come first.
    """

    keys: Tensor
    members: Tensor
    num_groups: Tensor
