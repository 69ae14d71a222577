"""Run layers of a pipeline stage from graphs that Transformer Engine captures.

Implements warm-up with real calls, one capture, and replay; chooses the graph for each call, and falls back to eager
with a reason, since Transformer Engine checks neither shapes nor dtypes nor order. A step begins with a forward while
no backward is outstanding. Forwards of other threads run eager.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from graph_cache.adapters.transformer_engine.layer import REPLAY_ATTRIBUTE, BackwardHook, Layer, protect_gradient
from graph_cache.adapters.transformer_engine.maker import CapturePlan, GraphSet, Maker, Precision
from graph_cache.adapters.transformer_engine.order import GraphSlots, max_outstanding
from graph_cache.adapters.transformer_engine.preserved_state import FIRST_MICROBATCH, PreservedState
from graph_cache.adapters.transformer_engine.samples import CapturedLayer, choose_samples, static_inputs
from graph_cache.core.addresses import AddressBook
from graph_cache.core.capture_state import CaptureState, CaptureStatus
from graph_cache.core.keys import STALE, WARMING_UP
from graph_cache.errors import CaptureError, GraphConfigError
from graph_cache.guards.torch_settings import records_gradients
from graph_cache.training.attached import Hook, Part, Watched
from graph_cache.training.autograd import Lease
from graph_cache.training.call import Result, flatten_call
from graph_cache.training.capture_context import CaptureContext
from graph_cache.training.compiled import without_compiling
from graph_cache.training.parameter_aliases import ADDED, MainGrads
from graph_cache.training.reasons import HOOKS, NO_GRAD, NO_INSTANCE, UNSEEN
from graph_cache.training.threads import OneThread

logger = logging.getLogger(__name__)

SCOPE = "module"


class TransformerEngineGraphs:
    """Forward and backward graphs of a pipeline stage's layers, captured in the order in which the stage runs them.

    `layers`: parts of the stage's model chunks. Parts of a chunk are captured in the order in which they first ran.
    `order`: the stage's forwards and backwards (from `adapters.megatron.schedule`; [1, -1] for one microbatch at a
    time). The microbatch of a call is the attribute `current_microbatch` of the part's module, or of the module in
    `holders` under the part's name; without it, calls are counted from the start of the step.

    The first `warmup_rounds` steps run eagerly and determine what to capture: arguments, modes, and the precision of
    Transformer Engine's autocast around each layer. With `caches_weights`, reduced-precision weights are quantized once
    per step: in microbatch 0, or when a call passes `is_first_microbatch=True`. `fired`: see AttachedModule.

    Transformer Engine captures in CUDA's global mode, which fails if another thread makes a CUDA call. `paused` returns
    a context manager that stops such threads (an engine's loop) and sets trainer flags (Megatron's capture flags); it
    is entered before the pool's lock is taken. `options`: further options of `make_graphed_callables`. `maker`:
    captures instead of Transformer Engine.

    The outputs of a replay are valid until its backward has run; later replays overwrite them. Raises GraphConfigError
    without Transformer Engine or a GPU, for an invalid order, and for layers that are already intercepted.
    """

    def __init__(
        self,
        layers: Iterable[Part | tuple[str, nn.Module]],
        order: Sequence[float],
        context: CaptureContext,
        *,
        holders: Mapping[str, nn.Module] | None = None,
        fired: Callable[[Hook], bool] | None = None,
        warmup_rounds: int = 3,
        caches_weights: bool = False,
        paused: Callable[[], AbstractContextManager] = nullcontext,
        options: Mapping[str, Any] | None = None,
        maker: Maker | None = None,
    ):
        if maker is None:
            # The constructor raises its own error without Transformer Engine or a GPU.
            from graph_cache.adapters.transformer_engine.installed import InstalledTransformerEngine

            maker = InstalledTransformerEngine(context, options or {})
        self.context = context
        self._maker = maker
        self._order = [int(entry) if entry == int(entry) else entry for entry in order]
        self._chunks = range(len(max_outstanding(order)))
        self._warmup_rounds = max(1, warmup_rounds)
        self._state = CaptureState(self._warmup_rounds)  # one capture for all layers; warm-up runs are steps
        self._caches_weights = caches_weights
        self._paused = paused
        holders, parts = holders or {}, [Part(*part) for part in layers]
        self._layers = [Layer(part, fired, holders.get(part.name, part.module)) for part in parts]
        self._by_name = {layer.name: layer for layer in self._layers}
        if len(self._by_name) != len(self._layers):
            raise GraphConfigError("two layers have the same name: give each layer a unique name")
        outside = [layer.name for layer in self._layers if layer.chunk not in self._chunks]
        if outside:
            raise GraphConfigError(
                f"order: it has {len(self._chunks)} chunks, found layers of other chunks: "
                f"{', '.join(outside)}; number chunks from 0 and cover them in the order"
            )
        calls = OneThread(context.pool, context.stats).calls
        for layer in self._layers:
            layer.attached.take_over(calls(self._call_of(layer)))
        self._watched = Watched([layer.attached for layer in self._layers])
        self._steps = 0
        self._outstanding = 0  # eager calls whose backward has not run yet
        self._running = context.running
        self._forget(CaptureStatus.EVICTED)

    def _forget(self, cause: CaptureStatus) -> None:
        self._state.drop(cause, self._warmup_rounds)
        self._graph_set: GraphSet | None = None
        self._graph_slots: GraphSlots | None = None
        self._addresses = AddressBook()
        self._capture_seconds = 0.0
        self._recorded_this_step = self._replays_cache_weights = False
        self._last_weights_new: bool | None = None
        self._run_order: dict[Layer, None] = {}  # layers with recorded calls, in the order of their first call
        for layer in self._layers:
            layer.forget()
        self._accumulators: dict[Tensor, Any] = {}  # kept alive until the capture

    # ---- calls -----------------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether no forward is waiting for its backward."""
        return not self._outstanding and (self._graph_slots is None or not self._graph_slots.alive)

    def _call_of(self, layer: Layer) -> Callable[[Any, tuple, dict[str, Any]], Any]:
        return lambda _, args, kwargs: self._call(layer, args, kwargs)

    def _call(self, layer: Layer, args: tuple, kwargs: dict[str, Any]) -> Any:
        if self._running.active or self.context.pool.backend.is_capturing():
            return layer.attached.eager(*args, **kwargs)
        if not records_gradients():
            return self._run_eager(layer, args, kwargs, NO_GRAD)
        if self.is_idle:
            self._begin_step()
        layer_kwargs = (
            {name: value for name, value in kwargs.items() if name != FIRST_MICROBATCH}
            if FIRST_MICROBATCH in kwargs
            else kwargs
        )
        microbatch, graph_slots = layer.microbatch(self._steps), self._graph_slots
        if not layer.graphs:
            return self._without_graphs(layer, args, kwargs, layer_kwargs)
        tensors = layer.fits(args, layer_kwargs, self._maker.precision())
        if tensors is None:
            return self._run_eager(layer, args, kwargs, HOOKS if layer.attached.hooks_inside else UNSEEN)
        graph_index = graph_slots.index_of(layer.chunk, microbatch % graph_slots.microbatches, layer.index)
        if not graph_slots.may_replay_forward(graph_index) or not layer.sample.loads(
            tensors, idle=not graph_slots.alive
        ):
            return self._run_eager(layer, args, kwargs, NO_INSTANCE)
        is_first = kwargs.get(FIRST_MICROBATCH)
        return self._replay(
            layer,
            graph_index,
            microbatch % graph_slots.microbatches,
            tensors,
            is_first if isinstance(is_first, bool) else microbatch == 0,
        )

    def _without_graphs(self, layer: Layer, args: tuple, kwargs: dict[str, Any], layer_kwargs: dict[str, Any]) -> Any:
        """Run eagerly. Before the capture, record the call."""
        if layer.attached.hooks_inside:
            return self._run_eager(layer, args, kwargs, HOOKS)
        if self._state.captured or self._state.failed:
            return self._run_eager(layer, args, kwargs, self._state.fallback_reason or UNSEEN)
        key, tensors = flatten_call(args, layer_kwargs, layer.attached.module.training)
        if not layer.attached.wants_gradients(tensors):
            return self._run_eager(layer, args, kwargs, NO_GRAD)
        record = layer.calls.record(key, tensors, args, layer_kwargs, self._maker.precision())
        if record is not None and not self._recorded_this_step:
            self._hold_accumulators()
        value = self._run_eager(layer, args, kwargs, WARMING_UP)
        found = Result.of(value)[1]
        if record is not None:
            self._recorded_this_step = True
            self._run_order.setdefault(layer)
            record.differentiable = tuple(tensor.requires_grad for tensor in found)
        self._track_backward(found)
        return value

    def _run_eager(self, layer: Layer, args: tuple, kwargs: dict[str, Any], reason: str) -> Any:
        """Run the eager forward and count the fallback. Nested layers run as part of it."""
        self.context.stats.fallbacks[layer.name, "forward", reason] += 1
        self._running.active = True
        try:
            return layer.attached.eager(*args, **kwargs)
        finally:
            self._running.active = False

    def _track_backward(self, tensors: Iterable[Tensor]) -> None:
        """Keep the step open until the backward of an eager call has run or its autograd graph is freed."""
        node = next((tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None), None)
        if node is None:
            return

        def on_backward(graph_index: int) -> None:
            self._outstanding -= 1

        self._outstanding += 1
        lease = Lease(on_backward)
        node.register_prehook(lambda grads: lease.end())

    def _replay(
        self, layer: Layer, graph_index: int, microbatch: int, tensors: Sequence[Tensor], weights_are_new: bool
    ) -> Any:
        layer.attached.fire_hooks()
        graph_slots = self._graph_slots
        call, names = layer.graphs[microbatch]
        next_backward = graph_slots.next_backward.get(graph_index)
        inputs: dict[str, Any] = {
            name: protect_gradient(tensors[index], graph_slots, next_backward)
            for name, index in zip(names, layer.sample.per_call, strict=True)
        }
        if self._replays_cache_weights:
            # Transformer Engine updates the flag only with the first module of an autocast, which may have run eagerly:
            # later graphs would then use weights of the previous step.
            if layer.index == 0 or weights_are_new is not self._last_weights_new:
                self._maker.update_weights(weights_are_new)
                self._last_weights_new = weights_are_new
            inputs[FIRST_MICROBATCH] = weights_are_new
        graph_slots.run_forward(graph_index)
        try:
            value, node = layer.rebuild_result(call(**inputs))
        except BaseException:
            graph_slots.release(graph_index)
            raise

        def on_backward(graph_index: int) -> None:
            graph_slots.run_backward(graph_index)
            for parameter in layer.added:
                setattr(parameter, ADDED, True)

        layer.clear_first_microbatch()
        setattr(node, REPLAY_ATTRIBUTE, (id(graph_slots), graph_index))
        node.register_prehook(BackwardHook(layer.name, graph_index, on_backward, graph_slots.release))
        self._state.replays += 1
        self.context.stats.replays[layer.label] += 1
        return value

    def backward_dw(self, name: str, microbatch: int) -> bool:
        """Replay the delayed weight gradients of a layer. Returns False without doing anything if the forward of this
        microbatch ran eagerly; the caller must then call the layer's own `backward_dw`.
        """
        layer = self._by_name[name]
        if not layer.graphs:
            return False
        microbatch %= self._graph_slots.microbatches
        graph_index = self._graph_slots.index_of(layer.chunk, microbatch, layer.index)
        if not self._graph_slots.awaits_backward_dw(graph_index):
            return False
        self._graph_slots.run_backward_dw(graph_index)
        layer.graphs[microbatch][0].backward_dw()
        return True

    # ---- capture ---------------------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        """At the start of a step, drop graphs whose memory was replaced, count warm-up, and capture after it."""
        self._watched.refresh()
        if self._graph_set is not None and not (self._addresses.unchanged() and self._graph_set.are_current()):
            moved = [
                *map(str, self._addresses.moved()),
                *([] if self._graph_set.are_current() else ["quantizers, replaced by another recipe"]),
            ]
            logger.error(
                "dropped Transformer Engine's graphs because memory that they read was replaced: %s", "; ".join(moved)
            )
            self.context.stats.invalidations[STALE] += 1
            self._drop(CaptureStatus.STALE)
        self._steps += 1
        if self._recorded_this_step:
            self._state.count_warmup()
            self._recorded_this_step = False
        if self._state.may_capture:
            self._capture()

    def _hold_accumulators(self) -> None:
        """Keep AccumulateGrad nodes that are safe in the capture alive until then (see Maker.accumulators)."""
        self._accumulators |= self._maker.accumulators(
            parameter
            for layer in self._layers
            for parameter in layer.attached.parameters
            if parameter.requires_grad and parameter not in self._accumulators
        )

    def _capture(self) -> None:
        started = time.perf_counter()
        gc.collect()  # frees autograd graphs of earlier steps, whose AccumulateGrad nodes would break the capture
        layers_run = sorted(self._run_order, key=lambda layer: layer.chunk)
        samples = choose_samples([layer.take_call_log() for layer in layers_run])
        chunks: list[list[Layer]] = [[] for _ in self._chunks]
        modules: list[CapturedLayer] = []
        nondiff_outputs = max(
            (sample.record.differentiable.count(False) for sample in samples if sample is not None), default=0
        )
        for layer, sample in zip(layers_run, samples, strict=True):
            if sample is not None and not layer.attached.hooks_inside:
                modules.append(layer.captured_layer(sample, len(chunks[layer.chunk]), nondiff_outputs))
                chunks[layer.chunk].append(layer)
        if not modules:  # all layers got hooks since they were recorded
            self._forget(CaptureStatus.EVICTED)
            return
        self._hold_accumulators()
        self.context.pool.trim()  # memory cached by eager steps can't be used by the graphs' pool
        self._running.active = True
        try:
            graph_set, keywords, added = self._make_graphs(chunks, modules)
        except CaptureError as error:
            logger.error("the capture by Transformer Engine failed, layers will run eagerly: %s", error)
            self._state.fail(error)
            for layer in self._layers:
                self.context.stats.capture_failed(layer.name, SCOPE, error)
        finally:
            self._running.active = False
            self._accumulators = {}  # replays and eager calls don't need them
        if self._state.failed:  # outside `except`: the error no longer references memory of the capture
            self.context.pool.trim()
            return
        self._capture_seconds = time.perf_counter() - started
        self._install(graph_set, keywords, chunks, added)
        self.context.stats.observe_capture(self._capture_seconds)
        logger.info(
            "Transformer Engine captured %d pairs of graphs in %.2f s", len(graph_set.calls), self._capture_seconds
        )

    def _make_graphs(
        self, chunks: Sequence[Sequence[Layer]], modules: Sequence[CapturedLayer]
    ) -> tuple[GraphSet, list[list[str]], set[int]]:
        """Capture the plan. Returns the graphs, the keywords of each, and the ids of parameters whose gradients they
        add to `main_grad`.

        Raises CaptureError.
        """
        pool, layers = self.context.pool, [layer for chunk in chunks for layer in chunk]
        precisions = [layer.sample.record.precision for layer in layers if layer.sample.record.precision.enabled]
        if any(precision != precisions[0] for precision in precisions):
            raise CaptureError(
                f"the layers ran under different recipes or groups ({precisions}), but a capture has only one: "
                "run them under one autocast, or attach them separately"
            )
        samples: list[list[Any]] = [[layer.sample for layer in chunk] for chunk in chunks]
        plan = CapturePlan(
            tuple(modules),
            [len(chunk) for chunk in chunks],
            self._order,
            static_inputs(samples, self._order),
            tuple(layer.sample.record.precision.enabled for layer in layers),
            precisions[0] if precisions else Precision(),
            self._caches_weights and bool(precisions),
        )
        device = pool.backend.device.type
        with ExitStack() as stack:
            stack.enter_context(self._paused())  # first: paused threads may need the lock to reach their pause point
            stack.enter_context(pool.session())
            stack.enter_context(pool.capture_flag())
            stack.enter_context(without_compiling(pool.backend))
            if torch.is_autocast_enabled(device):  # each CapturedLayer enters its own layer's autocast
                stack.enter_context(torch.autocast(device, enabled=False))
            for layer in layers:
                stack.enter_context(layer.hooks_removed())
            preserved = stack.enter_context(
                PreservedState([layer.attached.scope for layer in layers], self.context.state.values())
            )
            graph_set = self._maker.make(plan)
        self._replays_cache_weights = plan.caches_weights
        return graph_set, [list(inputs) for inputs in plan.samples], preserved.added

    def _install(
        self, graph_set: GraphSet, keywords: Sequence[list[str]], chunks: Sequence[Sequence[Layer]], added: set[int]
    ) -> None:
        """Serve calls from these graphs from now on. `keywords`: of each graph."""
        self._state.succeed()
        self._graph_set, self._graph_slots = graph_set, GraphSlots(self._order, [len(chunk) for chunk in chunks])
        for chunk, layers in enumerate(chunks):
            for layer in layers:
                indices = [
                    self._graph_slots.index_of(chunk, microbatch, layer.index)
                    for microbatch in range(self._graph_slots.microbatches)
                ]
                layer.set_graphs([(graph_set.calls[index], keywords[index]) for index in indices], added, SCOPE)
                self._addresses.watch(layer.attached.scope, prefix=f"{layer.name}.")
                self._addresses.watch(MainGrads(layer.attached.scope), prefix=f"{layer.name}.main_grad of ")
                self.context.stats.captures[layer.name, SCOPE, "recorded"] += len(layer.graphs)
        self._addresses.watch(self.context.state)

    # ---- shutdown --------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Drop all graphs; the next steps warm up again. A backward that is still outstanding raises."""
        self._drop(CaptureStatus.EVICTED)

    def _drop(self, cause: CaptureStatus) -> None:
        graph_set = self._graph_set
        self._forget(cause)
        if graph_set is not None:
            graph_set.close()
            self.context.pool.trim()

    def detach(self) -> None:
        """Drop all graphs and stop intercepting the layers. Call it before process groups are destroyed: NCCL resources
        held by graphs would hang the exit.
        """
        self.clear()
        for layer in self._layers:
            layer.attached.give_back()
        self._layers = []

    def table(self) -> list[dict[str, Any]]:
        """Return one row per pair of graphs.

        State and replays describe the whole capture; bytes and seconds are its totals divided evenly.
        """
        if self._graph_set is None:
            return []
        pairs = [(layer, microbatch) for layer in self._layers for microbatch in range(len(layer.graphs))]
        return [
            {"module": layer.name, "instance": microbatch}
            | self._state.row(
                engine=self._graph_set.engine,
                nbytes=self._graph_set.nbytes // len(pairs),
                capture_seconds=self._capture_seconds / len(pairs),
            )
            for layer, microbatch in pairs
        ]
