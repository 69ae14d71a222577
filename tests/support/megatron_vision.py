"""Small Megatron-Core vision-language models that run on a CPU: LLaVAModel with CLIPViTModel, and a packed encoder."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.common.vision_module.vision_module import VisionModule
from megatron.core.models.multimodal.llava_model import LLaVAModel
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor, nn

from graph_cache.adapters.megatron.cpu import keep_rotary_in_place, layer_spec
from tests.support.megatron_models import VOCAB, config

SIDE, PATCH = 8, 4
PATCHES = (SIDE // PATCH) ** 2  # per image
IMAGE_TOKEN = -200
MERGE = 2  # spatial merge size of the packed encoder


class BidirectionalCore(nn.Module):
    """Attention without a causal mask for `core_attention`, within each sequence if they are packed. No host reads."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        if packed_seq_params is None:
            q, k, v = (one.permute(1, 2, 0, 3) for one in (query, key, value))
            out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            return out.permute(2, 0, 1, 3).flatten(2)
        at = torch.arange(len(query), dtype=torch.int32)
        image = torch.searchsorted(packed_seq_params.cu_seqlens_q, at, right=True)
        q, k, v = (one.transpose(0, 1) for one in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, image[:, None] == image, enable_gqa=True)
        return out.transpose(0, 1).flatten(1)


def vision_spec() -> ModuleSpec:
    """Return Megatron's local spec of a vision encoder's layer, with attention that runs on a CPU."""
    spec = get_vit_layer_with_local_spec()
    spec.submodules.self_attention.params = {"attn_mask_type": AttnMaskType.no_mask}
    spec.submodules.self_attention.submodules.core_attention = BidirectionalCore
    return spec


def vision_config(**changes: Any) -> Any:
    values = {"normalization": "LayerNorm", "gated_linear_unit": False, "add_bias_linear": True, "num_query_groups": 4}
    found = config(**(values | changes))
    found.vision_model_type = "internvit"  # a CLIPViTModel without the norms that need Transformer Engine or Apex
    return found


def llava(seed: int = 0, **options: Any) -> LLaVAModel:
    """Return a LLaVAModel with two layers in the encoder and two in the language model."""
    torch.manual_seed(seed)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(Tensor, "cuda", lambda self: self)  # CLIPViTModel moves its positions to the GPU
        model = LLaVAModel(
            config(),
            layer_spec(normalization="RMSNorm"),
            VOCAB,
            256,
            vision_config(),
            vision_spec(),
            drop_vision_class_token=True,
            vision_projection_config=vision_config(ffn_hidden_size=48),
            vision_projection_layer_spec=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
            language_position_embedding_type="rope",
            img_h=SIDE,
            img_w=SIDE,
            patch_dim=PATCH,
            **options,
        )
    if model.language_model is not None:
        keep_rotary_in_place(model.language_model)
    return model


def llava_batch(seed: int, images: int, length: int = 16) -> dict[str, Tensor]:
    """Return a batch with this number of images in one sequence. Each image becomes PATCHES embeddings."""
    generator = torch.Generator().manual_seed(seed)
    text = length - images * PATCHES + images  # an image is one id, so the combined length is the same for all batches
    ids = torch.randint(0, VOCAB, (1, text), generator=generator)
    ids[0, 1 : 1 + images] = IMAGE_TOKEN
    return {
        "images": torch.randn(images, 3, SIDE, SIDE, generator=generator),
        "input_ids": ids,
        "position_ids": torch.arange(text)[None],
        "attention_mask": None,
        "labels": ids.clamp(min=0),
        "loss_mask": torch.ones(1, text),
        "num_image_tiles": torch.ones(images, dtype=torch.int),
    }


class DeepstackBlock(TransformerBlock):
    """A block that also returns merged features of its first layer, as that of Qwen3-VL in Megatron Bridge."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.merger = nn.Linear(MERGE**2 * self.config.hidden_size, self.config.hidden_size)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        features = []
        for index, layer in enumerate(self.layers):
            hidden_states, _ = layer(
                hidden_states=hidden_states,
                attention_mask=attention_mask,
                rotary_pos_emb=rotary_pos_emb,
                packed_seq_params=packed_seq_params,
            )
            if index == 0:
                features.append(self.merger(hidden_states.view(-1, self.merger.in_features)))
        return hidden_states, features


class PackedEncoder(VisionModule):
    """A vision encoder over images packed into one sequence, as that of Qwen3-VL in Megatron Bridge."""

    def __init__(self, **changes: Any):
        settings = vision_config(**changes)
        settings.spatial_merge_size, settings.num_position_embeddings = MERGE, 64
        super().__init__(settings)
        self.patch_embed = nn.Linear(3 * PATCH**2, settings.hidden_size)
        self.decoder = DeepstackBlock(settings, vision_spec(), post_layer_norm=False)
        self.head = nn.Linear(settings.hidden_size, 1)

    def forward(self, patches: Tensor, cu_seqlens: Tensor, rotary: Tensor | None = None) -> Tensor:
        """Return a loss for patches [patches, 48] of images that end at cu_seqlens."""
        longest = int(cu_seqlens.diff().max())
        packed = PackedSeqParams("thd", cu_seqlens, cu_seqlens, max_seqlen_q=longest, max_seqlen_kv=longest)
        hidden, (features,) = self.decoder(
            self.patch_embed(patches)[:, None], None, rotary_pos_emb=rotary, packed_seq_params=packed
        )
        assert len(hidden) == len(patches) and len(features) == len(patches) // MERGE**2
        return self.head(hidden).square().mean() + features.square().mean()


def packed_encoder(seed: int = 0, **changes: Any) -> PackedEncoder:
    """Return a PackedEncoder with two layers."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PackedEncoder(**changes)


def packed_images(seed: int, sizes: list[int]) -> tuple[Tensor, Tensor]:
    """Return patches and cu_seqlens of images with these numbers of patches."""
    generator = torch.Generator().manual_seed(seed)
    ends = torch.tensor([0, *sizes]).cumsum(0).int()
    return torch.randn(sum(sizes), 3 * PATCH**2, generator=generator), ends
