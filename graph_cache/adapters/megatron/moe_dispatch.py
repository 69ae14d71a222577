"""Capture of `MoELayer.preprocess`, the step between router and dispatch: permuted tokens and token counts.

`preprocess` returns the tokens and stores the rest on the token dispatcher, where dispatch, experts and combine read
it. This module restores those attributes on replay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

# Attributes in addition to the tensors that Megatron lists for its own graphs (`cudagraph_attrs`).
DISPATCHER_ATTRIBUTES = ("hidden_shape", "hidden_shape_before_permute", "probs", "capacity", "cuda_sync_point")
DTOH_POINT = "before_ep_alltoall"  # where counts are copied to the host after a captured preprocess


class _Argument(NamedTuple):
    """Placeholder for a stored value that is an argument of the call, by its position among all arguments."""

    position: int


def eager_reason(layer: MoELayer) -> str:
    """Return why this layer's preprocess can't be captured; empty if it can."""
    dispatcher, config = layer.token_dispatcher, layer.config
    if not isinstance(dispatcher, MoEAlltoAllTokenDispatcher):
        return f"{type(dispatcher).__name__} does little work before it communicates"
    if dispatcher.shared_experts is not None:
        return "shared experts that overlap with the dispatch start in it (moe_shared_expert_overlap)"
    if getattr(config, "overlap_moe_expert_parallel_comm", False):
        return "overlap_moe_expert_parallel_comm frees the memory of the experts' input, which belongs to a graph"
    if config.moe_pad_expert_input_to_capacity:
        return ""
    if config.moe_expert_capacity_factor is not None or getattr(config, "moe_router_padding_for_quantization", False):
        return "the host reads the number of tokens sent: set moe_pad_expert_input_to_capacity"
    return (
        ""
        if config.moe_permute_fusion
        else (
            "the host reads the number of tokens per expert: set moe_permute_fusion, or "
            "moe_pad_expert_input_to_capacity with a capacity factor"
        )
    )


class DispatchState:
    """`SideOutput` of a layer's preprocess: the attributes that it sets on the token dispatcher.

    While attached, counts are copied to the host after preprocess and not in it, as for Megatron's own graphs.
    """

    def __init__(self, layer: MoELayer):
        self._dispatcher = layer.token_dispatcher
        self._names = tuple(dict.fromkeys([*self._dispatcher.cudagraph_attrs, *DISPATCHER_ATTRIBUTES]))
        self._original_dtoh_point = ""

    def begin(self) -> None:
        self._original_dtoh_point = self._dispatcher.cuda_dtoh_point
        self._dispatcher.cuda_dtoh_point = DTOH_POINT

    def end(self) -> None:
        self._dispatcher.cuda_dtoh_point = self._original_dtoh_point

    def take(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Return the arguments unchanged."""
        return args, kwargs

    def gather(self, call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        state = vars(self._dispatcher)
        before = {name: state.pop(name) for name in self._names if name in state and name != "cuda_sync_point"}
        try:
            result = call(*args, **kwargs)
            positions = {id(value): position for position, value in enumerate((*args, *kwargs.values()))}
            return result, {
                name: _Argument(positions[id(state[name])]) if id(state[name]) in positions else state[name]
                for name in self._names
                if name in state
            }
        finally:
            for name, value in before.items():
                state.setdefault(name, value)  # attributes that this call did not set

    def put(self, gathered: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        result, attributes = gathered
        arguments = (*args, *kwargs.values())
        for name, value in attributes.items():
            setattr(self._dispatcher, name, arguments[value.position] if isinstance(value, _Argument) else value)
        return result
