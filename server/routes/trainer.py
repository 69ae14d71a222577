"""Routes with which a trainer drives the server: pauses, aborts, weights and their versions, sleep, in two dialects.

vLLM's (TRL, SkyRL, prime-rl) and SGLang's (slime, AReaL, verl). All need the admin key, see `http/keys.py`. Each runs
in the engine loop between two steps, for all API workers. Nothing of a body is unpickled.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Query, Request

from engine.core.pause import PauseMode
from engine.errors import RequestError
from engine.protocol.sleep import KV_CACHE, MEMORY_PARTS, check_tags
from graph_cache.utils.validation import did_you_mean
from server.http.body_route import BodyRoute
from server.http.errors import WireError
from server.http.openapi import ADMIN_REFUSALS, NOT_SUPPORTED, answered_by
from server.schemas import answers as wire
from server.schemas import trainer as bodies
from server.serving.service import Service

router = APIRouter(tags=["trainer"], responses=ADMIN_REFUSALS, route_class=BodyRoute)
log = logging.getLogger("encore.server")
T = TypeVar("T")
VLLM_GROUP = "vllm"  # name of the only group of vLLM's routes


async def _client(request: Request, body: bodies.TrainerBody | None = None) -> Any:
    """Return the engine client. Raises WireError 503 until the engine has started, RequestError for unknown fields."""
    service: Service = request.app.state.service
    _ = service.tokens
    known = [one.alias for one in request.scope["route"].dependant.query_params]
    for name in request.query_params:
        if name not in known:
            raise RequestError(
                f"{name[:64]} is not a known query parameter{did_you_mean(name, known)}", param=name[:64]
            )
    if body is not None:
        body.refuse_unsupported()
    log.info("trainer: %s %s", request.method, request.url.path)
    return service.client


# ---- pause and abort -----------------------------------------------------------------------------------------------


@router.post("/pause", responses=answered_by(wire.Status))
async def pause(
    request: Request,
    body: bodies.PauseBody | None = None,
    mode: Annotated[PauseMode | None, Query()] = None,
    wait_for_inflight_requests: Annotated[bool, Query()] = False,
    clear_cache: Annotated[bool, Query()] = False,
) -> dict[str, Any]:
    """Pause generation: `abort` running requests (default), `wait` for their end, or `keep` them frozen.

    `abort` refuses new requests with 503, the other modes hold them. `clear_cache` drops cached prefixes, and with
    `keep` the KV of the frozen requests. `wait_for_inflight_requests` is the earlier name of the mode `wait`. The
    parameters may be in the query, as vLLM's clients send them, or in the body.
    """
    client, sent = await _client(request, body), body or bodies.PauseBody()
    waits = wait_for_inflight_requests or sent.wait_for_inflight_requests
    await client.pause(_given("mode", mode, sent.mode) or ("wait" if waits else "abort"))
    if clear_cache or sent.clear_cache:
        await client.ask("reset_prefix_cache", True)
    return {"status": "paused"}


@router.post("/resume", responses=answered_by(wire.Status))
async def resume(request: Request, body: bodies.NoBody | None = None) -> dict[str, Any]:
    """End a pause: frozen requests go on, and held ones are queued."""
    await (await _client(request, body)).resume()
    return {"status": "resumed"}


@router.get("/is_paused", responses=answered_by(wire.IsPaused))
async def is_paused(request: Request) -> dict[str, Any]:
    """Return whether generation is paused."""
    return {"is_paused": await (await _client(request)).is_paused()}


@router.post("/abort_requests", responses=answered_by(wire.Aborted))
async def abort_requests(request: Request, body: bodies.AbortRequestsBody | None = None) -> dict[str, Any]:
    """Abort the requests with these ids, or all; they end with `abort` and keep what was generated."""
    client = await _client(request, body)
    return {"status": "aborted", "aborted": await client.abort_requests((body and body.request_ids) or None)}


@router.post("/reset_prefix_cache", responses=answered_by(wire.Success))
async def reset_prefix_cache(
    request: Request,
    body: bodies.ResetPrefixCacheBody | None = None,
    reset_running_requests: Annotated[bool, Query()] = False,
    reset_external: Annotated[bool, Query()] = False,
) -> dict[str, Any]:
    """Drop all cached prefixes; with `reset_running_requests` running requests compute their KV again."""
    client = await _client(request, body)
    await client.ask("reset_prefix_cache", reset_running_requests or (body is not None and body.reset_running_requests))
    return {"success": True, "message": "cached prefixes were dropped"}


@router.post("/pause_generation", responses=answered_by(wire.SGLangStatus))
async def pause_generation(request: Request, body: bodies.PauseGenerationBody | None = None) -> dict[str, Any]:
    """Pause generation, in SGLang's modes: `abort`, `retract` (requests compute their KV again) and `in_place`.

    New requests are held in every mode, as in SGLang.
    """
    client, mode = await _client(request, body), "abort" if body is None else body.mode
    await client.pause("keep")
    if mode == "abort":
        await client.abort_requests()
    elif mode == "retract":
        await client.ask("reset_prefix_cache", True)
    return {"message": "Generation paused successfully.", "status": "ok"}


@router.post("/continue_generation", responses=answered_by(wire.SGLangStatus))
async def continue_generation(request: Request, body: bodies.ContinueGenerationBody | None = None) -> dict[str, Any]:
    """End a pause, in SGLang's format."""
    await (await _client(request, body)).resume()
    return {"message": "Generation continued successfully.", "status": "ok"}


