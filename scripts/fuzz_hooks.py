"""Hooks for scripts/fuzz_api: bring what no schema can say (which model, which ids, what fits) into reach.

Without them nearly all generated bodies end at the 404 of an unknown model or the 400 of a full context, and what
lies behind is never tried. Every value of a wrong type is left as it is.
"""

from __future__ import annotations

from typing import Any

import schemathesis

VOCABULARY, LONGEST = 320, 24


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """The body with its well-typed values made small; a third of the lengths stay as they were generated."""
    if not isinstance(body, dict):
        return body
    if isinstance(body.get("model"), str):
        body["model"] = "tiny"
    for holder in (body, body.get("sampling_params")):
        if not isinstance(holder, dict):
            continue
        for name in ("max_tokens", "max_completion_tokens", "min_tokens", "max_new_tokens", "min_new_tokens", "n"):
            value = holder.get(name)
            if type(value) is int and value > LONGEST and value % 3:
                holder[name] = value % (8 if name == "n" else LONGEST) + (name == "n")
        least, most = holder.get("min_tokens"), holder.get("max_tokens")
        if type(least) is int and type(most) is int and least > most >= 0:
            holder["min_tokens"] = most
        if isinstance(holder.get("stop_token_ids"), list):
            holder["stop_token_ids"] = [_id(value) for value in holder["stop_token_ids"]]
        if isinstance(holder.get("logit_bias"), dict):
            holder["logit_bias"] = {_id_text(key): bias for key, bias in holder["logit_bias"].items()}
    for name in ("prompt", "input_ids", "tokens"):
        if isinstance(body.get(name), list):
            body[name] = [[_id(one) for one in item] if isinstance(item, list) else _id(item) for item in body[name]]
    if not body.get("stream") and isinstance(body.get("stream_options"), dict) and body.get("stream") in (None, False):
        body["stream"] = True
    return body


def _id_text(key: str) -> str:
    return str(_id(int(key))) if key.isascii() and key.isdigit() and len(key) < 100 else key


def _id(value: Any) -> Any:
    return value % VOCABULARY if type(value) is int and value >= 0 else value
