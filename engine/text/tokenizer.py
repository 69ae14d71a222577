"""The tokenizer: text to token ids and back, and chat messages to a prompt.

Loads from a GGUF file's metadata or a Hugging Face folder. Importing transformers takes about a second, so it is
deferred until the first chat or Hugging Face folder.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import os
import threading
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import models

from engine.checkpoint.source import ModelSource, resolve_model
from engine.errors import ModelError, NoTokenizer, RequestError
from engine.text import request_template, tokenizer_config
from engine.text.conversation import Conversation, reads
from engine.text.folder_tokenizer import (
    NAMED_TOKENS,
    PIPELINE,
    json_object,
    load_folder,
    read_config,
    require_readable_folder,
)
from engine.text.gguf_tokenizer import load_gguf
from engine.text.load_warnings import warn
from engine.text.parsing.selection import MARKERS
from graph_cache.utils.garbage import no_garbage_collections

logger = logging.getLogger(__name__)

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_IDS_HINT = "prompts given as token ids still work"


class Tokenizer:
    """A model's tokenizer. Thread-safe; encoding and decoding take no lock.

    `backend` is the `tokenizers.Tokenizer` used for incremental detokenization, `eos_token_ids` the end-of-text ids.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        name: str,
        eos_token_ids: Iterable[int] = (),
        bos_token: str | None = None,
        eos_token: str | None = None,
        chat_template: str | Mapping[str, str] | None = None,
        chat: Any = None,
        special_tokens: Mapping[str, str] | None = None,
        settings: Mapping[str, Any] | None = None,
    ):
        self.backend = backend
        self.name = name
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self._special = {"bos_token": bos_token, "eos_token": eos_token} | dict(special_tokens or {})
        self._settings = dict(settings or {})
        self._chat_template = chat_template
        self._marker_ids: frozenset[int] | None = None
        self._special_ids: frozenset[int] | None = None
        self._rewritten = _rewritten_tokens(backend)
        self._chat = chat  # a transformers tokenizer; None: created for the first chat
        self._chat_lock = threading.Lock()

    @classmethod
    def load(cls, model: str | ModelSource) -> Tokenizer:
        """Load the tokenizer of a model name, path or ModelSource.

        Raises NoTokenizer (a ModelError) if the model has none or an unsupported one, ModelError if it is invalid.
        """
        source = model if isinstance(model, ModelSource) else resolve_model(model)
        return _from_gguf(source) if source.kind == "gguf" else _from_folder(source)

    @classmethod
    def try_load(cls, model: str | ModelSource) -> Tokenizer | None:
        """Like `load`, but log a warning and return None if the model has no usable tokenizer."""
        try:
            return cls.load(model)
        except NoTokenizer as error:
            warn(logger, "%s", error)
            return None

    @property
    def vocab_size(self) -> int:
        """Number of ids in the tokenizer, added tokens included; the model's vocabulary may be larger."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template."""
        return bool(self._chat_template)

    def chat_template(self, with_tools: bool = False) -> str:
        """Return the source of the chat template; "" if there is none. Some models have another one for tools."""
        template = self._chat_template
        if isinstance(template, Mapping):
            return template.get("tool_use" if with_tools and "tool_use" in template else "default", "")
        return template or ""

    @property
    def marker_ids(self) -> frozenset[int]:
        """Special tokens that mark tool calls or reasoning. `skip_special_tokens` would remove them from the text."""
        if self._marker_ids is None:
            added = self.backend.get_added_tokens_decoder().items()
            self._marker_ids = frozenset(index for index, token in added if token.special and token.content in MARKERS)
        return self._marker_ids

    def encode(self, text: object, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`. Raises RequestError if it is not a string or has lone surrogates."""
        if not isinstance(text, str):
            raise RequestError(f"the prompt must be a string, not {type(text).__name__}", param="prompt")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the prompt is not valid Unicode: a lone surrogate at character {error.start}", param="prompt"
            ) from error
        # Unlike `encode`, it releases the GIL: a long text would stall every other thread for a second.
        return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def cut(self, text: str, count: int) -> str:
        """Return the beginning of a text that its first `count` tokens cover, without part of a character."""
        encoding = self.backend.encode(text, add_special_tokens=False)
        if len(encoding.ids) <= count:
            return text
        return text[: min(encoding.offsets[count - 1][1], encoding.offsets[count][0])]

    @functools.cached_property
    def num_special_tokens(self) -> tuple[int, int]:
        """How many tokens `encode` adds before and after a text."""
        plain, whole = self.encode("a", add_special_tokens=False), self.encode("a")
        ends = range(len(whole) - len(plain) + 1)
        before = next((start for start in ends if whole[start : start + len(plain)] == plain), 0)
        return before, len(whole) - len(plain) - before

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True, shown: Container[int] = frozenset()) -> str:
        """Return the text of `ids`, skipping unknown ids. Special tokens in `shown` are not skipped.

        Raises RequestError for values that can't be ids.
        """
        ids = list(ids)
        try:
            rewritten = bool(self._rewritten) and any(index in self._rewritten for index in ids)
            if skip_special_tokens and (rewritten or shown and any(index in shown for index in ids)):
                ids = [index for index in ids if index in shown or index not in self._skipped_ids()]
                skip_special_tokens = False
            if rewritten:
                return self._decode_around(ids)
            return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError) as error:
            raise RequestError(f"can't decode token ids: {error}", param="input_ids") from error

    def _decode_around(self, ids: Sequence[int]) -> str:
        """Return the text of ids: the content of tokens in `_rewritten`, and the decode of what is between them."""
        parts: list[str] = []
        for rewritten, group in itertools.groupby(ids, self._rewritten.__contains__):
            run = list(group)
            parts += map(self._rewritten.__getitem__, run) if rewritten else [self.backend.decode(run, False)]
        return "".join(parts)

    def _skipped_ids(self) -> frozenset[int]:
        if self._special_ids is None:
            added = self.backend.get_added_tokens_decoder().items()
            self._special_ids = frozenset(index for index, token in added if token.special)
        return self._special_ids

    def convert_ids_to_tokens(self, ids: Iterable[int]) -> list[str | None]:
        """Return the vocabulary entry of each id, None for an unknown id."""
        return [self.backend.id_to_token(token_id) for token_id in ids]

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Return the token ids of a conversation, rendered with the model's chat template and `variables` (tools, …).

        Raises RequestError naming `messages` if the template rejects them or the model has no template.
        """
        return self.encode(self.render_chat(messages, add_generation_prompt, **variables), add_special_tokens=False)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Return the text that `apply_chat_template` encodes."""
        tools = variables.pop("tools", None) or ()
        return self.render(
            Conversation(
                messages=messages, tools=tools, variables=variables, add_generation_prompt=add_generation_prompt
            )
        )

    def render(self, conversation: Conversation) -> str:
        """Return the text of a conversation.

        A template that knows no tools gets them as text. Raises RequestError if the model has no template, or naming
        what the template doesn't read or rejects.
        """
        template = conversation.template or self.chat_template(with_tools=bool(conversation.tools))
        if not template:
            raise RequestError(f"model {self.name} has no chat template; use a plain completion", param="messages")
        if not conversation.messages:
            raise RequestError("messages is empty: give at least one message", param="messages")
        conversation.check_against(template)
        takes_tools = reads(template, "tools")
        options: dict[str, Any] = dict(conversation.variables)
        options |= {
            "tools": list(conversation.tools) if takes_tools and conversation.tools else None,
            "add_generation_prompt": conversation.add_generation_prompt,
        }
        if conversation.documents:
            options["documents"] = list(conversation.documents)
        apply = self._apply if conversation.template is None else self._apply_own
        if takes_tools:
            return apply(list(conversation.messages), conversation, options)
        try:
            return conversation.render_as_text(lambda messages: apply(messages, conversation, options))
        except (TypeError, KeyError, AttributeError) as error:  # messages that the server has not checked
            raise RequestError(f"the messages can't be written as text: {error!r}", param="messages") from error

    def _apply(self, messages: list[Any], conversation: Conversation, options: dict[str, Any]) -> str:
        from jinja2.exceptions import TemplateError  # here: a start needs no templates

        try:
            return self.prepare_chat().apply_chat_template(
                messages,
                chat_template=self.chat_template(with_tools=bool(conversation.tools)),
                tokenize=False,
                continue_final_message=conversation.continue_final_message,
                **options,
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise RequestError(
                f"the model's chat template can't render these messages: {error}", param="messages"
            ) from error

    def _apply_own(self, messages: list[Any], conversation: Conversation, options: dict[str, Any]) -> str:
        special = {name: value for name, value in self._special.items() if value is not None}
        try:
            text = request_template.render(str(conversation.template), special | options | {"messages": messages})
        except request_template.TemplateFailed as error:
            raise RequestError(f"chat_template can't render these messages: {error}", param="chat_template") from error
        if not conversation.continue_final_message:
            return text
        final = str(conversation.messages[-1]["content"]).rstrip()
        at = text.rfind(final)
        if at < 0:
            raise RequestError(
                "continue_final_message: chat_template doesn't write the last message as it is", param="chat_template"
            )
        return text[: at + len(final)]

    def description(self) -> dict[str, Any]:
        """Return the settings of the tokenizer as in tokenizer_config.json, without paths. May take a second."""
        return tokenizer_config.describe(self.prepare_chat(), self._chat_template)

    def prepare_chat(self) -> Any:
        """Create and return the transformers tokenizer for chats. The first call takes about a second."""
        with self._chat_lock:
            if self._chat is None:
                # From the module: `from transformers import …` fails while another thread is importing transformers.
                from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

                special = {key: value for key, value in self._special.items() if value is not None}
                named = {key: special.pop(key) for key in list(special) if key not in NAMED_TOKENS}
                more = {"model_specific_special_tokens": named} if named else {}
                # It only renders text: for its backend, an empty one saves the copy that it would make.
                empty = tokenizers.Tokenizer(models.BPE())
                chat = PreTrainedTokenizerFast(
                    tokenizer_object=empty, chat_template=self._chat_template, **special, **more
                )
                chat._tokenizer = self.backend  # noqa: SLF001 - there is no public way to share it
                chat.init_kwargs |= self._settings
                limit = self._settings.get("model_max_length")
                if isinstance(limit, int | float):
                    chat.model_max_length = limit
                self._chat = chat
            return self._chat


def _from_gguf(source: ModelSource) -> Tokenizer:
    found = load_gguf(source.path)
    return Tokenizer(
        found.backend,
        name=source.name,
        eos_token_ids=found.eos_token_ids,
        bos_token=found.bos_token,
        eos_token=found.eos_token,
        chat_template=found.chat_template,
    )


def _rewritten_tokens(backend: tokenizers.Tokenizer) -> dict[int, str]:
    """Return the added tokens, by id, whose content the backend's decoder takes for other bytes.

    A byte-level decoder reads each character of its alphabet as a byte: "čem" as "\rem". Other decoders have
    added tokens on purpose that stand for other text: Gemma's "▁▁" is two spaces.
    """
    if backend.decoder is None:
        return {}
    state = json.loads(backend.decoder.__getstate__())
    kinds = {part["type"] for part in state.get("decoders", [state])}
    if not {"ByteLevel"} <= kinds <= {"ByteLevel", "Fuse"}:
        return {}
    added = {index: token.content for index, token in backend.get_added_tokens_decoder().items()}
    return {index: text for index, text in added.items() if backend.decoder.decode([text]) != text}


def _from_folder(source: ModelSource) -> Tokenizer:
    folder = source.path
    if not any(os.path.exists(os.path.join(folder, name)) for name in _TOKENIZER_FILES):
        raise NoTokenizer(f"{folder} has no tokenizer ({', '.join(_TOKENIZER_FILES)}); {_IDS_HINT}")
    with no_garbage_collections():
        try:
            if not os.path.exists(os.path.join(folder, PIPELINE)):
                return _from_vocabulary(source)
            found = load_folder(folder)
        except ModelError:
            raise
        except Exception as error:  # JSON errors, and bare Exceptions of the tokenizers library
            raise ModelError(f"{folder}: the tokenizer can't be loaded: {error}") from error
    eos = found.special_tokens.get("eos_token")
    return Tokenizer(
        found.backend,
        name=source.name,
        eos_token_ids=[
            index
            for index in (None if eos is None else found.backend.token_to_id(eos), *_generation_eos(folder))
            if index is not None
        ],
        chat_template=found.chat_template,
        special_tokens=found.special_tokens,
        settings=found.settings,
    )


def _from_vocabulary(source: ModelSource) -> Tokenizer:
    """Load the tokenizer of a folder without tokenizer.json: transformers builds the pipeline from its class."""
    folder = source.path
    require_readable_folder(folder)
    read_config(folder)  # checks the numbers of added tokens
    settings = json_object(folder, "tokenizer_config.json")
    if "auto_map" in settings:
        raise NoTokenizer(
            f"{folder}: tokenizer_config.json names code (auto_map), which is never run: add a tokenizer.json; "
            f"{_IDS_HINT}"
        )
    # From the full module path: `from transformers import …` fails while another thread is importing transformers.
    from transformers.models.auto.tokenization_auto import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        folder, config=_plain_config(folder, settings), local_files_only=True, trust_remote_code=False
    )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise NoTokenizer(f"{folder}: {type(tokenizer).__name__} has no fast form (tokenizer.json); {_IDS_HINT}")
    eos = [tokenizer.eos_token_id, *_generation_eos(folder)]
    return Tokenizer(
        backend,
        name=source.name,
        eos_token_ids=[index for index in eos if index is not None],
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        chat_template=tokenizer.chat_template,
        chat=tokenizer,
    )


def _plain_config(folder: str, tokenizer_settings: Mapping[str, Any]) -> Any:
    """Return the model's configuration as AutoTokenizer reads it if tokenizer_config.json names the tokenizer's class.

    AutoTokenizer then needs only names from it. The configuration's own class would import PyTorch's distributed
    tensors, which takes a second. Returns None, for that class, if no class of a tokenizer is named.
    """
    from transformers.configuration_utils import PreTrainedConfig

    if not isinstance(tokenizer_settings.get("tokenizer_class"), str):
        return None
    settings = json_object(folder, "config.json")
    config = PreTrainedConfig()
    config.name_or_path = folder
    for name in ("model_type", "model_name", "tokenizer_class"):
        if isinstance(settings.get(name), str):
            setattr(config, name, settings[name])
    return config


def _generation_eos(folder: str) -> list[int]:
    """Return the end-of-text ids of generation_config.json, where chat models list their end-of-turn ids."""
    try:
        eos = json_object(folder, "generation_config.json").get("eos_token_id")
    except (OSError, ValueError) as error:
        raise ModelError(f"can't read {os.path.join(folder, 'generation_config.json')}: {error}") from error
    ids = eos if isinstance(eos, list) else [eos]
    return [index for index in ids if isinstance(index, int)]
