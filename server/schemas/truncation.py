"""The fields truncate_prompt_tokens and truncation_side: shorten prompts instead of refusing them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Truncation:
    """Keep at most `limit` tokens of a prompt: its last ones, or with `keeps_start` its first. -1: what fits."""

    limit: int
    keeps_start: bool = False

    def apply(self, ids: list[int], max_model_len: int, max_tokens: int | None) -> list[int]:
        """Return the tokens to keep, in a context of max_model_len with max_tokens (default 1) to generate."""
        room = max_model_len - (1 if max_tokens is None else max_tokens)
        limit = max(room, 0) if self.limit == -1 else self.limit
        if len(ids) <= limit:
            return ids
        return ids[:limit] if self.keeps_start else ids[len(ids) - limit :]
