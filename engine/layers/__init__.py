"""Model layers: RMSNorm, rotary embedding, fused linear layers and their weight slots.

Layers are independent of requests, KV pages and checkpoint files.
"""

from engine.layers.linear import Embedding, Linear
from engine.layers.norm import HeadNorm, RMSNorm
from engine.layers.rotary import RopeScaling, RotaryTable, rotate
from engine.layers.weight_slot import WeightSlot

__all__ = ["Embedding", "HeadNorm", "Linear", "RMSNorm", "RopeScaling", "RotaryTable", "WeightSlot", "rotate"]
