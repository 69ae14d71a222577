"""The parts models are made of: RMSNorm, rotary positions, fused linear layers and their weight slots.

Layers own parameters and arithmetic; they know no request, no page and no file.
"""

from engine.layers.linear import Embedding, Linear
from engine.layers.norm import HeadNorm, RMSNorm
from engine.layers.rotary import RopeScaling, RotaryTable, rotate
from engine.layers.weight_slot import WeightSlot

__all__ = ["Embedding", "HeadNorm", "Linear", "RMSNorm", "RopeScaling", "RotaryTable", "WeightSlot", "rotate"]
