"""Transformer Engine as it is installed: whether it can capture here, its captures, and its precision.

The one file that imports it, when something is made of it. Owns what its capture leaves behind when it fails: it puts
nothing back then, neither its own state nor the allocator's nor the generators'.
"""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from graph_cache.adapters.transformer_engine.maker import CapturePlan, Precision
from graph_cache.adapters.transformer_engine.quantizers import Quantizers
from graph_cache.backends.cuda import REFUSALS, CudaMemory
from graph_cache.errors import CaptureError, GraphConfigError
from graph_cache.training.capture_context import CaptureContext

logger = logging.getLogger(__name__)

PACKAGE = "transformer_engine"
FULL = Precision()
# Without the last, gradients of parameters are handed out where the next replay overwrites them.
NEEDED = (
    "sample_kwargs",
    "enabled",
    "recipe",
    "amax_reduction_group",
    "cache_quantized_params",
    "_order",
    "_num_layers_per_chunk",
    "pool",
    "_reuse_graph_input_output_buffers",
    "clone_param_grads_on_return",
)
OURS = (
    "modules",
    "sample_args",
    "calibrating",
    "fp8_enabled",
    "fp8_calibrating",
    "fp8_recipe",
    "fp8_group",
    "fp8_weight_caching",
    "capture_time_hooks",
    *NEEDED,
)


def missing(backend: str) -> list[str]:
    """What a capture by Transformer Engine needs and isn't here, a line each."""
    found = []
    if importlib.util.find_spec(PACKAGE) is None:
        found.append(f"no {PACKAGE} to import")
    if not torch.cuda.is_available():
        found.append("no CUDA device (torch.cuda.is_available() is False)")
    if backend != "cuda":
        found.append(f"a pool that captures on {backend!r}")
    return found


