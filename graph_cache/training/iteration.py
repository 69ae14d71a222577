"""A whole training iteration as one graph: forward, backward and whatever else the step function does on the device.

Owns static copies of the step's arguments, the gradients that it leaves, and that a call which differs in anything
from the capture is never served by it. One thread calls it.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from graph_cache.errors import CaptureError
from graph_cache.pool import GraphPool
from graph_cache.runner import GraphRunner
from graph_cache.stats import CacheStats
from graph_cache.training.call import CallKey, Result, load, put_together, take_apart
from graph_cache.training.compiled import is_compiled, reached_from, without_compiling

logger = logging.getLogger(__name__)

SCOPE = "full_iteration"
WARMING = "warming_up"
FAILED = "capture_failed"


class _Captured:
    """One kind of call: its static arguments, its graph, its results, and the gradients it starts from and leaves."""

    def __init__(self, key: CallKey, tensors: Sequence[Tensor]):
        self.key = key
        self.inputs = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors]
        self.result: Result | None = None
        self.outputs: list[Tensor] = []
        self.grads_before: list[tuple[nn.Parameter, Tensor]] = []
        self.grads_after: list[tuple[nn.Parameter, Tensor | None]] = []
        self.runner: GraphRunner | None = None


class CapturedIteration:
    """`step(*args, **kwargs)` from a graph, one for each kind of call.

    A kind is the structure of the arguments, the shapes and dtypes of tensors, every other value, train or eval of each
    module, and which parameters have a gradient already. Calls run eager `warmup_steps` times per kind (at least one),
    then are captured. Tensors that the step returns come back without history, from a replay as copies; `.grad` is left
    as the step leaves it.
    """

    def __init__(self, step: Callable[..., Any], pool: GraphPool, stats: CacheStats, *, name: str = "iteration",
                 warmup_steps: int = 3, generators: Sequence[torch.Generator] = ()):
        self.name = name
        self._step = step
        self._pool = pool
        self._stats = stats
        self._warmup_steps = max(1, warmup_steps)
        self._generators = tuple(generators)
        self._memory = pool.new_memory()
        self._seen: Counter[Hashable] = Counter()
        self._captured: dict[Hashable, _Captured] = {}
        self._failed: dict[Hashable, str] = {}
        self._modules: dict[int, nn.Module] = {}
        self._looked = self._compiled = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one iteration."""
        if not self._looked:
            self._look_for_compiled()
        key, tensors = take_apart(args, kwargs, training=True)
        kind = (key, self._state())
        captured = self._captured.get(kind)
        if captured is not None:
            return self._replay(captured, tensors)
        if kind in self._failed or self._seen[kind] < self._warmup_steps:
            self._seen[kind] += 1
            self._stats.fallbacks[self.name, SCOPE, FAILED if kind in self._failed else WARMING] += 1
            return self._eager(args, kwargs)
        return self._capture(kind, key, tensors, args, kwargs)

    def clear(self) -> None:
        """Drop every graph and give the memory back; kinds seen before are captured again at their next call."""
        for captured in self._captured.values():
            for parameter, grad in captured.grads_after:
                if grad is not None and parameter.grad is grad:
                    parameter.grad = grad.clone()
            captured.runner.close()
        self._captured = {}
        self._pool.trim()

    def table(self) -> list[dict[str, Any]]:
        """Every graph as plain values."""
        return [{"module": self.name, "instance": index, "engine": captured.runner.engine,
                 "bytes": captured.runner.nbytes, "capture_seconds": round(captured.runner.capture_seconds, 6)}
                for index, captured in enumerate(self._captured.values())]

    def _state(self) -> Hashable:
        """What of the model is baked into a graph: the mode of each module, and where gradients are."""
        return (tuple(module.training for module in self._modules.values()),
                tuple(parameter.grad is not None for parameter in self._parameters()))

    def _look_for_compiled(self) -> None:
        """A hook that notes modules would be compiled in with them: beside compiled ones, those within reach count."""
        reached = reached_from(self._step)
        self._looked, self._compiled = True, any(map(is_compiled, reached))
        if self._compiled:
            modules = [inner for value in reached if isinstance(value, nn.Module) for inner in value.modules()]
            self._modules = {id(module): module for module in modules}

    def _parameters(self) -> list[nn.Parameter]:
        """Of every module that the step has run: those that want gradients, each once."""
        found = {id(parameter): parameter for module in self._modules.values() for parameter in module.parameters()}
        return [parameter for parameter in found.values() if parameter.requires_grad]

    def _eager(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run the step, and note the modules that it runs."""
        def note(module: nn.Module, inputs: Any) -> None:
            self._modules.setdefault(id(module), module)

        handle = None if self._compiled else register_module_forward_pre_hook(note)
        try:
            # On the stream of captures: autograd ties the accumulation of gradients to the stream of its first use.
            with self._pool.backend.on_capture_stream():
                result, outputs = Result.of(self._step(*args, **kwargs))
        finally:
            if handle is not None:
                handle.remove()
        return result.build([output.detach() for output in outputs])

    def _capture(self, kind: Hashable, key: CallKey, tensors: Sequence[Tensor], args: tuple,
                 kwargs: dict[str, Any]) -> Any:
        """Capture this call, and run it: by the capture itself where that runs, else by the first replay."""
        captured = _Captured(key, tensors)
        self._pool.trim()  # what the eager steps left cached is of no use to the graph's own memory
        parameters = self._parameters()
        before = _GradsBefore(parameters, copied=self._pool.backend.capture_runs)

        def body() -> None:
            static_args, static_kwargs = put_together(key, captured.inputs)
            captured.result, captured.outputs = Result.of(self._step(*static_args, **static_kwargs))

        runner = GraphRunner(body, self._pool, statics=list, generators=self._generators, memory=self._memory,
                             grad=True, checked=False)
        try:
            with without_compiling(self._pool.backend):
                runner.capture()
        except CaptureError as error:
            before.restore()
            logger.error("capture of %s failed, it will run eager: %s", self.name, error)
            self._failed[kind] = str(error)
            self._stats.failed_captures[self.name, SCOPE] += 1
            self._stats.fallbacks[self.name, SCOPE, FAILED] += 1
            return self._eager(args, kwargs)
        captured.runner = runner
        captured.grads_after = [(parameter, parameter.grad) for parameter in parameters]
        captured.grads_before = before.accumulated()
        self._captured[kind] = captured
        self._stats.captures[self.name, SCOPE, "recorded"] += 1
        self._stats.observe_capture(runner.capture_seconds)
        if not self._pool.backend.capture_runs:
            runner.replay()
        return captured.result.build([output.detach().clone() for output in captured.outputs])

    @torch.no_grad()
    def _replay(self, captured: _Captured, tensors: Sequence[Tensor]) -> Any:
        load(captured.inputs, tensors)
        load([static for _, static in captured.grads_before],
             [parameter.grad for parameter, _ in captured.grads_before])
        captured.runner.replay()
        self._stats.replays[self.name, SCOPE, "iteration", 1] += 1
        for parameter, grad in captured.grads_after:
            parameter.grad = grad
        return captured.result.build([output.detach().clone() for output in captured.outputs])


class _GradsBefore:
    """The gradients that a capture starts from. They are not held: a step that clears them frees their memory."""

    def __init__(self, parameters: Sequence[nn.Parameter], copied: bool):
        self._originals: list[tuple[nn.Parameter, Any]] = []
        for parameter in parameters:
            grad = parameter.grad
            if grad is None:
                self._originals.append((parameter, lambda: None))
            elif copied:  # the capture itself adds to them, and a failed one must be able to go back
                self._originals.append((parameter, lambda grad=grad: grad))
                parameter.grad = grad.detach().clone()
            else:
                self._originals.append((parameter, weakref.ref(grad)))
        self._statics = [(parameter, weakref.ref(parameter.grad)) for parameter in parameters
                         if parameter.grad is not None]

    def restore(self) -> None:
        """As before a capture that failed; what the step had cleared by then stays cleared."""
        for parameter, grad in self._originals:
            parameter.grad = grad()

    def accumulated(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Those that the captured step added to, which every replay starts from."""
        return [(parameter, parameter.grad) for parameter, grad in self._statics
                if parameter.grad is not None and parameter.grad is grad()]
