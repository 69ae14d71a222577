"""Moves of KV pages between the device, host memory and disk, as the core orders them and the workers report them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class RisingBlock(NamedTuple):
    """A block to copy to a page. It is in a slot of host memory, or in the file `name`, which is read into the slot."""

    slot: int
    page: int
    name: str = ""


class PromotionOrder(NamedTuple):
    """Blocks to bring to the device together, as promotion `number`."""

    number: int
    blocks: list[RisingBlock]


@dataclass
class Moves:
    """What to move, in the order of the fields.

    - clears: delete all files first; the weights may have changed since.
    - offloads: the page to copy to each slot, by slot. The pages may be overwritten by the next step.
    - promotions: blocks to copy to pages.
    - writes: slots to write to files, by name, in the background.
    - deletions: names of files to delete.
    """

    clears: bool = False
    offloads: dict[int, int] = field(default_factory=dict)
    promotions: list[PromotionOrder] = field(default_factory=list)
    writes: dict[str, int] = field(default_factory=dict)
    deletions: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.clears or self.offloads or self.promotions or self.writes or self.deletions)


@dataclass
class Moved:
    """What has been moved since the last report.

    - promoted: by the number of a promotion, the indices of its blocks that could not be read.
    - written: by slot, the bytes of the file; 0 if it was not written.
    """

    promoted: dict[int, list[int]] = field(default_factory=dict)
    written: dict[int, int] = field(default_factory=dict)
