"""Model layers: norms, rotary embedding, fused and tensor-parallel linear layers, and their weight slots.

Layers are independent of requests, KV pages and checkpoint files.
"""

from engine.kernels.linear_weight import LinearWeight
from engine.layers.linear import Embedding, Linear
from engine.layers.norm import AllHeadsNorm, HeadNorm, LayerNorm, PerHeadLayerNorm, RMSNorm
from engine.layers.parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, VocabParallelHead
from engine.layers.rotary import RopeScaling, RotaryTable, rotate
from engine.layers.weight_slot import PartSlot, WeightSlot

__all__ = [
    "AllHeadsNorm",
    "ColumnParallelLinear",
    "Embedding",
    "HeadNorm",
    "LayerNorm",
    "Linear",
    "LinearWeight",
    "PartSlot",
    "PerHeadLayerNorm",
    "RMSNorm",
    "RopeScaling",
    "RotaryTable",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "WeightSlot",
    "rotate",
]
