"""Qwen3-VL-like models for the benchmark of vision encoders: of transformers, and of Megatron-Core.

Each returns a loss for a batch, with images packed into one sequence.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PATCH, MERGE, CHANNELS, FRAMES = 16, 2, 3, 2
VOCABULARY, IMAGE, START = 32000, 31999, 31998
TAPS = (0.3, 0.6, 0.9)  # depths of the encoder whose features go to the language model


class Batch(NamedTuple):
    """Patches [n, 1536] of images `grid` [images, 3] (frames, rows, columns), and text ids [1, tokens] around them."""

    patches: Tensor
    grid: Tensor
    ids: Tensor


def taps_of(depth: int) -> list[int]:
    """Return the layers whose features go to the language model."""
    return sorted({int(share * depth) for share in TAPS})


def batch_of(seed: int, images: int, side: int, length: int, device: torch.device) -> Batch:
    """Return a batch with this number of images of side x side pixels in a text of `length` tokens.

    Raises ValueError if they don't fit.
    """
    generator = torch.Generator().manual_seed(seed)
    edge = side // PATCH
    merged = (edge // MERGE) ** 2
    if images * (merged + 1) >= length:
        raise ValueError(f"{images} images of {merged} tokens don't fit into {length} tokens")
    ids = torch.randint(START, (1, length), generator=generator)
    for image in range(images):
        at = image * (merged + 1)
        ids[0, at], ids[0, at + 1 : at + 1 + merged] = START, IMAGE
    patches = torch.randn(images * edge**2, CHANNELS * FRAMES * PATCH**2, generator=generator, dtype=torch.bfloat16)
    grid = torch.tensor([[1, edge, edge]] * images)
    return Batch(patches.to(device), grid.to(device), ids.to(device))


class TransformersModel(nn.Module):
    """transformers' Qwen3VLForConditionalGeneration."""

    def __init__(self, layers: int, width: int, tower_layers: int, tower_width: int):
        super().__init__()
        from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

        heads = max(1, width // 128)
        size = width // heads
        pairs = size // 2
        vision = {
            "depth": tower_layers,
            "hidden_size": tower_width,
            "intermediate_size": 4 * tower_width,
            "num_heads": max(1, tower_width // 72),
            "patch_size": PATCH,
            "out_hidden_size": width,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": taps_of(tower_layers),
        }
        text = {
            "vocab_size": VOCABULARY,
            "hidden_size": width,
            "intermediate_size": 3 * width,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": max(1, heads // 2),
            "head_dim": size,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e6,
                "mrope_section": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3],
            },
            "use_cache": False,
        }
        special = {"image_token_id": IMAGE, "vision_start_token_id": START}
        self.model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(vision_config=vision, text_config=text, **special))

    @property
    def tower(self) -> Any:
        """The vision encoder."""
        return self.model.model.visual

    def forward(self, batch: Batch) -> Tensor:
        return self.model(
            input_ids=batch.ids,
            labels=batch.ids,
            pixel_values=batch.patches,
            image_grid_thw=batch.grid,
            mm_token_type_ids=(batch.ids == IMAGE).int(),
        ).loss


