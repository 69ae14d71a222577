"""Keys that vLLM's responses always have, and that are left out here without a value: --compat vllm sends them as null.

Clients of vLLM read them without asking whether they are there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from server.config import ServerConfig

Keys = Mapping[str, None]


def _keys(names: str) -> Keys:
    return dict.fromkeys(names.split())


@dataclass(frozen=True)
class NullKeys:
    """Keys to send as null, unless they have a value, by the object that they belong to."""

    answer: Keys = field(default_factory=dict)
    usage: Keys = field(default_factory=dict)
    choice: Keys = field(default_factory=dict)
    message: Keys = field(default_factory=dict)
    first_chunk: Keys = field(default_factory=dict)
    chunk_choice: Keys = field(default_factory=dict)


NO_KEYS = NullKeys()
COMPLETION_KEYS = NullKeys(
    answer=_keys("service_tier system_fingerprint kv_transfer_params ec_transfer_params metrics"),
    usage=_keys("completion_tokens_details"),
    choice=_keys("token_ids prompt_logprobs prompt_token_ids routed_experts weight_versions"),
    chunk_choice=_keys("prompt_token_ids token_ids weight_versions"),
)
CHAT_KEYS = NullKeys(
    answer=_keys(
        "service_tier system_fingerprint prompt_logprobs prompt_token_ids prompt_text kv_transfer_params "
        "ec_transfer_params metrics"
    ),
    usage=_keys("completion_tokens_details"),
    choice=_keys("token_ids routed_experts weight_versions"),
    message=_keys("annotations audio function_call reasoning reasoning_content"),
    first_chunk=_keys("prompt_token_ids prompt_text"),
    chunk_choice=_keys("token_ids"),
)


def completion_keys(config: ServerConfig) -> NullKeys:
    """Return the keys of /v1/completions."""
    return COMPLETION_KEYS if config.compat == "vllm" else NO_KEYS


def chat_keys(config: ServerConfig) -> NullKeys:
    """Return the keys of /v1/chat/completions."""
    return CHAT_KEYS if config.compat == "vllm" else NO_KEYS
