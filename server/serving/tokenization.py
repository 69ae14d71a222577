"""Tokenization for the routes: prompts, chat templates, detokenization, and the text of single tokens.

Long texts are encoded in a thread, so that they don't block the event loop and every stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from engine.errors import PromptTooLong, RequestError
from engine.text.tokenizer import Tokenizer

INLINE_CHARS = 4096  # up to this length, encoding takes a few milliseconds: not worth a thread


class Tokenization:
    """Asynchronous access to one model's tokenizer. `close` ends its thread.

    With `tokenizer=None` token ids are accepted and text is refused.
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
        """End the thread after the text that it is encoding."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def encode(self, text: str, param: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a prompt. Raises RequestError if the model has no tokenizer, or PromptTooLong."""
        tokenizer = self._require_tokenizer(param)
        self._refuse_oversized(len(text), param)
        if len(text) <= INLINE_CHARS:
            return tokenizer.encode(text, add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, tokenizer.encode, text, add_special_tokens)

    async def chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> list[int]:
        """Apply the chat template and return the token ids. Raises RequestError if the template fails."""
        apply = self._require_tokenizer("messages").apply_chat_template
        self._refuse_oversized(sum(len(message.get("content") or "") for message in messages), "messages")
        return await asyncio.get_running_loop().run_in_executor(self._thread, apply, messages, add_generation_prompt)

    def check(self, ids: Sequence[int], param: str) -> None:
        """Check token ids of a prompt.

        Raises RequestError for an empty list or ids outside the vocabulary, PromptTooLong for more ids than the context
        holds. The errors name the field `param`.
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
            # A number of thousands of digits is valid JSON, but Python refuses to convert it to text.
            shown = low if low < 0 else high
            shown_text = str(shown) if abs(shown) < 2**64 else "beyond 64 bits"
            raise RequestError(
                f"{param} has a token id {shown_text}; ids from 0 to {self._vocab_size - 1} exist", param=param
            )

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, including special tokens; "" for a model without a tokenizer."""
        return "" if self._tokenizer is None else self._tokenizer.decode(ids, skip_special_tokens=False)

    def entries(self, ids: Sequence[int]) -> list[str | None]:
        """Return the vocabulary entry of each id, such as "Ġred"; None for ids that the tokenizer doesn't have."""
        return [None] * len(ids) if self._tokenizer is None else self._tokenizer.convert_ids_to_tokens(ids)

    def piece(self, token_id: int) -> str:
        """Return the text of a single token. Cached, since logprobs repeat the same few tokens."""
        found = self._pieces.get(token_id)
        if found is None:
            found = self._pieces[token_id] = self.decode((token_id,))
        return found

    def _refuse_oversized(self, chars: int, param: str) -> None:
        """Refuse text that can't fit even if every token were the vocabulary's longest: encoding it takes seconds."""
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
