"""The installed Transformer Engine: whether it can capture here, its captures, and its precision.

Imports transformer_engine lazily. Transformer Engine restores nothing after a failed capture; this module restores its
state, the allocator's and the generators'.
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
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from graph_cache.adapters.transformer_engine.maker import CapturePlan, Precision
from graph_cache.backends.cuda import REFUSALS, CudaMemory
from graph_cache.errors import CaptureError, GraphConfigError
from graph_cache.guards.library_state import weight_update_flag
from graph_cache.guards.quantizers import Quantizers
from graph_cache.training.capture_context import CaptureContext

logger = logging.getLogger(__name__)

PACKAGE = "transformer_engine"
NO_AUTOCAST = Precision()
# Without clone_param_grads_on_return, parameter gradients alias memory that the next replay overwrites.
REQUIRED_OPTIONS = (
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
RESERVED_OPTIONS = (
    "modules",
    "sample_args",
    "calibrating",
    "fp8_enabled",
    "fp8_calibrating",
    "fp8_recipe",
    "fp8_group",
    "fp8_weight_caching",
    "capture_time_hooks",
    *REQUIRED_OPTIONS,
)


def missing_requirements(backend: str) -> list[str]:
    """Return the missing requirements for a capture by Transformer Engine."""
    found = []
    if importlib.util.find_spec(PACKAGE) is None:
        found.append(f"{PACKAGE} is not installed")
    if not torch.cuda.is_available():
        found.append("no CUDA device (torch.cuda.is_available() is False)")
    if backend != "cuda":
        found.append(f"a pool that captures on {backend!r}")
    return found


class InstalledTransformerEngine:
    """`Maker` for one capture context. Raises GraphConfigError if requirements are missing or options are invalid."""

    def __init__(self, context: CaptureContext, options: Mapping[str, Any]):
        problems = missing_requirements(context.pool.backend.name)
        if problems:
            raise _refusal("; ".join(problems))
        try:
            import transformer_engine.pytorch as te
            from transformer_engine.pytorch import graph
            from transformer_engine.pytorch.quantization import FP8GlobalStateManager
        except Exception as error:  # loading its shared libraries may raise anything
            raise _refusal(f"{PACKAGE} can't be imported: {type(error).__name__}: {error}") from error
        self.version = installed_version()
        self._context = context
        self._backend: Any = context.pool.backend  # the CUDA backend
        self._make: Callable[..., Any] = te.make_graphed_callables
        self._graph = graph
        self._state = FP8GlobalStateManager
        self._options = dict(options)
        parameters = inspect.signature(self._make).parameters
        problems = [name for name in REQUIRED_OPTIONS if name not in parameters]
        if not hasattr(graph, "_graph_context_wrapper"):
            problems.append("_graph_context_wrapper")
        if problems:
            raise _refusal(f"{PACKAGE} {self.version}, with a make_graphed_callables that lacks {', '.join(problems)}")
        refused = [name for name in options if name not in parameters or name in RESERVED_OPTIONS]
        if refused:
            allowed = ", ".join(sorted(set(parameters) - set(RESERVED_OPTIONS)))
            raise GraphConfigError(
                f"options: {', '.join(refused)} can't be passed to Transformer Engine "
                f"{self.version}: allowed are {allowed}"
            )
        self._check_generators(context.generators)
        self._scratch = torch.zeros(1, device=self._backend.device)
        self._stream = torch.cuda.Stream(self._backend.device)  # stream of the captures

    def _check_generators(self, generators: Sequence[torch.Generator]) -> None:
        registered = [self._backend.default_generator, *self._tracked_generators()]
        others = [one for one in generators if all(one is not other for other in registered)]
        if others:
            raise GraphConfigError(
                f"{len(others)} generators used in the capture are not Transformer Engine's, "
                "which registers only the generators of its RNG tracker with its graphs: build the model "
                "with use_te_rng_tracker=True, or use cuda_graph_impl='local'"
            )

    def _tracked_generators(self) -> list[torch.Generator]:
        return [state for state in self._graph.get_all_rng_states().values() if isinstance(state, torch.Generator)]

    # ---- precision -------------------------------------------------------------------------------------------------

    def precision(self) -> Precision | None:
        """Return the precision of the current autocast; None while calibrating."""
        if self._state.is_fp8_calibration():
            return None
        if not self._state.is_fp8_enabled():
            return NO_AUTOCAST
        return Precision(True, self._state.get_fp8_recipe(), self._state.get_fp8_group())

    def update_weights(self, are_new: bool) -> None:
        """Set whether subsequent replays quantize their weights."""
        self._state.set_skip_fp8_weight_update_tensor(not are_new)

    # ---- capture ---------------------------------------------------------------------------------------------------

    def make(self, plan: CapturePlan) -> TransformerEngineGraphSet:
        """Capture a plan into its own memory pool. Raises CaptureError after restoring the device and its flags."""
        memory: Any = self._context.pool.new_memory()  # the CUDA backend's
        recipe = plan.precision.recipe if any(plan.enabled) else None
        options = {"allow_unused_input": True} | self._options
        outer_error = sys.exception()  # an error that the caller is handling; not a cause of ours
        try:
            with (
                torch.cuda.device(self._backend.device),
                nullcontext() if plan.caches_weights else weight_update_flag(None),
                self._capture_on_own_stream(),
                self._restore_on_failure(plan.modules, recipe, memory),
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
            cause = _root_cause(error, outer_error)
            raise CaptureError(
                f"make_graphed_callables of Transformer Engine {self.version} raised "
                f"{type(cause).__name__}: {cause}. It captures into the parameters' own gradients: "
                "attach a model while no loss of earlier steps is held, and build data-parallel "
                "wrappers on a non-default stream"
            ) from error
        return TransformerEngineGraphSet(calls, memory, Quantizers(plan.modules))

    def accumulators(self, parameters: Iterable[Tensor]) -> dict[Tensor, Any]:
        """Create AccumulateGrad nodes on the capture stream. On the default stream, a capture would depend on
        uncaptured work.
        """
        # PyTorch warns once that their stream differs from the step's, which is intended here.
        warnings.filterwarnings("ignore", "The AccumulateGrad node's stream does not match")
        with torch.cuda.stream(self._stream):
            return new_accumulators(parameters)

    @contextmanager
    def _capture_on_own_stream(self) -> Iterator[None]:
        """Run its captures on our stream and check each for host copies before it ends, as for our own captures."""
        capture = self._graph._graph_context_wrapper

        @contextmanager
        def checked_capture(*args: Any, **kwargs: Any) -> Iterator[None]:
            with capture(*args, stream=self._stream, **kwargs):
                yield
                self._backend.refuse_copies_of_the_host()

        self._graph._graph_context_wrapper = checked_capture
        try:
            yield
        finally:
            self._graph._graph_context_wrapper = capture

    @contextmanager
    def _restore_on_failure(self, modules: Sequence[nn.Module], recipe: Any, memory: CudaMemory) -> Iterator[None]:
        """Restore, if the block raises, the state that Transformer Engine restores only after a successful capture."""
        gc_was_enabled, stream = gc.isenabled(), torch.cuda.current_stream()
        generators = [self._backend.default_generator, *self._tracked_generators()]
        rng_states = [generator.get_state() for generator in generators]
        quantizers = self._graph.save_fp8_tensors(modules, recipe=recipe)
        hooks = [(module._forward_hooks, dict(module._forward_hooks)) for one in modules for module in one.modules()]
        try:
            yield
        except BaseException:
            torch.cuda.set_stream(stream)
            self._graph.set_capture_end()
            if gc_was_enabled:
                gc.enable()
            for registered, before in hooks:
                registered.clear()
                registered.update(before)
            self._end_broken_capture(memory)
            self._graph.restore_fp8_tensors(modules, quantizers)
            for generator, state in zip(generators, rng_states, strict=True):
                generator.set_state(state)
            raise
        finally:
            for kind in {type(module) for module in modules}:
                if "__call__" in vars(kind):  # set by make_graphed_callables to enter its autocast
                    del kind.__call__

    def _end_broken_capture(self, memory: CudaMemory) -> None:
        """Clean up after a capture that raised: end the allocator's routing to its pool and unregister its generators.

        A successful empty capture takes the generators out of capture mode.
        """
        try:
            torch._C._cuda_endAllocateToPool(self._backend.device.index, memory.id)
        except RuntimeError as ended:  # the capture already ended it
            logger.debug("after a failed capture: %s", ended)
        torch.cuda.synchronize(self._backend.device)
        generators = self._tracked_generators()
        self._backend.capture(self._scratch.zero_, self._context.pool.new_memory(), generators, None).close()


class TransformerEngineGraphSet:
    """Graphs captured by Transformer Engine into their own `memory`."""

    engine = PACKAGE

    def __init__(self, calls: Sequence[Any], memory: CudaMemory, quantizers: Quantizers):
        self.calls: Sequence[Any] = tuple(calls)
        self.nbytes = memory.growth()
        self._memory = memory
        self._quantizers: Quantizers | None = quantizers
        memory.add_graph()

    def are_current(self) -> bool:
        """Return whether the modules still use the captured scales, amaxes and cached weights."""
        return self._quantizers is None or self._quantizers.are_current()

    def close(self) -> None:
        """Reset every graph and free their memory. A backward that is still outstanding raises."""
        calls, self.calls = self.calls, ()
        for call in calls:
            call.reset()
        if self._quantizers is not None:
            self._quantizers = None
            self._memory.remove_graph()


def _root_cause(error: BaseException, outer_error: BaseException | None) -> BaseException:
    """Return the original error of a capture if `error` only reports that ending the capture failed."""
    context = error.__context__
    if (
        context is None
        or context is outer_error
        or error.__suppress_context__
        or not any(word in str(error) for word in REFUSALS)
    ):
        return error
    return _root_cause(context, outer_error)


def new_accumulators(parameters: Iterable[Tensor]) -> dict[Tensor, Any]:
    """Create an AccumulateGrad node on the current stream for each parameter that has none alive."""
    parameters, seen = list(parameters), "seen by Encore"
    for parameter in parameters:
        _accumulator(parameter).metadata[seen] = True  # lost with the node unless something else keeps it alive
    found = {parameter: _accumulator(parameter) for parameter in parameters}
    return {parameter: node for parameter, node in found.items() if node.metadata.pop(seen, None) is None}


@torch.enable_grad()
def _accumulator(parameter: Tensor) -> Any:
    return parameter.expand_as(parameter).grad_fn.next_functions[0][0]


def installed_version() -> str | None:
    """Return the version of Transformer Engine without importing it; None if it is not installed."""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None


def _refusal(found: str) -> GraphConfigError:
    return GraphConfigError(
        "cuda_graph_impl='transformer_engine' was asked for, which captures with Transformer "
        f"Engine's make_graphed_callables on an NVIDIA GPU; found {found}. Install "
        "encore-serve[gpu] (transformer-engine 2.20 or later) on a machine with a GPU, or use "
        "cuda_graph_impl='local', which captures the same layers without either"
    )
