"""Request bodies of the routes with which trainers drive the server, in vLLM's and SGLang's formats.

A field that these servers read and that has no effect here is listed in `no_effect`; other unknown fields are refused.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, Field, ValidationError

from engine.core.pause import PauseMode
from engine.errors import RequestError
from engine.protocol.memory_handles import SharedWeights
from graph_cache.utils.validation import did_you_mean
from server.schemas.field_paths import field_path
from server.schemas.requests import FAIL_FAST, Text, Wire
from server.schemas.tensor_handles import FROM_DISK, from_sglang, from_skyrl, from_vllm

Path = Annotated[Text, Field(min_length=1, max_length=4096)]
Version = Annotated[Text, Field(min_length=1, max_length=256)]

B = TypeVar("B", bound="TrainerBody")


class TrainerBody(Wire):
    """Base of these bodies."""

    no_effect: ClassVar[str] = ""

    def refuse_unsupported(self) -> None:
        """Raise RequestError for a field that is neither known nor without effect."""
        for name, value in (self.model_extra or {}).items():
            if value is not None and name not in self.no_effect.split():
                hint = did_you_mean(name, type(self).model_fields) or "; remove it"
                raise RequestError(f"{name[:64]} is not a known field{hint}", param=name[:64])


def _checked(kind: type[B], fields: dict[str, Any], name: str) -> B:
    """Return the fields of the object `name` in a body as `kind`. Raises RequestError."""
    try:
        found = kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        said = first["msg"].removeprefix("Value error, ")
        raise RequestError(f"{name}.{field_path(first['loc'])}: {said}", param=str(first["loc"][0])) from error
    found.refuse_unsupported()
    return found


class NoBody(TrainerBody):
    """Body of a route that takes no fields."""


class PauseBody(TrainerBody):
    """Body of POST /pause, for clients that send the parameters in the body."""

    mode: PauseMode | None = None
    wait_for_inflight_requests: bool = False
    clear_cache: bool = False


class SleepBody(TrainerBody):
    """Body of POST /sleep, for clients that send the parameters in the body."""

    level: int | None = None
    mode: PauseMode | None = None


class ReleaseKvBody(TrainerBody):
    """Body of POST /release_kv_cache_memory."""

    mode: PauseMode | None = None


class TagsBody(TrainerBody):
    """Body of POST /wake_up, and of SGLang's /release_memory_occupation and /resume_memory_occupation."""

    tags: Annotated[list[Text], FAIL_FAST] | None = None


class AbortRequestsBody(TrainerBody):
    """Body of vLLM's POST /abort_requests. None or an empty list stands for all requests."""

    request_ids: Annotated[list[Text], FAIL_FAST] | None = None


class AbortRequestBody(TrainerBody):
    """Body of SGLang's POST /abort_request."""

    no_effect = "abort_message finished_reason"

    rid: Text | None = None
    abort_all: bool = False


class PauseGenerationBody(TrainerBody):
    """Body of SGLang's POST /pause_generation."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class ContinueGenerationBody(TrainerBody):
    """Body of SGLang's POST /continue_generation."""

    no_effect = "torch_empty_cache"


class ResetPrefixCacheBody(TrainerBody):
    """Body of POST /reset_prefix_cache; vLLM's clients send these fields in the body or in the query."""

    no_effect = "reset_external"

    reset_running_requests: bool = False


def _of_checkpoint(value: bool) -> bool:
    if not value:
        raise ValueError("must be true: send tensors under their Hugging Face names")
    return value


IsCheckpointFormat = Annotated[bool, AfterValidator(_of_checkpoint)]


class StartWeightUpdateBody(TrainerBody):
    """Body of POST /start_weight_update."""

    is_checkpoint_format: IsCheckpointFormat = True


Port = Annotated[int, Field(ge=1, le=65535, strict=False)]  # AReaL sends digits
Names = Annotated[list[Text], FAIL_FAST, Field(min_length=1, max_length=200_000)]
Shapes = Annotated[list[list[int]], FAIL_FAST]


