"""Graphs in a training job: forward and backward of modules, or a whole iteration.

TrainingEngine selects the submodules to capture and reports which calls replayed graphs and which ran eager.
`graph_cache.training` captures and replays.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import torch
from torch import nn

from engine.errors import ConfigError
from engine.training.recorded_outputs import RecordedOutputs, Recording, is_recording_hook, records_outputs
from engine.training.vision.towers import is_transformers
from engine.training_config import TrainingConfig
from graph_cache.adapters import is_megatron
from graph_cache.adapters.megatron.config import MegatronGraphConfig
from graph_cache.adapters.megatron.vision import VisionSettings, token_budgets
from graph_cache.backends import backend_for
from graph_cache.core.pool import GraphPool
from graph_cache.core.stats import CacheStats
from graph_cache.guards.library_state import is_of_transformer_engine
from graph_cache.training.ambient_state import AmbientState, combined
from graph_cache.training.attached import FORWARD, Attachment, Part, is_data_parallel
from graph_cache.training.capture_context import CaptureContext, Running
from graph_cache.training.iteration import CapturedIteration
from graph_cache.training.modules import TrainingGraphs
from graph_cache.utils.cpu_threads import ThreadTuner, threads_are_unset
from graph_cache.utils.digest import Digest
from graph_cache.utils.validation import names_arguments

if TYPE_CHECKING:
    from graph_cache.adapters.megatron.dropless import DroplessExperts  # imports megatron
    from graph_cache.adapters.megatron.iteration import FullIteration
    from graph_cache.adapters.megatron.packed import PackedDocuments
    from graph_cache.adapters.transformer_engine.graphs import TransformerEngineGraphs  # for its impl only

WHOLE_LAYER = "layer"
Iteration = TypeVar("Iteration", bound="CapturedIteration | FullIteration")
INFERENCE_ONLY = ("generate", "update_weights", "share_weights", "weights_changed", "warm")


class CallAdapter(Protocol):
    """Changes how a model's calls compute between `begin` and `end`, eager ones too, so that graphs can serve them."""

    def begin(self) -> None: ...

    def end(self) -> None:
        """Restore the model."""


@dataclass(frozen=True, eq=False)
class Network:
    """What one call of `attach` captures. `graphs`: of the language model, then of the encoder."""

    models: Sequence[nn.Module]
    parts: Sequence[Part]
    graphs: list[TrainingGraphs | TransformerEngineGraphs]
    adapters: Sequence[CallAdapter]


