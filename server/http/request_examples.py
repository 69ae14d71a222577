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
    "/inference/v1/generate": {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 16, "logprobs": 1}},
    "/v1/embeddings": {"input": ["The capital of France is Paris.", "Cats sleep."]},
    "/pooling": {"input": "The capital of France is Paris."},
    "/v1/score": {"text_1": "capital of France", "text_2": ["Paris is its capital.", "Cats sleep."]},
    "/v1/rerank": {"query": "capital of France", "documents": ["Paris is its capital.", "Cats sleep."], "top_n": 1},
    "/tokenize": {"prompt": _COMPLETION["prompt"]},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/invocations": _CHAT,
    "/api/chat": {"messages": _CHAT["messages"], "options": {"num_predict": 64}, "stream": False},
    "/api/generate": {"prompt": _COMPLETION["prompt"], "options": {"num_predict": 16}, "stream": False},
    "/api/show": {},
    "/weights/update": {"path": "/models/step-1", "version": "step-1"},
    "/kv_blocks/lookup": {"block_hashes": [7412938650198273645]},
    "/kv_blocks/export": {"block_hashes": [7412938650198273645]},
    "/pause": {"mode": "keep"},
    "/resume": {},
    "/flush_cache": {},
    "/abort_requests": {"request_ids": ["rollout-1"]},
    "/abort_request": {"rid": "rollout-1"},
    "/reset_prefix_cache": {"reset_running_requests": False},
    "/sleep": {"level": 1, "mode": "keep"},
    "/wake_up": {"tags": ["weights"]},
    "/release_kv_cache_memory": {"mode": "keep"},
    "/release_memory_occupation": {"tags": ["kv_cache"]},
    "/resume_memory_occupation": {"tags": ["kv_cache"]},
    "/pause_generation": {"mode": "in_place"},
    "/continue_generation": {},
    "/start_weight_update": {},
    "/update_weights": {"weight_dir": "/models/step-1"},
    "/finish_weight_update": {"weight_version": "step-1"},
    "/update_weight_version": {"new_version": "step-1"},
    "/weight_checker": {"action": "checksum"},
    "/update_weights_from_disk": {"model_path": "/models/step-1", "weight_version": "step-1"},
    "/init_weight_transfer_engine": {
        "init_info": {"master_address": "localhost", "master_port": 29600, "world_size": 2}
    },
    "/init_weights_update_group": {"master_address": "localhost", "master_port": 29600, "world_size": 2},
    "/destroy_weights_update_group": {"group_name": "weight_update_group"},
    "/update_weights_from_distributed": {"names": ["model.norm.weight"], "dtypes": ["bfloat16"], "shapes": [[576]]},
    "/update_weights_from_tensor": {"serialized_named_tensors": ["gASVBAAAAAAAAABdlC4="], "weight_version": "step-1"},
    "/collective_rpc": {"method": "skyrl_start_weight_update", "kwargs": {"is_checkpoint_format": True}},
    "/get_weights_by_name": {"name": "model.norm.weight", "truncate_size": 4},
}
