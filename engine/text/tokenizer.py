"""The tokenizer: text to token ids and back, and chat messages to a prompt.

Loads from a GGUF file's metadata or a Hugging Face folder. Importing transformers takes about a second, so it is
deferred until the first chat or Hugging Face folder.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from engine.checkpoint.gguf_file import GGUFFile
from engine.checkpoint.source import ModelSource, resolve_model
from engine.errors import ModelError, RequestError

logger = logging.getLogger(__name__)

_CONTROL, _USER_DEFINED = 3, 4
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_IDS_HINT = "prompts given as token ids still work"


class NoTokenizer(ModelError):
    """The model has no usable tokenizer; prompts given as token ids still work."""


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
        chat_template: str | None = None,
        chat: Any = None,
    ):
        self.backend = backend
        self.name = name
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self._special = {"bos_token": bos_token, "eos_token": eos_token}
        self._chat_template = chat_template
        self._chat = chat  # a transformers tokenizer; for GGUF files, created for the first chat
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
            logger.warning("%s", error)
            return None

    @property
    def vocab_size(self) -> int:
        """Number of ids in the tokenizer, added tokens included; the model's vocabulary may be larger."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template."""
        return bool(self._chat_template)

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
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`, skipping unknown ids. Raises RequestError for values that can't be ids."""
        try:
            return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError) as error:
            raise RequestError(f"can't decode token ids: {error}", param="input_ids") from error

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
        from jinja2.exceptions import TemplateError

        if not self.has_chat_template:
            raise RequestError(f"model {self.name} has no chat template; use a plain completion", param="messages")
        if not messages:
            raise RequestError("messages is empty: give at least one message", param="messages")
        try:
            return self.prepare_chat().apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **variables
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise RequestError(
                f"the model's chat template can't render these messages: {error}", param="messages"
            ) from error

    def prepare_chat(self) -> Any:
        """Create and return the transformers tokenizer for chats. The first call takes about a second."""
        with self._chat_lock:
            if self._chat is None:
                from transformers import PreTrainedTokenizerFast

                special = {key: value for key, value in self._special.items() if value is not None}
                self._chat = PreTrainedTokenizerFast(
                    tokenizer_object=self.backend, chat_template=self._chat_template, **special
                )
            return self._chat


def _from_gguf(source: ModelSource) -> Tokenizer:
    metadata: dict[str, Any] = GGUFFile(source.path).metadata
    model_type, pre_tokenizer = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if model_type is None:
        raise NoTokenizer(f"{source.path}: has no tokenizer; {_IDS_HINT}")
    if model_type != "gpt2" or pre_tokenizer not in ("smollm", "gpt-2", "qwen2"):
        raise NoTokenizer(
            f"{source.path}: tokenizer {model_type!r} with pre-tokenizer {pre_tokenizer!r} is not supported from "
            f"GGUF files (gpt2 with smollm, gpt-2 or qwen2 is); use the model's Hugging Face folder, or "
            f"token ids: {_IDS_HINT}"
        )
    # Checked by the tokenizers library, which the error below wraps.
    tokens: Any = metadata.get("tokenizer.ggml.tokens")
    merges: Any = metadata.get("tokenizer.ggml.merges")
    template = metadata.get("tokenizer.chat_template")
    try:
        backend = _byte_level_bpe(tokens, merges, pre_tokenizer)
        _add_special_tokens(backend, tokens, metadata.get("tokenizer.ggml.token_type") or [])
        names = {key: _special_token(metadata, tokens, key) for key in ("bos", "eos", "eot")}
        if metadata.get("tokenizer.ggml.add_bos_token") and names["bos"]:
            backend.post_processor = processors.TemplateProcessing(
                single=f"{names['bos']} $A", special_tokens=[(names["bos"], tokens.index(names["bos"]))]
            )
    except Exception as error:  # the tokenizers library raises bare Exception for bad vocabularies and merges
        raise ModelError(f"{source.path}: the tokenizer in its metadata is damaged: {error}") from error
    eos = [tokens.index(names[key]) for key in ("eos", "eot") if names[key]]
    return Tokenizer(
        backend,
        name=source.name,
        eos_token_ids=eos,
        bos_token=names["bos"],
        eos_token=names["eos"],
        chat_template=template if isinstance(template, str) else None,
    )


def _byte_level_bpe(tokens: list[str], merges: list[str], pre_tokenizer: str) -> tokenizers.Tokenizer:
    """Build a byte-level BPE tokenizer from a vocabulary in id order and merges as "left right" lines."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ValueError(f"{len(tokens) - len(vocabulary)} of {len(tokens)} tokens appear twice")
    pairs: list[Any] = [tuple(merge.split(" ")) for merge in merges]  # BPE rejects what is no pair
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    if pre_tokenizer == "qwen2":
        backend.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(tokenizers.Regex(_QWEN2_PATTERN), behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    else:
        steps: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
        if pre_tokenizer == "smollm":
            steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _add_special_tokens(backend: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
    marked = list(zip(tokens, types, strict=False))
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token, kind in marked if kind == _CONTROL]
    )
    backend.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token, kind in marked if kind == _USER_DEFINED]
    )


def _special_token(metadata: dict[str, Any], tokens: list[str], key: str) -> str | None:
    index = metadata.get(f"tokenizer.ggml.{key}_token_id")
    if index is None:
        return None
    if not isinstance(index, int) or not 0 <= index < len(tokens):
        raise ValueError(f"{key}_token_id is {index!r} and there are {len(tokens)} tokens")
    return tokens[index]


def _from_folder(source: ModelSource) -> Tokenizer:
    if not any(os.path.exists(os.path.join(source.path, name)) for name in _TOKENIZER_FILES):
        raise NoTokenizer(f"{source.path} has no tokenizer ({', '.join(_TOKENIZER_FILES)}); {_IDS_HINT}")
    # From the full module path: `from transformers import …` fails while another thread is importing transformers.
    from transformers.models.auto.tokenization_auto import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source.path, local_files_only=True)
    except Exception as error:  # transformers doesn't wrap JSON errors or the bare Exceptions of tokenizers
        raise ModelError(f"{source.path}: the tokenizer can't be loaded: {error}") from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise NoTokenizer(f"{source.path}: {type(tokenizer).__name__} has no fast form (tokenizer.json); {_IDS_HINT}")
    eos = [tokenizer.eos_token_id, *_generation_eos(source.path)]
    return Tokenizer(
        backend,
        name=source.name,
        eos_token_ids=[index for index in eos if index is not None],
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        chat_template=tokenizer.chat_template,
        chat=tokenizer,
    )


def _generation_eos(folder: str) -> list[int]:
    """Return the end-of-text ids of generation_config.json, where chat models list their end-of-turn ids."""
    path = os.path.join(folder, "generation_config.json")
    if not os.path.exists(path):
        return []
    try:
        with open(path, encoding="utf-8") as file:
            eos = json.load(file).get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"can't read {path}: {error}") from error
    ids = eos if isinstance(eos, list) else [eos]
    return [index for index in ids if isinstance(index, int)]
