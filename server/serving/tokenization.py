"""Text to token ids and back for the routes: prompts, chat templates, and the spelling of single tokens.

Long texts are encoded in a thread, so that one client's book doesn't stop every stream. Knows the engine's Tokenizer
and no request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from engine.errors import PromptTooLong, RequestError
from engine.text.tokenizer import Tokenizer

INLINE_CHARS = 4096  # encodes in a few milliseconds at most: less than that isn't worth a thread


class Tokenization:
    """One model's tokenizer, as the event loop may use it. `close` ends its thread.

    A model may have no tokenizer: token ids work then, text is refused.
    """

    def __init__(self, tokenizer: Tokenizer | None, max_model_len: int, vocab_size: int):
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._pieces: dict[int, str] = {}
        longest = max(map(len, tokenizer.backend.get_vocab())) if tokenizer is not None else 1
        self._max_chars = max_model_len * max(longest, 16)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")
        if tokenizer is not None and tokenizer.has_chat_template:
            self._thread.submit(tokenizer.prepare_chat)

    def close(self) -> None:
        """End the thread; what it is encoding is finished first."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def encode(self, text: str, param: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt. Raises RequestError(param) where the model has no tokenizer, PromptTooLong."""
        tokenizer = self._require_tokenizer(param)
        self._refuse_oversized(len(text), param)
        if len(text) <= INLINE_CHARS:
            return tokenizer.encode(text, add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, tokenizer.encode, text, add_special_tokens)

    async def chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> list[int]:
        """Token ids of a conversation through the model's chat template; raises RequestError where it refuses."""
        apply = self._require_tokenizer("messages").apply_chat_template
        self._refuse_oversized(sum(len(message.get("content") or "") for message in messages), "messages")
        return await asyncio.get_running_loop().run_in_executor(self._thread, apply, messages, add_generation_prompt)

    def check(self, ids: Sequence[int], param: str) -> None:
        """Refuse no ids at all, more than the context holds, and ids outside the vocabulary.

        Raises RequestError, PromptTooLong, that name the field `param`.
        """
        if not ids:
            raise RequestError(f"{param} is empty: give at least one token", param=param)
        if len(ids) > self._max_model_len:
            raise PromptTooLong(
                f"{param} has {len(ids)} tokens, and the model's context holds {self._max_model_len}: shorten it",
                param=param,
            )
        low, high = min(ids), max(ids)
        if low < 0 or high >= self._vocab_size:
            # A number of thousands of digits is legal JSON, and Python refuses to print it.
            shown = low if low < 0 else high
            shown_text = str(shown) if abs(shown) < 2**64 else "beyond 64 bits"
            raise RequestError(
                f"{param} has a token id {shown_text}; ids from 0 to {self._vocab_size - 1} exist", param=param
            )

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a run of tokens, special ones included; "" for a model without a tokenizer."""
        return "" if self._tokenizer is None else self._tokenizer.decode(ids, skip_special_tokens=False)

    def piece(self, token_id: int) -> str:
        """Text of one token by itself; remembered, as logprobs name the same few tokens over and over."""
        found = self._pieces.get(token_id)
        if found is None:
            found = self._pieces[token_id] = self.decode((token_id,))
        return found

    def _refuse_oversized(self, chars: int, param: str) -> None:
        """Refuse text that can't fit even if all its tokens were the longest there are: encoding it takes seconds."""
        if chars > self._max_chars:
            raise PromptTooLong(
                f"{param} has {chars} characters, and a context of {self._max_model_len} tokens can't hold them: "
                "shorten it",
                param=param,
            )

    def _require_tokenizer(self, param: str) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError("this model has no tokenizer: give the prompt as token ids", param=param)
        return self._tokenizer
