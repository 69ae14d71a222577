"""Tensor-parallel layers: each rank holds and computes a part of a linear layer or of the vocabulary.

With one rank they are the plain layers of linear.py. A checkpoint tensor's slot takes the whole tensor and writes this
rank's part of it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.distributed.tensor_parallel import SINGLE_RANK, TensorParallel
from engine.errors import ModelError
from engine.layers.float32_linear import linear_float32
from engine.layers.linear import Embedding, Linear
from engine.layers.weight_method import PLAIN, WeightMethod
from engine.layers.weight_slot import JoinedSlot, MatrixSlot, PartSlot, Slot, SplitSlot, WeightSlot


class ColumnParallelLinear(Linear):
    """Linear layer whose outputs are split: x [T, inputs] -> this rank's 1 / size of the outputs of each part.

    `parts` gives whole sizes. Every part is split by itself, so a rank of a fused QKV projection has its q rows, then
    its k rows, then its v rows; a `joined` checkpoint tensor is split by its parts too. Raises ModelError if a part is
    not divisible by the number of ranks.
    """

    def __init__(
        self,
        parts: dict[str, int],
        inputs: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        parallel: TensorParallel = SINGLE_RANK,
        method: WeightMethod = PLAIN,
        joined: str | None = None,
    ):
        rows = rank_rows(parts, parallel)
        super().__init__(rows, inputs, bias=bias, dtype=dtype, device=device, method=method, joined=joined)
        self.parallel = parallel

    def slots(self, prefix: str) -> dict[str, Slot]:
        """Map Hugging Face names to this rank's rows of the fused storage."""
        if self.joined is not None and self.parallel.size > 1:
            return {f"{prefix}.{self.joined}.{suffix}": slot for suffix, slot in self._joined_slots().items()}
        return {
            name: split_slot(stored.slot, stored.output_dim, self.parallel)
            for name, stored in self.stored(prefix).items()
        }

    def _joined_slots(self) -> dict[str, Slot]:
        """Map the last parts of checkpoint names to slots of the joined tensor, of which each part is split."""
        pieces, start = [], 0
        for rows in self.parts.values():
            pieces.append(self.stored_rows(start, rows))
            start += rows
        if unsplit := [suffix for suffix, stored in pieces[0].items() if stored.output_dim != 0]:
            raise ModelError(f"{', '.join(unsplit)} of {self.joined} can't be split over tensor-parallel ranks")
        return {
            suffix: JoinedSlot([split_slot(piece[suffix].slot, 0, self.parallel) for piece in pieces])
            for suffix in pieces[0]
        }


class RowParallelLinear(Linear):
    """Linear layer whose inputs are split: this rank's x [T, inputs / size] -> y [T, outputs], summed over the ranks.

    `inputs` is the whole size. Every rank stores the bias, and only the first adds it. Raises ModelError if `inputs` is
    not divisible by the number of ranks.
    """

    def __init__(
        self,
        parts: dict[str, int],
        inputs: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        parallel: TensorParallel = SINGLE_RANK,
        method: WeightMethod = PLAIN,
    ):
        own = rank_inputs(parts, inputs, parallel)
        super().__init__(parts, own, bias=bias, dtype=dtype, device=device, method=method)
        self.parallel = parallel

    def forward(self, x: Tensor) -> Tensor:
        return self.parallel.all_reduce(self.method.apply(self, x, self.bias if self.parallel.is_first else None))

    def slots(self, prefix: str) -> dict[str, Slot]:
        """Map Hugging Face names to this rank's columns of the weight, and to the whole bias."""
        return {
            name: split_slot(stored.slot, stored.input_dim, self.parallel)
            for name, stored in self.stored(prefix).items()
        }


class VocabParallelEmbedding(Embedding):
    """Embedding table whose rows are split: token ids [T] int64 -> hidden [T, h], on every rank.

    Each rank stores the rows of `vocab_part`; padding rows are zero and belong to no slot.
    """

    def __init__(
        self,
        vocab: int,
        hidden: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        parallel: TensorParallel = SINGLE_RANK,
    ):
        part = parallel.vocab_part(vocab)
        super().__init__(part.rows, hidden, dtype=dtype, device=device)
        self.vocab, self.vocab_part, self.parallel = vocab, part, parallel
        self.weight.data[part.used :].zero_()

    def forward(self, token_ids: Tensor) -> Tensor:
        if self.parallel.size == 1:
            return F.embedding(token_ids, self.weight)
        part = self.vocab_part
        return self.parallel.all_reduce(embed_part(token_ids, self.weight[: part.used], part.first))

    def slots(self, prefix: str) -> dict[str, Slot]:
        """Map the table's Hugging Face name to this rank's rows."""
        return {f"{prefix}.weight": _vocab_slot(self.weight, self.vocab, self.parallel)}


