"""Command line flags from the configuration classes: one flag per field, its default read from the field.

A new setting appears as a flag by itself; a test holds that each has its help text here.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from engine import config as engine_config
from engine.config import EngineConfig
from server.cli.settings import METAVARS, NOT_OFFERED, PARSERS, read_environment, read_file
from server.config import LOG_FORMATS, LOG_LEVELS, ServerConfig

SERVER_HELP = {
    "host": "address to listen on",
    "port": "port to listen on; 0 takes a free one",
    "served_model_name": "names that clients may give as model, comma-separated; none: the model's own",
    "max_waiting": "sequences that may wait beyond those running; more are refused with 429",
    "max_body_bytes": "largest body; more is refused with 413",
    "max_connections": "connections at once; more are answered 503, probes excepted",
    "header_seconds": "how long a request's headers may take to arrive",
    "write_seconds": "how long a client may take nothing of an answer before its connection is closed",
    "keep_alive_seconds": "how long an idle connection is kept open",
    "drain_seconds": "how long running requests may go on after SIGTERM",
    "api_key_file": "file of keys for inference, one a line; ENCORE_API_KEYS adds more. None: no key is asked for",
    "admin_key_file": "file of keys for the admin routes; ENCORE_ADMIN_KEYS adds more. None: those routes are off",
    "profile_folder": "where POST /profile/stop writes its traces. None: no profiles",
    "http_workers": "processes that answer HTTP; none: one for each 4 processors, at most 4",
    "in_process": "run the engine in the server's own process",
    "log_level": "how much is logged",
    "log_format": "lines of text, or of JSON",
}
ENGINE_HELP = {
    "model": "the default model's name, a folder in Hugging Face layout, a .gguf file, or a hub name",
    "dtype": "number format of activations and cache",
    "device": "cpu, cuda, cuda:N, or auto",
    "load_format": "auto reads the weights; dummy makes random ones",
    "cpu_weight_format": "how weights are kept on a CPU",
    "num_threads": "threads of a CPU engine",
    "tensor_parallel_size": "GPUs of this host to split the model over, a process each",
    "max_model_len": "context in tokens",
    "max_num_seqs": "sequences in the running batch",
    "max_num_batched_tokens": "tokens computed in one step",
    "page_size": "tokens in a page of the KV cache",
    "num_pages": "pages of the KV cache",
    "gpu_memory_utilization": "share of the GPU's memory to use",
    "enable_prefix_caching": "reuse the KV of prompts that begin alike",
    "async_scheduling": "enqueue each step before the last one's tokens were read",
    "kernels": "how a GPU computes a step: fused (the engine's own), torch, or auto",
    "cuda_graph_impl": "who captures graphs: none or local for inference",
    "inference_cuda_graph_scope": "one graph per layer or per step: none, layer, block",
    "cuda_graph_modules": "modules that a training capture covers, comma-separated",
    "cuda_graph_warmup_steps": "runs before a capture",
    "graph_buckets": "batch sizes to capture, comma-separated; none: a ladder up to max_num_seqs",
    "warmup": "full captures all before it is ready, background while serving, lazy when needed",
    "graph_manifest": "file that remembers which graphs traffic used",
    "logprobs_mode": "of the distribution sampled from, or of the model's own",
    "seed": "seed of offline requests that bring none; a server draws theirs",
}
CHOICES = {
    "dtype": engine_config.DTYPES,
    "load_format": engine_config.LOAD_FORMATS,
    "cpu_weight_format": engine_config.CPU_WEIGHT_FORMATS,
    "warmup": engine_config.WARMUPS,
    "logprobs_mode": engine_config.LOGPROBS_MODES,
    "kernels": engine_config.KERNELS,
    "log_level": LOG_LEVELS,
    "log_format": LOG_FORMATS,
}
# A server can answer while it captures, and then each bucket's graph is there before it is needed.
SERVING_DEFAULTS = {"warmup": "background"}


def add_flags(parser: argparse.ArgumentParser, kind: type, *, title: str, defaults: Mapping[str, Any]) -> None:
    """Add a group of flags, one per field of the dataclass `kind`; `defaults` are shown in place of the fields'."""
    texts = ENGINE_HELP if kind is EngineConfig else SERVER_HELP
    group = parser.add_argument_group(title)
    for setting in dataclasses.fields(kind):
        if setting.name in NOT_OFFERED:
            continue
        default = defaults.get(setting.name, setting.default)
        flag = "--" + setting.name.replace("_", "-")
        text = f"{texts.get(setting.name, '')} (default: {_shown(default, kind)})"
        type_name = str(setting.type)
        if type_name.startswith("bool"):
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
        else:
            group.add_argument(
                flag,
                type=PARSERS[type_name],
                choices=CHOICES.get(setting.name),
                default=argparse.SUPPRESS,
                metavar=None if setting.name in CHOICES else METAVARS[type_name],
                help=text,
            )


def given(args: argparse.Namespace, kind: type) -> dict[str, Any]:
    """The fields of `kind` that were given as flags."""
    names = {setting.name for setting in dataclasses.fields(kind)}
    return {name: value for name, value in vars(args).items() if name in names}


def server_config(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> ServerConfig:
    """A ServerConfig: each setting from its flag, else its variable, else --config's file, else a server's default.

    Raises ConfigError as the classes do, and for names that don't exist in file or environment.
    """
    path = getattr(args, "config", None) or environ.get("ENCORE_CONFIG")
    from_file = read_file(path) if path else {}
    flags = given(args, EngineConfig) | given(args, ServerConfig)
    return ServerConfig.from_dict(SERVING_DEFAULTS | from_file | read_environment(environ) | flags)


def _shown(default: Any, kind: type) -> str:
    if default is None:
        return "none" if kind is ServerConfig else "chosen for the machine and model"
    if isinstance(default, tuple):
        return ",".join(map(str, default)) or "none"
    return str(default).lower() if isinstance(default, bool) else str(default).replace("%", "%%")
