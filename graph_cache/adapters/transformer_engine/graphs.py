"""Layers of a pipeline stage that run from graphs which Transformer Engine captures.

Owns the rounds (warm-up by real calls, one capture, replay), which graph serves a call, and every fallback with its
reason: Transformer Engine itself looks at neither shapes nor dtypes nor order. A round begins with a forward while no
backward is outstanding. One thread runs the forwards.
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

from graph_cache.adapters.transformer_engine.layer import REPLAYED, Arrival, Layer, own_gradient
from graph_cache.adapters.transformer_engine.maker import CapturePlan, Made, Maker, Precision
from graph_cache.adapters.transformer_engine.order import GraphSlots, slots
from graph_cache.adapters.transformer_engine.preserved_state import FIRST, PreservedState
from graph_cache.adapters.transformer_engine.samples import CapturedLayer, settle, static_inputs
from graph_cache.addresses import AddressBook
from graph_cache.errors import CaptureError, GraphConfigError
from graph_cache.training.attached import Hook, Part, Watched
from graph_cache.training.autograd import Lease
from graph_cache.training.call import Result, flatten_call
from graph_cache.training.capture_context import CaptureContext
from graph_cache.training.compiled import without_compiling
from graph_cache.training.modules import FAILED, HOOKS, NO_GRAD, NO_INSTANCE, STALE, UNSEEN, WARMING
from graph_cache.training.parameter_aliases import ADDED, MainGrads

logger = logging.getLogger(__name__)

SCOPE = "module"


class TransformerEngineGraphs:
    """Forward and backward graphs of a pipeline stage's layers, captured in the order in which the stage runs them.

    `layers`: parts of the stage's model chunks; those of a chunk are captured in the order in which they first ran.
    `order` is that of the stage's forwards and backwards (`adapters.megatron.schedule` asks Megatron for it; [1, -1]
    for one microbatch at a time). The microbatch of a call is the attribute `current_microbatch` of the part's module,
    or of the one that `holders` has under the part's name; where there is none, calls are counted from the begin of the
    round.

    The first `warmup_rounds` rounds run eager, and say what to capture: arguments, modes, and the precision of
    Transformer Engine's autocast around each layer. With `caches_weights` weights in reduced precision are quantized
    once a step: in microbatch 0, or where a call says `is_first_microbatch=True`. `fired`: see AttachedModule.

    Transformer Engine captures in CUDA's global mode, which a CUDA call of any other thread breaks: `paused` makes a
    context that holds these still (an engine's loop), and whatever of the trainer must know (Megatron's hooks for
    gradients); it is entered before the pool's lock is taken. `options` are further ones of `make_graphed_callables`.

    What a replay returns is overwritten by later replays, from the end of its backward on. Raises GraphConfigError
    without Transformer Engine or a GPU, for an order that can't be, and for layers that are taken over already. `maker`
    captures instead of Transformer Engine.
    """

    def __init__(
        self,
        layers: Iterable[Part | tuple[str, nn.Module]],
        order: Sequence[float],
        job: CaptureContext,
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
            from graph_cache.adapters.transformer_engine.installed import Installed  # refuses by itself, in its words

            maker = Installed(job, options or {})
        self.job = job
        self._maker = maker
        self._order = [int(entry) if entry == int(entry) else entry for entry in order]
        self._slots = slots(order)
        self._chunks = range(1 + max(chunk for chunk, _, _ in self._slots))
        self._warmup_rounds = max(1, warmup_rounds)
        self._caches_weights = caches_weights
        self._paused = paused
        holders, parts = holders or {}, [Part(*part) for part in layers]
        self._layers = [Layer(part, fired, holders.get(part.name, part.module)) for part in parts]
        self._by_name = {layer.name: layer for layer in self._layers}
        if len(self._by_name) != len(self._layers):
            raise GraphConfigError("two layers have one name: give each a name of its own")
        beyond = [layer.name for layer in self._layers if layer.chunk not in self._chunks]
        if beyond:
            raise GraphConfigError(
                f"order: it has {len(self._chunks)} chunks, found layers of others: "
                f"{', '.join(beyond)}; number chunks from 0, as many as the order has"
            )
        for layer in self._layers:
            layer.attached.take_over(self._call_of(layer))
        self._watched = Watched([layer.attached for layer in self._layers])
        self._rounds = 0
        self._outstanding = 0  # eager calls whose backward is to come
        self._busy = False  # inside a capture or a layer: nested layers run eager
        self._forget()

    def _forget(self) -> None:
        self._made: Made | None = None
        self._places: GraphSlots | None = None
        self._addresses = AddressBook()
        self._capture_seconds = 0.0
        self._warm_rounds = 0
        self._noted = self._failed = self._caches = False
        self._weights_are_new: bool | None = None
        self._run_order: dict[Layer, None] = {}  # those of which calls were noted, as they first ran
        for layer in self._layers:
            layer.forget()
        self._accumulators: dict[Tensor, Any] = {}  # until the capture

    # ---- calls -----------------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether no forward waits for its backward."""
        return not self._outstanding and (self._places is None or not self._places.alive)

    def _call_of(self, layer: Layer) -> Callable[[Any, tuple, dict[str, Any]], Any]:
        return lambda _, args, kwargs: self._call(layer, args, kwargs)

    def _call(self, layer: Layer, args: tuple, kwargs: dict[str, Any]) -> Any:
        if self._busy or self.job.pool.backend.is_capturing():
            return layer.attached.eager(*args, **kwargs)
        if not torch.is_grad_enabled():
            return self._eager(layer, args, kwargs, NO_GRAD)
        if self.is_idle:
            self._begin_step()
        plain = {name: value for name, value in kwargs.items() if name != FIRST} if FIRST in kwargs else kwargs
        microbatch, places = layer.microbatch(self._rounds), self._places
        if not layer.graphs:
            return self._without_graphs(layer, args, kwargs, plain)
        tensors = layer.fits(args, plain, self._maker.precision())
        if tensors is None:
            return self._eager(layer, args, kwargs, HOOKS if layer.attached.hooks_inside else UNSEEN)
        place = places.at(layer.chunk, microbatch % places.microbatches, layer.index)
        if not places.may_begin(place) or not layer.sample.loads(tensors, idle=not places.alive):
            return self._eager(layer, args, kwargs, NO_INSTANCE)
        said = kwargs.get(FIRST)
        return self._replay(
            layer, place, microbatch % places.microbatches, tensors, said if isinstance(said, bool) else microbatch == 0
        )

    def _without_graphs(self, layer: Layer, args: tuple, kwargs: dict[str, Any], plain: dict[str, Any]) -> Any:
        """Eager; before the capture, the call is noted."""
        if layer.attached.hooks_inside:
            return self._eager(layer, args, kwargs, HOOKS)
        if self._made is not None or self._failed:
            return self._eager(layer, args, kwargs, FAILED if self._failed else UNSEEN)
        key, tensors = flatten_call(args, plain, layer.attached.module.training)
        if not layer.attached.wants_gradients(tensors):
            return self._eager(layer, args, kwargs, NO_GRAD)
        seen = layer.calls.note(key, tensors, args, plain, self._maker.precision())
        if seen is not None and not self._noted:
            self._hold_accumulators()
        value = self._eager(layer, args, kwargs, WARMING)
        found = Result.of(value)[1]
        if seen is not None:
            self._noted = True
            self._run_order.setdefault(layer)
            seen.differentiable = tuple(tensor.requires_grad for tensor in found)
        self._wait_for_backward(found)
        return value

    def _eager(self, layer: Layer, args: tuple, kwargs: dict[str, Any], reason: str) -> Any:
        """The eager forward, counted; layers inside it are part of it."""
        self.job.stats.fallbacks[layer.name, "forward", reason] += 1
        self._busy = True
        try:
            return layer.attached.eager(*args, **kwargs)
        finally:
            self._busy = False

    def _wait_for_backward(self, tensors: Iterable[Tensor]) -> None:
        """A round lasts until the backwards of its eager calls are done, or will never come."""
        node = next((tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None), None)
        if node is None:
            return

        def came(place: int) -> None:
            self._outstanding -= 1

        self._outstanding += 1
        lease = Lease(came)
        node.register_prehook(lambda grads: lease.end())

    def _replay(self, layer: Layer, place: int, microbatch: int, tensors: Sequence[Tensor], are_new: bool) -> Any:
        layer.attached.fire_hooks()
        places = self._places
        call, names = layer.graphs[microbatch]
        next_place = places.read_next.get(place)
        given: dict[str, Any] = {
            name: own_gradient(tensors[index], places, next_place)
            for name, index in zip(names, layer.sample.moving, strict=True)
        }
        if self._caches:
            # By itself Transformer Engine says it with the first module of an autocast only, which may have run eager:
            # graphs after it would go on with weights of the step before.
            if layer.index == 0 or are_new is not self._weights_are_new:
                self._maker.update_weights(are_new)
                self._weights_are_new = are_new
            given[FIRST] = are_new
        places.begin(place)
        try:
            value, node = layer.returned(call(**given))
        except BaseException:
            places.end(place)
            raise

        def came(place: int) -> None:
            places.go_back(place)
            for parameter in layer.added:
                setattr(parameter, ADDED, True)

        layer.ran()
        setattr(node, REPLAYED, (id(places), place))
        node.register_prehook(Arrival(layer.name, place, came, places.end))
        self.job.stats.replays[layer.label] += 1
        return value

    def backward_dw(self, name: str, microbatch: int) -> bool:
        """Compute the delayed weight gradients of a layer from its graph. False, and nothing done, where its forward of
        this microbatch ran eager: then call the layer's own `backward_dw`.
        """
        layer = self._by_name[name]
        if not layer.graphs:
            return False
        microbatch %= self._places.microbatches
        place = self._places.at(layer.chunk, microbatch, layer.index)
        if not self._places.owes_weights(place):
            return False
        self._places.compute_weights(place)
        layer.graphs[microbatch][0].backward_dw()
        return True

    # ---- capture ---------------------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        """Between two steps: count warm-up, capture after it, and look whether anything changed or moved."""
        self._watched.refresh()
        if self._made is not None and not (self._addresses.unchanged() and self._made.are_current()):
            moved = [
                *map(str, self._addresses.moved()),
                *([] if self._made.are_current() else ["quantizers, by another recipe"]),
            ]
            logger.error(
                "what Transformer Engine's graphs read was replaced, and they were dropped: %s", "; ".join(moved)
            )
            self.job.stats.invalidations[STALE] += 1
            self.clear()
        self._rounds += 1
        if self._noted:
            self._warm_rounds += 1
            self._noted = False
        if self._made is None and not self._failed and self._warm_rounds >= self._warmup_rounds:
            self._capture()

    def _hold_accumulators(self) -> None:
        """From the first recorded call on until the capture, which may meet these nodes and no others (see Maker)."""
        self._accumulators |= self._maker.accumulators(
            parameter
            for layer in self._layers
            for parameter in layer.attached.parameters
            if parameter.requires_grad and parameter not in self._accumulators
        )

    def _capture(self) -> None:
        started = time.perf_counter()
        gc.collect()  # histories of earlier steps, whose nodes the capture would meet
        ran = sorted(self._run_order, key=lambda layer: layer.chunk)
        samples = settle([layer.take_calls() for layer in ran])
        chunks: list[list[Layer]] = [[] for _ in self._chunks]
        modules: list[CapturedLayer] = []
        without = max((sample.seen.differentiable.count(False) for sample in samples if sample is not None), default=0)
        for layer, sample in zip(ran, samples, strict=True):
            if sample is not None and not layer.attached.hooks_inside:
                modules.append(layer.captured_layer(sample, len(chunks[layer.chunk]), without))
                chunks[layer.chunk].append(layer)
        if not modules:  # hooks came up in all of them since
            self._forget()
            return
        self._hold_accumulators()
        self.job.pool.trim()  # what the eager rounds left cached is of no use to the graphs' own memory
        self._busy = True
        try:
            made, added = self._make(chunks, modules)
        except CaptureError as error:
            logger.error("the capture by Transformer Engine failed, its layers will run eager: %s", error)
            self._failed = True
            for layer in self._layers:
                self.job.stats.capture_failed(layer.name, SCOPE, error)
        finally:
            self._busy = False
            self._accumulators = {}  # replays and eager calls need none of a stream of their own
        if self._failed:  # the error is gone by now, and with it what it held of the capture
            self.job.pool.trim()
            return
        self._capture_seconds = time.perf_counter() - started
        self._take(made, chunks, added)
        self.job.stats.observe_capture(self._capture_seconds)
        logger.info("Transformer Engine captured %d pairs of graphs in %.2f s", len(made.calls), self._capture_seconds)

    def _make(self, chunks: Sequence[Sequence[Layer]], modules: Sequence[CapturedLayer]) -> tuple[Made, set[int]]:
        """The graphs, and which parameters' gradients they add to `main_grad` themselves. Raises CaptureError."""
        pool, layers = self.job.pool, [layer for chunk in chunks for layer in chunk]
        reduced = [layer.sample.seen.precision for layer in layers if layer.sample.seen.precision.enabled]
        if any(precision != reduced[0] for precision in reduced):
            raise CaptureError(
                f"the layers ran under different recipes or groups ({reduced}): one capture has one; "
                "run them under one autocast, or attach those that differ apart"
            )
        samples: list[list[Any]] = [[layer.sample for layer in chunk] for chunk in chunks]
        plan = CapturePlan(
            tuple(modules),
            [len(chunk) for chunk in chunks],
            self._order,
            static_inputs(samples, self._slots),
            tuple(layer.sample.seen.precision.enabled for layer in layers),
            reduced[0] if reduced else Precision(),
            self._caches_weights and bool(reduced),
        )
        device = pool.backend.device.type
        with ExitStack() as stack:
            stack.enter_context(self._paused())  # first: who is paused may need the lock to get there
            stack.enter_context(pool.session())
            stack.enter_context(pool.capture_flag())
            stack.enter_context(without_compiling(pool.backend))
            if torch.is_autocast_enabled(device):  # each stand-in enters what its layer ran under
                stack.enter_context(torch.autocast(device, enabled=False))
            for layer in layers:
                stack.enter_context(layer.hooks_put_aside())
            kept = stack.enter_context(
                PreservedState([layer.attached.scope for layer in layers], self.job.state.values())
            )
            made = self._maker.make(plan)
        self._caches = plan.caches_weights
        return made, kept.added

    def _take(self, made: Made, chunks: Sequence[Sequence[Layer]], added: set[int]) -> None:
        """Serve calls from these graphs from here on."""
        self._made, self._places = made, GraphSlots(self._order, [len(chunk) for chunk in chunks])
        slot_of = {(chunk, microbatch): slot for chunk, microbatch, slot in self._slots}
        for chunk, layers in enumerate(chunks):
            microbatches = range(self._places.microbatches)
            for layer in layers:
                layer.captured(
                    [made.calls[self._places.at(chunk, microbatch, layer.index)] for microbatch in microbatches],
                    [slot_of[chunk, microbatch] for microbatch in microbatches],
                    added,
                    SCOPE,
                )
                self._addresses.watch(layer.attached.scope, prefix=f"{layer.name}.")
                self._addresses.watch(MainGrads(layer.attached.scope), prefix=f"{layer.name}.main_grad of ")
                self.job.stats.captures[layer.name, SCOPE, "recorded"] += len(layer.graphs)
        self._addresses.watch(self.job.state)

    # ---- the end ---------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Drop all graphs at once; the next rounds warm up anew. A backward that is still to come then raises."""
        made = self._made
        self._forget()
        if made is not None:
            made.close()
            self.job.pool.trim()

    def detach(self) -> None:
        """Drop all graphs and give the layers their calls back. Call it before process groups are destroyed: what NCCL
        holds for graphs would hang the exit.
        """
        self.clear()
        for layer in self._layers:
            layer.attached.give_back()
        self._layers = []

    def table(self) -> list[dict[str, Any]]:
        """Every pair of graphs as plain values; bytes and seconds are shares of the one capture."""
        if self._made is None:
            return []
        pairs = [(layer, microbatch) for layer in self._layers for microbatch in range(len(layer.graphs))]
        return [
            {
                "module": layer.name,
                "instance": microbatch,
                "engine": self._made.engine,
                "bytes": self._made.nbytes // len(pairs),
                "capture_seconds": round(self._capture_seconds / len(pairs), 6),
            }
            for layer, microbatch in pairs
        ]