def megatron_model(
    layers: int, width: int, tower_layers: int, tower_width: int, length: int, impl: str, with_te: bool
) -> nn.Module:
    """Return a Megatron-Core model with a packed encoder, merged features and a GPTModel.

    `impl`: Megatron's own cuda_graph_impl of the language model. `with_te`: use Transformer Engine's layer specs.
    """
    from megatron.core.enums import ModelType
    from megatron.core.models.common.vision_module.vision_module import VisionModule
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.models.vision.vit_layer_specs import (
        get_vit_layer_with_local_spec,
        get_vit_layer_with_transformer_engine_spec,
    )
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_block import TransformerBlock
    from megatron.core.transformer.transformer_config import TransformerConfig

    from benchmarks.training.packed_attention import PackedSdpa
    from graph_cache.adapters.megatron.cpu import keep_rotary_in_place, layer_spec

    shared = {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": torch.bfloat16,
        "bf16": True,
        "pipeline_dtype": torch.bfloat16,
        "bias_dropout_fusion": with_te,
        "apply_rope_fusion": False,  # the encoder's positions are absolute
        "use_cpu_initialization": not torch.cuda.is_available(),
    }
    tower = TransformerConfig(
        num_layers=tower_layers,
        hidden_size=tower_width,
        num_attention_heads=max(1, tower_width // 72),
        normalization="LayerNorm",
        **shared,
    )
    tower.spatial_merge_size = MERGE
    text = TransformerConfig(
        num_layers=layers,
        hidden_size=width,
        num_attention_heads=max(1, width // 128),
        add_bias_linear=False,
        normalization="RMSNorm",
        cuda_graph_impl=impl,
        **shared,
    )
    if with_te:
        vision_spec, text_spec = (
            get_vit_layer_with_transformer_engine_spec(),
            get_gpt_layer_with_transformer_engine_spec(),
        )
    else:
        vision_spec, text_spec = get_vit_layer_with_local_spec(), layer_spec(normalization="RMSNorm")
        attention = vision_spec.submodules.self_attention
        attention.params = {"attn_mask_type": AttnMaskType.no_mask}
        attention.submodules.core_attention = PackedSdpa

    class Block(TransformerBlock):
        """A block that also returns merged features of some layers."""

        def __init__(self) -> None:
            super().__init__(tower, vision_spec, post_layer_norm=False)
            self.taps = taps_of(tower_layers)
            self.mergers = nn.ModuleList(nn.Linear(MERGE**2 * tower_width, width) for _ in self.taps)

        def forward(
            self,
            hidden_states: Tensor,
            attention_mask: Tensor | None,
            rotary_pos_emb: Tensor | None = None,
            packed_seq_params: PackedSeqParams | None = None,
        ) -> tuple[Tensor, list[Tensor]]:
            features: list[Tensor] = []
            for index, layer in enumerate(self.layers):
                hidden_states, _ = layer(
                    hidden_states=hidden_states,
                    attention_mask=attention_mask,
                    rotary_pos_emb=rotary_pos_emb,
                    packed_seq_params=packed_seq_params,
                )
                if index in self.taps:
                    features.append(_merged(hidden_states, self.mergers[len(features)]))
            return hidden_states, features

    class Encoder(VisionModule):
        """Patches of packed images -> embeddings for the language model."""

        def __init__(self) -> None:
            super().__init__(tower)
            self.patch_embed = nn.Linear(CHANNELS * FRAMES * PATCH**2, tower_width)
            self.decoder = Block()
            self.merger = nn.Linear(MERGE**2 * tower_width, width)
            size = tower_width // tower.num_attention_heads
            self.frequencies: Tensor
            self.register_buffer("frequencies", 1e4 ** (-torch.arange(0, size // 2, 2) / (size // 2)), persistent=False)

        def forward(self, patches: Tensor, grid: Tensor) -> Tensor:
            rows = torch.cat([torch.cartesian_prod(*map(torch.arange, (h, w))) for _, h, w in grid.tolist()])
            angles = (rows.to(patches.device)[:, :, None] * self.frequencies.float()).flatten(1)
            rotary = torch.cat([angles, angles], -1)[:, None, None]
            ends = F.pad(grid.prod(1).cumsum(0), (1, 0)).int()
            longest = int(grid.prod(1).max())
            packed = PackedSeqParams("thd", ends, ends, max_seqlen_q=longest, max_seqlen_kv=longest)
            hidden, features = self.decoder(
                self.patch_embed(patches)[:, None], None, rotary_pos_emb=rotary, packed_seq_params=packed
            )
            return _merged(hidden, self.merger) + sum(features)

    class VisionLanguage(MegatronModule):
        """The encoder's embeddings take the places of image tokens in a GPTModel's sequence."""

        def __init__(self) -> None:
            super().__init__(text)
            self.vision_model = Encoder()
            self.language_model = GPTModel(
                text,
                text_spec,
                vocab_size=VOCABULARY,
                max_sequence_length=length,
                position_embedding_type="rope",
                share_embeddings_and_output_weights=True,
            )
            if not torch.cuda.is_available():
                keep_rotary_in_place(self.language_model)

        def set_input_tensor(self, input_tensor: Any) -> None:
            """Take the input of a pipeline stage; the only stage has none."""
            self.language_model.set_input_tensor(input_tensor)

        # Megatron's schedule and its own helper look these up on the model that they are given.
        @property
        def model_type(self) -> ModelType:
            return ModelType.encoder_or_decoder

        @property
        def decoder(self) -> nn.Module:
            return self.language_model.decoder

        @property
        def rotary_pos_emb(self) -> nn.Module:
            return self.language_model.rotary_pos_emb

        @property
        def position_embedding_type(self) -> str:
            return self.language_model.position_embedding_type

        def forward(self, batch: Batch) -> Tensor:
            images = self.vision_model(batch.patches, batch.grid)
            positions = torch.arange(batch.ids.shape[1], device=batch.ids.device)[None]
            embedded = self.language_model.embedding(batch.ids, positions)  # [s, 1, h]
            # As Megatron Bridge does; the nonzero() inside synchronises with the device, between the graphs.
            at = (batch.ids[0] == IMAGE).nonzero()[:, 0]
            embedded = embedded.index_copy(0, at, images[:, None].to(embedded.dtype))
            return self.language_model(batch.ids, positions, None, decoder_input=embedded, labels=batch.ids.roll(-1, 1))

    model: nn.Module = VisionLanguage()
    return model


def _merged(hidden: Tensor, merger: nn.Linear) -> Tensor:
    return merger(hidden.reshape(-1, merger.in_features))