@router.post("/abort_request", responses=answered_by(wire.Aborted))
async def abort_request(body: bodies.AbortRequestBody, request: Request) -> dict[str, Any]:
    """Abort the request with this `rid`, or all with `abort_all`, in SGLang's format."""
    client = await _client(request, body)
    if not body.rid and not body.abort_all:
        raise WireError(400, "rid is missing: send it, or abort_all=true", param="rid", code="invalid_value")
    names = None if body.abort_all else [body.rid]
    return {"status": "aborted", "aborted": await client.abort_requests(names)}


@router.post("/flush_cache", responses=answered_by(wire.Success))
@router.get("/flush_cache", include_in_schema=False)
async def flush_cache(request: Request, body: bodies.NoBody | None = None) -> dict[str, Any]:
    """Drop all cached prefixes, in SGLang's format. Running requests keep their KV."""
    await (await _client(request, body)).ask("reset_prefix_cache", False)
    return {"success": True, "message": "Cache flushed."}


# ---- weights -------------------------------------------------------------------------------------------------------


@router.post("/start_weight_update", responses=answered_by(wire.Message))
async def start_weight_update(request: Request, body: bodies.StartWeightUpdateBody | None = None) -> dict[str, Any]:
    """Begin a weight update in several parts, which becomes visible with /finish_weight_update, all or nothing."""
    await (await _client(request, body)).ask("start_weight_update")
    return {"message": "Weight update started"}


@router.post("/init_weight_transfer_engine", responses=answered_by(wire.Message))
async def init_weight_transfer_engine(body: bodies.InitTransferBody, request: Request) -> dict[str, Any]:
    """Join a trainer's group of processes, over which /update_weights then receives. Ends when all have joined.

    With an empty `init_info`, for handles of GPU memory, there is nothing to do.
    """
    client, info = await _client(request, body), body.group
    if info is None:
        return {"message": "Weight transfer initialized"}
    await client.ask(
        "join_weight_group", VLLM_GROUP, info.master_address, info.master_port, info.rank_offset, info.world_size,
        info.backend, info.timeout, info.packed, info.packed_buffer_size_bytes,
    )  # fmt: skip
    return {"message": "Weight transfer initialized"}


@router.post("/init_weights_update_group", responses=answered_by(wire.Success))
async def init_weights_update_group(body: bodies.InitUpdateGroupBody, request: Request) -> dict[str, Any]:
    """Join a trainer's group of processes, in SGLang's format."""
    await (await _client(request, body)).ask(
        "join_weight_group", body.group_name, body.master_address, body.master_port, body.rank_offset,
        body.world_size, body.backend, None,
    )  # fmt: skip
    return {"success": True, "message": "Succeeded to initialize custom process group."}


