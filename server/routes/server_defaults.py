"""What the server's settings change in a request of the OpenAI routes."""

from __future__ import annotations

from server.config import ServerConfig
from server.schemas.guided_fields import adopt_guided_fields
from server.schemas.requests import OpenAISampling, StreamOptions


def apply_defaults(body: OpenAISampling, config: ServerConfig) -> None:
    """Set what the server's settings decide where the request leaves it out. Raises RequestError."""
    if body.return_token_ids is None:
        body.return_token_ids = config.return_token_ids
    if body.return_tokens_as_token_ids is None:
        body.return_tokens_as_token_ids = config.return_tokens_as_token_ids
    if config.enable_force_include_usage and body.stream:
        body.stream_options = StreamOptions(include_usage=True, continuous_usage_stats=True)
    if config.compat == "vllm":
        adopt_guided_fields(body)
        if body.stream_options is not None and not body.stream_options.include_usage:
            body.stream_options.continuous_usage_stats = False  # has no effect then, as in vLLM
