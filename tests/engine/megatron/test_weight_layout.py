"""Weight slots over tensor-parallel ranks and pipeline stages: splitting, gathering, loading and saving."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from engine.errors import ModelError
from engine.layers.rotary import inverse_frequencies
from engine.megatron.checkpoint import load_checkpoint, save_checkpoint, whole_shapes
from engine.megatron.config import transformer_config_values
from engine.megatron.weight_layout import gather, named_weights, weight_slots
from engine.models import config_from_dict
from tests.engine.megatron.checkpoints import SIZES, TOLERANCE, checkpoint, gpt_for, hf_config, same, stored
from tests.support import megatron_models as models
from tests.support.ranks import outputs_of

ROOT = Path(__file__).resolve().parents[3]


def bare_stage(
    hf: dict[str, Any],
    *,
    ranks: int = 1,
    padded: int | None = None,
    layers: tuple[int, ...] = (1,),
    first: bool = True,
    last: bool = True,
    te: bool = False,
) -> nn.Module:
    """Build a module with a stage's parameters only, in Megatron's names and shapes, filled with -1.

    `te`: use Transformer Engine's norm names.
    """
    config = config_from_dict(hf)
    values = transformer_config_values(config)
    heads, groups, size = values["num_attention_heads"], values["num_query_groups"], values["kv_channels"]
    hidden, ffn, tied = values["hidden_size"], values["ffn_hidden_size"], config.tie_word_embeddings
    vocabulary = ((padded or config.vocab_size) // ranks, hidden)
    norms = (
        ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight")
        if te
        else ("input_layernorm.weight", "pre_mlp_layernorm.weight")
    )
    qkv = (heads + 2 * groups) * size // ranks
    layer = {
        norms[0]: (hidden,),
        norms[1]: (hidden,),
        "self_attention.linear_qkv.weight": (qkv, hidden),
        "mlp.linear_fc1.weight": (2 * ffn // ranks, hidden),
        "self_attention.linear_proj.weight": (hidden, heads * size // ranks),
        "mlp.linear_fc2.weight": (hidden, ffn // ranks),
    }
    if values["qk_layernorm"]:
        layer |= {f"self_attention.{x}_layernorm.weight": (size,) for x in "qk"}
    if values["add_qkv_bias"]:
        layer["self_attention.linear_qkv.bias"] = (qkv,)
    shapes = {f"decoder.layers.{i}.{name}": shape for i in range(len(layers)) for name, shape in layer.items()}
    if first:
        shapes["embedding.word_embeddings.weight"] = vocabulary
    if last:
        shapes["decoder.final_layernorm.weight"] = (hidden,)
    if last and not (tied and first):
        shapes["output_layer.weight"] = vocabulary
    model = nn.Module()
    for name, shape in shapes.items():
        *path, leaf = name.split(".")
        module = model
        for step in path:
            if not hasattr(module, step):
                module.add_module(step, nn.ModuleList() if step == "layers" else nn.Module())
            module = getattr(module, step)
        module.register_parameter(leaf, nn.Parameter(torch.full(shape, -1.0)))
    for module, number in zip(model.decoder.layers, layers, strict=True):
        module.layer_number = number
    model.config = models.config(**values)
    model.share_embeddings_and_output_weights, model.position_embedding_type = tied, "rope"
    model.rotary_pos_emb = nn.Module()
    model.rotary_pos_emb.inv_freq = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    return model


def numbered_weights(hf: dict[str, Any]) -> dict[str, Tensor]:
    """Return weights of this configuration in which all elements differ."""
    weights: dict[str, Tensor] = {}
    count = 0
    for name, shape in whole_shapes(config_from_dict(hf)).items():
        size = torch.Size(shape).numel()
        weights[name] = torch.arange(count, count + size, dtype=torch.float32).view(shape)
        count += size
    assert count < 2**24
    return weights


def merged_qkv(weights: dict[str, Tensor], groups: int, kind: str) -> Tensor:
    """Return Megatron's linear_qkv of the whole model: q heads, k and v of each query group."""
    q, k, v = (weights[f"model.layers.0.self_attn.{x}_proj.{kind}"].chunk(groups) for x in "qkv")
    return torch.cat([piece for group in zip(q, k, v, strict=True) for piece in group])


