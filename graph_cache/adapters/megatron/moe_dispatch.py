"""What comes between Megatron's router and its experts, as a part: tokens in the order of their experts, and counts.

`MoELayer.preprocess` returns the tokens and leaves the rest with the token dispatcher, where the dispatch, the experts
and the way back take it. Owns that a replay leaves it there, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

# Beside the tensors that Megatron counts up for graphs of its own (`cudagraph_attrs`).
DISPATCHER_ATTRIBUTES = ("hidden_shape", "hidden_shape_before_permute", "probs", "capacity", "cuda_sync_point")
DTOH_POINT = "before_ep_alltoall"  # the point at which counts are copied where graphs come before it


class _Argument(NamedTuple):
    """Stands for what was left that is an argument of the call: by its place among all of them."""

    position: int


def eager_reason(layer: MoELayer) -> str:
    """Why no graph can hold the preprocessing of this layer; empty where one can."""
    dispatcher, config = layer.token_dispatcher, layer.config
    if not isinstance(dispatcher, MoEAlltoAllTokenDispatcher):
        return f"{type(dispatcher).__name__} does little before it communicates"
    if dispatcher.shared_experts is not None:
        return "shared experts that overlap with the dispatch begin in it (moe_shared_expert_overlap)"
    if getattr(config, "overlap_moe_expert_parallel_comm", False):
        return "overlap_moe_expert_parallel_comm gives the memory of what goes to the experts back, which is a graph's"
    if config.moe_pad_expert_input_to_capacity:
        return ""
    if config.moe_expert_capacity_factor is not None or getattr(config, "moe_router_padding_for_quantization", False):
        return "how many tokens go out is read by the host: set moe_pad_expert_input_to_capacity"
    return (
        ""
        if config.moe_permute_fusion
        else (
            "how many tokens each expert gets is read by the host: set moe_permute_fusion, or "
            "moe_pad_expert_input_to_capacity with a capacity factor"
        )
    )


class DispatchState:
    """`SideOutput` of a layer's preprocessing: its result goes with what it leaves with the dispatcher.

    While attached, counts are copied to the host after it and not in it, as for Megatron's own graphs.
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
                state.setdefault(name, value)  # what this call has no use for

    def put(self, gathered: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        result, attributes = gathered
        arguments = (*args, *kwargs.values())
        for name, value in attributes.items():
            setattr(self._dispatcher, name, arguments[value.position] if isinstance(value, _Argument) else value)
        return result
