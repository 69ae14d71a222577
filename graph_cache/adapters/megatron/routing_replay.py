"""Recorded and replayed expert ids (`moe_enable_routing_replay`) of routers inside captured parts.

Megatron's RouterReplay switches a router on the host between recording the ids of the chosen experts and using given
ones. Here the action is part of the call signature, given ids are an input of the graph, and recorded ids an output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor, nn

from graph_cache.errors import GraphConfigError
from graph_cache.training.attached import Part

ACTION, TARGET = "_routing_action_", "_routing_ids_"  # keywords of a call, each followed by the router's index
_RECORD, _REPLAY = RouterReplayAction.RECORD, RouterReplayAction.REPLAY_FORWARD


def with_routing_replay(part: Part) -> Part:
    """Return the part with the expert ids of its routers as inputs and outputs, if it has such routers.

    Routers have a RouterReplay if the model was built with `moe_enable_routing_replay`.
    """
    modules = nn.ModuleList(part.submodules).modules() if part.submodules else part.module.modules()
    routers = [one for module in modules if isinstance(one := getattr(module, "router_replay", None), RouterReplay)]
    if not routers or part.carry is not None:
        return part
    return part._replace(carry=RoutingReplay(part.name, part.module, routers))


class RoutingReplay:
    """`SideOutput` of a part with routers: expert ids enter as arguments and leave as outputs of its calls.

    Recorded ids are copies, int64 [tokens, top-k], which later replays don't overwrite.
    """

    def __init__(self, name: str, module: nn.Module, routers: list[RouterReplay]):
        self._name, self._module, self._routers = name, module, routers

    def begin(self) -> None:
        """Nothing to prepare."""

    def end(self) -> None:
        """Nothing to restore."""

    def take(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Add each router's action, and the ids that it replays, to the arguments.

        Takes the next ids of a recomputation (`REPLAY_BACKWARD`) from the router's list, as its forward would. Raises
        GraphConfigError for a router that replays and has no ids.
        """
        kwargs = dict(kwargs)
        for index, router in enumerate(self._routers):
            action = router.router_replay_action
            if action is None:
                continue
            kwargs[f"{ACTION}{index}"] = "record" if action is _RECORD else "replay"
            if action is _RECORD:
                continue
            ids = router.target_topk_idx
            if action is RouterReplayAction.REPLAY_BACKWARD:
                ids = router.replay_backward_list.pop(0) if router.replay_backward_list else None
            if not isinstance(ids, Tensor):
                raise GraphConfigError(
                    f"{self._name}: its router is set to {action} and has no expert ids: call "
                    "RouterReplay.set_replay_data with the ids of this microbatch before each forward"
                )
            kwargs[f"{TARGET}{index}"] = ids.to(next(self._module.parameters()).device)
        return args, kwargs

    def gather(self, call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call with the routers set as in the arguments, and return the result and the recorded ids by router."""
        kwargs = dict(kwargs)
        actions = {index: kwargs.pop(f"{ACTION}{index}", None) for index in range(len(self._routers))}
        before = [dict(vars(router)) for router in self._routers]
        try:
            for index, router in enumerate(self._routers):
                action = actions[index]
                router.router_replay_action = {None: None, "record": _RECORD, "replay": _REPLAY}[action]
                router.target_topk_idx = kwargs.pop(f"{TARGET}{index}", None)
                if hasattr(router, "static_buffer"):  # from 0.19 on; `put` copies into it
                    router.static_buffer = None
            result = call(*args, **kwargs)
            recorded = {
                index: self._routers[index].recorded_topk_idx for index in actions if actions[index] == "record"
            }
        finally:
            for router, attributes in zip(self._routers, before, strict=True):
                vars(router).update(attributes)
        return result, recorded

    def put(self, gathered: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Record the ids with the routers, and return the result."""
        result, recorded = gathered
        for index, ids in recorded.items():
            self._routers[index].record_indices(ids.clone())
        return result
