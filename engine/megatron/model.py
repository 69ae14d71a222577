"""Run a Megatron-Core GPTModel in the engine, on the model's own parameters.

The model's own layers compute, so the model that trains is the model that generates. Only core attention is replaced,
by attention over the engine's KV pages, and only while the engine runs the model: a trainer's calls are unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from engine.attention.interface import Attention
from engine.distributed.tensor_parallel import TensorParallel
from engine.errors import ModelError
from engine.megatron.fusable import fusable_tensors
from engine.megatron.weight_layout import Slot, unwrapped, weight_slots
from engine.models.config import ModelConfig
from engine.models.decoder_tensors import DecoderTensors
from engine.models.interface import ForwardContext, Model

Rope = tuple[Tensor, ...]


class MegatronModel(Model, nn.Module):
    """Adapt a GPTModel to the interface of models.

    The model must be whole on one pipeline stage, with rotary positions and causal attention. `max_len` bounds
    positions (default: the model's max_sequence_length). `vocab_size` cuts the logits of a padded vocabulary. Raises
    ModelError, listing every setting with which the engine's result would differ from Megatron's.

    Until `close`, the `forward` of every core attention is replaced; calls from outside the engine reach the
    original.
    """

    def __init__(self, model: nn.Module, max_len: int | None = None, vocab_size: int | None = None):
        super().__init__()
        gpt: Any = unwrapped(model)
        if problems := _unsupported(gpt):
            raise ModelError(f"{type(gpt).__name__} can't be served: {'; '.join(problems)}")
        parameter = next(gpt.parameters())
        self.gpt: Any = gpt
        self.dtype, self.device = parameter.dtype, parameter.device
        self.config = _config_of(gpt, vocab_size)
        self.max_len = max_len or self.config.context_length
        self._attention: Attention | None = None
        self._cores = [layer.self_attention.core_attention for layer in self.layers]
        if any("forward" in vars(core) for core in self._cores):
            raise ModelError(
                "an engine serves this model already, or its core attention was replaced; close that engine first"
            )
        # The frequencies that training uses, one row per position.
        self.register_buffer("rotary", self._rotary_frequencies(), persistent=False)
        for index, core in enumerate(self._cores):
            core.forward = partial(self._core_attention, index, core.forward)

    def close(self) -> None:
        """Restore the model's own core attention."""
        for core in self._cores:
            vars(core).pop("forward", None)

    @property
    def layers(self) -> nn.ModuleList:
        return self.gpt.decoder.layers

    def fused(self, max_rows: int, max_tokens: int) -> Model:
        from engine.models.fused_decoder import FusedDecoder  # imports triton, which is installed only with CUDA

        return FusedDecoder(self, self.tensors(), max_rows, max_tokens)

    def embed(self, tokens: Tensor, index: Tensor | None = None) -> Tensor:
        ids = tokens if index is None else tokens.index_select(0, index)
        with self._engine_mode(self.gpt.embedding):
            return self.gpt.embedding(input_ids=ids.unsqueeze(0), position_ids=None).squeeze(1)

    def rope(self, positions: Tensor) -> Rope:
        """Positions int64 [T] -> rotary frequencies [T, 1, 1, D] for `layer`."""
        return (self.rotary.index_select(0, positions),)

    def layer(self, index: int, hidden: Tensor, context: ForwardContext) -> Tensor:
        """See Model. The tokens take Megatron's sequence dimension."""
        layer, rope = self.layers[index], context.rope[0]
        with self._engine_mode(layer, context.attention):
            out, _ = layer(hidden_states=hidden.unsqueeze(1), attention_mask=None, rotary_pos_emb=rope)
        return out.squeeze(1)

    def final_norm(self, hidden: Tensor) -> Tensor:
        return self.gpt.decoder.final_layernorm(hidden)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        gpt, hidden = self.gpt, self.final_norm(hidden)
        weight = gpt.shared_embedding_or_output_weight() if gpt.share_embeddings_and_output_weights else None
        local, _ = gpt.output_layer(hidden.unsqueeze(1), weight=weight, runtime_gather_output=False)
        # Megatron's own gather works on GPUs only.
        return self._parallel().gather_columns(local.squeeze(1), self.config.vocab_size)[:, : self.config.vocab_size]

    def weight_slots(self) -> dict[str, Slot]:
        """Map Hugging Face tensor names to slots in this rank's parameters."""
        return weight_slots(self.gpt, self.config.vocab_size, *self._parallel()[:2])

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, tensor) for every weight of this rank."""
        for name, slot in self.weight_slots().items():
            yield name, slot.read()

    def tensors(self) -> DecoderTensors:
        """Return the model's tensors for the fused kernels.

        Raises ModelError, listing every difference from the dense decoder that the kernels compute.
        """
        return fusable_tensors(self)

    def _core_attention(
        self, index: int, original: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, *args: Any,
        **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """Compute the core attention of layer `index`: over KV pages inside an engine step, else by `original`."""
        if self._attention is None:
            return original(query, key, value, *args, **kwargs)
        return self._attention(index, query.squeeze(1), key.squeeze(1), value.squeeze(1)).unsqueeze(1)

    @contextmanager
    def _engine_mode(self, module: nn.Module, attention: Attention | None = None) -> Iterator[None]:
        """Run `module` for the engine: in eval mode, with its training flags restored afterwards."""
        training = [submodule for submodule in module.modules() if submodule.training]
        for submodule in training:
            submodule.training = False
        self._attention = attention
        try:
            yield
        finally:
            self._attention = None
            for submodule in training:
                submodule.training = True

    def _parallel(self) -> TensorParallel:
        """Return this process's place among Megatron's tensor-parallel ranks."""
        group = self.gpt.pg_collection.tp
        return TensorParallel(group.rank(), group.size(), group)

    def _rotary_frequencies(self) -> Tensor:
        if self.device.type == "cpu":
            from graph_cache.adapters.megatron.cpu import (
                keep_rotary_in_place,
            )  # imports megatron, which the model needs anyway

            before = self.gpt.rotary_pos_emb
            keep_rotary_in_place(self.gpt)
            try:
                return self.gpt.rotary_pos_emb(self.max_len).detach().clone()
            finally:
                self.gpt.rotary_pos_emb = before
        return self.gpt.rotary_pos_emb(self.max_len).detach().clone()


def _config_of(gpt: nn.Module, vocab_size: int | None) -> ModelConfig:
    """Return the model's configuration; the numbers of heads and KV heads and the MLP size are per rank."""
    config = gpt.config
    if vocab_size is not None and vocab_size > gpt.vocab_size:
        raise ModelError(
            f"a vocabulary of {vocab_size} tokens was given for a model of {gpt.vocab_size}: set `model` to the "
            "folder that these weights come from"
        )
    ranks = config.tensor_model_parallel_size
    return ModelConfig(
        architecture=type(gpt).__name__,
        vocab_size=vocab_size or gpt.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=len(gpt.decoder.layers),
        num_heads=config.num_attention_heads // ranks,
        num_kv_heads=max(1, config.num_query_groups // ranks),
        head_dim=config.kv_channels,
        intermediate_size=config.ffn_hidden_size // ranks,
        rms_norm_eps=config.layernorm_epsilon,
        rope_theta=10000.0,  # unused: the model has its own frequencies
        max_position_embeddings=gpt.max_sequence_length,
        tie_word_embeddings=gpt.share_embeddings_and_output_weights,
        qk_norm=config.qk_layernorm,
        dtype=str(next(gpt.parameters()).dtype).removeprefix("torch."),
    )


def _unsupported(gpt: nn.Module) -> list[str]:
    """List the features of this model that the engine can't compute."""
    config = getattr(gpt, "config", None)
    if config is None or not hasattr(gpt, "decoder") or not hasattr(gpt, "embedding"):
        return [f"it is not a complete GPTModel (embedding, decoder and output layer), found {type(gpt).__name__}"]
    problems = []
    if not gpt.pre_process or not gpt.post_process or config.pipeline_model_parallel_size > 1:
        problems.append("it is one stage of a pipeline; put the whole model on one stage")
    if gpt.position_embedding_type != "rope":
        problems.append(f"position_embedding_type={gpt.position_embedding_type!r}: only 'rope' is served")
    for name, needed in (
        ("sequence_parallel", False),
        ("context_parallel_size", 1),
        ("multi_latent_attention", False),
        ("softmax_scale", None),
        ("window_size", None),
        ("attention_output_gate", False),
        ("mtp_num_layers", None),
        ("use_mup", False),
        ("fp32_residual_connection", False),
        ("fp8", None),
        ("fp4", None),
        ("cuda_graph_impl", "none"),
    ):
        value = getattr(config, name, needed)
        if value != needed:
            problems.append(f"{name}={value!r}: build it with {needed!r}")
    if getattr(config, "softmax_type", "vanilla") != "vanilla":
        problems.append(f"softmax_type={config.softmax_type!r}: build it with 'vanilla'")
    without_attention = [
        index
        for index, layer in enumerate(gpt.decoder.layers)
        if not hasattr(getattr(layer, "self_attention", None), "core_attention")
    ]
    if without_attention:
        problems.append(f"its layers {without_attention} have no self-attention with a core_attention")
    hooked = [name for name, module in gpt.named_modules() if module._forward_pre_hooks or module._forward_hooks]
    if hooked:
        problems.append(
            f"{len(hooked)} of its modules have forward hooks ({hooked[0]}, …), which graphs would skip; "
            "remove them (DDP: disable_forward_pre_hook()) while the engine serves"
        )
    return problems
