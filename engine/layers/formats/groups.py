"""Columns that name their group of scales: `g_idx` of activation order."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.layers.formats.region import CheckpointTensor, Region
from engine.layers.formats.scaled_weight import ScaledWeight


def group_index(method: ScaledWeight, region: Region) -> CheckpointTensor:
    """Return the tensor of the group of each column, integers [inputs] in range."""
    groups = method.grid(region)[1]

    def check(index: Tensor) -> str | None:
        low, high = int(index.min()), int(index.max())
        if 0 <= low and high < groups:
            return None
        return f"has groups {low} to {high}, expected 0 to {groups - 1}"

    return CheckpointTensor(
        ((region.inputs,),),
        (torch.int32, torch.int64),
        lambda index: method.store_groups(region, index),
        lambda: method.load_groups(region),
        check,
    )


def ordered_groups(method: ScaledWeight, region: Region) -> CheckpointTensor:
    """Return a tensor that may repeat what is known without it: columns are in the order of their groups."""
    columns = method.blocks(region)[1]

    def check(index: Tensor) -> str | None:
        expected = torch.arange(region.inputs, device=index.device) // columns
        return (
            None if torch.equal(index.long(), expected) else "is not in order, but quantization_config has no desc_act"
        )

    return CheckpointTensor(
        ((region.inputs,),),
        (torch.int32, torch.int64),
        lambda index: None,
        lambda: torch.arange(region.inputs, dtype=torch.int32) // columns,
        check,
        required=False,
    )