@router.post("/destroy_weights_update_group", responses=answered_by(wire.Success))
async def destroy_weights_update_group(
    request: Request, body: bodies.DestroyUpdateGroupBody | None = None
) -> dict[str, Any]:
    """Leave a trainer's group of processes, in SGLang's format."""
    sent = body or bodies.DestroyUpdateGroupBody()
    await (await _client(request, body)).ask("leave_weight_group", sent.group_name)
    return {"success": True, "message": "Succeeded to destroy custom process group."}


@router.post("/update_weights_from_distributed", responses=answered_by(wire.DiskUpdate))
async def update_weights_from_distributed(body: bodies.DistributedUpdateBody, request: Request) -> dict[str, Any]:
    """Receive weights over a trainer's group of processes, in SGLang's format. Steps go on until all have arrived."""
    client = await _client(request, body)
    if body.abort_all_requests:
        await client.abort_requests()
    written, version = await client.ask(
        "update_weights_from_group", body.group_name, body.names, body.dtypes, body.shapes,
        body.load_format == "flattened_bucket", body.weight_version,
    )  # fmt: skip
    message = f"{written} tensors were written; the weights have the version {version}"
    return {"success": True, "message": message, "num_paused_requests": 0, "weight_version": version}


@router.post("/collective_rpc", responses=answered_by(wire.RpcResults))
async def collective_rpc(body: bodies.CollectiveRpcBody, request: Request) -> dict[str, Any]:
    """Update weights in parts from the memory of a GPU, as SkyRL calls its extension of vLLM's workers.

    Other methods are refused: nothing is called by the name that a client sends.
    """
    client = await _client(request, body)
    if body.method == "skyrl_start_weight_update":
        await client.ask("start_weight_update")
    elif body.method == "update_weights_ipc":
        await client.ask("update_weights_from_memory", body.shared)
    else:
        await client.ask("finish_weight_update")
    return {"results": [None]}


@router.post("/update_weights_from_tensor", responses=answered_by(wire.DiskUpdate))
async def update_weights_from_tensor(body: bodies.TensorUpdateBody, request: Request) -> dict[str, Any]:
    """Copy weights from the memory of a GPU that trainer and server share, in SGLang's format.

    Of the pickles, exactly the handles of tensors are read; nothing is unpickled.
    """
    client, shared = await _client(request, body), body.shared
    if body.abort_all_requests:
        await client.abort_requests()
    written, version = await client.ask("update_weights_from_memory", shared, body.weight_version)
    message = f"{written} tensors were written; the weights have the version {version}"
    return {"success": True, "message": message, "num_paused_requests": 0, "weight_version": version}


@router.post("/update_weights", responses=answered_by(wire.WeightsWritten) | NOT_SUPPORTED)
async def update_weights(body: bodies.UpdateWeightsBody, request: Request) -> dict[str, Any]:
    """Load weights from files on the server's host, over a trainer's group of processes, or from a GPU's memory.

    Within an update that was started they only become a part of it. Steps go on while tensors arrive.
    """
    client, sent = await _client(request, body), body.transfer
    shared = body.shared
    if shared is not None:
        written, version = await client.ask("update_weights_from_memory", shared, body.weight_version)
    elif sent is None:
        written, version = await client.ask("update_weights_from_disk", body.path(), body.weight_version)
    else:
        written, version = await client.ask(
            "update_weights_from_group", VLLM_GROUP, sent.names, sent.dtype_names, sent.shapes, None,
            body.weight_version,
        )  # fmt: skip
    return {"message": "Weights updated", "updated": written, "weight_version": version}


@router.post("/finish_weight_update", responses=answered_by(wire.WeightsWritten))
async def finish_weight_update(request: Request, body: bodies.FinishWeightUpdateBody | None = None) -> dict[str, Any]:
    """Write all parts of the update that was started, or none, and name the weights `weight_version`."""
    client = await _client(request, body)
    written, version = await client.ask("finish_weight_update", body and body.weight_version)
    return {"message": "Weight update finished", "updated": written, "weight_version": version}


