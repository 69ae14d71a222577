"""The body of /server_info: settings and state, under the names of vLLM and of SGLang."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as distribution_version
from typing import Any

from server.keys import ADMIN_KEYS, API_KEYS
from server.serving.service import Service
from server.version import version

PACKAGES = ("torch", "transformers", "tokenizers", "llguidance", "triton", "fastapi", "uvicorn")


def server_details(service: Service, as_text: bool) -> dict[str, Any]:
    """Return the body. `as_text`: vLLM's configuration as JSON text. Raises WireError 503 until the model is loaded."""
    _ = service.tokens
    tools, reasoning = service.chat_formats.tools, service.chat_formats.reasoning
    parsers = {
        "tool_call_parser": "none" if tools is None else tools.name,
        "reasoning_parser": "none" if reasoning is None else reasoning.name,
    }
    info, stats, config = service.client.info(), service.client.stats(), service.config
    engine = config.engine
    names = list(service.model_names())
    weight_version = stats.weight_version or info.weight_version
    vllm_config: dict[str, Any] = {
        "model_config": {
            "model": engine.model, "served_model_name": names, "dtype": info.dtype, "seed": engine.seed,
            "max_model_len": info.max_model_len, "vocab_size": info.vocab_size, "quantization": info.weight_format,
            "logprobs_mode": f"{info.logprobs_mode}_logprobs", "architecture": info.architecture,
            "generation_config": engine.generation_config, "default_sampling_params": dict(info.sampling_defaults),
        },
        "cache_config": {
            "block_size": info.page_size, "num_gpu_blocks": info.num_pages, "cache_dtype": info.dtype,
            "kv_cache_size_tokens": info.page_size * info.num_pages,
            "enable_prefix_caching": info.enable_prefix_caching,
            "gpu_memory_utilization": engine.gpu_memory_utilization,
        },
        "parallel_config": {
            "tensor_parallel_size": engine.tensor_parallel_size, "pipeline_parallel_size": 1, "data_parallel_size": 1,
        },
        "scheduler_config": {
            "max_num_seqs": info.max_num_seqs, "max_num_batched_tokens": info.max_num_batched_tokens,
            "async_scheduling": info.async_scheduling,
        },
        "device_config": {"device": info.device},
        "structured_outputs_config": {"backend": "guidance", "reasoning_parser": parsers["reasoning_parser"]},
        "weight_transfer_config": None,
        "additional_config": dataclasses.asdict(config),
    }  # fmt: skip
    return {
        "vllm_config": json.dumps(vllm_config, default=str) if as_text else vllm_config,
        "vllm_env": _variables(),
        "system_env": _system(),
        "version": version(),
        "model_path": engine.model,
        "served_model_name": names[0],
        "device": info.device,
        "dtype": info.dtype,
        "tp_size": engine.tensor_parallel_size,
        "context_length": info.max_model_len,
        "page_size": info.page_size,
        "max_total_num_tokens": info.num_pages * info.page_size,
        "max_running_requests": info.max_num_seqs,
        "max_prefill_tokens": info.max_num_batched_tokens,
        "mem_fraction_static": engine.gpu_memory_utilization,
        "random_seed": engine.seed,
        "weight_version": weight_version,
        "sampling_defaults": dict(info.sampling_defaults),
        **parsers,
        "internal_states": [
            {
                "num_running_reqs": stats.num_running, "num_waiting_reqs": stats.num_waiting,
                "token_usage": stats.kv_cache_usage, "weight_version": weight_version,
            }
        ],
    }  # fmt: skip


def _variables() -> dict[str, str]:
    """Return the ENCORE_* variables, without those that hold keys."""
    secret = (API_KEYS, ADMIN_KEYS)
    return {name: value for name, value in os.environ.items() if name.startswith("ENCORE_") and name not in secret}


def _system() -> dict[str, str]:
    found = {"os": platform.platform(), "python_version": platform.python_version()}
    for name in PACKAGES:
        try:
            found[f"{name}_version"] = distribution_version(name)
        except PackageNotFoundError:
            found[f"{name}_version"] = "not installed"
    return found