class TrainingEngine:
    """The object that `Engine(EngineConfig(mode="training"))` returns. Use it from one training loop, in one thread.

    `pool`: the pool of an inference engine in the same process, to share it; by default a new one.
    """

    def __init__(self, config: TrainingConfig, pool: GraphPool | None = None):
        self.config = config
        self._graph_config = config.graph_config()
        self.stats = CacheStats()
        self._pool = pool
        self._networks: list[Network] = []
        self._threads: ThreadTuner | None = None  # of steps on a CPU; None if their number stays
        self._running = Running()
        self._adapters: list[CallAdapter] = []  # of whole iterations
        self._iterations: list[CapturedIteration | FullIteration] = []
        self._replaced_chunks: set[nn.Module] = set()  # of whole iterations

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

    @names_arguments
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

        Call it once for each network, such as an actor and a critic. Names that another network has get a prefix.

        Args:
            model: A module, or the list of chunks of a Megatron-Core model.
            modules: Paths of submodules ("layers.3.attn"; "" is the model itself). By default a Megatron-Core model is
                captured layer by layer, or by the parts of each layer that `cuda_graph_modules` of the configuration
                lists. Any other model's `cuda_graph_modules()` method maps these names (attn, mlp, …, and "layer" for
                whole layers) to paths. Without the method, a model of transformers is captured layer by layer, and any
                other model whole.
            generators: Generators to register with every graph, besides the device's default.
            microbatches: Microbatches per step. Required for Transformer Engine's captures with a schedule that has
                several in flight, as in a pipeline; otherwise they are counted.
            packed_documents: Pad packed sequences of a Megatron-Core model to this many documents, and their max_seqlen
                to the tokens of the batch, so that all batches have one call signature. Batches with more documents
                are not padded. None: `cuda_graph_max_packed_seqs` of the configuration, or no padding.
        """
        vision = self.config.vision_settings()
        captures_model = self._graph_config.training_captures in ("native", "transformer_engine")
        captures_encoder = vision.graphs.cuda_graph_impl != "none"
        if not captures_model and not captures_encoder:
            raise ConfigError(
                f"attach() captures modules, for cuda_graph_impl='local' or 'transformer_engine'; found "
                f"{self.config.cuda_graph_impl!r}. Use capture_iteration() for a whole iteration"
            )
        models = [model] if isinstance(model, nn.Module) else list(model)
        for one in models:
            if not isinstance(one, nn.Module):
                raise ConfigError(f"attach() takes a module, or a list of modules; found {one!r}")
        sections: list[tuple[Attachment, MegatronGraphConfig]] = []
        if captures_model:
            sections.append((self._attachment(models, modules), self.config.megatron_graph_config()))
        adapters: list[CallAdapter] = []
        if captures_encoder:
            sections.append((self._encoder_attachment(models, vision), vision.graphs))
            adapters += self._padded_images(models, vision)
        packed = self._packed_documents(models, packed_documents)
        if packed is not None:
            adapters.append(packed)
        if self.config.cuda_graph_moe_dropless:
            adapters.append(self._dropless_experts(models))
        sections = self._named_apart(models, sections)
        pool = self._pool_for(self._device_of(models))
        network = Network(models, [part for found, _ in sections for part in found.parts], [], adapters)
        own_generators = [*generators, *(own for one in models for own in _generators_of(one))]
        try:
            for found, settings in sections:
                registered = self._registered(pool, [*own_generators, *found.generators])
                context = CaptureContext(
                    pool, self.stats, registered, found.state, self._running, self._threads,
                    checks=self.config.graph_shadow_check_share > 0,
                )  # fmt: skip
                network.graphs.append(self._graphs(models, found, settings, context, microbatches))
        except BaseException:
            for graphs in network.graphs:
                graphs.detach()
            raise
        for adapter in adapters:
            adapter.begin()
        self._networks.append(network)
        return [part.name for part in network.parts]

    def _named_apart(
        self, models: Sequence[nn.Module], sections: Sequence[tuple[Attachment, MegatronGraphConfig]]
    ) -> list[tuple[Attachment, MegatronGraphConfig]]:
        """Return the sections, with names that no other network has. Raises ConfigError for parts of another."""
        attached = [part for network in self._networks for part in network.parts]
        inside = {id(module): part.name for part in attached for module in part.module.modules()}
        whole = {(id(part.module), part.method) for part in attached}
        methods = {id(part.module) for part in attached if part.method != FORWARD}
        names, renamed = {part.name for part in attached}, []
        for found, settings in sections:
            parts = []
            for part in found.parts:
                if (id(part.module), part.method) in whole:
                    raise ConfigError(f"{part.name} is already attached: call detach() first, or detach(model)")
                shared = [inside[id(module)] for module in part.module.modules() if id(module) in inside]
                if shared and id(part.module) not in methods:
                    raise ConfigError(
                        f"{part.name} has modules in common with {shared[0]}, which is already attached: attach the "
                        "smallest parts that do not overlap, or call detach(model) first"
                    )
                parts.append(part._replace(name=_unused_name(part.name, models, names)))
            names |= {part.name for part in parts}
            renamed.append((replace(found, parts=parts), settings))
        return renamed

    def _graphs(
        self,
        models: Sequence[nn.Module],
        found: Attachment,
        settings: MegatronGraphConfig,
        context: CaptureContext,
        microbatches: int | None,
    ) -> TrainingGraphs | TransformerEngineGraphs:
        """Create the graphs of one section, the language model or the encoder, and intercept its calls."""
        if settings.cuda_graph_impl == "transformer_engine":
            return self._transformer_engine_graphs(models, found, settings, context, microbatches)
        graphs = TrainingGraphs(context, warmup_rounds=settings.cuda_graph_warmup_steps)
        graphs.attach(found)
        return graphs

    def _encoder_attachment(self, models: Sequence[nn.Module], vision: VisionSettings) -> Attachment:
        """Return the layers of the vision encoders to capture; none on a pipeline stage without an encoder."""
        if any(map(is_megatron, models)):
            from graph_cache.adapters.megatron.attachment import attachment  # imports megatron, which is installed

            return attachment(models, vision.graphs, encoder=True)
        if vision.graphs.cuda_graph_impl == "transformer_engine":
            raise ConfigError(
                "vision_cuda_graph_impl='transformer_engine' captures Megatron-Core's encoders: use 'local' here"
            )
        from engine.training.vision.towers import layer_parts, towers_of

        parts = [
            part
            for model in models
            for path, tower in towers_of(model)
            for part in layer_parts(tower, vision.graphs.cuda_graph_modules, path=path)
        ]
        if not parts:
            raise ConfigError(
                f"vision_cuda_graph_impl={vision.graphs.cuda_graph_impl!r}: {type(models[0]).__name__} has no vision "
                "tower of transformers: leave it out, or name its layers in attach(model, modules=[…])"
            )
        return _attachment_of(models, parts)

    def _padded_images(self, models: Sequence[nn.Module], vision: VisionSettings) -> list[CallAdapter]:
        """Create the padding of microbatches to token budgets, for the encoders that can be padded."""
        if any(map(is_megatron, models)):
            from graph_cache.adapters.megatron.vision_padding import padded_encoders  # imports megatron

            return list(padded_encoders(models, vision, self._count_eager))
        from engine.training.vision.image_batches import PaddedImageBatches, takes_images_of_one_size
        from engine.training.vision.padding import PaddedImages
        from engine.training.vision.towers import is_packed_tower, towers_of

        found: list[CallAdapter] = []
        for path, tower in (one for model in models for one in towers_of(model)):
            unpadded = functools.partial(self._count_eager, path or type(tower).__name__)
            if is_packed_tower(tower):
                budgets = token_budgets(
                    vision,
                    num_position_embeddings=getattr(tower.config, "num_position_embeddings", None),
                    spatial_merge_size=cast(int, tower.spatial_merge_size),
                )
                found.append(PaddedImages(tower, budgets, vision.max_images, unpadded))
            elif vision.is_explicit and takes_images_of_one_size(tower):
                budgets = token_budgets(vision, num_position_embeddings=None, spatial_merge_size=None)
                found.append(PaddedImageBatches(tower, budgets, unpadded))
        return found

    def _count_eager(self, name: str, reason: str) -> None:
        """Count a microbatch that was not padded, so that its layers run eager."""
        self.stats.fallbacks[name, "forward", reason] += 1

    def _device_of(self, models: Sequence[nn.Module]) -> torch.device:
        """Return the device of the models' tensors; without any, that of the pool, or the default."""
        # Not `one.buffers()`: Megatron's DistributedDataParallel has a list of that name.
        tensors = (tensor for one in models for _, tensor in (*one.named_parameters(), *one.named_buffers()))
        own = self._pool.backend.device if self._pool is not None else torch.get_default_device()
        return next((tensor.device for tensor in tensors), own)

    def _transformer_engine_graphs(
        self,
        models: Sequence[nn.Module],
        found: Attachment,
        graph_settings: MegatronGraphConfig,
        context: CaptureContext,
        microbatches: int | None,
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
                found.parts, models, settings, graph_settings.cuda_graph_modules, microbatches, installed_version()
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
            warmup_rounds=graph_settings.cuda_graph_warmup_steps,
            caches_weights=caches,
            paused=paused,
        )

    def _packed_documents(self, models: Sequence[nn.Module], documents: int | None) -> PackedDocuments | None:
        """Create the padding of packed sequences for these models; None without any."""
        option, configured = "packed_documents", self.config.packed_documents
        if documents is None:
            option, documents = "cuda_graph_max_packed_seqs", configured
        elif configured is not None and documents != configured:
            raise ConfigError(
                f"packed_documents={documents!r} contradicts cuda_graph_max_packed_seqs={configured} of the "
                "configuration: leave one out"
            )
        if documents is None:
            return None
        unsupported = [type(model).__name__ for model in models if not is_megatron(model)]
        if unsupported:
            raise ConfigError(
                f"{option}={documents!r} pads packed sequences of Megatron-Core models; found "
                f"{', '.join(unsupported)}: leave it out"
            )
        from graph_cache.adapters.megatron.packed import PackedDocuments  # imports megatron, which is installed

        return PackedDocuments(models, documents, option, self._count_eager)

    def _dropless_experts(self, models: Sequence[nn.Module]) -> DroplessExperts:
        """Create the replacement of the MoE layers' dispatch, with counts on the device."""
        if not all(map(is_megatron, models)):
            raise ConfigError(
                "cuda_graph_moe_dropless=True is for Megatron-Core models: leave it out; models of transformers choose "
                "with set_experts_implementation('grouped_mm')"
            )
        from graph_cache.adapters.megatron.dropless import DroplessExperts  # imports megatron, which is installed

        return DroplessExperts(models)

    def _attachment(self, models: Sequence[nn.Module], modules: Iterable[str] | None) -> Attachment:
        """Return the parts of these models to capture, and their generators, state and hooks."""
        if any(map(is_megatron, models)):
            from graph_cache.adapters.megatron.attachment import attachment  # imports megatron, which is installed

            named = None if modules is None else self._named_parts(models, modules)
            return attachment(models, self.config.megatron_graph_config(), named)
        return _attachment_of(models, self._named_parts(models, modules))

    def _named_parts(self, models: Sequence[nn.Module], modules: Iterable[str] | None) -> list[Part]:
        """Return the submodules of one model at the given paths, or at those from its `cuda_graph_modules()`."""
        if len(models) != 1:
            raise ConfigError(
                f"attach() takes one model, or the chunks of a Megatron-Core model without modules=…, "
                f"which names submodules of one model; found {len(models)} models: leave modules out, or "
                "attach each chunk with a separate engine"
            )
        (model,), parts = models, []
        if modules is None and (layers := self._layers_of_transformers(model)) is not None:
            return layers
        for path in self._paths(model) if modules is None else modules:
            try:
                parts.append(Part(path or type(model).__name__, model.get_submodule(path)))
            except AttributeError as error:
                raise ConfigError(f"modules: the model has no submodule {path!r} ({error})") from error
        return parts

    def _layers_of_transformers(self, model: nn.Module) -> list[Part] | None:
        """Return the layers of a model of transformers, or the parts of them that `cuda_graph_modules` names.

        The model may be inside other modules, such as wrappers of PEFT or DistributedDataParallel: their forwards stay
        eager, since transformers' models read masks on the host. Layers of vision towers are left out; a separate
        section captures them. None: no model of transformers, one with `cuda_graph_modules()`, or a tower alone.
        """
        wrapped = is_data_parallel(model) and isinstance(getattr(model, "module", None), nn.Module)
        if hasattr(model.module if wrapped else model, "cuda_graph_modules"):
            return None
        from engine.training.vision.towers import layer_parts, towers_of

        towers = [tower for _, tower in towers_of(model)]
        inner = [module for module in model.modules() if is_transformers(module)]
        is_tower_alone = towers == inner[:1] and self.config.vision_cuda_graph_impl == "none"
        if not inner or is_tower_alone:
            return None
        found = layer_parts(model, self._graph_config.modules, without=towers)
        return found if found or towers else None

    @names_arguments
    def capture_iteration(
        self,
        step: Callable[..., Any],
        *,
        device: torch.device | str | None = None,
        name: str = "iteration",
        generators: Sequence[torch.Generator] = (),
    ) -> CapturedIteration:
        """Capture all of `step(*args, **kwargs)`, forward, backward and the rest, in one graph per call signature."""
        make = functools.partial(CapturedIteration, checks=self.config.graph_shadow_check_share > 0)
        return self._make_iteration(make, step, "capture_iteration", device, name, generators)

    @names_arguments
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

        prepare = self._replace_experts if self.config.cuda_graph_moe_dropless else None
        make = functools.partial(FullIteration, settings=settings, prepare=prepare)
        return self._make_iteration(make, forward_backward_func, "capture_forward_backward", device, name, generators)

    def _replace_experts(self, chunks: Sequence[nn.Module]) -> None:
        """Replace the dispatch of dropless experts in chunks that are seen for the first time, until detach."""
        if new := [chunk for chunk in chunks if chunk not in self._replaced_chunks]:
            experts = self._dropless_experts(new)
            experts.begin()
            self._adapters.append(experts)
            self._replaced_chunks.update(new)

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
            threads=self._threads,
        )
        self._iterations.append(iteration)
        return iteration

    def graphs(self) -> list[dict[str, Any]]:
        """Return a row per module or iteration: graphs, bytes, replays, failed captures, the last failure, eager calls
        by reason, and the digest of the graphs.
        """
        holders = [*self._attached_graphs(), *self._iterations]
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
            | Digest.combined(Digest.of_row(row) for row in rows if row["module"] == name).columns()
            for name in sorted(names)
        ]

    def clear(self) -> None:
        """Drop all graphs and free their memory. Training can continue; it warms up and captures again."""
        for graphs in self._attached_graphs():
            graphs.clear()
        for iteration in self._iterations:
            iteration.clear()

    def detach(self, model: nn.Module | Sequence[nn.Module] | None = None) -> None:
        """Restore all models and drop all graphs; with a `model` that was attached, only that one and its graphs."""
        networks = self._networks if model is None else [self._network_of(model)]
        for network in networks:
            for graphs in network.graphs:
                graphs.detach()
            for adapter in network.adapters:
                adapter.end()
        self._networks = [network for network in self._networks if network not in networks]
        if model is not None:
            return
        self.clear()
        if self._threads is not None:
            self._threads.end()
        for adapter in self._adapters:
            adapter.end()
        self._adapters, self._iterations = [], []
        self._replaced_chunks.clear()

    def _network_of(self, model: nn.Module | Sequence[nn.Module]) -> Network:
        models = [model] if isinstance(model, nn.Module) else list(model)
        for network in self._networks:
            if len(network.models) == len(models) and all(map(operator.is_, network.models, models)):
                return network
        raise ConfigError("detach(model): this model is not attached; pass what attach() was called with")

    def _attached_graphs(self) -> list[TrainingGraphs | TransformerEngineGraphs]:
        return [graphs for network in self._networks for graphs in network.graphs]

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
        if device.type == "cpu":
            self._choose_threads()
        return self._pool

    def _choose_threads(self) -> None:
        """Set the number of threads that the configuration names, or tune it if nothing sets it."""
        if self.config.num_threads is not None:
            torch.set_num_threads(self.config.num_threads)
        elif self._threads is None and threads_are_unset():
            self._threads = ThreadTuner()

    def _registered(self, pool: GraphPool, generators: Sequence[torch.Generator]) -> list[torch.Generator]:
        """Return all generators that captured code may use; CUDA registers its default generator with every graph."""
        own = [pool.backend.default_generator] if pool.backend.name == "cpu" else []
        return list({id(generator): generator for generator in (*own, *generators)}.values())


