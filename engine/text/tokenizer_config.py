"""A tokenizer's settings as JSON, with the names of tokenizer_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PATHS = frozenset({"vocab_file", "merges_file", "tokenizer_file", "name_or_path", "special_tokens_map_file"})
_TOKEN_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
NO_LIMIT = 2**53  # beyond it JSON readers round; transformers writes 1e30 for "unlimited"


def describe(tokenizer: Any, chat_template: Any) -> dict[str, Any]:
    """Return the settings of a transformers tokenizer.

    Special tokens are text, `added_tokens_decoder` maps ids (as text) to the fields of the added tokens. Paths and
    values that JSON can't hold are left out.
    """
    found = {
        name: value
        for name, given in tokenizer.init_kwargs.items()
        if name not in _PATHS and (value := _plain(given)) is not None
    }
    found |= {name: str(value) for name, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
    found["tokenizer_class"] = type(tokenizer).__name__
    found["vocab_size"] = len(tokenizer)
    if tokenizer.model_max_length < NO_LIMIT:
        found["model_max_length"] = tokenizer.model_max_length
    else:
        found.pop("model_max_length", None)
    if chat_template:
        found["chat_template"] = _plain(chat_template)
    found["added_tokens_decoder"] = {
        str(index): {field: getattr(token, field) for field in _TOKEN_FIELDS}
        for index, token in sorted(tokenizer.added_tokens_decoder.items())
    }
    return found


def _plain(value: Any) -> Any:
    """Return a JSON value; None for what has no form in JSON."""
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain for key, one in value.items() if (plain := _plain(one)) is not None}
    if isinstance(value, list | tuple):
        return [plain for one in value if (plain := _plain(one)) is not None]
    return getattr(value, "content", None)  # an AddedToken