class InitGroup(TrainerBody):
    """Where a trainer's group of processes is, in vLLM's format."""

    no_effect = "packed_num_buffers"

    master_address: Text
    master_port: Port
    rank_offset: Annotated[int, Field(ge=1)] = 1
    world_size: Annotated[int, Field(ge=2)]
    packed: bool = False
    packed_buffer_size_bytes: Annotated[int, Field(ge=1, le=1 << 40)] = 1 << 30
    backend: Literal["gloo", "nccl"] | None = None
    timeout: Annotated[float, Field(gt=0, le=3600)] | None = None


class InitTransferBody(TrainerBody):
    """Body of vLLM's POST /init_weight_transfer_engine. An empty init_info is that of handles of GPU memory."""

    init_info: dict[str, Any]

    @property
    def group(self) -> InitGroup | None:
        """Where the group of processes is; None if there is none to join."""
        if not self.init_info:
            return None
        return _checked(InitGroup, self.init_info, "init_info")


class InitUpdateGroupBody(TrainerBody):
    """Body of SGLang's POST /init_weights_update_group."""

    master_address: Text
    master_port: Port
    rank_offset: Annotated[int, Field(ge=1)] = 1
    world_size: Annotated[int, Field(ge=2)]
    group_name: Text = "weight_update_group"
    backend: Literal["gloo", "nccl"] | None = None


class DestroyUpdateGroupBody(TrainerBody):
    """Body of SGLang's POST /destroy_weights_update_group."""

    group_name: Text = "weight_update_group"


class GroupTransfer(TrainerBody):
    """The tensors that a trainer sends next, in vLLM's format."""

    names: Names
    dtype_names: list[Text]
    shapes: Shapes
    is_checkpoint_format: IsCheckpointFormat = True


class HandleTransfer(GroupTransfer):
    """Handles of the tensors in a GPU's memory, in vLLM's format; with `tensor_sizes`, of one buffer of all."""

    no_effect = "packed"

    ipc_handles_pickled: Text
    tensor_sizes: Annotated[list[int], FAIL_FAST] | None = None


class ChunkTransfer(GroupTransfer):
    """Handles of one buffer of several tensors of a dtype, in SkyRL's format. `sizes` count elements."""

    sizes: Annotated[list[int], FAIL_FAST]
    ipc_handles_pickled: Text


class CollectiveRpcBody(TrainerBody):
    """Body of vLLM's POST /collective_rpc: the calls of SkyRL's extension of vLLM's workers, and no others."""

    no_effect = "timeout"

    method: Literal["skyrl_start_weight_update", "update_weights_ipc", "skyrl_finish_weight_update"]
    args: list[Any] = Field(default_factory=list, max_length=0)
    kwargs: dict[str, Any] = Field(default_factory=dict)

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        known = {"skyrl_start_weight_update": "is_checkpoint_format", "update_weights_ipc": "update_info"}
        for name, value in self.kwargs.items():
            if name != known.get(self.method):
                raise RequestError(f"kwargs.{name[:64]} is not an argument of {self.method}: remove it", param="kwargs")
            if name == "is_checkpoint_format" and value is not True:
                raise RequestError("kwargs.is_checkpoint_format must be true: send Hugging Face names", param="kwargs")

    @property
    def shared(self) -> SharedWeights:
        """The weights of update_weights_ipc, which lie in a GPU's memory."""
        sent = self.kwargs.get("update_info")
        if not isinstance(sent, dict):
            raise RequestError("kwargs.update_info is missing: send it", param="kwargs")
        chunk = _checked(ChunkTransfer, sent, "kwargs.update_info")
        return from_skyrl(chunk.names, chunk.dtype_names, chunk.shapes, chunk.ipc_handles_pickled, chunk.sizes)


class TensorUpdateBody(TrainerBody):
    """Body of SGLang's POST /update_weights_from_tensor: an entry per rank, of which the first is read."""

    no_effect = "flush_cache torch_empty_cache disable_draft_model"

    serialized_named_tensors: Annotated[list[Text], FAIL_FAST, Field(min_length=1)]
    load_format: Literal["auto", "flattened_bucket"] | None = None
    weight_version: Version | None = None
    abort_all_requests: bool = False

    @property
    def shared(self) -> SharedWeights:
        """The weights, which lie in a GPU's memory."""
        return from_sglang(self.serialized_named_tensors[0], self.load_format == "flattened_bucket")