class VocabParallelHead(Linear):
    """LM head whose rows are split: hidden [N, h] -> float32 logits [N, vocab], gathered on every rank without padding.

    `tied`: the weight of a VocabParallelEmbedding of the same vocabulary and ranks, which the head then uses. `bias`:
    whether the head has a bias, not with a tied weight.
    """

    def __init__(
        self,
        vocab: int,
        hidden: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        parallel: TensorParallel = SINGLE_RANK,
        tied: torch.nn.Parameter | None = None,
        bias: bool = False,
    ):
        part = parallel.vocab_part(vocab)
        device = device if tied is None else torch.device("meta")  # a tied head shares the storage
        super().__init__({"lm_head": part.rows}, hidden, bias=bias, dtype=dtype, device=device)
        self.vocab, self.parallel = vocab, parallel
        if tied is None:
            self.weight.data[part.used :].zero_()
        else:
            self.weight = tied
        if self.bias is not None:
            self.bias.data[part.used :].zero_()

    def forward(self, x: Tensor) -> Tensor:
        logits = linear_float32(x, self.weight)
        return self.parallel.gather_columns(logits if self.bias is None else logits + self.bias, self.vocab)

    def slots(self, prefix: str) -> dict[str, Slot]:
        """Map the parameters' Hugging Face names to this rank's rows."""
        slots = {f"{prefix}.lm_head.weight": _vocab_slot(self.weight, self.vocab, self.parallel)}
        if self.bias is not None:
            slots[f"{prefix}.lm_head.bias"] = _vocab_slot(self.bias, self.vocab, self.parallel)
        return slots


def embed_part(token_ids: Tensor, table: Tensor, first: int) -> Tensor:
    """Return the rows of token ids int64 [T] in a table of the tokens from `first` on: [T, h], 0 for other tokens."""
    local_ids = token_ids - first
    is_local = (local_ids >= 0) & (local_ids < len(table))
    return F.embedding(local_ids * is_local, table).masked_fill_(~is_local.unsqueeze(1), 0)


def rank_rows(parts: Mapping[str, int], parallel: TensorParallel) -> dict[str, int]:
    """Return a rank's rows of the parts of a ColumnParallelLinear. Raises ModelError if they can't be split."""
    return {name: _divide(rows, parallel, f"{name} with {rows} outputs") for name, rows in parts.items()}


def rank_inputs(parts: Mapping[str, int], inputs: int, parallel: TensorParallel) -> int:
    """Return a rank's inputs of a RowParallelLinear. Raises ModelError if they can't be split."""
    return _divide(inputs, parallel, f"{', '.join(parts)} with {inputs} inputs")


def _divide(size: int, parallel: TensorParallel, what: str) -> int:
    """Return a rank's share of `size`. Raises ModelError, with `what` as the subject, if it is not a whole number."""
    if size % parallel.size:
        raise ModelError(f"{what} can't be split over {parallel.size} tensor-parallel ranks")
    return size // parallel.size


def split_slot(slot: Slot, dim: int | None, parallel: TensorParallel) -> Slot:
    """Return the slot of a whole tensor that is split evenly along `dim` (None: not at all).

    `slot` holds this rank's part.
    """
    if parallel.size == 1 or dim is None:
        return slot
    if isinstance(slot, MatrixSlot):
        return slot.split(dim, parallel.rank, parallel.size)
    shape = list(slot.shape)
    start = parallel.rank * shape[dim]
    shape[dim] *= parallel.size
    if isinstance(slot, WeightSlot):
        return PartSlot(slot.target, tuple(shape), dim, start)
    return SplitSlot(slot, tuple(shape), dim, start)


def _vocab_slot(weight: Tensor, vocab: int, parallel: TensorParallel) -> Slot:
    if parallel.size == 1:
        return WeightSlot(weight)
    part = parallel.vocab_part(vocab)
    return PartSlot(weight.data[: part.used], (vocab, *weight.shape[1:]), 0, part.first)
