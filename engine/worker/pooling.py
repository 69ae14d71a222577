"""Pool the hidden states of prompts on the device: what is copied to the host is one vector per prompt."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.models.interface import Model
from engine.utils.async_copy import Download, ids_to
from engine.worker.async_output import AsyncStepOutput
from engine.worker.step_input import ChunkInput


class Pooler:
    """Computes the vectors of prompts that end in a step, and sums those with mean pooling over their chunks.

    `model` has the classification head, `step_model` the norm after the last layer. Not thread-safe.
    """

    def __init__(self, model: Model, step_model: Model):
        self._model, self._step_model = model, step_model
        # By slot, float32 [h]: of a prompt's chunks so far. The prompt of an aborted request leaves its sum until
        # another begins in the slot.
        self._sums: dict[int, Tensor] = {}

    def pool(self, chunks: Sequence[ChunkInput], hidden: Tensor, output: AsyncStepOutput) -> None:
        """Add to `output` the vectors of the prompts that end. hidden [T, h]: of the chunks, after the last layer."""
        if all(chunk.pooling is None for chunk in chunks):
            return
        by_mode: dict[str, list[tuple[ChunkInput, int]]] = {"last": [], "mean": [], "classify": []}  # and their starts
        start = 0
        for chunk in chunks:
            if chunk.pooling is not None and (chunk.is_last or chunk.pooling.mode == "mean"):
                by_mode[chunk.pooling.mode].append((chunk, start))
            start += chunk.length
        if by_mode["last"]:
            self._send(by_mode["last"], self._last(by_mode["last"], hidden), output)
        if by_mode["classify"]:
            logits = self._model.classify(self._last(by_mode["classify"], hidden))
            self._send(by_mode["classify"], logits, output)
        if by_mode["mean"]:
            means = [self._mean(chunk, hidden[at : at + chunk.length]) for chunk, at in by_mode["mean"]]
            ended = [(pair, mean) for pair, mean in zip(by_mode["mean"], means, strict=True) if mean is not None]
            if ended:
                self._send([pair for pair, _ in ended], torch.stack([mean for _, mean in ended]), output)

    def _last(self, chunks: Sequence[tuple[ChunkInput, int]], hidden: Tensor) -> Tensor:
        """Return the hidden states [n, h] of the last tokens, after the norm."""
        ends = ids_to(hidden.device, [start + chunk.length - 1 for chunk, start in chunks])
        return self._step_model.final_norm(hidden.index_select(0, ends))

    def _mean(self, chunk: ChunkInput, rows: Tensor) -> Tensor | None:
        """Add a chunk's rows [n, h] to its prompt's sum; return the mean [h] if the prompt ends."""
        total = self._step_model.final_norm(rows).sum(0, dtype=torch.float32)
        if chunk.start:  # else a prompt that begins, perhaps again after a preemption
            total += self._sums.pop(chunk.slot)
        if chunk.is_last:
            return total / (chunk.start + chunk.length)
        self._sums[chunk.slot] = total
        return None

    def _send(self, chunks: Sequence[tuple[ChunkInput, int]], vectors: Tensor, output: AsyncStepOutput) -> None:
        owners = [
            (chunk.pooling.request_id, chunk.start + chunk.length - 1, 1)
            for chunk, _ in chunks
            if chunk.pooling is not None
        ]
        output.hidden_states.append((Download(vectors), owners))