class Installed:
    """Captures plans for one job. Raises GraphConfigError, saying what was asked, found, and what to do."""

    def __init__(self, job: CaptureContext, options: Mapping[str, Any]):
        lacking = missing(job.pool.backend.name)
        if lacking:
            raise _refusal("; ".join(lacking))
        try:
            import transformer_engine.pytorch as te
            from transformer_engine.pytorch import graph
            from transformer_engine.pytorch.quantization import FP8GlobalStateManager
        except Exception as error:  # a library of its own that can't be loaded may raise anything
            raise _refusal(f"{PACKAGE} can't be imported: {type(error).__name__}: {error}") from error
        self.version = installed_version()
        self._job = job
        self._backend: Any = job.pool.backend  # the CUDA backend
        self._make: Callable[..., Any] = te.make_graphed_callables
        self._graph = graph
        self._state = FP8GlobalStateManager
        self._options = dict(options)
        known = inspect.signature(self._make).parameters
        lacking = [name for name in NEEDED if name not in known]
        if not hasattr(graph, "_graph_context_wrapper"):
            lacking.append("_graph_context_wrapper")
        if lacking:
            raise _refusal(f"{PACKAGE} {self.version}, whose make_graphed_callables has no {', '.join(lacking)}")
        refused = [name for name in options if name not in known or name in OURS]
        if refused:
            free = ", ".join(sorted(set(known) - set(OURS)))
            raise GraphConfigError(
                f"options: {', '.join(refused)} can't be given to Transformer Engine "
                f"{self.version}: what may be is {free}"
            )
        self._check_generators(job.generators)
        self._nothing = torch.zeros(1, device=self._backend.device)
        self._stream = torch.cuda.Stream(self._backend.device)  # of the captures

    def _check_generators(self, generators: Sequence[torch.Generator]) -> None:
        registered = [self._backend.default_generator, *self._tracked_generators()]
        others = [one for one in generators if all(one is not known for known in registered)]
        if others:
            raise GraphConfigError(
                f"{len(others)} generators that captured draws use are not Transformer Engine's, "
                "which registers its own tracker's with its graphs and no others: build the model "
                "with use_te_rng_tracker=True, or take cuda_graph_impl='local'"
            )

    def _tracked_generators(self) -> list[torch.Generator]:
        return [state for state in self._graph.get_all_rng_states().values() if isinstance(state, torch.Generator)]

    # ---- precision -------------------------------------------------------------------------------------------------

    def precision(self) -> Precision | None:
        """That of Transformer Engine's autocast now; None while calibrating."""
        if self._state.is_fp8_calibration():
            return None
        if not self._state.is_fp8_enabled():
            return FULL
        return Precision(True, self._state.get_fp8_recipe(), self._state.get_fp8_group())

    def update_weights(self, are_new: bool) -> None:
        """Whether graphs that replay from here on quantize their weights."""
        self._state.set_skip_fp8_weight_update_tensor(not are_new)

    # ---- capture ---------------------------------------------------------------------------------------------------

    def make(self, plan: CapturePlan) -> Captured:
        """Capture a plan into memory of its own. Raises CaptureError; the device and its flags are as before then."""
        memory: Any = self._job.pool.new_memory()  # the CUDA backend's
        recipe = plan.precision.recipe if any(plan.enabled) else None
        options = {"allow_unused_input": True} | self._options
        handled = sys.exception()  # by the caller, which has no part in what goes wrong here
        try:
            with (
                torch.cuda.device(self._backend.device),
                self._flag_of(plan),
                self._captures_as_ours(),
                self._put_back_on_failure(plan.modules, recipe, memory),
            ):
                calls = self._make(
                    plan.modules,
                    tuple(() for _ in plan.samples),
                    sample_kwargs=tuple(plan.samples),
                    enabled=plan.enabled,
                    recipe=recipe,
                    amax_reduction_group=plan.precision.group,
                    cache_quantized_params=plan.caches_weights,
                    _order=plan.order,
                    _num_layers_per_chunk=plan.layers_per_chunk,
                    pool=memory.id,
                    _reuse_graph_input_output_buffers=True,
                    clone_param_grads_on_return=True,
                    **options,
                )
        except Exception as error:
            cause = _within(error, handled)
            raise CaptureError(
                f"make_graphed_callables of Transformer Engine {self.version} raised "
                f"{type(cause).__name__}: {cause}. It captures into the parameters' own gradients: "
                "attach a model when no loss of earlier steps is held any more, and build wrappers for "
                "data parallelism on a stream of their own"
            ) from error
        return Captured(calls, memory, Quantizers(plan.modules))

    def accumulators(self, parameters: Iterable[Tensor]) -> dict[Tensor, Any]:
        """They work on the stream where they are made: on the default one, a capture would depend on what isn't."""
        # PyTorch warns of them, once: that they are of another stream than the steps is what they are for.
        warnings.filterwarnings("ignore", "The AccumulateGrad node's stream does not match")
        with torch.cuda.stream(self._stream):
            return new_accumulators(parameters)

    @contextmanager
    def _captures_as_ours(self) -> Iterator[None]:
        """Each of its captures is on our stream, and looked at before it ends, as our own are."""
        capture = self._graph._graph_context_wrapper

        @contextmanager
        def looked_at(*args: Any, **kwargs: Any) -> Iterator[None]:
            with capture(*args, stream=self._stream, **kwargs):
                yield
                self._backend.refuse_copies_of_the_host()

        self._graph._graph_context_wrapper = looked_at
        try:
            yield
        finally:
            self._graph._graph_context_wrapper = capture

    @contextmanager
    def _flag_of(self, plan: CapturePlan) -> Iterator[None]:
        """Without cached weights, no flag: one that an earlier capture made would be read by these graphs too, which
        nobody then tells that weights are new.
        """
        state = self._state.quantization_state
        flag = state.skip_fp8_weight_update_tensor
        if plan.caches_weights:
            yield
            return
        state.skip_fp8_weight_update_tensor = None
        try:
            yield
        finally:
            state.skip_fp8_weight_update_tensor = flag

    @contextmanager
    def _put_back_on_failure(self, modules: Sequence[nn.Module], recipe: Any, memory: CudaMemory) -> Iterator[None]:
        """What Transformer Engine changes for a capture, and puts back itself only after one that went well."""
        collects, stream = gc.isenabled(), torch.cuda.current_stream()
        generators = [self._backend.default_generator, *self._tracked_generators()]
        draws = [generator.get_state() for generator in generators]
        quantizers = self._graph.save_fp8_tensors(modules, recipe=recipe)
        hooks = [(module._forward_hooks, dict(module._forward_hooks)) for one in modules for module in one.modules()]
        try:
            yield
        except BaseException:
            torch.cuda.set_stream(stream)
            self._graph.set_capture_end()
            if collects:
                gc.enable()
            for registered, before in hooks:
                registered.clear()
                registered.update(before)
            self._leave_capture(memory)
            self._graph.restore_fp8_tensors(modules, quantizers)
            for generator, state in zip(generators, draws, strict=True):
                generator.set_state(state)
            raise
        finally:
            for kind in {type(module) for module in modules}:
                if "__call__" in vars(kind):  # which it sets, to enter its autocast
                    del kind.__call__

    def _leave_capture(self, memory: CudaMemory) -> None:
        """End what a capture that broke off left: the allocator's routing, and generators that think they are captured.

        An empty capture that ends well takes the generators out.
        """
        try:
            torch._C._cuda_endAllocateToPool(self._backend.device.index, memory.id)
        except RuntimeError as ended:  # by the capture itself, as far as it came
            logger.debug("after a failed capture: %s", ended)
        torch.cuda.synchronize(self._backend.device)
        generators = self._tracked_generators()
        self._backend.capture(self._nothing.zero_, self._job.pool.new_memory(), generators, None).close()


