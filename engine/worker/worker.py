"""The worker: one device with its part of the model, and every operation that all ranks execute.

A worker knows steps, weights and graphs. It knows no requests and no scheduling: those are in engine/core, above the
executor, in one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from engine.config import ResolvedConfig
from engine.distributed.tensor_parallel import SINGLE_RANK, TensorParallel
from engine.errors import ConfigError, ModelError, RequestError, WeightUpdateError
from engine.layers.weight_slot import Slot
from engine.loader.checksums import fingerprint, sha256_of
from engine.loader.shared_weights import share_weights
from engine.loader.weights import check_update, iterate_safetensors, iterate_shards, load_dummy, write_update
from engine.models.interface import Model
from engine.protocol.kv_moves import Moved, Moves
from engine.protocol.messages import ModelInfo
from engine.scheduling.batch import Batch
from engine.worker.async_output import AsyncStepOutput
from engine.worker.block_files import BlockFiles
from engine.worker.capabilities import Capabilities
from engine.worker.kernel_compilation import compile_kernels
from engine.worker.kv_tiers import KVTiers, block_bytes
from engine.worker.model_runner import ModelRunner
from engine.worker.releasable import ReleasableMemory
from engine.worker.step_input import MaskInput, StepInput
from graph_cache.backends.base import Region
from graph_cache.core.keys import GraphKey
from graph_cache.core.manifest import Manifest
from graph_cache.utils.cpu_threads import ThreadTuner, threads_are_unset
from graph_cache.utils.validation import did_you_mean

FIRST_WEIGHT_VERSION = "initial"


class Worker:
    """One rank of the engine. Not thread-safe, except `abandon`.

    With several ranks, all of them must make the same calls in the same order, as steps and captures hold collectives.

    - config: all sizes resolved; the number of pages is the same on all ranks.
    - name, weight_format: for reports.
    - weights: the region that holds the model's weights, if they may be released.
    - on_close: called last by `close`.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        model: Model,
        eos_token_ids: Sequence[int],
        *,
        name: str,
        weight_format: str,
        manifest: Manifest | None = None,
        parallel: TensorParallel = SINGLE_RANK,
        weights: Region | None = None,
        on_close: Callable[[], None] | None = None,
    ):
        self.config, self._parallel, self._on_close = config, parallel, on_close
        self.runner = ModelRunner(config, model, eos_token_ids, manifest)
        # If one rank ran a step eager because its capture failed, the others' graphs would wait for its collectives.
        self.runner.cache.must_capture = parallel.size > 1
        self.runner.cache.shadows.agree = parallel.all_reduce
        compile_kernels(self.runner, parallel.rank, parallel.size)
        self.info = ModelInfo(
            name=name,
            architecture=model.config.architecture,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            vocab_size=model.config.vocab_size,
            eos_token_ids=tuple(eos_token_ids),
            device=config.device,
            dtype=config.dtype,
            weight_format=weight_format,
            weight_version=FIRST_WEIGHT_VERSION,
            logprobs_mode=config.logprobs_mode,
            graph_buckets=self.runner.site.buckets.sizes,
            page_size=config.page_size,
            num_pages=config.num_pages,
            max_num_batched_tokens=config.max_num_batched_tokens,
            enable_prefix_caching=config.enable_prefix_caching,
            async_scheduling=config.async_scheduling,
            hidden_state_size=model.config.hidden_size if config.enable_return_hidden_states else 0,
            routed_experts=None if self.runner.routed_experts is None else self.runner.routed_experts.shape,
            num_experts=model.config.num_experts,
            hidden_size=model.config.hidden_size,
            num_labels=model.config.num_labels,
            generates_text=model.config.has_lm_head,
            num_parameters=_num_parameters(model),
        )
        # Ranks whose results differ in the last bits could sample different tokens.
        is_tuned = self.runner.device.type == "cpu" and config.num_threads is None and parallel.size == 1
        self.threads = ThreadTuner() if is_tuned and threads_are_unset() else None
        self.tiers = self._open_tiers()
        self.capabilities = Capabilities(
            config=config,
            info=self.info,
            windows=tuple(group.window for group in self.runner.kv.groups),
            max_prefill_chunks=self.runner.prefill_buckets.max_chunks,
            prefill_buckets=self.runner.builder.prefill_sizes,
            max_mixed_decodes=self.runner.builder.max_mixed_decodes,
            max_verify_tokens=self.runner.max_verify_tokens,
            adapters=() if model.adapters is None else model.adapters.names,
            device=self.runner.device,
            threads=self.threads,
            host_blocks=0 if self.tiers is None else self.tiers.num_slots,
            block_bytes=block_bytes(self.runner.kv) * parallel.size,
        )
        self.memory = ReleasableMemory(
            model,
            weights,
            self.runner.kv,
            self.runner.model_state,
            self.runner.kv_region,
            self.runner.cache.pool.site_memory,
        )
        self._staged: dict[str, Tensor] = {}
        self._slots: Mapping[str, Slot] = {}  # where the staged tensors go
        self._num_weight_updates = 0
        self._closed = False

    def state(self) -> tuple[int, ...]:
        """Return counters that are equal on all ranks: weight updates, captures, failed captures and replays."""
        stats = self.runner.cache.stats
        return (
            self._num_weight_updates,
            stats.captures.total(),
            stats.failed_captures.total(),
            stats.replays.total(),
        )

    # ---- steps -----------------------------------------------------------------------------------------------------

    def prepare(self, batch: Batch) -> StepInput:
        """Return the step of a batch, for all ranks. Only the rank beside the core is asked. See StepBuilder.build."""
        return self.runner.builder.build(batch)

    def execute(self, step: StepInput) -> AsyncStepOutput:
        """Enqueue one step and return without waiting for it. See ModelRunner.execute."""
        if self.threads is None:
            return self.runner.execute(step)
        with self.threads.step(*_kind_and_work(step)):
            return self.runner.execute(step)

    def sample(self, masks: MaskInput) -> None:
        """Enqueue the rest of a constrained step. See ModelRunner.sample."""
        with self._held_threads():
            self.runner.sample(masks)

    def reset_after_failure(self) -> None:
        """Recover from a failed step: the next one takes all inputs from the host."""
        self.runner.reset_after_failure()

    def zero_pages(self, pages: Sequence[int]) -> None:
        """Zero free KV pages that may hold NaN."""
        self.runner.zero_pages(pages)

    # ---- tiers below the KV cache ------------------------------------------------------------------------------------

    def _open_tiers(self) -> KVTiers | None:
        """Reserve host memory, a part of `kv_offloading_size` on each rank, and open the folder of files."""
        config, kv = self.config, self.runner.kv
        if not config.kv_offloading_size:
            return None
        size = block_bytes(kv) * self._parallel.size
        num_slots = int(config.kv_offloading_size * 2**30) // size
        if num_slots < 1:
            raise ConfigError(
                f"kv_offloading_size={config.kv_offloading_size} holds no page, which takes {size / 2**30:.6f} GiB: "
                "raise it or leave it out"
            )
        folder = config.kv_offloading_disk_path
        return KVTiers(kv, num_slots, None if folder is None else BlockFiles(folder))

    def open_files(self) -> dict[str, int]:
        """Return the sizes of the files that hold blocks of this model, by name, least recently used first."""
        assert self.tiers is not None and self.tiers.files is not None
        return self.tiers.files.open(self._fingerprint())

    def move_blocks(self, moves: Moves) -> None:
        """Begin to move blocks between the tiers. The pages of offloads may be overwritten by the next step."""
        assert self.tiers is not None
        clears = moves.clears and self.tiers.files is not None
        self.tiers.move(moves, self._fingerprint() if clears else "")

    def poll_blocks(self) -> Moved:
        """Return what has been moved since the last call. The core takes the report of rank 0."""
        assert self.tiers is not None
        return self.tiers.poll()

    def blocks_arrived(self, numbers: Sequence[int]) -> None:
        """Let the next step read the pages of these promotions."""
        assert self.tiers is not None
        self.tiers.arrived(numbers)

    def read_blocks(self, places: Mapping[str, int | None]) -> dict[str, bytes | None]:
        """Return blocks by name, from slots of host memory or from files. See KVTiers.read_blocks."""
        assert self.tiers is not None
        return self.tiers.read_blocks(places)

    def write_blocks(self, blocks: Mapping[int, bytes]) -> None:
        """Write blocks to slots of host memory. See KVTiers.write_blocks."""
        assert self.tiers is not None
        self.tiers.write_blocks(blocks)

    def kv_fingerprint(self) -> str:
        """Return a hash of all that keys and values depend on beside tokens, and of their form."""
        return self._fingerprint()

    def _fingerprint(self) -> str:
        """Return a hash of all that keys and values depend on beside tokens: weights, model, and form of the pages."""
        config, model = self.config, self.runner.model
        tensors = {**dict(model.module.named_parameters()), **dict(model.module.named_buffers())}
        form = config.page_size, config.dtype, config.kv_cache_dtype, config.max_model_len
        shapes = [tuple(pages.shape[1:]) for storage in self.runner.kv.storage for pages in storage]
        adapters = () if model.adapters is None else model.adapters.names
        return fingerprint(tensors, model.config, model.cache_specs(), *form, shapes, adapters)

    # ---- graphs ----------------------------------------------------------------------------------------------------

    def warm(self, keys: Sequence[GraphKey]) -> None:
        """Capture the missing graphs of `keys`, in order."""
        with self._held_threads():
            self.runner.cache.warm(wanted=keys)

    def capture(self, key: GraphKey) -> None:
        """Capture one graph between steps."""
        with self._held_threads():
            self.runner.cache.warm_next(key)

    def _held_threads(self) -> AbstractContextManager[None]:
        return nullcontext() if self.threads is None else self.threads.held()

    def invalidate(self, reason: str) -> int:
        """Drop every graph; return the number dropped."""
        return self.runner.cache.invalidate(reason)

    def check_addresses(self) -> None:
        """Drop the graphs that read storage which has moved."""
        self.runner.cache.check_addresses()

    # ---- weights ---------------------------------------------------------------------------------------------------

    def stage_weights(self, weights: Iterable[tuple[str, Tensor]]) -> int:
        """Check (Hugging Face name, whole tensor) pairs and keep them for `commit_weights`; return their number.

        The tensors must not change until then. Raises WeightUpdateError, and keeps nothing, if any is invalid.
        """
        self._staged = {}
        model = self.runner.model
        pairs = model.split_stacked(weights)
        self._slots = model.weight_slots()
        self._staged = check_update(self._slots, pairs, check_finite=True, names=model.config.names)
        return len(self._staged)

    def stage_files(self, *paths: str) -> int:
        """Stage the tensors of safetensors files or folders of them, which are read when they are written.

        Raises WeightUpdateError if the files can't be read or don't match the model.
        """
        try:
            return self.stage_weights(chain.from_iterable(map(_tensors_of, paths)))
        except ModelError as error:
            raise WeightUpdateError(str(error)) from error

    def commit_weights(self) -> None:
        """Write this rank's part of the staged tensors in place; graphs stay valid."""
        write_update(self._slots, self._staged)
        self.memory.weights_came(self._staged)
        self._num_weight_updates += 1
        self.discard_weights()

    def randomize_weights(self) -> None:
        """Overwrite all weights with random values, equal on all ranks; graphs stay valid."""
        load_dummy(self.runner.model, seed=self._num_weight_updates)
        self.memory.weights_came()
        self._num_weight_updates += 1

    def discard_weights(self) -> None:
        """Release the staged tensors."""
        self._staged, self._slots = {}, {}

    def share_weights(self, trainer: nn.Module) -> int:
        """Make a trainer's parameters views of the model's storage; return their number. Only with one rank.

        Raises WeightUpdateError, and changes nothing, if any doesn't match.
        """
        shared = share_weights(trainer, self.runner.model)
        self.memory.weights_came()
        self.memory.shares_weights = True
        return shared

    def weight_checksums(self) -> dict[str, str]:
        """Return the SHA-256 of each tensor's bytes by Hugging Face name. Only with one rank.

        Hashes the contiguous tensor in the checkpoint's shape and the model's dtype, little-endian.
        Weights that are stored in fewer bits are hashed as they are computed with, in bfloat16.
        """
        return {name: sha256_of(slot.read()) for name, slot in self._named_slots().items()}

    def weight_values(self, name: str, limit: int) -> list:
        """Return the first `limit` entries of a tensor's first dimension as lists of floats. Only with one rank."""
        slots = self._named_slots()
        if name not in slots:
            hint = did_you_mean(name, slots)
            raise RequestError(f"name={name[:200]!r} is no tensor of the model{hint}", param="name")
        return slots[name].read()[:limit].float().tolist()

    def _named_slots(self) -> Mapping[str, Slot]:
        try:
            return self.runner.model.weight_slots()
        except ModelError as error:
            raise RequestError(f"the weights have no Hugging Face names: {error}") from error

    # ---- sleep -----------------------------------------------------------------------------------------------------

    def trim_memory(self) -> None:
        """Return memory that is cached but not in use to the system."""
        self.runner.cache.pool.trim()

    def release_memory(self, part: str, discards: bool) -> int:
        """Give back the memory of a part of MEMORY_PARTS; return its bytes. See ReleasableMemory.release."""
        return self.memory.release(part, discards)

    def restore_memory(self, part: str) -> None:
        """Undo `release_memory`. Raises EngineError, and changes nothing, if there is no room."""
        self.memory.restore(part)

    def missing_weights(self) -> list[str]:
        """Return the names of the weights that were discarded and have not been written since."""
        return sorted(self.memory.missing)

    def shares_weights(self) -> bool:
        """Return whether a trainer's parameters are views of the weights."""
        return self.memory.shares_weights

    # ---- shutdown --------------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Abort GPU work that waits for a lost rank; its results are invalid. May block: call it in its own thread.

        Does nothing with gloo, where a broken connection raises at once.
        """
        group, device = self._parallel.group, self.runner.device
        if group is None or device.type != "cuda":
            return
        torch.cuda.set_device(device)
        collectives = self.runner.step_model.collectives
        if collectives is not None:
            collectives.abandon()
        group.abort()

    def close(self) -> None:
        """Drop the graphs and release the model. The worker can't be used afterwards. Closing twice does nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            if self.tiers is not None:
                self.tiers.close()
            self.runner.cache.clear()
            self.runner.model.close()
        finally:
            if self._on_close is not None:
                self._on_close()


def _tensors_of(path: str) -> Iterator[tuple[str, Tensor]]:
    source = Path(path)
    if not source.exists():
        raise ModelError(f"{path!r} does not exist: give a safetensors file or folder on the server's machine")
    return iterate_safetensors(source) if source.is_dir() else iterate_shards([source])


def _kind_and_work(step: StepInput) -> tuple[Hashable, int]:
    """Return the kind of a step for `ThreadTuner`, and the tokens that its time is proportional to."""
    decode, prompt = step.decode, step.prefill
    rows = None if decode is None else (decode.site, decode.bucket, *decode.variant.values())
    tokens = 0 if prompt is None else sum(chunk.length for chunk in prompt.chunks)
    drafted = 0 if step.verify is None else len(step.verify.slots)
    return (rows, tokens.bit_length(), drafted.bit_length(), step.is_constrained), tokens + drafted or 1


def _num_parameters(model: Model) -> int:
    """Return the number of parameters of the whole model, or 0 if its weights have no Hugging Face names."""
    try:
        slots = model.weight_slots()
    except ModelError:  # such as experts of a Megatron model: it runs, but its weights can't be updated by name
        return 0
    return sum(getattr(slot, "num_parameters", math.prod(slot.shape)) for slot in slots.values())
