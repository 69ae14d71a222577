"""Request fields of OpenAI, Anthropic, vLLM, SGLang and Ollama that this server doesn't implement: one table.

The table decides which fields are refused and which are accepted without effect. It drives the checks, the schemas of
/openapi.json and docs/compatibility.md (scripts/compatibility).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import RequestError
from graph_cache.utils.validation import did_you_mean

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
SAMPLING = "sampling_params"  # of /generate
TOKENS = "/inference/v1/generate"
TOKEN_SAMPLING = "sampling_params of tokens"  # of /inference/v1/generate
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
RESPONSES = "/v1/responses"
EMBEDDINGS, POOLING, SCORE, RERANK = "/v1/embeddings", "/pooling", "/v1/score", "/v1/rerank"
OLLAMA_GENERATE, OLLAMA_CHAT = "/api/generate", "/api/chat"
OPTIONS = "options"  # of Ollama's routes
STREAM_OPTIONS = "stream_options"  # of the OpenAI routes
PLACES = (
    COMPLETIONS,
    CHAT,
    STREAM_OPTIONS,
    GENERATE,
    SAMPLING,
    TOKENS,
    TOKEN_SAMPLING,
    TOKENIZE,
    DETOKENIZE,
    MESSAGES,
    COUNT_TOKENS,
    RESPONSES,
    EMBEDDINGS,
    POOLING,
    SCORE,
    RERANK,
    OLLAMA_GENERATE,
    OLLAMA_CHAT,
    OPTIONS,
)

MAX_SHOWN_CHARS = 64  # of an unknown field's name, in errors

_OPENAI = (COMPLETIONS, CHAT)
_INFERENCE = (*_OPENAI, GENERATE)
_CHATS = (CHAT, TOKENIZE)
_INPUTS = (EMBEDDINGS, POOLING)
_POOLED = (*_INPUTS, SCORE, RERANK)
_ANTHROPIC = (MESSAGES, COUNT_TOKENS)
_OLLAMA = (OLLAMA_GENERATE, OLLAMA_CHAT)


@dataclass(frozen=True)
class Refused:
    """Fields that would change the answer. They are refused, except null and the `neutral` values.

    `instead` says what to send instead of removing the field. With `unless` (field, value) they have no effect if the
    body has that value.
    """

    names: str
    places: tuple[str, ...]
    effect: str
    neutral: tuple[Any, ...] = ()
    instead: str = ""
    unless: tuple[str, str] | None = None

    def check(self, name: str, body: Mapping[str, Any], prefix: str = "") -> None:
        """Raise RequestError if the field `name` of `body` has a value that would change the answer."""
        value = body.get(name)
        if value is None or _is_one_of(value, self.neutral):
            return
        if self.unless is not None and body.get(self.unless[0]) == self.unless[1]:
            return
        raise RequestError(f"{prefix}{name} is not supported; {self.instead or 'remove it'}", param=name)


@dataclass(frozen=True)
class Ignored:
    """Fields that can't change an answer. Any value is accepted."""

    names: str
    places: tuple[str, ...]
    effect: str


