"""Tokenization for the routes: prompts, chat templates, detokenization, and the text of single tokens.

Templates and long texts run in threads, so that they don't block the event loop and every stream.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from engine.errors import PromptTooLong, RequestError
from engine.text.conversation import Conversation
from engine.text.scoring import Scoring
from engine.text.token_bytes import TokenBytes, TokenPlaces, prompt_places
from engine.text.tokenizer import Tokenizer
from server.http.sender import SENDER
from server.serving.text_threads import Lane, TextThreads, lane_of

T = TypeVar("T")

INLINE_CHARS = 4096  # up to this length, encoding takes a few milliseconds: not worth a thread


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered conversation: its text and token ids."""

    text: str
    ids: list[int]


class Tokenization:
    """Asynchronous access to one model's tokenizer. Create it inside an event loop.

    With `tokenizer=None` token ids are accepted and text is refused. Rendering a chat template may take
    `template_seconds`. A prompt or conversation may have `max_chars` characters; None: as many as the context can hold.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, max_model_len: int, vocab_size: int, template_seconds: float = 3.0,
        max_chars: int | None = None,
    ):  # fmt: skip
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._token_bytes = None if tokenizer is None else TokenBytes(tokenizer)
        longest = max(map(len, tokenizer.backend.get_vocab())) if tokenizer is not None else 1
        self._context_chars = max_model_len * max(longest, 16)
        self._max_chars = max_chars
        self._template_seconds = template_seconds
        self._threads = TextThreads()
        self._own_templates: Counter[tuple[str, int]] = Counter()  # of requests, that wait or are being rendered
        self._preparation: asyncio.Task[Any] | None = None
        if tokenizer is not None and tokenizer.has_chat_template:
            self._preparation = asyncio.create_task(self._threads.run(tokenizer.prepare_chat, Lane.LARGE))

    def close(self) -> None:
        """End the requests whose text is being rendered or encoded with WireError 503."""
        self._threads.close()

    async def encode(self, text: str, param: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a prompt. Raises RequestError if the model has no tokenizer, or PromptTooLong."""
        tokenizer = self._require_tokenizer(param)
        self._refuse_oversized(len(text), param)
        if len(text) <= INLINE_CHARS:
            return tokenizer.encode(text, add_special_tokens)
        return await self._threads.run(partial(tokenizer.encode, text, add_special_tokens), lane_of(len(text)))

    async def chat(self, conversation: Conversation, add_special_tokens: bool = False) -> ChatPrompt:
        """Apply the chat template and encode its text. Raises RequestError if the template fails or takes too long.

        `add_special_tokens`: whether the tokenizer adds its own to those that the template writes.
        """
        tokenizer = self._require_tokenizer("messages")
        chars = conversation.num_chars
        self._refuse_oversized(chars, "messages")
        render = partial(tokenizer.render, conversation)
        if conversation.template is None:
            text = await self._render(render, chars)
        else:
            text = await self._render_own(render, conversation.template)
        self._refuse_oversized(len(text), "messages")
        try:
            ids = await self._threads.run(partial(tokenizer.encode, text, add_special_tokens), lane_of(len(text)))
        except RequestError as error:
            raise RequestError(
                "the conversation contains a lone surrogate, which is not valid Unicode", "messages"
            ) from error
        return ChatPrompt(text, ids)

    async def _render_own(self, render: Callable[[], str], template: str) -> str:
        """Render a request's own template, which runs in a process with a time limit.

        The same template of a sender makes way for its other templates, in case that it loops.
        """
        key = (SENDER.get(), hash(template))
        rank = self._own_templates[key]
        self._own_templates[key] += 1
        try:
            return await self._threads.run(render, Lane.PROCESS, rank=rank)
        finally:
            self._own_templates[key] -= 1
            if not self._own_templates[key]:
                del self._own_templates[key]

    async def _render(self, render: Callable[[], str], chars: int) -> str:
        if self._preparation is not None:
            await asyncio.shield(self._preparation)  # its seconds don't count
        try:
            return await self._threads.run(render, lane_of(chars), self._template_seconds)
        except TimeoutError as error:
            raise RequestError(
                f"the chat template takes longer than {self._template_seconds:g} seconds for these messages "
                "(--template-seconds): send fewer",
                param="messages",
            ) from error
        except (ArithmeticError, LookupError, MemoryError, RecursionError) as error:
            raise RequestError(
                f"the model's chat template can't render these messages: {type(error).__name__}: {error}",
                param="messages",
            ) from error

    async def pair(
        self, scoring: Scoring, query: str, document: str, instruction: str | None, limit: int | None, param: str
    ) -> list[int]:
        """Return the prompt of a query and a document; see Scoring.pair_ids. Raises RequestError, PromptTooLong."""
        chars = len(query) + len(document) + len(instruction or "")
        self._refuse_oversized(chars, param)
        work = partial(scoring.pair_ids, query, document, instruction, limit, param)
        return work() if chars <= INLINE_CHARS else await self._threads.run(work, lane_of(chars))

    async def cut(self, text: str, count: int, param: str) -> str:
        """Return the beginning of a text that its first `count` tokens cover. Raises RequestError, PromptTooLong."""
        tokenizer = self._require_tokenizer(param)
        self._refuse_oversized(len(text), param)
        work = partial(tokenizer.cut, text, count)
        return work() if len(text) <= INLINE_CHARS else await self._threads.run(work, lane_of(len(text)))

    @property
    def num_special_tokens(self) -> tuple[int, int]:
        """How many tokens the tokenizer adds before and after a text."""
        return (0, 0) if self._tokenizer is None else self._tokenizer.num_special_tokens

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run work on a large answer in a thread."""
        return await self._threads.run(work, Lane.ANSWER)

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

    async def description(self) -> dict[str, Any]:
        """Return the tokenizer's settings. Raises RequestError if the model has none."""
        return await self._threads.run(self._require_tokenizer("model").description, Lane.LARGE)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, including special tokens; "" for a model without a tokenizer."""
        return "" if self._tokenizer is None else self._tokenizer.decode(ids, skip_special_tokens=False)

    def entries(self, ids: Sequence[int]) -> list[str | None]:
        """Return the vocabulary entry of each id, such as "Ġred"; None for ids that the tokenizer doesn't have."""
        return [None] * len(ids) if self._tokenizer is None else self._tokenizer.convert_ids_to_tokens(ids)

    def piece(self, token_id: int) -> str:
        """Return the text that a single token adds to a text, with U+FFFD for parts of characters."""
        return "" if self._token_bytes is None else self._token_bytes.text(token_id)

    def bytes_of(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes that a single token adds to a text."""
        return b"" if self._token_bytes is None else self._token_bytes.of(token_id)

    def places(
        self, prompt_ids: Sequence[int] = (), at: int = 0, skip_special_tokens: bool = True
    ) -> TokenPlaces | None:
        """Return the positions of tokens that follow a prompt, from `at` on; None for a model without a tokenizer."""
        if self._token_bytes is None:
            return None
        return TokenPlaces(self._token_bytes, prompt_ids, at=at, skip_special_tokens=skip_special_tokens)

    def prompt_places(self, text: str | None, ids: Sequence[int], add_special_tokens: bool) -> list[int]:
        """Return the positions of a prompt's tokens in its text, or in the text that they decode to."""
        if self._token_bytes is None or self._tokenizer is None:
            return [0] * len(ids)
        return prompt_places(self._tokenizer, self._token_bytes, text, ids, add_special_tokens)

    def _refuse_oversized(self, chars: int, param: str) -> None:
        """Refuse text that can't fit even if every token were the vocabulary's longest: encoding it takes seconds."""
        if self._max_chars is not None and chars > self._max_chars:
            raise PromptTooLong(
                f"{param} has {chars} characters, and at most {self._max_chars} are allowed (--max-prompt-chars): "
                "shorten it",
                param=param,
            )
        if chars > self._context_chars:
            raise PromptTooLong(
                f"{param} has {chars} characters, and a context of {self._max_model_len} tokens can't hold them: "
                "shorten it",
                param=param,
            )

    def _require_tokenizer(self, param: str) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError("this model has no tokenizer: give the prompt as token ids", param=param)
        return self._tokenizer
