"""Command line flags generated from the configuration classes: one flag per field, with the field's default.

A new setting becomes a flag automatically. A test checks that each has a help text here.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

from engine import config as engine_config
from engine.config import EngineConfig
from engine.errors import ConfigError
from server.cli.parser import Parser
from server.cli.settings import METAVARS, NEEDED, NOT_OFFERED, PARSERS, read_environment, read_file
from server.cli.spelling import spell_settings
from server.config import ADMINS_WITHOUT_KEY, CLOSE_OBJECTS, COMPATS, LOG_FORMATS, LOG_LEVELS, ServerConfig

SERVER_HELP = {
    "host": "host name or IP address to listen on; one that other machines can reach requires API keys",
    "port": "port number; 0 selects a free port",
    "root_path": "prefix of the paths under which a proxy offers the server, such as /llm",
    "allow_unauthenticated": "listen on an address that other machines can reach without API keys",
    "allowed_hosts": "names in the Host header that are answered beside localhost and the server's address, "
    "comma-separated; *: any. None: no other name on a loopback address without API keys, else any",
    "forwarded_allow_ips": "addresses or networks of proxies whose X-Forwarded-For is believed, comma-separated; *: "
    "any. None: the header is ignored",
    "served_model_name": "model names used in the API, comma-separated; none: the model's own name",
    "max_waiting": "maximum number of waiting sequences; further requests are refused with 429",
    "max_body_bytes": "maximum size of a request body; larger ones are refused with 413",
    "max_total_body_bytes": "maximum size of all bodies of an API worker together; none: 8 times --max-body-bytes",
    "max_body_items": "maximum number of commas, colons, quotes and opening brackets in a body of more than 256 KiB",
    "max_sequences_per_request": "maximum number of prompts times n of one request",
    "max_prompt_chars": "maximum length of a prompt or conversation; none: as many characters as the context can hold",
    "max_logprobs": "maximum number of alternatives in a token's log-probabilities; -1: the whole vocabulary",
    "max_total_logprob_bytes": "maximum size of the log-probabilities that an API worker holds for its answers",
    "body_seconds": "timeout for receiving a request's body",
    "template_seconds": "how long the chat template may take for one conversation",
    "max_connections": "maximum number of connections; further ones get 503, except for probes",
    "header_seconds": "timeout for receiving a request's headers",
    "write_seconds": "close a connection whose client reads nothing of a pending response for this long",
    "keep_alive_seconds": "how long an idle connection is kept open",
    "drain_seconds": "how long running requests may continue after SIGTERM",
    "api_key_file": "file with API keys for inference, one per line; ENCORE_API_KEYS adds more. None: no key required",
    "admin_key_file": "file with keys for the admin routes; ENCORE_ADMIN_KEYS adds more. None: admin routes are off",
    "admin_without_key": "loopback: the admin routes need no key in requests from this machine, for trainers whose "
    "clients send none",
    "allow_priority": "let any client set priority; otherwise it requires an admin key",
    "enable_kv_block_api": "turn on the admin routes /kv_blocks, which copy blocks of the KV cache out and in",
    "profile_folder": "folder for the traces of POST /profile/stop. None: profiling is off",
    "http_workers": "number of API worker processes; none: one per 4 processors, at most 4",
    "in_process": "run the engine in the server process",
    "replicas": "number of servers, each with its own engine, behind one address, on Ray Serve; none: one, without Ray",
    "max_replicas": "maximum number of replicas, which are added as the load grows; none: their number is fixed",
    "target_requests": "requests in flight per replica at which replicas are added and removed",
    "tool_call_parser": "format of tool calls: hermes, llama3_json, pythonic, mistral, qwen3_coder; auto: by the chat "
    "template; none: off",
    "reasoning_parser": "format of reasoning: qwen3, deepseek_r1, mistral; auto: by the chat template; none: off",
    "close_objects": "JSON schemas whose objects allow no additional properties unless they say so: with strict: true; "
    "arguments of tools, too; or all",
    "response_store_entries": "maximum number of stored responses of /v1/responses; 0: store none",
    "response_store_bytes": "maximum size of all stored responses with their conversations",
    "response_store_seconds": "how long a response is stored",
    "trust_request_chat_template": "accept chat templates in requests; they run sandboxed, in a separate process",
    "enable_prompt_tokens_details": "send usage.prompt_tokens_details; none: unless --compat vllm is on",
    "return_token_ids": "token ids and weight versions in completions and chats, unless a request says otherwise",
    "return_tokens_as_token_ids": "write tokens of logprobs as token_id:5, unless a request says otherwise",
    "enable_force_include_usage": "usage in each chunk of every stream of completions and chats, and at its end",
    "compat": "vllm: vLLM's metrics, /version, keys of responses and guided_* fields too",
    "otlp_traces_endpoint": "address of an OpenTelemetry collector (OTLP over HTTP) for traces of requests; none: no "
    "traces",
    "log_level": "log level",
    "log_format": "log format: lines of text or of JSON",
}
ENGINE_HELP = {
    "model": "Hugging Face model name, folder in Hugging Face layout, .gguf file, or the built-in default model's name",
    "dtype": "data type of activations and KV cache",
    "device": "cpu, cuda, cuda:N, or auto",
    "load_format": "auto: load the weights; dummy: random weights",
    "generation_config": "sampling parameters that requests leave out: auto: from the model's "
    "generation_config.json or .gguf file; engine: the engine's own; or a folder with a generation_config.json",
    "quantization": "quantise the linear layers of a plain checkpoint while it loads; none: store what it holds",
    "kv_cache_dtype": "storage of keys and values: auto (the model's data type), or 8-bit floats",
    "cpu_weight_format": "earlier name of --quantization on a CPU (int4), and of --dtype (bf16, fp32)",
    "num_threads": "number of threads of a CPU engine; by default one per core, fewer beside busy processes",
    "tensor_parallel_size": "number of GPUs of this host for tensor parallelism, one process each",
    "max_model_len": "context length in tokens",
    "max_num_seqs": "maximum number of sequences in the running batch",
    "max_num_batched_tokens": "maximum number of tokens per step",
    "page_size": "tokens per KV cache page",
    "num_pages": "number of KV cache pages",
    "gpu_memory_utilization": "fraction of the GPU's memory to use",
    "enable_prefix_caching": "reuse the KV cache of prompts with the same prefix",
    "kv_events_config": "publish over ZeroMQ which prefixes the KV cache holds, for routers; a JSON object with "
    'vLLM\'s keys, such as {"enable_kv_cache_events": true}',
    "kv_offloading_size": "GiB of host memory for pages that the prefix cache evicts, over all GPUs; none: off",
    "kv_offloading_disk_path": "folder to which those pages are written too, and read from after a restart; none: off",
    "kv_offloading_disk_size": "GiB that the files in that folder may take",
    "async_scheduling": "enqueue each step before the previous step's tokens are read",
    "num_speculative_tokens": "draft tokens per request and step, by prompt lookup; 0: none",
    "enable_return_hidden_states": "allow requests to ask for hidden states",
    "enable_return_routed_experts": "record the experts of each token; /inference/v1/generate returns them",
    "enable_sleep_mode": "allow /sleep to release the memory of weights, KV cache and graphs",
    "keep_stale_kv": "running requests go on with the KV of the weights before an update",
    "score_tokens": "tokens for no and yes whose logits score a query and a document, comma-separated",
    "score_template": "file with the Jinja template of a query and a document; none: as the model's folder says",
    "kernels": "kernels on a GPU: fused (the engine's own), torch, or auto",
    "cuda_graph_impl": "graph capture implementation; none or local for inference",
    "inference_cuda_graph_scope": "none: no graphs; layer: one graph per layer; block: one graph per step",
    "graph_buckets": "batch sizes to capture, comma-separated; none: a ladder up to max_num_seqs",
    "warmup": "full: capture all graphs before ready; background: while serving; lazy: on first use",
    "graph_manifest": "file that records the graphs that traffic used",
    "graph_shadow_check_share": "share of the time in which replays are compared with eager steps; 0: never",
    "logprobs_mode": "logprobs of the distribution that is sampled, or of the model's raw output",
    "seed": "base seed of offline requests that have none; a server uses random seeds",
    "progress": "show the progress of loading and captures on standard error",
}
CHOICES = {
    "dtype": engine_config.DTYPES,
    "load_format": engine_config.LOAD_FORMATS,
    "quantization": engine_config.QUANTIZATIONS,
    "kv_cache_dtype": engine_config.KV_CACHE_DTYPES,
    "cpu_weight_format": engine_config.CPU_WEIGHT_FORMATS,
    "warmup": engine_config.WARMUPS,
    "logprobs_mode": engine_config.LOGPROBS_MODES,
    "kernels": engine_config.KERNELS,
    "admin_without_key": ADMINS_WITHOUT_KEY,
    "compat": COMPATS,
    "close_objects": CLOSE_OBJECTS,
    "log_level": LOG_LEVELS,
    "log_format": LOG_FORMATS,
}
# Shown first by --help, in this order.
MOST_USED = (
    "model", "host", "port", "api_key_file", "served_model_name", "dtype", "max_model_len", "max_num_seqs",
    "gpu_memory_utilization", "tensor_parallel_size",
)  # fmt: skip
# The other flags, as --help groups them.
TOPICS: Mapping[str, tuple[str, ...]] = {
    "network": (
        "root_path", "allowed_hosts", "forwarded_allow_ips", "http_workers", "in_process", "max_connections",
        "header_seconds", "body_seconds", "write_seconds", "keep_alive_seconds", "drain_seconds",
    ),
    "replicas": ("replicas", "max_replicas", "target_requests"),
    "access": (
        "allow_unauthenticated", "admin_key_file", "admin_without_key", "allow_priority", "profile_folder",
        "trust_request_chat_template", "enable_kv_block_api",
    ),
    "limits": (
        "max_waiting", "max_body_bytes", "max_total_body_bytes", "max_body_items", "max_sequences_per_request",
        "max_prompt_chars", "max_logprobs", "max_total_logprob_bytes", "template_seconds",
    ),
    "api": (
        "tool_call_parser", "reasoning_parser", "close_objects", "response_store_entries", "response_store_bytes",
        "response_store_seconds", "enable_prompt_tokens_details", "return_token_ids", "return_tokens_as_token_ids",
        "enable_force_include_usage", "compat", "generation_config", "enable_return_hidden_states",
        "enable_return_routed_experts", "logprobs_mode", "score_tokens", "score_template", "seed",
    ),
    "logging": ("log_level", "log_format", "otlp_traces_endpoint", "progress"),
    "model": ("device", "load_format", "quantization", "kv_cache_dtype", "cpu_weight_format", "num_threads", "kernels"),
    "batching": (
        "max_num_batched_tokens", "page_size", "num_pages", "enable_prefix_caching", "kv_events_config",
        "kv_offloading_size", "kv_offloading_disk_path", "kv_offloading_disk_size", "async_scheduling",
        "num_speculative_tokens", "enable_sleep_mode", "keep_stale_kv",
    ),
    "graphs": (
        "warmup", "graph_buckets", "graph_manifest", "cuda_graph_impl", "inference_cuda_graph_scope",
        "graph_shadow_check_share",
    ),
}  # fmt: skip
OTHER_TOPIC = "other"
# A server can serve while it captures in the background, so each graph exists before it is needed.
SERVING_DEFAULTS = {"warmup": "background"}


def add_flags(
    parser: Parser, *config_classes: type, defaults: Mapping[str, Any], leave_out: Collection[str] = ()
) -> None:
    """Add a flag per field of the classes, by topics. `defaults` override the fields' defaults in the help."""
    settings = {
        setting.name: (setting, config_class)
        for config_class in config_classes
        for setting in dataclasses.fields(config_class)
        if setting.name not in NOT_OFFERED and setting.name not in leave_out
    }
    in_topics = [name for names in TOPICS.values() for name in names]
    topics = {**TOPICS, OTHER_TOPIC: tuple(name for name in settings if name not in (*MOST_USED, *in_topics))}
    for name in MOST_USED:
        if name in settings:
            parser.add_most_used(f"--{name.replace('_', '-')}", **_options(*settings[name], defaults))
    for topic, names in topics.items():
        for name in names:
            if name in settings:
                parser.add_to_topic(topic, f"--{name.replace('_', '-')}", **_options(*settings[name], defaults))