class DistributedUpdateBody(TrainerBody):
    """Body of SGLang's POST /update_weights_from_distributed."""

    no_effect = "flush_cache torch_empty_cache"

    names: Names
    dtypes: list[Text]
    shapes: Shapes
    group_name: Text = "weight_update_group"
    weight_version: Version | None = None
    abort_all_requests: bool = False
    load_format: Literal["auto", "flattened_bucket"] | None = None


class UpdateWeightsBody(TrainerBody):
    """Body of POST /update_weights: vLLM's, with the fields in update_info, or prime-rl's, with weight_dir."""

    update_info: dict[str, Any] | None = None
    weight_dir: Path | None = None
    weight_version: Version | None = None

    def path(self) -> str:
        """Return the folder or file with the weights.

        Raises RequestError for other ways to hand weights over, which it names with the route to use instead.
        """
        if self.update_info is None:
            if self.weight_dir is None:
                raise RequestError("update_info is missing: send it, or weight_dir", param="update_info")
            return self.weight_dir
        found = self._info.get("weight_dir")
        if isinstance(found, str) and found and set(self.update_info) == {"weight_dir"}:
            return found
        for name in filter(_is_handle, self.update_info):
            raise RequestError(
                f"update_info.{name[:64]}: send the handles as ipc_handles_pickled, with names, dtype_names and "
                f"shapes; or {FROM_DISK}",
                param=name[:64],
            )
        raise RequestError(
            "update_info must be an object with weight_dir alone, the path of the weights", "update_info"
        )

    @property
    def _info(self) -> dict[str, Any]:
        if self.update_info is not None and self.weight_dir is not None:
            raise RequestError("send update_info or weight_dir, not both", param="weight_dir")
        return self.update_info or {}

    @property
    def transfer(self) -> GroupTransfer | None:
        """What comes over a group of processes, as in vLLM's nccl back end; None if the weights come otherwise."""
        info = self._info
        if not {"names", "shapes"} <= info.keys() or any(map(_is_handle, info)):
            return None
        return _checked(GroupTransfer, info, "update_info")

    @property
    def shared(self) -> SharedWeights | None:
        """What lies in a GPU's memory, as in vLLM's ipc back end; None if the weights come otherwise."""
        info = self._info
        if not {"names", "shapes", "ipc_handles_pickled"} <= info.keys() or info["ipc_handles_pickled"] is None:
            return None
        transfer = _checked(HandleTransfer, info, "update_info")
        return from_vllm(
            transfer.names, transfer.dtype_names, transfer.shapes, transfer.ipc_handles_pickled, transfer.tensor_sizes
        )


def _is_handle(name: str) -> bool:
    """Return whether this field of update_info has serialised handles of memory, as in vLLM's ipc back end."""
    return "ipc" in name or "pickled" in name


class FinishWeightUpdateBody(TrainerBody):
    """Body of POST /finish_weight_update."""

    weight_version: Version | None = None


class UpdateWeightVersionBody(TrainerBody):
    """Body of POST /update_weight_version."""

    new_version: Version
    abort_all_requests: bool = False


class WeightCheckerBody(TrainerBody):
    """Body of POST /weight_checker."""

    action: Literal["checksum", "compare", "reset"]
    baseline: dict[str, str] | None = None


class UpdateFromDiskBody(TrainerBody):
    """Body of SGLang's POST /update_weights_from_disk."""

    no_effect = "flush_cache torch_empty_cache recapture_cuda_graph is_async token_step"

    model_path: Path
    load_format: Literal["auto", "safetensors"] | None = None
    weight_version: Version | None = None
    abort_all_requests: bool = False
    keep_pause: bool = False


class WeightsByNameBody(TrainerBody):
    """Body of SGLang's /get_weights_by_name."""

    name: Text
    truncate_size: Annotated[int, Field(ge=1, le=10_000)] = 100
