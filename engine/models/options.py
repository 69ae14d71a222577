"""Where and how the layers of a model are created: dtype, device, rank, and weight methods."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.distributed.tensor_parallel import SINGLE_RANK, TensorParallel
from engine.layers.parallel import ColumnParallelLinear, RowParallelLinear, rank_inputs, rank_rows
from engine.layers.weight_method import WeightMethods, plain_weights


@dataclass(frozen=True)
class LayerOptions:
    """What all layers of a model share. `methods` chooses the weight method of each linear layer."""

    dtype: torch.dtype
    device: torch.device
    parallel: TensorParallel = SINGLE_RANK
    methods: WeightMethods = plain_weights

    def column_linear(
        self, prefix: str, parts: dict[str, int], inputs: int, *, bias: bool, joined: str | None = None
    ) -> ColumnParallelLinear:
        """Create a linear layer whose outputs are split; `prefix` begins the checkpoint names of its parts.

        `joined` is the name of one checkpoint tensor that has the rows of all parts.
        """
        rows = rank_rows(parts, self.parallel)
        return ColumnParallelLinear(
            parts,
            inputs,
            bias=bias,
            dtype=self.dtype,
            device=self.device,
            parallel=self.parallel,
            method=self.methods(prefix, rows if joined is None else {joined: sum(rows.values())}, inputs),
            joined=joined,
        )

    def row_linear(self, prefix: str, parts: dict[str, int], inputs: int, *, bias: bool) -> RowParallelLinear:
        """Create a linear layer whose inputs are split; `prefix` begins the checkpoint names of its parts."""
        return RowParallelLinear(
            parts,
            inputs,
            bias=bias,
            dtype=self.dtype,
            device=self.device,
            parallel=self.parallel,
            method=self.methods(prefix, parts, rank_inputs(parts, inputs, self.parallel)),
        )
