"""How checkpoints name and lay out the tensors of experts: one tensor per expert, or one of all experts.

Shapes: E experts, h hidden size, I an expert's intermediate size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.layers.weight_slot import Slot

STACKED_GATE_UP, STACKED_DOWN = "gate_up_proj", "down_proj"
"""Names of stacked experts, tensors [E, 2I, h] and [E, h, I], in the modules of transformers 5."""


@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """Names of the tensors of a layer with experts, after the layer's prefix, and how a checkpoint lays them out.

    - router, experts: the router and the module of the experts. shared, shared_gate: the shared expert and its gate.
    - gate, up, down: the matrices of an expert: `{experts}.{index}.{gate}.weight` and so on.
    - stacked: names of the checkpoint's tensors of all experts, gate and up [E, 2I, h] with gate first, and down
      [E, h, I]; None: it has tensors per expert. Biases, if any, are [E, 2I] and [E, h], and have `_bias` in the name.
    - interleaved: stacked matrices are transposed, and gate and up take turns: [E, h, 2I] and [E, I, h].
    - aliases: (part of another name, that part in the checkpoint's name): names that modules of transformers 5 have.
    """

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    stacked: tuple[str, str] | None = None
    interleaved: bool = False
    aliases: tuple[tuple[str, str], ...] = ()
    shared: str = "mlp.shared_expert"
    shared_gate: str = "mlp.shared_expert_gate"

    def checkpoint_tensors(self, tensors: Iterable[Any], experts: int) -> Iterator[Any]:
        """Yield (name, tensor) pairs under the checkpoint's names.

        Renames aliases. Where the checkpoint has a tensor per expert, stacked ones become views of each expert's
        matrices. Items that are no such pairs pass unchanged, for the caller to reject.
        """
        for item in tensors:
            if not isinstance(item, tuple | list) or len(item) != 2 or not isinstance(item[0], str):
                yield item
                continue
            name, tensor = item
            for other, own in self.aliases:
                name = name.replace(other, own)
            if self.stacked is None and self._is_stacked(name, tensor, experts):
                yield from self._split(name, tensor)
            else:
                yield name, tensor

    def _is_stacked(self, name: str, tensor: Any, experts: int) -> bool:
        """Return whether the tensor, which a caller may have sent malformed, stacks as many experts."""
        names = (f".{self.experts}.{STACKED_GATE_UP}", f".{self.experts}.{STACKED_DOWN}")
        return name.endswith(names) and isinstance(tensor, Tensor) and tensor.dim() == 3 and len(tensor) == experts

    def _split(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        prefix, _, part = name.rpartition(".")
        for index, matrix in enumerate(tensor):
            if part == STACKED_DOWN:
                yield f"{prefix}.{index}.{self.down}.weight", matrix
            else:
                gate, up = matrix.tensor_split(2)
                yield f"{prefix}.{index}.{self.gate}.weight", gate
                yield f"{prefix}.{index}.{self.up}.weight", up


class StackedSlot:
    """The slot of a checkpoint tensor of all experts, stored through the slots of each expert's matrices or biases.

    `parts` has one tuple of slots per expert: (gate, up) or (down,). `interleaved`: the tensor's rows take turns
    between the parts, and its matrices are transposed. Each slot may hold this rank's part, in any format.
    """

    def __init__(self, parts: Sequence[tuple[Slot, ...]], *, interleaved: bool):
        self.parts, self.interleaved = parts, interleaved
        rows = sum(slot.shape[0] for slot in parts[0])
        shape = (rows, *parts[0][0].shape[1:])
        self.shape = (len(parts), *(reversed(shape) if interleaved else shape))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype to which `write` converts."""
        return self.parts[0][0].dtype

    def write(self, tensor: Tensor) -> None:
        """Store `tensor` (any floating dtype, any device) in place, expert by expert."""
        for slots, pieces in zip(self.parts, map(self._cut, tensor), strict=True):
            for slot, piece in zip(slots, pieces, strict=True):
                slot.write(piece)

    def part_of(self, tensor: Tensor) -> Tensor:
        """Return the part of the whole `tensor` that is stored here, as a copy."""
        return torch.stack(
            [
                self._join([slot.part_of(piece) for slot, piece in zip(slots, pieces, strict=True)])
                for slots, pieces in zip(self.parts, map(self._cut, tensor), strict=True)
            ]
        )

    def read(self) -> Tensor:
        """Return the stored tensor, or this rank's part of it, as a copy."""
        return torch.stack([self._join([slot.read() for slot in slots]) for slots in self.parts])

    def _cut(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return views of the parts of one expert."""
        count = len(self.parts[0])
        if self.interleaved:
            rows = tensor.mT if tensor.dim() == 2 else tensor
            return tuple(rows[start::count] for start in range(count))
        return tensor.tensor_split(count)

    def _join(self, pieces: Sequence[Tensor]) -> Tensor:
        if not self.interleaved:
            return torch.cat(tuple(pieces))
        rows = torch.stack(tuple(pieces), dim=1).flatten(0, 1)
        return rows.mT if rows.dim() == 2 else rows
