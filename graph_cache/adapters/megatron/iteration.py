"""Capture Megatron's `forward_backward_func` as one graph (`cuda_graph_impl=full_iteration`).

This module prefetches the microbatches, builds the key that decides which graph serves a call, and refuses settings
that can't be captured. `graph_cache.training.iteration` makes the graphs. Any schedule with Megatron's calling
convention is captured unchanged, including gradient finalization and collectives.
"""

from __future__ import annotations

import copy
import enum
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from graph_cache.adapters.megatron.attachment import ROUTING_REPLAY_ERROR, AuxLosses, register_packed_sequences
from graph_cache.adapters.megatron.attachment import generators as tracked_generators
from graph_cache.core.pool import GraphPool
from graph_cache.core.stats import CacheStats
from graph_cache.errors import GraphConfigError, GraphError
from graph_cache.guards.values import key_of
from graph_cache.training.iteration import CapturedIteration
from graph_cache.training.threads import one_at_a_time
from graph_cache.utils.cpu_threads import ThreadTuner

SCALARS = (int, float, complex, bool, str, bytes, type(None))
KEY_TYPES = (
    *SCALARS,
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.Size,
)  # non-tensor batch contents that become part of the key
# Settings with which Megatron's training loop, DDP and FSDP read losses or gradients on the host.
NAN_CHECKS = (
    "check_for_nan_in_loss_and_grad",
    "check_for_nan_in_grad",
    "check_for_large_grads",
    "report_nan_in_param_grad",
)
LOSS_SCALES = ("grad_scale_func", "moe_grad_scale_func", "mtp_grad_scale_func")


class MicrobatchesRanOut(GraphError):
    """A data iterator ended before the iteration had all its microbatches. Nothing ran.

    `read`: the batches already taken from the iterators, unmodified, one list per model chunk.
    """

    def __init__(self, message: str, read: Sequence[Sequence[Any]]):
        super().__init__(message)
        self.read = [list(batches) for batches in read]


