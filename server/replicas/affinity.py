"""Which replica a request prefers: a digest of its prompt's beginning, and replicas in the order of that digest.

Requests that begin alike go to the same replica, whose prefix cache then holds their KV. A bound on the load sends
those that would overload it to the next one ("consistent hashing with bounded loads", arXiv 1608.01350).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

MAX_CHARS = 4096  # of each part of a prompt's beginning
MAX_IDS = 256  # of token ids
LOAD_FACTOR = 1.25  # a replica takes requests of its prompts up to this multiple of the mean load
# Fields of a prompt, in all APIs that the server speaks. Those before "messages" precede the conversation.
_BEFORE = ("system", "instructions", "tools")
_PROMPTS = ("prompt", "input", "text", "input_ids", "token_ids", "prompt_token_ids")


def affinity_of(body: Any) -> bytes:
    """Return a digest of how the prompt of a request's JSON body begins; empty if it has none.

    For a conversation: what precedes it, and its messages up to the first of the user, so that the digest stays the
    same as the conversation grows. For texts and token ids: their beginning; of several, the first one's.
    """
    if not isinstance(body, Mapping):
        return b""
    parts = [_text(body[name]) for name in _BEFORE if body.get(name)]
    messages = body.get("messages")
    if isinstance(messages, list):
        parts += _first_messages(messages)
    else:
        prompt = next((body[name] for name in _PROMPTS if body.get(name)), None)
        if isinstance(prompt, list) and isinstance(prompt[0], Mapping):
            parts += _first_messages(prompt)
        elif prompt is not None:
            parts.append(_text(prompt))
    return blake2b("\0".join(parts).encode("utf-8", "surrogatepass"), digest_size=16).digest() if parts else b""


def _first_messages(messages: Sequence[Any]) -> list[str]:
    """Return the texts of the messages up to the first one of the user."""
    texts = []
    for message in messages:
        texts.append(_text(message))
        if isinstance(message, Mapping) and message.get("role") == "user":
            break
    return texts


def _text(value: Any) -> str:
    """Return the beginning of a text, of token ids, or of other JSON."""
    if isinstance(value, list) and value and isinstance(value[0], (str, list)):
        value = value[0]  # the first of several prompts
    if isinstance(value, list) and isinstance(value[0] if value else None, int):
        value = value[:MAX_IDS]
    return (value if isinstance(value, str) else json.dumps(value, sort_keys=True))[:MAX_CHARS]


def preferred(affinity: bytes, loads: Mapping[str, int]) -> list[str]:
    """Return the replicas of `loads` (replica id -> requests in flight), the preferred one first.

    With an affinity: in the order of their rendezvous hashes, but those at the bound of the load after the others.
    Without: the least loaded first.
    """
    bound = math.ceil(LOAD_FACTOR * (sum(loads.values()) + 1) / max(1, len(loads)))

    def rank(replica: str) -> tuple[bool, int, bytes]:
        digest = blake2b(affinity + replica.encode(), digest_size=16).digest()
        is_full = loads[replica] >= bound
        return is_full, loads[replica] if is_full or not affinity else 0, digest

    return sorted(loads, key=rank)