@st.composite
def splits(draw: st.DrawFn) -> tuple[dict[str, Any], int, int]:
    """Generate (Qwen config, ranks, padded vocabulary size); ranks divide the query groups or are divided by them."""
    groups = draw(st.integers(1, 4))
    ranks = draw(st.sampled_from([n for n in range(1, 7) if groups % n == 0 or n % groups == 0]))
    per_group = draw(st.integers(1, 3)) * max(ranks // groups, 1)
    vocab = draw(st.integers(1, 20))
    multiple = ranks * draw(st.integers(1, 4))
    hf = {
        "architectures": [draw(st.sampled_from(["Qwen2ForCausalLM", "Qwen3ForCausalLM"]))],
        "vocab_size": vocab,
        "hidden_size": draw(st.integers(1, 5)),
        "intermediate_size": ranks * draw(st.integers(1, 4)),
        "num_hidden_layers": 1,
        "num_attention_heads": groups * per_group,
        "num_key_value_heads": groups,
        # Megatron splits the rows of linear_qkv evenly, so they must be divisible by the ranks
        "head_dim": 2 * ranks,
        "max_position_embeddings": 8,
        "tie_word_embeddings": draw(st.booleans()),
    }
    return hf, ranks, -(-vocab // multiple) * multiple


@settings(max_examples=60, deadline=None, derandomize=True)
@given(splits())
def test_shards_split_and_gather_every_weight(split: tuple[dict[str, Any], int, int]) -> None:
    hf, ranks, padded = split
    weights = numbered_weights(hf)
    stages = [bare_stage(hf, ranks=ranks, padded=padded) for _ in range(ranks)]
    tables = [weight_slots(stage, hf["vocab_size"], rank, ranks) for rank, stage in enumerate(stages)]
    for table in tables:
        assert {name: slot.shape for name, slot in table.items()} == whole_shapes(config_from_dict(hf))
        for name, slot in table.items():
            slot.write(weights[name])
    whole = {name: gather([table[name].read() for table in tables], tables[0][name].shape) for name in weights}
    assert same(weights, whole)
    layers = [stage.decoder.layers[0] for stage in stages]
    qkv = merged_qkv(weights, hf["num_key_value_heads"], "weight")
    assert torch.equal(torch.cat([layer.self_attention.linear_qkv.weight for layer in layers]), qkv)
    gate, up = (weights[f"model.layers.0.mlp.{x}_proj.weight"].chunk(ranks) for x in ("gate", "up"))
    for rank, layer in enumerate(layers):
        assert torch.equal(layer.mlp.linear_fc1.weight, torch.cat((gate[rank], up[rank])))
    embedding = torch.cat([stage.embedding.word_embeddings.weight for stage in stages])
    assert bool((embedding[hf["vocab_size"] :] == -1).all())
    untouched = sum(int((parameter == -1).sum()) for stage in stages for parameter in stage.parameters())
    tables_of_vocabulary = 1 if hf["tie_word_embeddings"] else 2
    assert untouched == tables_of_vocabulary * (padded - hf["vocab_size"]) * hf["hidden_size"]


def test_gather_rejects_missing_ranks_and_differing_copies() -> None:
    with pytest.raises(ModelError, match=r"the parts of 1 ranks make \[2, 3\], \[4, 3\] is needed"):
        gather([torch.zeros(2, 3)], (4, 3))
    with pytest.raises(ModelError, match="differs between ranks"):
        gather([torch.zeros(3), torch.ones(3)], (3,))


def test_transformer_engine_norm_names_map_to_the_same_weights() -> None:
    hf = {"architectures": ["Qwen3ForCausalLM"], **SIZES, "head_dim": 16}
    weights = numbered_weights(hf)
    stage = bare_stage(hf, te=True, layers=(1, 2))
    for name, slot in weight_slots(stage).items():
        slot.write(weights[name])
    assert same(weights, dict(named_weights(stage)))
    assert torch.equal(
        stage.decoder.layers[1].mlp.linear_fc1.layer_norm_weight,
        weights["model.layers.1.post_attention_layernorm.weight"],
    )


@pytest.mark.parametrize("tied", [False, True])
def test_pipeline_stages_use_global_layer_numbers(tied: bool, tmp_path: Path) -> None:
    hf = {"architectures": ["LlamaForCausalLM"], **SIZES, "num_hidden_layers": 5, "tie_word_embeddings": tied}
    weights = numbered_weights(hf)
    (tmp_path / "config.json").write_text(json.dumps(hf))
    # a tied checkpoint may contain its head too; a stage without embedding can't compare the two
    head = {"lm_head.weight": weights["model.embed_tokens.weight"].clone()} if tied else {}
    save_file(weights | head, tmp_path / "model.safetensors")
    stages = [
        bare_stage(hf, layers=(1, 2), last=False),
        bare_stage(hf, layers=(3,), first=False, last=False),
        bare_stage(hf, layers=(4, 5), first=False),
    ]
    for stage in stages:
        load_checkpoint(stage, tmp_path)
        assert all(bool((parameter >= 0).all()) for parameter in stage.parameters())
    middle = set(weight_slots(stages[1]))
    assert len(middle) == 9 and all(name.startswith("model.layers.2.") for name in middle)
    save_checkpoint(stages, tmp_path / "to", hf)
    assert same(weights, stored(tmp_path / "to"))
    with pytest.raises(ModelError, match="model.layers.2.input_layernorm.weight is missing"):
        save_checkpoint([stages[0], stages[2]], tmp_path / "part", hf)
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights | head, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="up_proj.weight is missing"):
        load_checkpoint(stages[1], tmp_path)


def test_two_processes_load_compute_and_save_like_one(tmp_path: Path) -> None:
    """Tensor parallelism of 2, with two query groups and with one and a padded vocabulary; then two pipeline stages,
    untied and tied.
    """
    hf_models = {case: checkpoint(tmp_path / case, case, vocab_size=size) for case, size in RANKS_OF_TWO.items()}
    command = [sys.executable, "-c", "from tests.engine.megatron.test_weight_layout import rank_of_two; rank_of_two()"]
    outputs_of([[*command, str(rank), str(tmp_path)] for rank in range(2)], 60, cwd=ROOT)
    for case in ("qwen3", "qwen3-tied"):
        assert same(stored(tmp_path / case), stored(tmp_path / f"{case}-saved"))
        found = torch.cat([load_file(tmp_path / f"{case}.{rank}")["logits"] for rank in range(2)], -1)
        ids, _ = models.tokens(5)
        with torch.no_grad():
            wanted = hf_models[case](ids % RANKS_OF_TWO[case]).logits
        assert (found[..., : RANKS_OF_TWO[case]] - wanted).abs().max() < TOLERANCE * wanted.abs().max()
    stages = [load_file(tmp_path / f"llama.{rank}") for rank in range(2)]
    assert same(stored(tmp_path / "llama"), stages[0] | stages[1]) and not stages[0].keys() & stages[1].keys()
    for case in ("llama", "llama-tied"):
        saved = tmp_path / f"{case}-saved"
        assert same(stored(tmp_path / case), stored(saved))
        assert sorted(path.name for path in saved.iterdir()) == [
            "config.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
        ]
        reloaded = transformers.AutoModelForCausalLM.from_pretrained(saved)
        assert same(hf_models[case].state_dict(), reloaded.state_dict())
    refusals = [(tmp_path / f"refusal.{rank}").read_text() for rank in range(2)]
    assert refusals[0] == refusals[1] and "holds a model already" in refusals[0]


RANKS_OF_TWO = {"qwen3": 96, "qwen3-tied": 93, "llama": 96, "llama-tied": 96}
"""Cases of the test above and their vocabulary sizes."""


def rank_of_two() -> None:
    """Body of each process of the test above; arguments: rank and folder."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: torch.device("cpu")  # Megatron allocates gathered tensors there
    torch.Tensor.cuda = lambda tensor: tensor  # Megatron calls it for the last stage's copy of a tied embedding
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(str(folder / "store"), 2))
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    for case in ("qwen3", "qwen3-tied"):
        model = gpt_for(folder / case, tp_size=2, vocab_size=96)
        load_checkpoint(model, folder / case, rank, 2)
        ids, positions = models.tokens(5)
        with torch.no_grad():
            logits = model(ids % RANKS_OF_TWO[case], positions, None)
        save_file({"logits": logits.contiguous()}, folder / f"{case}.{rank}")
        save_checkpoint(
            model, folder / f"{case}-saved", hf_config(folder / case), parallel_state.get_tensor_model_parallel_group()
        )
        assert (folder / f"{case}-saved" / "config.json").exists()  # complete on return, for every rank
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    stages = parallel_state.get_pipeline_model_parallel_group()
    for case in ("llama", "llama-tied"):
        stage = gpt_for(folder / case, pp_size=2, pre_process=rank == 0, post_process=rank == 1)
        load_checkpoint(stage, folder / case)
        save_file({name: tensor.clone() for name, tensor in named_weights(stage)}, folder / f"{case}.{rank}")
        save_checkpoint(stage, folder / f"{case}-saved", hf_config(folder / case), pipeline_group=stages)
        assert (folder / f"{case}-saved" / "config.json").exists()
    try:  # a problem of one stage is reported by all stages
        save_checkpoint(
            stage, folder / ("new" if rank else "llama-saved"), hf_config(folder / case), pipeline_group=stages
        )
    except ModelError as error:
        (folder / f"refusal.{rank}").write_text(str(error))
    dist.destroy_process_group()