class FullIteration:
    """Replacement for Megatron's `forward_backward_func`, called with the same keywords.

    A call reads `num_microbatches` batches from each data iterator, moves their tensors to the pool's device, and runs
    the function on iterators over them: eagerly for the first `warmup_steps` calls of a call signature, then from a
    graph with static input buffers per chunk and microbatch. The signature is that of `CapturedIteration` plus every
    keyword, every field of the models' configurations, and the identity of model chunks and functions. Returns the
    function's result with losses copied; Python numbers in it keep their values from the capture.

    `forward_only` calls do not touch gradients. Loss scales (`grad_scale_func`) are read at every call and applied as
    tensors in the graph, so they may change. `settings`: objects with Megatron's settings (arguments, configurations)
    to check at construction; the models' settings are checked at every call. `generators` are registered with each
    graph, in addition to the generators of Megatron's tracker. `prepare` gets the model chunks before each call.
    `threads` chooses the number of threads of each step on a CPU. Threads run their calls one after another.

    Raises GraphConfigError for what can't be captured and MicrobatchesRanOut, both before anything runs; GraphError if
    the step consumes a different number of batches than of microbatches.
    """

    def __init__(
        self,
        forward_backward_func: Callable[..., Any],
        pool: GraphPool,
        stats: CacheStats,
        *,
        name: str = "iteration",
        warmup_steps: int = 3,
        generators: Sequence[torch.Generator] = (),
        settings: Iterable[Any] = (),
        prepare: Callable[[Sequence[nn.Module]], None] | None = None,
        threads: ThreadTuner | None = None,
    ):
        if isinstance(forward_backward_func, FullCudaGraphWrapper):
            raise GraphConfigError(
                "forward_backward_func is Megatron's own FullCudaGraphWrapper, and captures can't be "
                "nested: pass what get_forward_backward_func() returns"
            )
        for one in settings:
            check_settings(one)
        register_packed_sequences()  # a batch may contain them
        self.name = name
        self._function = forward_backward_func
        self._signature = inspect.signature(forward_backward_func)
        self._pool, self._stats = pool, stats
        self._warmup_steps = warmup_steps
        self._generators = tuple(generators)
        self._prepare = prepare
        self._threads = threads
        self._iteration: CapturedIteration | None = None

    @one_at_a_time
    def __call__(
        self,
        *,
        data_iterator: Any,
        model: nn.Module | Sequence[nn.Module],
        num_microbatches: int,
        forward_only: bool = False,
        **keywords: Any,
    ) -> Any:
        """Run one iteration. `keywords`: further keywords of the function."""
        keywords |= {"num_microbatches": num_microbatches, "forward_only": forward_only}
        self._signature.bind(
            data_iterator=data_iterator, model=model, **keywords
        )  # raises TypeError before any batch is read
        chunks = list(model) if isinstance(model, (list, tuple)) else [model]
        configs = _configs(chunks)
        for one in (*configs, *_wrapped(chunks)):
            check_settings(one)
        if self._prepare is not None:
            self._prepare(chunks)
        key = [
            _settings_key(dict(sorted(keywords.items()))),
            *[_settings_key(vars(one), LOSS_SCALES) for one in configs],
        ]
        call = _Call(isinstance(model, (list, tuple)), isinstance(data_iterator, (list, tuple)), keywords, tuple(key))
        iteration = self._iteration or self._create_iteration()
        batches = self._read(data_iterator, len(chunks), num_microbatches)
        scales = [_loss_scales(one, self._pool.backend.device) for one in configs]
        with _gradients_removed(chunks if forward_only else []):
            return iteration(chunks, batches, scales, call)

    def clear(self) -> None:
        """Drop every graph and free the memory. Known call signatures are captured again at their next call."""
        if self._iteration is not None:
            self._iteration.clear()

    def table(self) -> list[dict[str, Any]]:
        """Return one row of plain values per graph."""
        return [] if self._iteration is None else self._iteration.table()

    def _create_iteration(self) -> CapturedIteration:
        """Create the iteration at the first call, when Megatron's generators are seeded."""
        tracked = tracked_generators() if self._pool.backend.name == "cuda" else []
        self._iteration = CapturedIteration(
            self._run,
            self._pool,
            self._stats,
            name=self.name,
            warmup_steps=self._warmup_steps,
            generators=(*self._generators, *tracked),
            state=AuxLosses(),
            threads=self._threads,
            checks_attributes=False,  # Megatron counts microbatches and gradients in attributes
        )
        return self._iteration

    def _read(self, data_iterator: Any, chunks: int, count: int) -> list[list[Any] | None]:
        """Return this iteration's batches on the pool's device, per chunk; None for a chunk without an iterator."""
        iterators = list(data_iterator) if isinstance(data_iterator, (list, tuple)) else [data_iterator]
        if len(iterators) != chunks:
            raise GraphConfigError(
                f"data_iterator has {len(iterators)} iterators for {chunks} model chunks: pass a "
                "list with one for each, None for a chunk that reads no data"
            )
        given = [iterator for iterator in iterators if iterator is not None]
        if len({id(iterator) for iterator in given}) < len(given):
            raise GraphConfigError(
                "several model chunks have the same data iterator, so which chunk gets which "
                "batch would depend on the schedule: give each its own, for example with itertools.tee"
            )
        read: list[list[Any]] = [[] for _ in iterators]
        for index, iterator in enumerate(iterators):
            while iterator is not None and len(read[index]) < count:
                try:
                    read[index].append(next(iterator))
                except StopIteration as ended:
                    raise MicrobatchesRanOut(
                        f"{self.name}: num_microbatches={count}, but the data iterator of chunk {index} ended after "
                        f"{len(read[index])}; read so far, by chunk: {list(map(len, read))} batches, available as this "
                        "error's `read`. Nothing ran; end the epoch here, or pass fewer microbatches",
                        read,
                    ) from ended
        device = self._pool.backend.device
        return [
            None if iterator is None else [_to_device(batch, device) for batch in batches]
            for iterator, batches in zip(iterators, read, strict=True)
        ]

    def _run(
        self, chunks: list[nn.Module], batches: list[list[Any] | None], scales: list[dict[str, Tensor]], call: _Call
    ) -> Any:
        """Call the function with these batches. This is what runs eagerly and what is captured."""
        iterators = [None if given is None else _Microbatches(given) for given in batches]
        with _loss_scales_replaced(_configs(chunks), scales), _grad_counts_restored_on_error(chunks):
            result = self._function(
                data_iterator=iterators if call.many_iterators else iterators[0],
                model=chunks if call.many_chunks else chunks[0],
                **call.keywords,
            )
        for index, iterator in enumerate(iterators):
            if iterator is not None and 0 < iterator.remaining < len(batches[index]):
                raise GraphError(
                    f"{self.name}: the step consumed {len(batches[index]) - iterator.remaining} of the "
                    f"{len(batches[index])} batches that were read for chunk {index}: make "
                    "forward_step_func take one batch per microbatch"
                )
        return result


@dataclass(frozen=True)
class _Call:
    """A call without its tensors and chunks. Two calls are equal if one graph serves both."""

    many_chunks: bool
    many_iterators: bool
    keywords: dict[str, Any] = field(compare=False)
    key: tuple  # from `keywords` and the models' configurations


class _Microbatches:
    """Iterator over prefetched batches. Raises GraphError past the end, where the original iterator would continue."""

    def __init__(self, batches: Sequence[Any]):
        self._batches = batches
        self.remaining = len(batches)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self.remaining:
            raise GraphError(
                f"the step asks for more batches than the {len(self._batches)} microbatches of this "
                "iteration: make forward_step_func take one batch per microbatch"
            )
        self.remaining -= 1
        return self._batches[-1 - self.remaining]


