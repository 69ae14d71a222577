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
    _choose_prompt(context.operation.path, body)
    for name in ("documents", "chat_template"):  # refused, since the tiny model's template takes neither
        if body.get(name) and len(str(body[name])) % 4:
            del body[name]
    if type(body.get("priority")) is int and body["priority"] % 4:
        body["priority"] = 0
    if isinstance(body.get("messages"), list) and context.operation.path in ("/v1/chat/completions", "/tokenize"):
        body["messages"] = [_message(number, one) for number, one in enumerate(body["messages"])]
    for holder in (body, body.get("sampling_params")):
        if not isinstance(holder, dict):
            continue
        for name in (
            "max_tokens",
            "max_completion_tokens",
            "max_output_tokens",
            "min_tokens",
            "max_new_tokens",
            "min_new_tokens",
            "n",
        ):
            value = holder.get(name)
            if type(value) is int and value > LONGEST and value % 3:
                holder[name] = value % (8 if name == "n" else LONGEST) + (name == "n")
        least, most = holder.get("min_tokens"), holder.get("max_tokens")
        if type(least) is int and type(most) is int and least > most >= 0:
            holder["min_tokens"] = most
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids", "token_ids_logprob"):
            if isinstance(holder.get(name), list):
                holder[name] = [_id(value) for value in holder[name]]
        if isinstance(holder.get("bad_words"), list):
            holder["bad_words"] = [word[:99] if isinstance(word, str) else word for word in holder["bad_words"]]
        if isinstance(holder.get("logit_bias"), dict):
            holder["logit_bias"] = {_id_text(key): bias for key, bias in holder["logit_bias"].items()}
    for name in ("prompt", "input_ids", "tokens"):
        if isinstance(body.get(name), list):
            body[name] = [[_id(one) for one in item] if isinstance(item, list) else _id(item) for item in body[name]]
    if not body.get("stream") and isinstance(body.get("stream_options"), dict) and body.get("stream") in (None, False):
        body["stream"] = True
    return body


def _choose_prompt(path: str, body: dict[str, Any]) -> None:
    """Keep one of the fields for the prompt where exactly one is allowed."""
    fields = {"/generate": ("text", "input_ids"), "/tokenize": ("prompt", "messages")}.get(path)
    if fields is None:
        return
    given = [name for name in fields if name in body]
    if not given:
        body[fields[0]] = "the old king"
    for name in given[1:] if len(str(body)) % 2 else given[:-1]:
        del body[name]


def _message(number: int, message: Any) -> Any:
    """The message with a role that the template knows and parts of text; a few stay as they were generated."""
    if not isinstance(message, dict) or len(str(message)) % 9 == 0:
        return message
    if isinstance(message.get("role"), str) and len(message["role"]) < 50:  # not one that is too long on purpose
        message["role"] = ("user", "assistant", "system")[number % 3]
    if isinstance(message.get("content"), list):
        message["content"] = [
            {"type": "text", "text": str(part)[:99].encode(errors="replace").decode()} for part in message["content"]
        ]
    return message


def _id_text(key: str) -> str:
    return str(_id(int(key))) if key.isascii() and key.isdigit() and len(key) < 100 else key


def _id(value: Any) -> Any:
    return value % VOCABULARY if type(value) is int and value >= 0 else value