def _options(setting: dataclasses.Field, config_class: type, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return argparse's description of a field's flag."""
    text = (ENGINE_HELP if config_class is EngineConfig else SERVER_HELP).get(setting.name, "")
    default = _default_text(defaults.get(setting.name, setting.default), config_class)
    options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": f"{text} (default: {default})"}
    type_name = str(setting.type)
    if type_name.startswith("bool"):
        return options | {"action": argparse.BooleanOptionalAction}
    choices = CHOICES.get(setting.name)
    metavar = None if choices else METAVARS[type_name]
    return options | {"type": _parser_of(type_name), "choices": choices, "metavar": metavar}


def add_serving_flags(parser: Parser, leave_out: Collection[str] = ()) -> None:
    """Add the flags of a server and its engine, without the settings in `leave_out`, and --config."""
    parser.add_argument(
        "--config", metavar="FILE", default=argparse.SUPPRESS,
        help="YAML file with settings named as the flags; ENCORE_* variables override it, flags override both",
    )  # fmt: skip
    add_flags(parser, ServerConfig, EngineConfig, defaults=SERVING_DEFAULTS, leave_out=leave_out)


def _parser_of(annotation: str) -> Callable[[str], Any]:
    """Return a parser of a flag's value that says what is needed."""

    def parse_flag(text: str) -> Any:
        try:
            return PARSERS[annotation](text)
        except ValueError as exc:
            raise argparse.ArgumentTypeError(f"must be {NEEDED[annotation]}; found {text!r}") from exc

    return parse_flag


def given(args: argparse.Namespace, config_class: type) -> dict[str, Any]:
    """Return the fields of `config_class` that were given as flags."""
    names = {setting.name for setting in dataclasses.fields(config_class)}
    return {name: value for name, value in vars(args).items() if name in names}


def given_settings(args: argparse.Namespace) -> list[str]:
    """Return the names of the settings that were given as flags, --config included."""
    settings = {*given(args, ServerConfig), *given(args, EngineConfig), "config"}
    return [name for name in vars(args) if name in settings]


def server_config(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> ServerConfig:
    """Return the ServerConfig. Precedence: flag, environment variable, configuration file, server default.

    Raises ConfigError for invalid values and for unknown names in the file or the environment. Names a value as it was
    given: ENCORE_PORT=70000, not port=70000.
    """
    path = getattr(args, "config", None) or environ.get("ENCORE_CONFIG")
    from_file = read_file(path) if path else {}
    from_environment = read_environment(environ)
    flags = given(args, EngineConfig) | given(args, ServerConfig)
    try:
        return ServerConfig.from_dict(SERVING_DEFAULTS | from_file | from_environment | flags)
    except ConfigError as error:
        raise ConfigError(spell_settings(str(error), args, environ)) from error


def _default_text(default: Any, config_class: type) -> str:
    if default is None:
        return "none" if config_class is ServerConfig else "chosen for the machine and model"
    if isinstance(default, tuple):
        return ",".join(map(str, default)) or "none"
    return str(default).lower() if isinstance(default, bool) else str(default).replace("%", "%%")
