"""The static inputs of a decode step, filled from requests: tokens, positions and page tables by row.

Owns the staging on the host and what is known to be in each row already, so that a step writes only what changed.
Knows no graphs and no sampling.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.request import Request
from graph_cache.buffers import BATCH, BufferSpec, StaticBuffers


def decode_buffers(max_num_seqs: int, pages: int, hidden_size: int, vocab_size: int, dtype: torch.dtype,
                   device: torch.device) -> StaticBuffers:
    """The decode site's static buffers.

    tokens, positions int64 [b], page_table int64 [b, pages]: inputs, padded with 0 (the scratch page, length 1).
    hidden [b, hidden_size]: what passes between the parts of a layer-scoped step. logits [b, vocab_size] and
    next_tokens int64 [b]: outputs; a next token is -1 where the row's logits are not finite.
    """
    specs = {
        "tokens": BufferSpec((BATCH,), torch.int64),
        "positions": BufferSpec((BATCH,), torch.int64),
        "page_table": BufferSpec((BATCH, pages), torch.int64),
        "hidden": BufferSpec((BATCH, hidden_size), dtype, pad=None),
        "logits": BufferSpec((BATCH, vocab_size), dtype, pad=None),
        "next_tokens": BufferSpec((BATCH,), torch.int64, pad=None),
    }
    return StaticBuffers(specs, max_num_seqs, device)


class StepInputs:
    """Writes a decode batch into the static buffers. On a CPU the buffers are written directly, without staging."""

    def __init__(self, buffers: StaticBuffers):
        self._buffers = buffers
        on_gpu = buffers.device.type == "cuda"
        names = ("tokens", "positions", "page_table")
        self._host = {name: torch.zeros_like(buffers[name], device="cpu").pin_memory() if on_gpu else buffers[name]
                      for name in names}
        self._arrays: dict[str, np.ndarray] = {name: tensor.numpy() for name, tensor in self._host.items()}
        self._staged = on_gpu
        # What each page-table row holds: the request's list of pages and how many of them are written. The list object
        # itself is kept: a request that lost its pages gets a new list, so identity tells.
        self._rows: list[tuple[list[int] | None, int]] = [(None, 0)] * buffers.max_rows

    def forget(self) -> None:
        """Take nothing for granted at the next load: something else wrote to the buffers."""
        # Not None: that says "all scratch", and a padded row with pages left in it would write into another's KV.
        self._rows = [([], 0)] * self._buffers.max_rows

    def load(self, requests: Sequence[Request], bucket: int) -> None:
        """Row i gets request i's last token, its position and its pages; rows up to `bucket` become padding."""
        rows = len(requests)
        tokens, positions, table = (self._arrays[name] for name in ("tokens", "positions", "page_table"))
        tokens[:rows] = [request.token_ids[-1] for request in requests]
        positions[:rows] = [request.num_computed for request in requests]
        tokens[rows:bucket] = 0
        positions[rows:bucket] = 0
        changed = False
        for row, request in enumerate(requests):
            pages, written = self._rows[row]
            if pages is not request.pages:
                written = 0
            have = len(request.pages)
            if written < have:
                table[row, written:have] = request.pages[written:]
                self._rows[row] = (request.pages, have)
                changed = True
        for row in range(rows, bucket):
            if self._rows[row][0] is not None:
                table[row] = 0
                self._rows[row] = (None, 0)
                changed = True
        if self._staged:
            # Safe without a wait: a step's result is read before the next step is staged.
            for name in ("tokens", "positions", *(("page_table",) if changed else ())):
                self._buffers[name][:bucket].copy_(self._host[name][:bucket], non_blocking=True)
