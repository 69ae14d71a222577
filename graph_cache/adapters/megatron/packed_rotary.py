"""Unfused rotary embedding of packed sequences without host reads, in place of Megatron's while it is installed.

Megatron-Core 0.16 splits the batch by lengths that it reads on the host. Here each token finds its position in its
document on the device, from the same cu_seqlens, so lengths are inputs of a graph. The values are Megatron's bit for
bit. Later versions compute positions on the device themselves when they are given max_seqlen.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils
from torch import Tensor, nn

from graph_cache.errors import GraphConfigError

_NAME, _OF_TOKENS = "_apply_rotary_pos_emb_thd", "_apply_rotary_pos_emb_bshd"


def reads_lengths_on_host() -> bool:
    """Whether Megatron's own function reads lengths on the host."""
    return "max_seqlen" not in inspect.signature(_innermost(getattr(rope_utils, _NAME))).parameters


class RotaryReplacement:
    """A replacement of Megatron's function for packed sequences, between `install` and `remove`."""

    def __init__(self) -> None:
        self.replaced: Callable[..., Tensor] | None = None

    def install(self) -> None:
        """Replace the function that is there, which may be another replacement."""
        self.replaced = getattr(rope_utils, _NAME)
        setattr(rope_utils, _NAME, self)

    def remove(self) -> None:
        """Restore the replaced function, also if others were installed over this one."""
        current = getattr(rope_utils, _NAME)
        if current is self:
            setattr(rope_utils, _NAME, self.replaced)
            return
        while isinstance(current, RotaryReplacement):
            if current.replaced is self:
                current.replaced = self.replaced
                return
            current = current.replaced

    def __call__(self, t: Tensor, cu_seqlens: Tensor, freqs: Tensor, *args: Any, **options: Any) -> Tensor:
        """Rotate t [tokens, heads, d] by the angles of freqs [positions, 1, 1, d], as Megatron's function does."""
        raise NotImplementedError


class DeviceRotary(RotaryReplacement):
    """Finds the positions of packed documents on the device.

    A table with one row per token of the batch holds absolute positions (mrope); any other table holds the positions of
    one document. Megatron distinguishes them by the last entry of cu_seqlens, which is the number of tokens. Under
    context parallelism that is the number over all ranks: this rank has two chunks of each document, one counted from
    its start and one from its end.
    """

    def __call__(self, t: Tensor, cu_seqlens: Tensor, freqs: Tensor, *args: Any, **options: Any) -> Tensor:
        """Rotate t [tokens, heads, d] by the angles of freqs [positions, 1, 1, d], as Megatron's function does."""
        cp_group = options.pop("cp_group", None)
        if args or cp_group is None:
            raise GraphConfigError(
                "packed rotary embeddings of another version of Megatron-Core: expected cp_group and further options "
                f"by keyword, got {len(args)} positional arguments and {', '.join(sorted(options)) or 'no keywords'}: "
                "leave cuda_graph_max_packed_seqs out"
            )
        at = token_positions(cu_seqlens, t.size(0), cp_group.size(), cp_group.rank(), freqs.size(0))
        rotated = getattr(rope_utils, _OF_TOKENS)(t.unsqueeze(1), freqs[at.long()], **options)
        return rotated.squeeze(1)


class AbsoluteRotary(RotaryReplacement):
    """Takes each row of the table as the position of one token, while one of these attention modules runs.

    Megatron-Core 0.16 compares the table with cu_seqlens on the host to tell such tables, later versions with
    max_seqlen, which padding changes. Tables of another length, and other modules, use the replaced function.
    """

    def __init__(self, attentions: Iterable[nn.Module]):
        super().__init__()
        self._attentions = list(attentions)
        self._running = 0

    def install(self) -> None:
        super().install()
        for attention in self._attentions:
            attention.forward = functools.partial(self._run, attention.forward)  # not a hook: replays would skip it

    def remove(self) -> None:
        super().remove()
        for attention in self._attentions:
            vars(attention).pop("forward", None)

    def _run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._running += 1
        try:
            return forward(*args, **kwargs)
        finally:
            self._running -= 1

    def __call__(self, t: Tensor, cu_seqlens: Tensor, freqs: Tensor, *args: Any, **options: Any) -> Tensor:
        if not self._running or args or freqs.size(0) != t.size(0):
            return self.replaced(t, cu_seqlens, freqs, *args, **options)  # type: ignore[misc]  # installed
        others = {name: value for name, value in options.items() if name not in ("cp_group", "max_seqlen")}
        return getattr(rope_utils, _OF_TOKENS)(t.unsqueeze(1), freqs, **others).squeeze(1)


def token_positions(cu_seqlens: Tensor, tokens: int, ranks: int, rank: int, table: int) -> Tensor:
    """Return the row of a table with `table` rows for each of this rank's tokens, [tokens], computed on the device.

    `ranks`: of context parallelism. Each document has a multiple of 2 * ranks tokens over all ranks, if there are
    several.
    """
    at = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    local = cu_seqlens // ranks if ranks > 1 else cu_seqlens
    document = torch.searchsorted(local, at, right=True) - 1
    if ranks > 1:
        length = local.diff()[document.clamp(max=len(cu_seqlens) - 2)]
        chunk, offset = length // 2, at - local[document]
        from_end = ranks * length - (rank + 1) * chunk + offset - chunk
        at = torch.where(offset < chunk, rank * chunk + offset, from_end) + cu_seqlens[document]
    return at if table == tokens * ranks else at - cu_seqlens[document]


def _innermost(function: Any) -> Callable[..., Tensor]:
    while isinstance(function, RotaryReplacement):
        function = function.replaced
    return function
