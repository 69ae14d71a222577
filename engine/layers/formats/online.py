"""Plain checkpoints that are quantised while they load (`--quantization`): storage takes plain tensors only."""

from __future__ import annotations

from typing import Any

from engine.layers.formats.region import CheckpointTensor, Region
from engine.layers.formats.scaled_weight import ScaledWeight
from engine.layers.formats.slots import PLAIN_NAME, PlainSlot
from engine.layers.weight_method import Stored


class OnlineWeight(ScaledWeight):
    """`weight`, a plain tensor."""

    def checkpoint_tensors(self, region: Region) -> dict[str, CheckpointTensor]:
        return {}

    def slots(self, layer: Any, start: int, rows: int, expert: int | None = None) -> dict[str, Stored]:
        return {PLAIN_NAME: Stored(PlainSlot(self, self.region(layer, start, rows, expert)), 0, 1)}
