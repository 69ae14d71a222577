"""The interface of a drafter, and the acceptance of draft tokens.

A drafter proposes tokens that may follow; the model computes them together and samples after each. A draft token is
accepted if sampling chose it too, so texts are those without drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class DraftRow(NamedTuple):
    """A request for which drafts are wanted: its tokens so far, and how many more may follow at most."""

    request_id: str
    token_ids: Sequence[int]
    limit: int


class Drafter(Protocol):
    """Proposes draft tokens for the decodes of a step. Used by one scheduler, from its thread.

    It needs the tokens of the step before on the host. So steps can't be scheduled ahead of reading them, and
    `async_scheduling` is refused: see docs/adr/0010-the-host-one-step-behind.md.
    """

    def propose(self, rows: Sequence[DraftRow]) -> list[Sequence[int]]:
        """Return the draft tokens of each row, at most `limit`; an empty sequence where none are likely."""
        ...

    def forget(self, request_id: str) -> None:
        """Drop what is kept of a request that has ended. Does nothing for an unknown one."""
        ...


def accepted(drafts: Sequence[int], sampled: Sequence[int]) -> Sequence[int]:
    """Return the tokens to append, of those sampled after each computed token: up to the first that is no draft.

    `sampled` has one token more than `drafts`.
    """
    for index, draft in enumerate(drafts):
        if sampled[index] != draft:
            return sampled[: index + 1]
    return sampled
