"""The engine inside a training job: graphs for a module's forward and backward, or for a whole iteration.

Owns which submodules are captured and the report of what ran from graphs and what did not. The graphs themselves are
`graph_cache.training`'s. Knows no optimizer, no data and no requests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from engine.config import EngineConfig
from engine.errors import ConfigError
from graph_cache.adapters import is_megatron
from graph_cache.backends import backend_for
from graph_cache.pool import GraphPool
from graph_cache.stats import CacheStats
from graph_cache.training.attached import Attachment, Part
from graph_cache.training.capture_context import CaptureContext
from graph_cache.training.iteration import CapturedIteration
from graph_cache.training.modules import TrainingGraphs

if TYPE_CHECKING:
    from graph_cache.adapters.megatron.iteration import FullIteration  # it imports megatron
    from graph_cache.adapters.megatron.packed import PackedDocuments
    from graph_cache.adapters.transformer_engine.graphs import TransformerEngineGraphs  # for those who ask for it

WHOLE_LAYER = "layer"
Iteration = TypeVar("Iteration")
INFERENCE_ONLY = ("generate", "update_weights", "share_weights", "weights_changed", "warm")


class TrainingEngine:
    """What `Engine(EngineConfig(mode="training"))` makes. One training loop uses it, in one thread.

    `pool`: that of an inference engine in the same process, so that both share one; default: one of its own.
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
                f"this engine is in mode 'training', where there is no {name}(); make one with "
                "EngineConfig(model=…) for inference"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def pool(self) -> GraphPool | None:
        """The pool that it captures into; None before the first use."""
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
        """Capture parts of a model from here on; returns their names. Plain training code goes on as before.

        `modules` names submodules by their path ("layers.3.attn"; "" is the model itself). Without it a model of
        Megatron-Core's, or a list of its chunks, is captured layer by layer, or the parts of each layer that
        `cuda_graph_modules` of the configuration lists. Another model's own `cuda_graph_modules()` is asked, a mapping
        from these names (attn, mlp, …, and "layer" for whole layers) to paths; a model without one is captured whole.
        `generators` beside the device's own are registered with every graph. `microbatches` of a step: what Transformer
        Engine's captures need to know of a schedule in which several are outstanding at a time, as in a pipeline; ours
        see it. There it must be given. `packed_documents`: packed sequences of a model of Megatron-Core's are padded to
        this many documents, and their max_seqlen to the batch's tokens, so that all batches are one kind of call; those
        of more documents stay as they are. None leaves all of them alone.
        """
        if self._graph_config.cuda_graph_impl not in ("local", "transformer_engine"):
            raise ConfigError(
                f"attach() captures modules, for cuda_graph_impl='local' or 'transformer_engine'; found "
                f"{self._graph_config.cuda_graph_impl!r}. Use capture_iteration() for a whole iteration"
            )
        if self._modules is not None:
            raise ConfigError("a model is attached already; detach() it first")
        models = [model] if isinstance(model, nn.Module) else list(model)
        found = self._attachment(models, modules)
        packed = None if packed_documents is None else self._packed_documents(models, packed_documents)
        pool = self._pool_for(next(parameter for one in models for parameter in one.parameters()).device)
        drawn = (*generators, *found.generators, *(own for one in models for own in _generators_of(one)))
        job = CaptureContext(pool, self.stats, self._registered(pool, drawn), found.state)
        if self._graph_config.cuda_graph_impl == "transformer_engine":
            self._modules = self._by_transformer_engine(models, found, job, microbatches)
        else:
            graphs = TrainingGraphs(job, warmup_rounds=self._graph_config.cuda_graph_warmup_steps)
            graphs.attach(found)
            self._modules = graphs
        if packed is not None:
            packed.begin()
        self._packed = packed
        return [part.name for part in found.parts]

    def _by_transformer_engine(
        self, models: Sequence[nn.Module], found: Attachment, job: CaptureContext, microbatches: int | None
    ) -> TransformerEngineGraphs:
        """Graphs that Transformer Engine captures; of a model of Megatron-Core in the order of this pipeline stage."""
        from graph_cache.adapters.transformer_engine.graphs import TransformerEngineGraphs
        from graph_cache.adapters.transformer_engine.installed import installed_version

        parts, order, holders, caches, told = found.parts, [1, -1], {}, False, nullcontext
        if any(map(is_megatron, models)):
            from graph_cache.adapters.megatron.schedule import megatron_capture_flags, stage_plan

            settings = next(one.config for model in models for one in model.modules() if hasattr(one, "config"))
            plan = stage_plan(
                found.parts, models, settings, self._graph_config.cuda_graph_modules, microbatches, installed_version()
            )
            parts, order, holders, caches = plan.parts, plan.order, plan.holders, plan.caches_weights
            told = megatron_capture_flags

        @contextmanager
        def paused() -> Iterator[None]:
            with job.pool.quiet(), told():
                yield

        return TransformerEngineGraphs(
            parts,
            order,
            job,
            holders=holders,
            fired=found.fired,
            warmup_rounds=self._graph_config.cuda_graph_warmup_steps,
            caches_weights=caches,
            paused=paused,
        )

    def _packed_documents(self, models: Sequence[nn.Module], documents: int) -> PackedDocuments:
        """What pads these models' packed sequences."""
        others = [type(model).__name__ for model in models if not is_megatron(model)]
        if others:
            raise ConfigError(
                f"packed_documents={documents!r} pads packed sequences of Megatron-Core's models; found "
                f"{', '.join(others)}: leave it out"
            )
        from graph_cache.adapters.megatron.packed import PackedDocuments  # megatron is there: the models are its own

        return PackedDocuments(models, documents)

    def _attachment(self, models: Sequence[nn.Module], modules: Iterable[str] | None) -> Attachment:
        """What of these models is captured, and what that takes."""
        if any(map(is_megatron, models)):
            from graph_cache.adapters.megatron.attachment import attachment  # megatron is there: the model is its own

            named = None if modules is None else self._named_parts(models, modules)
            return attachment(models, self._graph_config, named)
        return Attachment(self._named_parts(models, modules))

    def _named_parts(self, models: Sequence[nn.Module], modules: Iterable[str] | None) -> list[Part]:
        """The submodules of one model by these paths, or by those that the model itself names."""
        if len(models) != 1:
            raise ConfigError(
                f"attach() takes one model, or the chunks of one of Megatron-Core's without modules=…, "
                f"which names submodules of one model; found {len(models)} models: leave modules out, or "
                "attach one chunk with an engine of its own"
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
        """`step(*args, **kwargs)` from one graph per kind of call: forward, backward and what else it does."""
        return self._whole(CapturedIteration, step, "capture_iteration", device, name, generators)

    def capture_forward_backward(
        self,
        forward_backward_func: Callable[..., Any],
        *,
        settings: Iterable[Any] = (),
        device: torch.device | str | None = None,
        name: str = "iteration",
        generators: Sequence[torch.Generator] = (),
    ) -> FullIteration:
        """What Megatron's `get_forward_backward_func()` returns, from one graph per kind of call; called as it is.

        `settings` (Megatron's arguments, say) are checked now for what a graph of an iteration can't hold; those of the
        models at each call. Raises GraphConfigError.
        """
        from graph_cache.adapters.megatron.iteration import FullIteration  # megatron is there: the function is its own

        make = functools.partial(FullIteration, settings=settings)
        return self._whole(make, forward_backward_func, "capture_forward_backward", device, name, generators)

    def _whole(
        self,
        make: Callable[..., Iteration],
        function: Callable[..., Any],
        asked: str,
        device: torch.device | str | None,
        name: str,
        generators: Sequence[torch.Generator],
    ) -> Iteration:
        """An iteration of this engine's, by `make`."""
        if self._graph_config.cuda_graph_impl not in ("local", "full_iteration"):
            raise ConfigError(
                f"{asked}() needs cuda_graph_impl='full_iteration' or 'local'; found "
                f"{self._graph_config.cuda_graph_impl!r}"
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
            warmup_steps=self._graph_config.cuda_graph_warmup_steps,
        )
        self._iterations.append(iteration)
        return iteration

    def graphs(self) -> list[dict[str, Any]]:
        """For each module or iteration: graphs held, replays, failed captures, why the last one failed, and eager calls
        by reason.
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
        """Drop all graphs and give their memory back; training goes on, and warms up and captures anew."""
        if self._modules is not None:
            self._modules.clear()
        for iteration in self._iterations:
            iteration.clear()

    def detach(self) -> None:
        """Leave the model as it was, and drop all graphs."""
        self.clear()
        if self._modules is not None:
            self._modules.detach()
            self._modules = None
        if self._packed is not None:
            self._packed.end()
            self._packed = None
        self._iterations = []

    def _paths(self, model: nn.Module) -> list[str]:
        wanted = self._graph_config.cuda_graph_modules
        mapping = model.cuda_graph_modules() if hasattr(model, "cuda_graph_modules") else None
        if mapping is None:
            if wanted:
                raise ConfigError(
                    f"cuda_graph_modules={','.join(wanted)}: {type(model).__name__} has no "
                    "cuda_graph_modules() that says which submodules these are; add one, or name "
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
        """All generators that captured draws may use; CUDA registers its own default one with every graph."""
        own = [pool.backend.default_generator] if pool.backend.name == "cpu" else []
        return list({id(generator): generator for generator in (*own, *generators)}.values())


def _generators_of(model: nn.Module) -> list[torch.Generator]:
    """Generators that modules keep as attributes."""
    found = [value for module in model.modules() for value in vars(module).values()]
    return [value for value in found if isinstance(value, torch.Generator)]
