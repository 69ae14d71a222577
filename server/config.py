"""Server configuration: names, defaults and validation of the server's settings.

ServerConfig contains an EngineConfig. `from_dict` takes the settings of both in one flat mapping, as the command line
does.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.text.parsing.selection import AUTO, reasoning_format, tool_format
from graph_cache.utils.validation import NamesFields, did_you_mean, is_whole_number

LOG_LEVELS = ("critical", "error", "warning", "info", "debug")
LOG_FORMATS = ("text", "json")
COMPATS = ("none", "vllm")
ADMINS_WITHOUT_KEY = ("none", "loopback")
CLOSE_OBJECTS = ("strict", "tools", "all")
# An API worker streams about 20,000 tokens per second; the other processors are left to the engine and the clients.
MAX_API_WORKERS, PROCESSORS_PER_API_WORKER = 4, 4
_ROOT_PATH = re.compile(r"(/[\w.~-]+)+", re.ASCII)
_HOST_NAME = re.compile(r"(\*\.)?[\w-]+(\.[\w-]+)*\.?", re.ASCII)
CGROUP_LIMIT = Path("/sys/fs/cgroup/cpu.max")  # in a container, its own limit


@dataclass(frozen=True, kw_only=True)
class ServerConfig(NamesFields):
    """Settings of one server. Raises ConfigError for an invalid value.

    Attributes:
        engine: Settings of the engine.
        root_path: Prefix of the paths under which a proxy offers the server, such as /llm.
        host, port: Address to listen on. Port 0 selects a free port. A host other than loopback requires API keys.
        allow_unauthenticated: Whether to listen on such a host without API keys.
        allowed_hosts: Names in the Host header that are answered beside localhost and the address of the connection;
            "*.example.com" for all names below one, "*" for any. Other names get 400. None: on a loopback address
            without API keys, no other name; else any.
        forwarded_allow_ips: Addresses or networks of proxies whose X-Forwarded-For and X-Forwarded-Proto are believed;
            "*" for any. None: those headers are ignored.
        served_model_name: Names that clients may use as "model". The first one is reported in responses. Default: the
            model's own name.
        max_waiting: Maximum number of waiting sequences. Further requests are refused with 429.
        max_body_bytes: Maximum size of a body. A larger one is refused with 413 before it is parsed.
        max_total_body_bytes: Maximum size of all bodies of an API worker together that arrive or wait to be tokenized,
            beyond 64 KiB of each. Slow uploads are dropped with 503 to make room. None: 8 times max_body_bytes.
        max_body_items: Maximum number of commas, colons, quotes and opening brackets in a body of more than 256 KiB.
            Bounds the time to parse it. Further ones are refused with 413.
        max_sequences_per_request: Maximum number of prompts times n of one request, which leaves room in the queue.
        max_prompt_chars: Maximum length of a prompt's text, and of all strings of a conversation together. None: as
            many characters as the context can hold.
        max_logprobs: Maximum number of alternatives to a token whose log-probabilities a request may ask for. -1: the
            whole vocabulary.
        max_total_logprob_bytes: Maximum size of the log-probabilities that an API worker holds for its answers. Beyond
            it, the request with most of them is aborted with 503.
        body_seconds: A body must arrive within this time, or is refused with 408.
        template_seconds: A chat template must render a conversation within this time, or the request is refused.
        max_connections: Maximum number of connections. Further ones get 503.
        header_seconds: Timeout for receiving a request's headers.
        write_seconds: A connection whose client reads none of its pending response for this long is closed.
        keep_alive_seconds: How long an idle connection is kept open.
        drain_seconds: How long running requests may continue after SIGTERM.
        api_key_file, admin_key_file: Files with one accepted key per line. Without API keys inference is open; without
            admin keys the admin routes are off.
        admin_without_key: "loopback": the admin routes need no key in requests from this machine over a loopback
            address, except from web pages and through proxies. "none": they always need one.
        allow_priority: Whether any client may set `priority`. Otherwise it requires an admin key.
        enable_kv_block_api: Whether the admin routes /kv_blocks copy blocks of the KV cache out and in. Needs
            `kv_offloading_size`, and a model on one GPU.
        profile_folder: Folder for the traces of /profile. Profiling is off without it.
        http_workers: Number of API workers, the processes that serve HTTP on the port. None: one per four processors,
            at most 4.
        in_process: Run the engine in the server's process. Only one API worker is possible then.
        replicas: Number of replicas of the server, each with its own engine, on Ray Serve. None: one server without
            Ray.
        max_replicas: Maximum number of replicas; Ray Serve adds them as the load grows, from `replicas`. None: their
            number is fixed.
        target_requests: Requests in flight per replica at which replicas are added and removed.
        tool_call_parser: Format of the model's tool calls (engine.text.parsing.selection.TOOL_FORMATS); "auto": by the
            chat template; "none": tool calls stay in the text.
        reasoning_parser: Format of the model's reasoning, likewise.
        close_objects: Where objects of JSON schemas that don't mention additionalProperties allow none. "strict": in
            schemas with `strict: true`; "tools": in arguments of all tools, too; "all": in all schemas.
        response_store_entries, response_store_bytes: Maximum number and total size of stored responses of
            /v1/responses, with their conversations. The oldest are deleted first. 0 entries: store none.
        response_store_seconds: How long a response is stored.
        trust_request_chat_template: Accept chat templates in requests. They run sandboxed in a separate process.
        enable_prompt_tokens_details: Send `usage.prompt_tokens_details`; None: unless compat is "vllm", as in vLLM.
        return_token_ids: Add token ids and weight versions to completions and chats, unless a request says otherwise.
        return_tokens_as_token_ids: Write tokens of log-probabilities as "token_id:5", unless a request says otherwise.
        enable_force_include_usage: Give the usage in each chunk of every stream of completions and chats, and at its
            end.
        compat: "vllm": also export metrics under vLLM's names, answer /version with the vLLM release that is followed,
            send the keys that its responses always have, and accept its `guided_*` fields. "none": none of these.
        log_level, log_format: Lowest level that is logged; "text" or "json".
    """

    engine: EngineConfig = field(default_factory=EngineConfig)
    host: str = "127.0.0.1"
    port: int = 8000
    root_path: str = ""
    allow_unauthenticated: bool = False
    allowed_hosts: tuple[str, ...] = ()
    forwarded_allow_ips: tuple[str, ...] = ()
    served_model_name: tuple[str, ...] = ()
    max_waiting: int = 1024
    max_body_bytes: int = 8 * 1024 * 1024
    max_total_body_bytes: int | None = None
    max_body_items: int = 500_000
    max_sequences_per_request: int = 256
    max_prompt_chars: int | None = None
    max_logprobs: int = 100
    max_total_logprob_bytes: int = 384 * 1024 * 1024
    body_seconds: float = 60.0
    template_seconds: float = 3.0
    max_connections: int = 4096
    header_seconds: float = 10.0
    write_seconds: float = 60.0
    keep_alive_seconds: float = 15.0
    drain_seconds: float = 30.0
    api_key_file: str | None = None
    admin_key_file: str | None = None
    admin_without_key: str = "none"
    allow_priority: bool = False
    enable_kv_block_api: bool = False
    profile_folder: str | None = None
    http_workers: int | None = None
    in_process: bool = False
    replicas: int | None = None
    max_replicas: int | None = None
    target_requests: float = 32.0
    tool_call_parser: str = AUTO
    reasoning_parser: str = AUTO
    close_objects: str = "tools"
    response_store_entries: int = 1024
    response_store_bytes: int = 64 * 1024 * 1024
    response_store_seconds: float = 3600.0
    trust_request_chat_template: bool = False
    enable_prompt_tokens_details: bool | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    enable_force_include_usage: bool = False
    compat: str = "none"
    otlp_traces_endpoint: str | None = None
    log_level: str = "info"
    log_format: str = "text"

    def __post_init__(self) -> None:
        for name in ("served_model_name", "allowed_hosts", "forwarded_allow_ips"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
            if not all(isinstance(item, str) and item for item in getattr(self, name)):
                raise ConfigError(f"{name}={value!r}: non-empty strings are required")
        for host in self.allowed_hosts:
            _check_host(host)
        for proxy in self.forwarded_allow_ips:
            _check_proxy(proxy)
        if not isinstance(self.host, str) or not self.host:
            raise ConfigError(f"host={self.host!r}: an address to listen on is required, such as 127.0.0.1 or 0.0.0.0")
        object.__setattr__(self, "root_path", _root_path(self.root_path))
        _check_int("port", self.port, 0, 65535)
        _check_int("max_waiting", self.max_waiting, 0, 1_000_000)
        _check_int("max_body_bytes", self.max_body_bytes, 1024, 2**31)
        _check_int("max_total_body_bytes", self.total_body_bytes, self.max_body_bytes, 2**40)
        _check_int("max_body_items", self.max_body_items, 1000, 2**31)
        _check_int("max_sequences_per_request", self.max_sequences_per_request, 1, 1_000_000)
        if self.max_prompt_chars is not None:
            _check_int("max_prompt_chars", self.max_prompt_chars, 1, 2**31)
        _check_int("max_logprobs", self.max_logprobs, -1, 2**31 - 1)
        _check_int("max_total_logprob_bytes", self.max_total_logprob_bytes, 1024, 2**40)
        _check_seconds("body_seconds", self.body_seconds, 0.1)
        _check_seconds("template_seconds", self.template_seconds, 0.01)
        _check_int("max_connections", self.max_connections, 1, 1_000_000)
        if self.http_workers is not None:
            _check_int("http_workers", self.http_workers, 1, 64)
            if self.http_workers > 1 and self.in_process:
                raise ConfigError(
                    f"http_workers={self.http_workers} is not possible with in_process, which allows one API worker: "
                    "drop one of the two"
                )
        if self.replicas is not None:
            _check_int("replicas", self.replicas, 1, 4096)
        if self.max_replicas is not None:
            _check_int("max_replicas", self.max_replicas, self.replicas or 1, 4096)
        if not isinstance(self.target_requests, (int, float)) or not 0 < self.target_requests <= 1_000_000:
            raise ConfigError(f"target_requests={self.target_requests!r}: must be a number from 0 to 1000000, above 0")
        _check_int("response_store_entries", self.response_store_entries, 0, 100_000)
        _check_int("response_store_bytes", self.response_store_bytes, 1024, 2**40)
        if not isinstance(self.enable_prompt_tokens_details, bool | None):
            raise ConfigError(
                f"enable_prompt_tokens_details={self.enable_prompt_tokens_details!r} must be True or False"
            )
        _check_seconds("response_store_seconds", self.response_store_seconds, 1)
        _check_seconds("header_seconds", self.header_seconds, 0.1)
        _check_seconds("write_seconds", self.write_seconds, 0.1)
        _check_seconds("keep_alive_seconds", self.keep_alive_seconds, 0.1)
        _check_seconds("drain_seconds", self.drain_seconds, 0)
        if self.otlp_traces_endpoint is not None:
            traces_url(self.otlp_traces_endpoint)
        if self.enable_kv_block_api:
            _check_kv_block_api(self.engine)
        tool_format(self.tool_call_parser, None)  # raises for an unknown name
        reasoning_format(self.reasoning_parser, None)
        for name, allowed in (
            ("admin_without_key", ADMINS_WITHOUT_KEY),
            ("compat", COMPATS),
            ("close_objects", CLOSE_OBJECTS),
            ("log_level", LOG_LEVELS),
            ("log_format", LOG_FORMATS),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name}={getattr(self, name)!r} is not one of {', '.join(allowed)}")

    @property
    def total_body_bytes(self) -> int:
        """Maximum size of all bodies of an API worker together."""
        return 8 * self.max_body_bytes if self.max_total_body_bytes is None else self.max_total_body_bytes

    @property
    def sends_prompt_tokens_details(self) -> bool:
        """Whether answers have `usage.prompt_tokens_details`."""
        default = self.compat != "vllm"
        return default if self.enable_prompt_tokens_details is None else self.enable_prompt_tokens_details

    @property
    def is_replicated(self) -> bool:
        """Whether replicas on Ray Serve serve, instead of one server."""
        return self.replicas is not None or self.max_replicas is not None

    @property
    def api_workers(self) -> int:
        """Number of API workers, the processes that serve HTTP."""
        if self.http_workers is not None:
            return self.http_workers
        return 1 if self.in_process else min(MAX_API_WORKERS, max(1, _processors() // PROCESSORS_PER_API_WORKER))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ServerConfig:
        """Create a configuration from one flat mapping of server and engine settings.

        Raises ConfigError for an unknown key; the message suggests the nearest known one.
        """
        own_names = {f.name for f in dataclasses.fields(cls)} - {"engine"}
        engine_names = {f.name for f in dataclasses.fields(EngineConfig)}
        own, engine = {}, {}
        for name, value in values.items():
            if name in own_names:
                own[name] = value
            elif name in engine_names:
                engine[name] = value
            else:
                raise ConfigError(f"unknown setting {name!r}{did_you_mean(name, own_names | engine_names)}")
        return cls(engine=EngineConfig.from_dict(engine), **own)


def _processors() -> int:
    """Return the number of processors that this process may use."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return int(min(found, max(1, quota(CGROUP_LIMIT))))


