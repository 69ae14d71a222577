"""One request body per route that takes one, for /openapi.json.

Tools that generate a body from the schema, such as the page at /docs, set every field, which no route accepts.
"""

from __future__ import annotations

from typing import Any

_CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Say hello in French, German and Japanese."}],
    "max_tokens": 64,
}
_COMPLETION: dict[str, Any] = {"prompt": "The capital of France is", "max_tokens": 16}

# Most routes answer with the served model if a request names none; openapi.py adds the name where it is required.
REQUEST_EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/completions": _COMPLETION,
    "/v1/chat/completions": _CHAT,
    "/v1/chat/completions/batch": _CHAT | {"messages": [_CHAT["messages"], [{"role": "user", "content": "Hello."}]]},
    "/v1/responses": {"input": "Say hello in French.", "max_output_tokens": 64},
    "/v1/messages": {"messages": _CHAT["messages"], "max_tokens": 64},
    "/v1/messages/count_tokens": {"messages": _CHAT["messages"]},
    "/generate": {"text": _COMPLETION["prompt"], "sampling_params": {"max_new_tokens": 16}},
    "/tokenize": {"prompt": _COMPLETION["prompt"]},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/invocations": _CHAT,
    "/api/chat": {"messages": _CHAT["messages"], "options": {"num_predict": 64}, "stream": False},
    "/api/generate": {"prompt": _COMPLETION["prompt"], "options": {"num_predict": 16}, "stream": False},
    "/api/show": {},
    "/weights/update": {"path": "/models/step-1", "version": "step-1"},
}