@router.post("/update_weight_version", responses=answered_by(wire.VersionSet))
async def update_weight_version(body: bodies.UpdateWeightVersionBody, request: Request) -> dict[str, Any]:
    """Name the weights in use, without changing them: tokens from now on have this version."""
    client = await _client(request, body)
    if body.abort_all_requests:
        await client.abort_requests()
    await client.ask("rename_weights", body.new_version)
    message = f"Weight version updated to {body.new_version}"
    return {"success": True, "message": message, "new_version": body.new_version}


@router.get("/weight_info", responses=answered_by(wire.WeightInfo))
@router.get("/get_weight_version", include_in_schema=False)
@router.get("/weight_version", include_in_schema=False)
async def weight_info(request: Request) -> dict[str, Any]:
    """Return the version of the weights in use."""
    return {"weight_version": await (await _client(request)).ask("weight_version")}


@router.post("/weight_checker", responses=answered_by(wire.WeightsChecked))
async def weight_checker(body: bodies.WeightCheckerBody, request: Request) -> dict[str, Any]:
    """Return the SHA-256 of each tensor, compare them with a `baseline`, or `reset` all weights to random values."""
    client = await _client(request, body)
    if body.action == "compare" and body.baseline is None:
        raise WireError(400, "compare requires a baseline: send it", param="baseline", code="invalid_value")
    if body.action == "reset":
        return {"status": "reset", "weight_version": await client.ask("randomize_weights")}
    found: dict[str, str] = await client.ask("weight_checksums")
    if body.baseline is None:
        return {"checksums": found}
    names = sorted(found.keys() | body.baseline.keys())
    mismatches = [name for name in names if found.get(name) != body.baseline.get(name)]
    return {"match": not mismatches, "mismatches": mismatches}


@router.post("/update_weights_from_disk", responses=answered_by(wire.DiskUpdate))
async def update_weights_from_disk(body: bodies.UpdateFromDiskBody, request: Request) -> dict[str, Any]:
    """Load weights from a safetensors file or folder on the server's host, in SGLang's format."""
    client = await _client(request, body)
    if body.keep_pause:
        raise WireError(
            400, "keep_pause is not supported: pause with /pause_generation", param="keep_pause", code="invalid_value"
        )
    if body.abort_all_requests:
        await client.abort_requests()
    written, version = await client.ask("update_weights_from_disk", body.model_path, body.weight_version)
    message = f"{written} tensors were written; the weights have the version {version}"
    return {"success": True, "message": message, "num_paused_requests": 0, "weight_version": version}


@router.post("/get_weights_by_name", responses=answered_by(list[Any]))
@router.get("/get_weights_by_name", include_in_schema=False)
async def get_weights_by_name(body: bodies.WeightsByNameBody, request: Request) -> list[Any]:
    """Return the first rows of a tensor by its Hugging Face name, in SGLang's format."""
    client = await _client(request, body)
    return await client.ask("weight_values", body.name, body.truncate_size)


@router.get("/get_world_size", responses=answered_by(wire.WorldSize))
async def get_world_size(request: Request, include_dp: Annotated[bool, Query()] = True) -> dict[str, Any]:
    """Return how many processes of this server join a trainer's group: one, which forwards to the other ranks."""
    await _client(request)
    return {"world_size": 1}


@router.get("/get_model_info", responses=answered_by(wire.ServedModel))
@router.get("/model_info", include_in_schema=False)
async def get_model_info(request: Request) -> dict[str, Any]:
    """Return the model and the version of its weights, in SGLang's format."""
    client = await _client(request)
    model, info = request.app.state.config.engine.model, client.info()
    return {
        "model_path": model, "tokenizer_path": model, "is_generation": True, "preferred_sampling_params": None,
        "weight_version": await client.ask("weight_version"), "architectures": [info.architecture],
        "dtype": info.dtype,
    }  # fmt: skip


# ---- sleep ---------------------------------------------------------------------------------------------------------