TABLE: tuple[Refused | Ignored, ...] = (
    # Constraints on the output.
    Refused("guided_json guided_regex guided_choice guided_grammar guided_whitespace_pattern", _OPENAI,
            "structured output", instead="use structured_outputs, or start the server with --compat vllm"),
    Ignored("guided_decoding_backend", _OPENAI, "the library that follows a grammar"),
    Refused("json_schema regex ebnf structural_tag", (GENERATE,), "structured output",
            instead="send it in sampling_params"),
    Refused("stop_regex", (*_OPENAI, SAMPLING), "stop conditions"),
    Refused("repetition_detection", _OPENAI, "stop conditions"),
    Refused("logits_processors", _OPENAI, "sampling", ([],)),
    Refused("custom_logit_processor", _INFERENCE, "sampling"),
    Refused("custom_params", (*_OPENAI, SAMPLING), "sampling", ({},)),
    Refused("vllm_xargs", _OPENAI, "sampling", ({},)),
    Refused("watermarking", _OPENAI, "watermarks"),
    Refused("watermark", (*_INFERENCE, SAMPLING), "watermarks"),
    # Search.
    Refused("use_beam_search early_stopping", _OPENAI, "beam search", (False,)),
    Refused("length_penalty", _OPENAI, "beam search", (1,)),
    Refused("beam_width", (SAMPLING,), "beam search", (1,)),
    Refused("best_of", (CHAT,), "beam search", (1,)),
    # Names of other APIs for parameters that exist.
    Refused("min_new_tokens", _OPENAI, "length", (0,), instead="use min_tokens"),
    Refused("max_new_tokens", _OPENAI, "length", instead="use max_tokens"),
    Refused("max_completion_tokens", (COMPLETIONS,), "length", instead="use max_tokens here"),
    Refused("sampling_seed", _OPENAI, "seed", instead="use seed"),
    # The prompt.
    Refused("suffix", (COMPLETIONS,), "the prompt", ("",)),
    Refused("input_ids", (CHAT,), "the prompt", instead="use /v1/completions or /generate for token ids"),
    Refused("task", _CHATS, "the prompt"),
    Refused("prompt_embeds", (COMPLETIONS,), "the prompt"),
    Refused("input_embeds positional_embed_overrides multi_item_delimiter_indices token_indices_to_pool",
            (GENERATE,), "the prompt"),
    Refused("session_params", _INFERENCE, "the prompt"),
    # Tools.
    Refused("tools", (COMPLETIONS,), "tool calls", ([],), unless=("tool_choice", "none"),
            instead="use /v1/chat/completions"),
    Refused("tool_choice", (COMPLETIONS,), "tool calls", ("none", "auto"), instead="use /v1/chat/completions"),
    Ignored("parallel_tool_calls", (COMPLETIONS,), "tool calls, which this route does not make"),
    Refused("functions", _OPENAI, "tool calls", ([],), unless=("function_call", "none"), instead="use tools"),
    Refused("function_call", _OPENAI, "tool calls", ("none", "auto"), instead="use tool_choice"),
    Refused("web_search_options", (CHAT,), "tool calls"),
    # Reasoning.
    Refused("thinking", (CHAT,), "reasoning"),
    Refused("thinking_token_budget", (COMPLETIONS,), "reasoning", instead="use /v1/chat/completions"),
    Refused("max_thinking_tokens", (GENERATE,), "reasoning"),
    Refused("require_reasoning", (GENERATE,), "reasoning", (False,)),
    Refused("stream_reasoning", (CHAT,), "reasoning", (True,), instead="use include_reasoning to leave it out"),
    # Other media.
    Refused("audio", (CHAT,), "other media"),
    Refused("modalities", (CHAT,), "other media", (["text"],)),
    Refused("modalities", (GENERATE,), "other media", ([], ["text"])),
    Refused("image_data audio_data video_data mm_hashes mm_content_hashes", (GENERATE,), "other media", ([],)),
    Refused("encoder_urls num_items_assigned", (GENERATE,), "other media", ([], {})),
    Refused("need_wait_for_mm_inputs", (GENERATE,), "other media", (False,)),
    Refused("use_audio_in_video", (CHAT, GENERATE), "other media", (False,)),
    Refused("images_config mm_processor_kwargs", _INFERENCE, "other media", ({},)),
    Refused("video_config", (CHAT, GENERATE), "other media", ({},)),
    Refused("max_dynamic_patch min_dynamic_patch", (CHAT, GENERATE), "other media"),
    Refused("image_max_dynamic_patch video_max_dynamic_patch", (GENERATE,), "other media"),
    Refused("media_io_kwargs", _CHATS, "other media", ({},)),
    Refused("mm_processor_kwargs", (TOKENIZE,), "other media", ({},)),
    # Adapters.
    Refused("lora_path", _INFERENCE, "adapters"),
    Refused("lora_id", (GENERATE,), "adapters"),
    # More values in the answer.
    Refused("logprob_token_ids", (GENERATE,), "values in the answer", ([],), instead="use token_ids_logprob"),
    Refused("token_ids_logprob", _OPENAI, "values in the answer", ([],), instead="use logprob_token_ids"),
    Refused("sampling_logprobs_mode", _INFERENCE, "values in the answer"),
    Refused("return_hidden_states", (SAMPLING,), "values in the answer", (False,),
            instead="give it beside sampling_params"),
    Refused("return_routed_experts return_indexer_topk return_entropy "
            "return_flat_raw_top_logprobs return_flat_raw_output_top_logprobs return_prompt_token_ids return_bytes",
            _INFERENCE, "values in the answer", (False,)),
    Refused("return_sampling_mask", _INFERENCE, "values in the answer", (False,),
            instead="use /inference/v1/generate"),
    Ignored("return_flat_raw_top_logprobs_b64 routed_experts_start_len", _INFERENCE,
            "the form of values that are refused"),
    Refused("return_token_offsets "
            "return_cached_tokens_details return_spec_tokens_details return_mm_kwargs return_prompt_text "
            "return_meta_info return_input_ids_in_sglext return_output_ids_in_sglext", _OPENAI,
            "values in the answer", (False,)),
    Ignored("routed_experts_prompt_start", _OPENAI, "the form of values that are refused"),
    Ignored("mm_payload", _OPENAI, "the form of values that are refused"),
    Refused("moderation", (CHAT,), "values in the answer"),
    # The prefix cache, transfers and placement.
    Refused("kv_transfer_params ec_transfer_params", _OPENAI, "transfers between servers", ({},)),
    Refused("bootstrap_host bootstrap_port bootstrap_room", _INFERENCE, "transfers between servers"),
    Refused("bootstrap_pair_key", (GENERATE,), "transfers between servers"),
    Refused("background", (GENERATE,), "requests that outlive their connection", (False,)),
    Ignored("data_parallel_rank routed_dp_rank disagg_prefill_dp_rank", _INFERENCE, "placement on a replica"),
    Ignored("decode_tp_size routing_key kv_hints", (GENERATE,), "placement on a replica, hints for caches"),
    Ignored("prompt_cache_key prompt_cache_retention prompt_cache_options", (CHAT,), "hints for caches"),
    Ignored("prediction", (CHAT,), "a hint that makes an answer faster"),
    # Bookkeeping.
    Ignored("user", _OPENAI, "names the end user"),
    Ignored("safety_identifier", (CHAT,), "names the end user"),
    Ignored("metadata store service_tier", (CHAT,), "bookkeeping of OpenAI's platform"),
    Ignored("request_id", _OPENAI, "the request id: send the header X-Request-Id"),
    Ignored("rid", _OPENAI, "the request id: send the header X-Request-Id"),
    Ignored("session_id", _INFERENCE, "names a session in logs and routers"),
    Ignored("custom_labels", (COMPLETIONS, GENERATE), "labels of metrics"),
    Ignored("log_metrics no_logs conversation_id external_trace_header received_time http_worker_ipc", (GENERATE,),
            "logs, metrics and traces"),
    Ignored("stream_interval", (*_OPENAI, SAMPLING), "how many tokens an event of a stream holds"),
    Ignored("include_obfuscation", (STREAM_OPTIONS,), "padding of events"),
    Refused("spaces_between_special_tokens", _OPENAI, "detokenization", (True,)),
    Ignored("spaces_between_special_tokens", (SAMPLING,), "detokenization of tokenizers that are not supported"),
    # vLLM's route for token ids.
    Refused("features", (TOKENS,), "other media: the model takes text only"),
    Refused("content_parts", (TOKENS,), "other media: the model takes text only", ([],)),
    Refused("kv_transfer_params ec_transfer_params", (TOKENS,), "transfers between servers", ({},)),
    Refused("output_mode", (TOKENS,), "text", ("tokens",),
            instead="use /v1/completions with return_token_ids for texts"),
    Refused("extra_args", (TOKEN_SAMPLING,), "plug-ins", ({},),
            instead="remove it: it is read by plug-ins of vLLM, which don't exist here"),
    Refused("repetition_detection", (TOKEN_SAMPLING,), "stop conditions"),
    Refused("thinking_token_budget", (TOKEN_SAMPLING,), "reasoning", instead="use /v1/chat/completions"),
    Refused("logits_processors", (TOKEN_SAMPLING,), "sampling", ([],)),
    Refused("trace_decode_token_ids", (TOKEN_SAMPLING,), "sampling"),
    Refused("prompt_logprob_token_ids prompt_logprob_start", (TOKEN_SAMPLING,), "values in the answer",
            instead="use prompt_logprobs"),
    Ignored("detokenize spaces_between_special_tokens", (TOKEN_SAMPLING,), "text, which the answer doesn't have"),
    Ignored("output_kind", (TOKEN_SAMPLING,), "a stream sends new tokens, another answer all tokens"),
    Ignored("flat_logprobs skip_clone output_text_buffer_length stream_interval", (TOKEN_SAMPLING,),
            "how vLLM processes outputs"),
    Ignored("skip_reading_prefix_cache", (TOKEN_SAMPLING,), "whether cached prefixes are used"),
    Refused("skip_special_tokens", (DETOKENIZE,), "detokenization", (False,)),
    # The Responses API.
    Refused("background_options", (RESPONSES,), "requests that outlive their connection", ({},)),
    Refused("conversation", (RESPONSES,), "the prompt", instead="use previous_response_id"),
    Refused("prompt", (RESPONSES,), "the prompt", instead="use input and instructions"),
    Refused("context_management", (RESPONSES,), "the prompt", ([],)),
    Refused("image", (RESPONSES,), "the prompt", ({},)),
    Refused("truncation", (RESPONSES,), "the prompt", ("disabled",)),
    Refused("moderation", (RESPONSES,), "values in the answer"),
    Ignored("max_tool_calls", (RESPONSES,), "tools that OpenAI's servers run"),
    Ignored("prompt_cache_key prompt_cache_retention prompt_cache_options", (RESPONSES,), "hints for caches"),
    Ignored("user safety_identifier", (RESPONSES,), "names the end user"),
    Ignored("service_tier access_programs", (RESPONSES,), "bookkeeping of OpenAI's platform"),
    # Embeddings, scores and reranking.
    Refused("pooling", (SAMPLING,), "the answer", instead="use /v1/embeddings or /pooling"),
    Refused("messages", _INPUTS, "the input", instead="send the text of the conversation as input"),
    Refused("add_generation_prompt continue_final_message", _INPUTS, "the input", (False,)),
    Refused("mm_processor_kwargs media_io_kwargs", _POOLED, "other media", ({},)),
    Refused("images", _INPUTS, "other media", ([],)),
    Refused("padding", _POOLED, "the input", ("do_not_pad",)),
    Refused("task late_chunking", (EMBEDDINGS,), "the input", (False,)),
    Refused("input_type", _INPUTS, "the input", instead="use prompt_name"),
    Refused("embedding_type embedding_types output_dtype", _INPUTS, "the form of the vectors",
            ("float", ["float"]), instead="use encoding_format: float or base64"),
    Refused("embed_dtype", _INPUTS, "the form of the vectors", ("float32",)),
    Refused("endianness", _INPUTS, "the form of the vectors", ("native", "little")),
    Refused("output_dimension", _INPUTS, "the form of the vectors", instead="use dimensions"),
    Refused("data", (POOLING,), "the input", instead="use input"),
    Refused("softmax activation", _POOLED, "the form of the answer", instead="use use_activation"),
    Refused("truncate", _POOLED, "an input that the context can't hold", instead="use truncate_prompt_tokens"),
    Refused("truncation_side", (SCORE, RERANK), "the part of a document that is cut off: its end", ("right",)),
    Refused("max_chunks_per_doc max_chunk_per_doc overlap_tokens", (RERANK,), "the documents",
            instead="use max_tokens_per_doc"),
    Refused("rank_fields", (RERANK,), "the documents", (["text"],)),
    Refused("chat_template", (*_INPUTS, SCORE, RERANK), "the input", instead="start the server with --score-template"),
    Refused("chat_template_kwargs", _INPUTS, "the input", ({},)),
    Refused("chat_template_kwargs", (SCORE, RERANK), "the input", ({},), instead="use instruction"),
    Ignored("user request_id", _POOLED, "names the end user or the request"),
    # Anthropic's API.
    Refused("container", (MESSAGES,), "tools of Anthropic's servers"),
    Refused("mcp_servers", _ANTHROPIC, "tools of Anthropic's servers", ([],)),
    Refused("context_management", _ANTHROPIC, "the prompt",
            ({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]})),
    Refused("diagnostics", (MESSAGES,), "values in the answer"),
    Refused("inference_geo", (MESSAGES,), "where the answer is computed"),
    Refused("compaction", _ANTHROPIC, "the prompt"),
    Refused("fallbacks", (MESSAGES,), "the model", ([],)),
    Ignored("betas", _ANTHROPIC, "names of beta features"),
    Ignored("billing_policy", _ANTHROPIC, "bookkeeping of Anthropic's platform"),
    Ignored("fallback_credit_token", (MESSAGES,), "bookkeeping of Anthropic's platform"),
    Ignored("cache_control", _ANTHROPIC, "hints for caches"),
    Ignored("speed", _ANTHROPIC, "how fast the answer is computed"),
    Ignored("user_profile_id workspace_id", _ANTHROPIC, "bookkeeping of Anthropic's platform"),
    Ignored("metadata service_tier", (MESSAGES,), "bookkeeping of Anthropic's platform"),
    # Ollama's API.
    Refused("suffix template", (OLLAMA_GENERATE,), "the prompt", ("",)),
    Refused("context", (OLLAMA_GENERATE,), "the prompt", ([],), instead="send the conversation to /api/chat"),
    Refused("images", (OLLAMA_GENERATE,), "the prompt: the model takes text only", ([],)),
    Refused("truncate shift", _OLLAMA, "a prompt or answer that the context can't hold", (False,),
            instead="send a shorter conversation"),
    Refused("_debug_render_only", _OLLAMA, "the answer", (False,), instead="use /tokenize"),
    Refused("width height steps", (OLLAMA_GENERATE,), "generated images", (0,)),
    Ignored("keep_alive", _OLLAMA, "how long the model stays loaded: always"),
    Refused("mirostat", (OPTIONS,), "sampling", (0,)),
    Refused("tfs_z typical_p", (OPTIONS,), "sampling", (1,)),
    Ignored("mirostat_tau mirostat_eta", (OPTIONS,), "the form of sampling that is refused"),
    Refused("penalize_newline", (OPTIONS,), "penalties", (True,)),
    Refused("vocab_only embedding_only logits_all", (OPTIONS,), "the answer", (False,)),
    Ignored("num_keep", (OPTIONS,), "what is kept of a conversation that is cut; none is"),
    Ignored("num_ctx", (OPTIONS,), "the context length, which is the server's: --max-model-len"),
    Ignored("num_batch num_gpu main_gpu num_thread numa low_vram f16_kv use_mmap use_mlock", (OPTIONS,),
            "how the model is loaded: the server's settings"),
)  # fmt: skip