class Captured:
    """Graphs that Transformer Engine made, in `memory`, which is theirs alone."""

    engine = PACKAGE

    def __init__(self, calls: Sequence[Any], memory: CudaMemory, quantizers: Quantizers):
        self.calls: Sequence[Any] = tuple(calls)
        self.nbytes = memory.growth()
        self._memory = memory
        self._quantizers: Quantizers | None = quantizers
        memory.adopt()

    def are_current(self) -> bool:
        """Whether scales, amaxes and cached weights are still those that the modules use."""
        return self._quantizers is None or self._quantizers.are_current()

    def close(self) -> None:
        """Reset every graph; their memory is free from then on. A backward that is still to come raises."""
        calls, self.calls = self.calls, ()
        for call in calls:
            call.reset()
        if self._quantizers is not None:
            self._quantizers = None
            self._memory.release()


def _within(error: BaseException, handled: BaseException | None) -> BaseException:
    """What went wrong in a capture, where `error` is that its end failed too."""
    within = error.__context__
    if (
        within is None
        or within is handled
        or error.__suppress_context__
        or not any(word in str(error) for word in REFUSALS)
    ):
        return error
    return _within(within, handled)


def new_accumulators(parameters: Iterable[Tensor]) -> dict[Tensor, Any]:
    """For each parameter whose gradients no living node adds up, one that does, of the current stream."""
    parameters, seen = list(parameters), "seen by Encore"
    for parameter in parameters:
        _accumulator(parameter).metadata[seen] = True  # gone with the node, where nobody else holds it
    found = {parameter: _accumulator(parameter) for parameter in parameters}
    return {parameter: node for parameter, node in found.items() if node.metadata.pop(seen, None) is None}


@torch.enable_grad()
def _accumulator(parameter: Tensor) -> Any:
    return parameter.expand_as(parameter).grad_fn.next_functions[0][0]


def installed_version() -> str | None:
    """The version of Transformer Engine here, without importing it; None where there is none."""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None


def _refusal(found: str) -> GraphConfigError:
    return GraphConfigError(
        "cuda_graph_impl='transformer_engine' was asked for, which captures by Transformer "
        f"Engine's make_graphed_callables on an NVIDIA GPU; found {found}. Install "
        "encore-serve[gpu] (transformer-engine 2.20 or later) on a machine with a GPU, or take "
        "cuda_graph_impl='local', which captures the same layers without either"
    )
