"""Graphs in a training job: forward and backward of modules, or a whole iteration.

TrainingEngine selects the submodules to capture and reports which calls replayed graphs and which ran eager.
`graph_cache.training` captures and replays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from engine.config import EngineConfig
from engine.errors import ConfigError
from graph_cache.adapters import is_megatron
from graph_cache.backends import backend_for
from graph_cache.pool import GraphPool
from graph_cache.stats import CacheStats
from graph_cache.training.attached import Attachment, Part, is_data_parallel
from graph_cache.training.capture_context import CaptureContext
from graph_cache.training.iteration import CapturedIteration
from graph_cache.training.modules import TrainingGraphs

if TYPE_CHECKING:
    from graph_cache.adapters.megatron.iteration import FullIteration  # imports megatron
    from graph_cache.adapters.megatron.packed import PackedDocuments
    from graph_cache.adapters.transformer_engine.graphs import TransformerEngineGraphs  # for its impl only

WHOLE_LAYER = "layer"
Iteration = TypeVar("Iteration", bound="CapturedIteration | FullIteration")
INFERENCE_ONLY = ("generate", "update_weights", "share_weights", "weights_changed", "warm")


class TrainingEngine:
    """The object that `Engine(EngineConfig(mode="training"))` returns. Use it from one training loop, in one thread.

    `pool`: the pool of an inference engine in the same process, to share it; by default a new one.
    """

    def __init__(self, config: EngineConfig, pool: GraphPool | None = None):
        self.config = config
        self._graph_config = config.graph_config()
        self.stats = CacheStats()
        self._pool = pool
        self._modules: TrainingGraphs | TransformerEngineGraphs | None = None
        self._packed: PackedDocuments | None = None
        self._iterations: list[CapturedIteration | FullIteration] = []

    def __enter__(self) -> TrainingEngine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.detach()

    def __getattr__(self, name: str) -> Any:
        if name in INFERENCE_ONLY:
            raise ConfigError(
                f"this engine is in mode 'training', which has no {name}(); for inference create an engine with "
                "EngineConfig(model=…)"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def pool(self) -> GraphPool | None:
        """The pool for captures; None before the first use."""
        return self._pool

    def attach(
        self,
        model: nn.Module | Sequence[nn.Module],
        modules: Iterable[str] | None = None,
        generators: Sequence[torch.Generator] = (),
        *,
        microbatches: int | None = None,
        packed_documents: int | None = None,
    ) -> list[str]:
        """Capture parts of a model from now on and return their names. Training code needs no changes.

        Args:
            model: A module, or the list of chunks of a Megatron-Core model.
            modules: Paths of submodules ("layers.3.attn"; "" is the model itself). By default a Megatron-Core model is
                captured layer by layer, or by the parts of each layer that `cuda_graph_modules` of the configuration
                lists. Any other model's `cuda_graph_modules()` method maps these names (attn, mlp, …, and "layer" for
                whole layers) to paths; a model without the method is captured whole.
            generators: Generators to register with every graph, besides the device's default.
            microbatches: Microbatches per step. Required for Transformer Engine's captures with a schedule that has
                several in flight, as in a pipeline; otherwise they are counted.
            packed_documents: Pad packed sequences of a Megatron-Core model to this many documents, and their max_seqlen
                to the tokens of the batch, so that all batches have one call signature. Batches with more documents
                are not padded. None pads nothing.
        """
        if self._graph_config.training_captures not in ("native", "transformer_engine"):
            raise ConfigError(
                f"attach() captures modules, for cuda_graph_impl='local' or 'transformer_engine'; found "
                f"{self.config.cuda_graph_impl!r}. Use capture_iteration() for a whole iteration"
            )
        if self._modules is not None:
            raise ConfigError("a model is already attached; call detach() first")
        models = [model] if isinstance(model, nn.Module) else list(model)
        found = self._attachment(models, modules)
        packed = None if packed_documents is None else self._packed_documents(models, packed_documents)
        pool = self._pool_for(self._device_of(models))
        all_generators = (*generators, *found.generators, *(own for one in models for own in _generators_of(one)))
        context = CaptureContext(pool, self.stats, self._registered(pool, all_generators), found.state)
        if self._graph_config.training_captures == "transformer_engine":
            self._modules = self._transformer_engine_graphs(models, found, context, microbatches)
        else:
            graphs = TrainingGraphs(context, warmup_rounds=self._graph_config.warmup_steps)
            graphs.attach(found)
            self._modules = graphs
        if packed is not None:
            packed.begin()
        self._packed = packed
        return [part.name for part in found.parts]

    def _device_of(self, models: Sequence[nn.Module]) -> torch.device:
        """Return the device of the models' tensors; without any, that of the pool, or the default."""
        tensors = (tensor for one in models for tensor in (*one.parameters(), *one.buffers()))
        own = self._pool.backend.device if self._pool is not None else torch.get_default_device()
        return next((tensor.device for tensor in tensors), own)

    def _transformer_engine_graphs(
        self, models: Sequence[nn.Module], found: Attachment, context: CaptureContext, microbatches: int | None
    ) -> TransformerEngineGraphs:
        """Create graphs captured by Transformer Engine, for Megatron-Core models in the order of the pipeline stage."""
        from graph_cache.adapters.transformer_engine.graphs import TransformerEngineGraphs
        from graph_cache.adapters.transformer_engine.installed import installed_version

        parts, caches = found.parts, False
        order: Sequence[float] = [1, -1]
        holders: Mapping[str, nn.Module] = {}
        during_capture: Callable[[], AbstractContextManager[None]] = nullcontext
        if any(map(is_megatron, models)):
            from graph_cache.adapters.megatron.schedule import megatron_capture_flags, stage_plan

            settings = next(one.config for model in models for one in model.modules() if hasattr(one, "config"))
            plan = stage_plan(
                found.parts, models, settings, self._graph_config.modules, microbatches, installed_version()
            )
            parts, order, holders, caches = plan.parts, plan.order, plan.holders, plan.caches_weights
            during_capture = megatron_capture_flags

        @contextmanager
        def paused() -> Iterator[None]:
            with context.pool.quiet(), during_capture():
                yield

        return TransformerEngineGraphs(
            parts,
            order,
            context,
            holders=holders,
            fired=found.fired,
            warmup_rounds=self._graph_config.warmup_steps,
            caches_weights=caches,
            paused=paused,
        )

    def _packed_documents(self, models: Sequence[nn.Module], documents: int) -> PackedDocuments:
        """Create the padding of packed sequences for these models."""
        unsupported = [type(model).__name__ for model in models if not is_megatron(model)]
        if unsupported:
            raise ConfigError(
                f"packed_documents={documents!r} pads packed sequences of Megatron-Core models; found "
                f"{', '.join(unsupported)}: leave it out"
            )
        from graph_cache.adapters.megatron.packed import PackedDocuments  # imports megatron, which is installed

        return PackedDocuments(models, documents)

    def _attachment(self, models: Sequence[nn.Module], modules: Iterable[str] | None) -> Attachment:
        """Return the parts of these models to capture, and their generators, state and hooks."""
        if any(map(is_megatron, models)):
            from graph_cache.adapters.megatron.attachment import attachment  # imports megatron, which is installed

            named = None if modules is None else self._named_parts(models, modules)
            return attachment(models, self.config.megatron_graph_config(), named)
        return Attachment(self._named_parts(models, modules))

    def _named_parts(self, models: Sequence[nn.Module], modules: Iterable[str] | None) -> list[Part]:
        """Return the submodules of one model at the given paths, or at those from its `cuda_graph_modules()`."""
        if len(models) != 1:
            raise ConfigError(
                f"attach() takes one model, or the chunks of a Megatron-Core model without modules=…, "
                f"which names submodules of one model; found {len(models)} models: leave modules out, or "
                "attach each chunk with a separate engine"
            )
        (model,), parts = models, []
        for path in self._paths(model) if modules is None else modules:
            try:
                parts.append(Part(path or type(model).__name__, model.get_submodule(path)))
            except AttributeError as error:
                raise ConfigError(f"modules: the model has no submodule {path!r} ({error})") from error
        return parts

    def capture_iteration(
        self,
        step: Callable[..., Any],
        *,
        device: torch.device | str | None = None,
        name: str = "iteration",
        generators: Sequence[torch.Generator] = (),
    ) -> CapturedIteration:
        """Capture all of `step(*args, **kwargs)`, forward, backward and the rest, in one graph per call signature."""
        return self._make_iteration(CapturedIteration, step, "capture_iteration", device, name, generators)

    def capture_forward_backward(
        self,
        forward_backward_func: Callable[..., Any],
        *,
        settings: Iterable[Any] = (),
        device: torch.device | str | None = None,
        name: str = "iteration",
        generators: Sequence[torch.Generator] = (),
    ) -> FullIteration:
        """Capture the function of Megatron's `get_forward_backward_func()` in one graph per call signature.

        Call the result like that function. `settings` (for example Megatron's arguments) are checked now for features
        that an iteration graph can't support; the models' settings are checked at each call. Raises GraphConfigError.
        """
        from graph_cache.adapters.megatron.iteration import FullIteration  # imports megatron, which is installed

        make = functools.partial(FullIteration, settings=settings)
        return self._make_iteration(make, forward_backward_func, "capture_forward_backward", device, name, generators)

    def _make_iteration(
        self,
        make: Callable[..., Iteration],
        function: Callable[..., Any],
        method: str,
        device: torch.device | str | None,
        name: str,
        generators: Sequence[torch.Generator],
    ) -> Iteration:
        """Create an iteration with `make` and register it."""
        if self._graph_config.training_captures not in ("native", "iteration"):
            raise ConfigError(
                f"{method}() needs cuda_graph_impl='full_iteration' or 'local'; found {self.config.cuda_graph_impl!r}"
            )
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        pool = self._pool_for(torch.device(device))
        iteration = make(
            function,
            pool,
            self.stats,
            name=name,
            generators=self._registered(pool, generators),
            warmup_steps=self._graph_config.warmup_steps,
        )
        self._iterations.append(iteration)
        return iteration

    def graphs(self) -> list[dict[str, Any]]:
        """Return a row per module or iteration: graphs, bytes, replays, failed captures, the last failure, and eager
        calls by reason.
        """
        holders = [*([self._modules] if self._modules else []), *self._iterations]
        rows = [row for holder in holders for row in holder.table()]
        names = {
            labels[0]
            for counter in (self.stats.replays, self.stats.fallbacks, self.stats.failed_captures)
            for labels in counter
        } | {row["module"] for row in rows}
        return [
            {
                "module": name,
                "graphs": sum(row["module"] == name for row in rows),
                "bytes": sum(row["bytes"] for row in rows if row["module"] == name),
                "engine": next((row["engine"] for row in rows if row["module"] == name), ""),
                "replays": sum(count for labels, count in self.stats.replays.items() if labels[0] == name),
                "failed": sum(count for labels, count in self.stats.failed_captures.items() if labels[0] == name),
                "failure": self.stats.failures.get(name, ""),
                "eager": {labels[2]: count for labels, count in self.stats.fallbacks.items() if labels[0] == name},
            }
            for name in sorted(names)
        ]

    def clear(self) -> None:
        """Drop all graphs and free their memory. Training can continue; it warms up and captures again."""
        if self._modules is not None:
            self._modules.clear()
        for iteration in self._iterations:
            iteration.clear()

    def detach(self) -> None:
        """Restore the model and drop all graphs."""
        self.clear()
        if self._modules is not None:
            self._modules.detach()
            self._modules = None
        if self._packed is not None:
            self._packed.end()
            self._packed = None
        self._iterations = []

    def _paths(self, model: Any) -> list[str]:
        """Return the paths to capture by default. A data-parallel wrapper stays outside: it reduces in its forward."""
        if is_data_parallel(model) and isinstance(getattr(model, "module", None), nn.Module):
            return [f"module.{path}" if path else "module" for path in self._paths(model.module)]
        wanted = self._graph_config.modules
        mapping = model.cuda_graph_modules() if hasattr(model, "cuda_graph_modules") else None
        if mapping is None:
            if wanted:
                raise ConfigError(
                    f"cuda_graph_modules={','.join(wanted)}: {type(model).__name__} has no "
                    "cuda_graph_modules() to map these names to submodules; add one, or name "
                    "submodules in attach(model, modules=[…])"
                )
            return [""]
        missing = [name for name in wanted or (WHOLE_LAYER,) if name not in mapping]
        if missing:
            raise ConfigError(
                f"cuda_graph_modules={','.join(missing)}: {type(model).__name__} has {', '.join(sorted(mapping))}"
            )
        return [path for name in wanted or (WHOLE_LAYER,) for path in mapping[name]]

    def _pool_for(self, device: torch.device) -> GraphPool:
        if self._pool is None:
            self._pool = GraphPool(backend_for(device))
        elif self._pool.backend.device.type != device.type:
            raise ConfigError(f"this engine captures on {self._pool.backend.device}, found a model on {device}")
        return self._pool

    def _registered(self, pool: GraphPool, generators: Sequence[torch.Generator]) -> list[torch.Generator]:
        """Return all generators that captured code may use; CUDA registers its default generator with every graph."""
        own = [pool.backend.default_generator] if pool.backend.name == "cpu" else []
        return list({id(generator): generator for generator in (*own, *generators)}.values())


def _generators_of(model: nn.Module) -> list[torch.Generator]:
    """Return generators that are attributes of modules."""
    found = [value for module in model.modules() for value in vars(module).values()]
    return [value for value in found if isinstance(value, torch.Generator)]