def _unused_name(name: str, models: Sequence[nn.Module], names: Container[str]) -> str:
    """Return the name of a part, with the class of its model and a number if another network has such a part."""
    kind = type(models[0]).__name__
    path = "" if name == kind else f".{name}"
    numbered = (f"{kind}[{number}]{path}" for number in itertools.count(2))
    candidates = itertools.chain([name, f"{kind}{path}"], numbered)
    return next(candidate for candidate in candidates if candidate not in names)


def _attachment_of(models: Sequence[nn.Module], parts: Sequence[Part]) -> Attachment:
    """Return the parts, with the outputs that transformers records inside them if a model is of transformers, and with
    the precision of modules of Transformer Engine.
    """
    modules = [one for model in models for one in model.modules()]
    kinds: list[AmbientState] = []
    if any(map(is_of_transformer_engine, modules)):
        from graph_cache.adapters.transformer_engine.ambient_state import Fp8AmbientState  # imports it

        kinds.append(Fp8AmbientState())
    if not records_outputs() or not any(map(is_transformers, modules)):
        return Attachment(parts, ambient=combined(kinds))
    carried = [part._replace(carry=RecordedOutputs()) for part in parts]
    return Attachment(carried, fired=is_recording_hook, ambient=combined([Recording(), *kinds]))


def _generators_of(model: nn.Module) -> list[torch.Generator]:
    """Return generators that are attributes of modules."""
    found = [value for module in model.modules() for value in vars(module).values()]
    return [value for value in found if isinstance(value, torch.Generator)]
