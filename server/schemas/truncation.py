"""The fields truncate_prompt_tokens and truncation_side: shorten prompts instead of refusing them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Truncation:
    """Keep at most `limit` tokens of a prompt: its last ones, or with `keeps_start` its first. -1: what fits."""

    limit: int
    keeps_start: bool = False

    def apply(self, ids: list[int], max_model_len: int, num_output: int) -> list[int]:
        """Return the tokens to keep, in a context of max_model_len with num_output to generate. At least one."""
        limit = max(max_model_len - num_output, 1) if self.limit == -1 else self.limit
        if len(ids) <= limit:
            return ids
        return ids[:limit] if self.keeps_start else ids[len(ids) - limit :]