def check_settings(settings: Any) -> None:
    """Raise GraphConfigError for settings that can't be captured in a whole iteration.

    These are NaN checks on the host, routing replay, and Megatron's own graphs. `settings`: any object or mapping with
    Megatron's names.
    """
    given = settings if isinstance(settings, Mapping) else vars(settings)
    enabled = [name for name in NAN_CHECKS if given.get(name)]
    if enabled:
        raise GraphConfigError(
            f"{' and '.join(enabled)} reads losses or gradients on the host, which can't be captured in a whole "
            "iteration: turn it off, return torch.isfinite(loss) with the loss from the loss function and read that "
            "device-side check after the iteration, or use cuda_graph_impl='local'"
        )
    if given.get("moe_enable_routing_replay"):
        raise GraphConfigError(ROUTING_REPLAY_ERROR)
    impl, scope = given.get("cuda_graph_impl"), given.get("cuda_graph_scope") or ()
    is_full_iteration = "full_iteration" in [
        getattr(one, "name", one) for one in ([scope] if isinstance(scope, str) else scope)
    ]
    if impl not in (None, "none", "full_iteration") and not (impl == "local" and is_full_iteration):
        raise GraphConfigError(
            f"the model was built with cuda_graph_impl={impl!r}, and a graph of an iteration can't "
            "contain captures of its layers: build it with 'none' or 'full_iteration'"
        )


def _wrapped(chunks: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yield each chunk's wrappers (DDP, FSDP, Float16Module) and the wrapped model, outermost first."""
    for chunk in chunks:
        inner: Any = chunk
        while isinstance(inner, nn.Module):
            yield inner
            inner = getattr(inner, "module", None)


def _configs(chunks: Iterable[nn.Module]) -> list[Any]:
    """Return the configurations of the models and their wrappers, without duplicates."""
    found = [getattr(inner, name, None) for inner in _wrapped(chunks) for name in ("config", "ddp_config")]
    return list({id(one): one for one in found if hasattr(one, "__dict__")}.values())


def _settings_key(values: Mapping[str, Any], excluded: Sequence[str] = ()) -> tuple:
    return tuple([(name, key_of(value, contents=True)) for name, value in values.items() if name not in excluded])


def _to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on the device. Raises GraphConfigError for unsupported contents."""
    unsupported = sorted(
        {type(leaf).__name__ for leaf in tree_leaves(batch) if not isinstance(leaf, (Tensor, *KEY_TYPES))}
    )
    if unsupported:
        raise GraphConfigError(
            f"a batch holds {', '.join(unsupported)}, which can't be flattened into tensors and plain "
            "values: make it a dict, a tuple or a list of tensors, or register the type with "
            "torch.utils._pytree.register_dataclass"
        )
    return tree_map(lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf, batch)


@torch.no_grad()
def _loss_scales(config: Any, device: torch.device) -> dict[str, Tensor]:
    """Return the current loss scales as tensors. A graph can't read Megatron's own: it replaces a dynamic one."""
    found = {}
    for name in LOSS_SCALES:
        scale = getattr(config, name, None)
        if scale is not None:
            # Megatron calls grad_scale_func on the loss and treats it as a multiplication, too.
            value = scale(torch.ones(1, device=device)) if name == "grad_scale_func" else scale()
            found[name] = torch.as_tensor(value, device=device).detach()
    return found


@contextmanager
def _loss_scales_replaced(configs: Sequence[Any], scales: Sequence[Mapping[str, Tensor]]) -> Iterator[None]:
    """Make the configurations scale losses by these tensors within the block."""
    replacements = [
        (config, name, scale) for config, given in zip(configs, scales, strict=True) for name, scale in given.items()
    ]
    attributes = [(config, name, getattr(config, name)) for config, name, _ in replacements]
    try:
        for config, name, scale in replacements:
            setattr(config, name, _multiply_by(scale) if name == "grad_scale_func" else _constant(scale))
        yield
    finally:
        for config, name, function in attributes:
            setattr(config, name, function)


def _multiply_by(scale: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda loss: loss * scale


def _constant(scale: Tensor) -> Callable[[], Tensor]:
    return lambda: scale


@contextmanager
def _grad_counts_restored_on_error(chunks: Iterable[nn.Module]) -> Iterator[None]:
    """Restore the gradient counts of Megatron's DDP if the block raises, as a failed capture does. DDP reduces a bucket
    once all its gradients are counted; the eager retry would otherwise count them twice."""
    groups = [
        group
        for inner in _wrapped(chunks)
        for name in ("bucket_groups", "expert_parallel_bucket_groups")
        for group in getattr(inner, name, ())
    ]
    before = [
        {
            name: copy.copy(value) if isinstance(value, (dict, list, set)) else value
            for name, value in vars(group).items()
        }
        for group in groups
    ]
    try:
        yield
    except BaseException:
        for group, attributes in zip(groups, before, strict=True):
            vars(group).clear()
            vars(group).update(attributes)
        raise


@contextmanager
def _gradients_removed(chunks: Iterable[nn.Module]) -> Iterator[None]:
    """Remove the chunks' gradients within the block and restore the same tensors afterwards. Otherwise a graph would
    copy them at capture and start from them at every replay."""
    gradients = [
        (parameter, parameter.grad)
        for chunk in chunks
        for parameter in chunk.parameters()
        if parameter.grad is not None
    ]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in gradients:
            parameter.grad = grad