def _by_place() -> dict[str, dict[str, Refused | Ignored]]:
    found: dict[str, dict[str, Refused | Ignored]] = {place: {} for place in PLACES}
    for entry in TABLE:
        for place in entry.places:
            for name in entry.names.split():
                if name in found[place]:
                    raise ValueError(f"{name} of {place} is in the table twice")
                found[place][name] = entry
    return found


FOREIGN_FIELDS = _by_place()
"""Place -> field -> its entry."""


def refuse_foreign(place: str, body: Mapping[str, Any], prefix: str = "") -> None:
    """Raise RequestError for the first field of the table that would change the answer. `prefix` precedes its name."""
    known = FOREIGN_FIELDS[place]
    for name in body:
        entry = known.get(name)
        if isinstance(entry, Refused):
            entry.check(name, body, prefix)


def refuse_unknown(place: str, body: Mapping[str, Any], implemented: Iterable[str]) -> None:
    """Raise RequestError for the first field that is neither implemented nor in the table, unless it is null.

    A misspelt field would be lost without a word.
    """
    for name, value in body.items():
        if value is not None and name not in FOREIGN_FIELDS[place]:
            shown = name if len(name) <= MAX_SHOWN_CHARS else f"{name[:MAX_SHOWN_CHARS]}…"
            prefix = f"{place}." if place in (STREAM_OPTIONS, OPTIONS) else ""
            hint = did_you_mean(name, implemented) or "; remove it"
            raise RequestError(f"{prefix}{shown} is not a known field{hint}", param=shown)


def json_schemas(place: str) -> dict[str, dict[str, Any]]:
    """Return the JSON schema of each field of the table: any value, or only the values without effect."""
    return {name: _json_schema(entry) for name, entry in FOREIGN_FIELDS[place].items()}


def _json_schema(entry: Refused | Ignored) -> dict[str, Any]:
    if isinstance(entry, Ignored):
        return {"description": f"no effect: {entry.effect}"}
    if entry.unless is not None:
        name, value = entry.unless
        return {"description": f"not supported: {entry.effect}; must be empty unless {name} is {value!r}"}
    return {"enum": [None, *entry.neutral], "description": f"not supported: {entry.effect}"}


def _is_one_of(value: Any, allowed: Iterable[Any]) -> bool:
    """Return whether a JSON value equals one of `allowed`; unlike `in`, 1 is not True."""
    return any(value == one and (type(value) is bool) == (type(one) is bool) for one in allowed)