@router.post("/sleep", responses=answered_by(wire.Sleeping))
async def sleep(
    request: Request,
    body: bodies.SleepBody | None = None,
    level: Annotated[int | None, Query()] = None,
    mode: Annotated[PauseMode | None, Query()] = None,
) -> dict[str, Any]:
    """Release the memory of weights, KV cache and graphs until /wake_up. Needs `--enable-sleep-mode`.

    Level 1 (default) keeps the weights in host memory, 2 discards them, 0 only pauses. `mode` as in /pause; default: of
    the pause there is, else `abort`. The parameters may be in the query, as vLLM's clients send them, or in the body.
    """
    client, sent = await _client(request, body), body or bodies.SleepBody()
    found = _given("level", level, sent.level)
    chosen = 1 if found is None else found
    await client.sleep(chosen, _given("mode", mode, sent.mode))
    return {"status": "sleeping", "level": chosen}


@router.post("/wake_up", responses=answered_by(wire.Status))
async def wake_up(
    request: Request, body: bodies.TagsBody | None = None, tags: Annotated[list[str] | None, Query()] = None
) -> dict[str, Any]:
    """Restore the memory with these tags (`weights`, `kv_cache`), or all. When all is there, the sleep ends."""
    client = await _client(request, body)
    await client.wake_up(_given("tags", tags, None if body is None else body.tags))
    return {"status": "awake"}


@router.get("/is_sleeping", responses=answered_by(wire.IsSleeping))
async def is_sleeping(request: Request) -> dict[str, Any]:
    """Return whether any memory is released, or a sleep of level 0 goes on."""
    return {"is_sleeping": await (await _client(request)).is_sleeping()}


@router.post("/release_kv_cache_memory", responses=answered_by(wire.Status))
async def release_kv_cache_memory(
    request: Request, body: bodies.ReleaseKvBody | None = None, mode: Annotated[PauseMode | None, Query()] = None
) -> dict[str, Any]:
    """Release the memory of the KV cache alone until /wake_up; requests that are kept compute their KV again."""
    client = await _client(request, body)
    await client.release((KV_CACHE,), mode=_given("mode", mode, None if body is None else body.mode))
    return {"status": "released"}


@router.post("/release_memory_occupation", responses=answered_by(wire.Success))
async def release_memory_occupation(request: Request, body: bodies.TagsBody | None = None) -> dict[str, Any]:
    """Release the memory with these tags (`weights`, `kv_cache`, `cuda_graph`), or all, in SGLang's format.

    Weights are kept in host memory. Requests are held, and running ones are kept and compute their KV again.
    """
    client = await _client(request, body)
    tags = None if body is None else body.tags
    parts = MEMORY_PARTS if tags is None else check_tags(tags, MEMORY_PARTS)
    await client.release(parts, mode=None if await client.is_paused() else "keep")
    return {"success": True, "message": f"released: {', '.join(parts)}"}


@router.post("/resume_memory_occupation", responses=answered_by(wire.Success))
async def resume_memory_occupation(request: Request, body: bodies.TagsBody | None = None) -> dict[str, Any]:
    """Restore the memory with these tags, or all, in SGLang's format."""
    client = await _client(request, body)
    tags = MEMORY_PARTS if body is None or body.tags is None else check_tags(body.tags, MEMORY_PARTS)
    await client.wake_up(tags)
    return {"success": True, "message": f"restored: {', '.join(tags)}"}


def _given(name: str, in_query: T | None, in_body: T | None) -> T | None:
    """Return a parameter that may be in the query or in the body. Raises RequestError if both differ."""
    if in_query is not None and in_body not in (None, in_query):
        raise RequestError(f"{name}={in_query} in the query and {name}={in_body} in the body differ: send one", name)
    return in_body if in_query is None else in_query


# ---- refused by name -----------------------------------------------------------------------------------------------


@router.post("/update_weights_from_ipc", responses=NOT_SUPPORTED)
async def update_weights_from_ipc(request: Request) -> None:
    """Refused with 501: the checkpoint engine's sockets carry pickles."""
    raise WireError(
        501,
        "update_weights_from_ipc: not supported by this engine, since the sockets of zmq_handles carry pickles; use "
        f"/update_weights_from_tensor for tensors on the same GPU, or {bodies.FROM_DISK}",
        type="not_implemented_error",
        code="not_implemented",
    )
