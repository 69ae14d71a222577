"""Greedy sampling inside the captured step: choose each row's most likely token and write the next step's inputs."""

from __future__ import annotations

import torch
from torch import Tensor


class GreedySampler:
    """Chooses the most likely token of up to `max_rows` rows, without host reads. Use it on one stream."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device):
        self._values = self._tokens = torch.empty(0)
        self._is_cuda = device.type == "cuda"
        if self._is_cuda:
            from engine.kernels.greedy import TILE  # triton is installed only with CUDA

            tiles = -(-vocab_size // TILE)
            self._values = torch.empty(max_rows * tiles, dtype=torch.float32, device=device)
            self._tokens = torch.empty(max_rows * tiles, dtype=torch.int32, device=device)

    def __call__(
        self,
        logits: Tensor,
        maxima: tuple[Tensor, Tensor] | None,
        slots: Tensor,
        positions: Tensor | None,
        last_tokens: Tensor,
        next_tokens: Tensor,
    ) -> None:
        """Choose from logits [b, vocab], or from their `maxima` by tile (see TileMaxima) if those are known.

        - next_tokens int64 [b] gets the token, or -1 if the row's largest logit is not finite.
        - last_tokens [entries] gets, at the row's slot, a token that the next step can embed: the row's request fails,
          but its next step may already be enqueued.
        - positions int64 [b], unless None, advance by 1.

        Rows of slot 0 are padding: they change neither last_tokens nor positions.
        """
        if self._is_cuda:
            from engine.kernels.greedy import choose_greedy, tile_maxima

            if maxima is None:
                rows, tiles = len(logits), tile_maxima(logits, self._values, self._tokens)
                count = rows * tiles
                maxima = self._values[:count].view(rows, tiles), self._tokens[:count].view(rows, tiles)
            choose_greedy(*maxima, slots, positions, last_tokens, next_tokens)
            return
        best, ids = logits.max(dim=-1)
        next_tokens.copy_(ids.masked_fill(best - best != 0, -1))  # the difference is NaN for NaN and the infinities
        is_real = slots.sign()
        last_tokens.index_copy_(0, slots, ids * is_real)
        if positions is not None:
            positions.add_(is_real)