def quota(limit: Path) -> float:
    """Return a container's CPU limit in processors, from the cgroup v2 file `cpu.max`; infinite if there is none."""
    try:
        time, period = limit.read_text().split()
    except OSError:  # no container, not Linux, or cgroup v1
        return math.inf
    return math.inf if time == "max" else int(time) / int(period)


def _check_host(host: str) -> None:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        if host != "*" and not _HOST_NAME.fullmatch(host):
            raise ConfigError(
                f"allowed_hosts={host!r}: must be host names such as llm.example.com or *.example.com, without scheme "
                "and port"
            ) from None


def _check_proxy(address: str) -> None:
    try:
        ipaddress.ip_network(address)
    except ValueError as error:
        if address != "*":
            raise ConfigError(
                f"forwarded_allow_ips={address!r}: must be IP addresses or networks such as 10.0.0.0/8, or *: {error}"
            ) from None


def _check_seconds(name: str, value: Any, low: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{name}={value!r}: a number of seconds is required")
    if not low <= value <= 86400:
        raise ConfigError(f"{name}={value}: must be from {low:g} to 86400 seconds")


def _root_path(value: str) -> str:
    """Return the prefix without a slash at its end; "" for none."""
    path = value.rstrip("/") if isinstance(value, str) else None
    if path is None or (path and not _ROOT_PATH.fullmatch(path)):
        raise ConfigError(f"root_path={value!r}: a path that begins with a slash is required, such as /llm")
    return path


def _check_int(name: str, value: Any, low: int, high: int) -> None:
    if not is_whole_number(value, low, high):
        raise ConfigError(f"{name}={value!r}: must be an integer from {low} to {high}")


def traces_url(endpoint: object) -> str:
    """Return the address of a collector, with the path of traces if it has none. Raises ConfigError."""
    parts = urlsplit(endpoint) if isinstance(endpoint, str) else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"otlp_traces_endpoint={endpoint!r} must be the http or https address of a collector, such as "
            "http://localhost:4318/v1/traces; OTLP over gRPC is not supported"
        )
    return parts._replace(path="/v1/traces").geturl() if parts.path in ("", "/") else str(endpoint)


def _check_kv_block_api(engine: EngineConfig) -> None:
    """Raise ConfigError for an engine whose blocks can't be copied."""
    if engine.kv_offloading_size is None:
        raise ConfigError(
            "enable_kv_block_api=True needs kv_offloading_size: blocks go through host memory; set it, or leave "
            "enable_kv_block_api out"
        )
    if engine.tensor_parallel_size > 1:
        raise ConfigError(
            f"enable_kv_block_api=True can't be combined with tensor_parallel_size={engine.tensor_parallel_size}: each "
            "rank has a part of a block; use one GPU, or leave it out"
        )
