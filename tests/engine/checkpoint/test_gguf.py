"""GGUF files: values are read as written, and any damage to a file raises ModelError."""

from __future__ import annotations

import random
import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf.constants import GGMLQuantizationType as Kind

from engine.attention.kv_cache import KVCache
from engine.checkpoint.gguf_codes import CODES, EIGHT_BITS, FOUR_BITS, Codes
from engine.checkpoint.gguf_file import GGUFFile
from engine.checkpoint.gguf_model import GGUFModel
from engine.checkpoint.source import ModelSource
from engine.errors import ModelError
from engine.layers.int8_table import dequantize_int8
from engine.loader.cpu_formats import gguf_config, load_gguf
from engine.models import config_from_dict
from engine.text.tokenizer import Tokenizer
from tests.engine.checkpoint.gguf_samples import (
    HF_MODEL_TYPES,
    SIZES,
    llama_cpp_order,
    random_weights,
    vocabulary,
    write_gguf,
)
from tests.support.attention import prefill_attention


def write_tensors(path: Path, tensors: dict[str, tuple[np.ndarray, Kind]]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    for name, (values, kind) in tensors.items():
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_everything(path: Path) -> None:
    """Read everything that startup reads from a file, without allocating a model."""
    source = GGUFModel(GGUFFile(path))
    config_from_dict(source.config, str(path))
    for _ in source.weights():
        pass
    Tokenizer.try_load(ModelSource(str(path), "gguf", "sample"))


def logits_of(path: Path, token_ids: list[int]) -> torch.Tensor:
    config, model = load_gguf(str(path), cpu_weight_format="fp32")
    kv = KVCache(config.cache_specs(), 4, 16, torch.float32, "cpu")
    with torch.inference_mode():
        attention = prefill_attention(kv, [(0, len(token_ids))], [[1, 2, 3]])
        return model.compute_logits(model(torch.tensor(token_ids), torch.arange(len(token_ids)), attention))


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_1])
def test_dense_equals_the_reference_dequantisation_bit_for_bit(tmp_path: Path, kind: Kind) -> None:
    values = np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32)
    write_tensors(tmp_path / "t.gguf", {"a": (values, kind), "b": (values[:2] * 3, kind)})
    found = GGUFFile(tmp_path / "t.gguf").dense("b")
    expected = gguf.quants.dequantize(gguf.quants.quantize(values[:2] * 3, kind), kind)
    assert found.dtype == torch.float32
    assert torch.equal(found, torch.from_numpy(np.array(expected, dtype=np.float32)))


def test_the_log_says_that_weights_on_a_gpu_are_dequantised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """On the meta device, which stands for any device but a CPU."""
    path = tmp_path / "m.gguf"
    write_gguf(path, matrices=Kind.Q8_0)
    with caplog.at_level("INFO", "engine.loader.cpu_formats"):
        load_gguf(str(path), device="meta")
    assert "dequantised to bfloat16 on meta" in caplog.text


def random_blocks(kind: Kind, rows: int, inputs: int) -> np.ndarray:
    """Return random bytes of a matrix, uint8 [rows, bytes], whose factors are finite."""
    size, nbytes = gguf.constants.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 256, size=(rows, inputs // size, nbytes), dtype=np.uint8)
    factors = 2 if kind in (Kind.Q4_1, Kind.Q4_K, Kind.Q5_1, Kind.Q5_K) else 1
    place = slice(-2, None) if kind is Kind.Q6_K else slice(2 * factors)
    blocks[:, :, place] = rng.normal(size=(rows, inputs // size, factors)).astype(np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def write_raw(path: Path, raw: np.ndarray, kind: Kind) -> GGUFFile:
    """Write bytes as the tensor `w`."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("w", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile(path)


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q4_K])
def test_codes_of_4_bits_give_the_reference_values_bit_for_bit(tmp_path: Path, kind: Kind) -> None:
    raw = random_blocks(kind, 5, 768)
    file = write_raw(tmp_path / "t.gguf", raw, kind)
    expected = torch.from_numpy(gguf.quants.dequantize(raw, kind))
    codes, scale, low = FOUR_BITS[file.info("w").type_id](file.blocks("w"))
    assert codes.max() == 15 and codes.min() == 0 and scale.shape == low.shape == (5, 24)
    rebuilt = codes.view(5, 24, 32).float() * scale.unsqueeze(2) + low.unsqueeze(2)
    assert torch.equal(rebuilt.view(5, 768), expected) and torch.equal(file.dense("w"), expected)


@pytest.mark.parametrize("kind", [Kind.Q5_0, Kind.Q5_1, Kind.Q5_K, Kind.Q6_K, Kind.Q8_0])
def test_codes_of_8_bits_give_the_reference_values(tmp_path: Path, kind: Kind) -> None:
    """Exactly, but for factors that are products, which are rounded to float16."""
    raw = random_blocks(kind, 5, 768)
    file = write_raw(tmp_path / "t.gguf", raw, kind)
    expected = torch.from_numpy(gguf.quants.dequantize(raw, kind))
    codes, scales, lows = EIGHT_BITS[kind](file.blocks("w"))
    assert CODES[kind] == Codes(8, 768 // scales.shape[1], lows is not None)
    assert (codes.dtype, scales.dtype, codes.shape) == (torch.int8, torch.float16, expected.shape)
    found = dequantize_int8(codes, scales, lows)
    parts = dequantize_int8(codes, scales).abs() + (0 if lows is None else lows.float().abs().repeat_interleave(32, 1))
    rounding = 2.0**-11 if kind in (Kind.Q5_K, Kind.Q6_K) else 0
    assert bool(((found - expected).abs() <= rounding * parts).all())


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("matrices", [Kind.F32, Kind.Q4_1])
def test_weights_have_hugging_face_names_and_row_order(tmp_path: Path, architecture, matrices) -> None:
    expected = write_gguf(tmp_path / "m.gguf", architecture=architecture, matrices=matrices, tied=False)
    found = dict(GGUFModel(GGUFFile(tmp_path / "m.gguf")).weights())
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name


def test_llama_rows_are_permuted_in_the_file() -> None:
    weight = random_weights("llama", tied=True)["model.layers.0.self_attn.q_proj.weight"]
    assert not torch.equal(llama_cpp_order(weight, SIZES["heads"]), weight)


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1])
def test_codes_use_the_row_order_of_the_dense_weight(tmp_path: Path, kind: Kind) -> None:
    write_gguf(tmp_path / "m.gguf", matrices=kind)
    source, name = GGUFModel(GGUFFile(tmp_path / "m.gguf")), "model.layers.1.self_attn.k_proj.weight"
    codes, scale, low = source.four_bits(name)
    rebuilt = codes.view(*scale.shape, 32).float() * scale.unsqueeze(2) + low.unsqueeze(2)
    assert torch.equal(rebuilt.view(codes.shape), source.weight(name))
    assert source.stored_format() == "int4" and source.codes_of(name) == Codes(4, has_lows=True)
    assert source.codes_of("model.norm.weight") is None


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(("architecture", "tied", "scaling", "rope"), [
    *((architecture, tied, {}, {}) for architecture in ("llama", "qwen2", "qwen3") for tied in (True, False)),
    ("llama", True, {"rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    ("qwen2", True, {"rope.scaling.factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
    ("llama", False, {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
                      "rope.scaling.original_context_length": 32, "rope.scaling.yarn_beta_fast": 2.0,
                      "rope.scaling.yarn_beta_slow": 0.5}, YARN | {"beta_fast": 2.0, "beta_slow": 0.5}),
    ("qwen3", True, {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
                     "rope.scaling.original_context_length": 32, "rope.scaling.yarn_log_multiplier": 0.5},
     YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}),
])  # fmt: skip
def test_logits_equal_transformers_on_the_same_weights(
    tmp_path: Path, architecture: str, tied: bool, scaling: dict, rope: dict
) -> None:
    weights = write_gguf(
        tmp_path / "m.gguf",
        architecture=architecture,
        matrices=Kind.Q8_0,
        tied=tied,
        metadata={"attention.key_length": SIZES["head_dim"]} | scaling,
    )
    reference = getattr(transformers, HF_MODEL_TYPES[architecture])(
        transformers.AutoConfig.for_model(
            architecture,
            vocab_size=len(vocabulary()[0]),
            hidden_size=SIZES["hidden"],
            num_hidden_layers=SIZES["layers"],
            num_attention_heads=SIZES["heads"],
            num_key_value_heads=SIZES["kv_heads"],
            head_dim=SIZES["head_dim"],
            intermediate_size=SIZES["wide"],
            max_position_embeddings=SIZES["context"],
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 20000.0} | rope,
            tie_word_embeddings=tied,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=None,
        )
    )
    missing = reference.load_state_dict(weights, strict=False).missing_keys
    assert missing == (["lm_head.weight"] if tied else [])
    reference.eval().tie_weights()
    ids = [5, 100, 9, 9, 260, 41, 2, 77, 18, 3, 150, 199]
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0]
    assert (logits_of(tmp_path / "m.gguf", ids) - expected).abs().max() < 1e-4


def test_config_matches_the_metadata(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tied=False)
    config, _ = gguf_config(str(tmp_path / "m.gguf"))
    assert (config.architecture, config.num_layers) == ("LlamaForCausalLM", 2)
    assert (config.num_heads, config.num_kv_heads) == (4, 2)
    assert (config.hidden_size, config.head_dim, config.intermediate_size) == (64, 16, 96)
    assert (config.rms_norm_eps, config.rope_theta, config.max_position_embeddings) == (1e-5, 20000.0, 128)
    assert (config.bos_token_id, config.eos_token_ids, config.tie_word_embeddings) == (1, (2,), False)


def test_an_architecture_that_is_not_a_string_is_refused(tmp_path: Path) -> None:
    def string(text: bytes) -> bytes:
        return struct.pack("<Q", len(text)) + text

    entry = string(b"general.architecture") + struct.pack("<IIQ", 9, 8, 1) + string(b"llama")  # an array of strings
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry)
    with pytest.raises(ModelError, match=r"architecture \['llama'\] is not supported"):
        gguf_config(str(tmp_path / "m.gguf"))


@pytest.mark.parametrize(("settings", "message"), [
    ({"architecture": "mamba"}, "architecture 'mamba' is not supported.*llama, qwen2, qwen3"),
    ({"metadata": {"embedding_length": 0}}, "embedding_length is 0"),
    ({"metadata": {"embedding_length": 2**31}}, "embedding_length is"),
    ({"metadata": {"embedding_length": 128}}, "embedding_length is 128"),
    ({"metadata": {"block_count": 3}}, "blk|missing"),
    ({"metadata": {"block_count": 2**30}}, "block_count"),
    ({"metadata": {"block_count": 1}}, "blk.1"),
    ({"metadata": {"feed_forward_length": 1 << 24}}, "the metadata implies"),
    ({"embedding_rows": 270}, "272 tokens.*270 rows"),
    ({"metadata": {"expert_count": 8}}, r"llama\.expert_used_count"),
    ({"metadata": {"expert_count": 8, "expert_used_count": 2}}, r"'blk\.0\.ffn_gate\.weight' is not part of a llama"),
    ({"metadata": {"rope.dimension_count": 8}}, "rope.dimension_count"),
    ({"metadata": {"attention.head_count": "four"}}, "head_count is 'four'"),
    ({"metadata": {"rope.scaling.type": "longrope", "rope.scaling.factor": 2}}, "longrope"),
    ({"metadata": {"attention.sliding_window": 64}}, r"llama\.attention\.sliding_window is 64"),
    ({"metadata": {"attention.causal": False}}, r"llama\.attention\.causal is False"),
    ({"metadata": {"attention.scale": 0.125}}, r"llama\.attention\.scale is 0\.125"),
    ({"metadata": {"attention.value_length": 8}}, r"llama\.attention\.value_length is 8"),
    ({"metadata": {"attn_logit_softcapping": 50.0}}, r"llama\.attn_logit_softcapping is 50"),
    ({"metadata": {"final_logit_softcapping": 30.0}}, r"llama\.final_logit_softcapping is 30"),
    ({"metadata": {"logit_scale": 0.25}}, r"llama\.logit_scale is 0\.25"),
    ({"metadata": {"embedding_scale": 12.0}}, r"llama\.embedding_scale is 12"),
    ({"metadata": {"rope.dimension_sections": [4, 4, 0, 0]}}, r"llama\.rope\.dimension_sections is a list"),
    ({"metadata": {"use_parallel_residual": True}}, r"llama\.use_parallel_residual is True"),
    ({"metadata": {"a_new_key": "on"}}, r"llama\.a_new_key is 'on', which is not supported"),
    ({"metadata": {"a_new_key": float("nan")}}, r"llama\.a_new_key is nan"),
    ({"drop": ("blk.1.ffn_up.weight",)}, "mlp.up_proj.weight is missing"),
    ({"drop": ("token_embd.weight",)}, "token_embd.weight"),
    ({"extra": {"blk.0.ssm_a.weight": np.zeros(4, np.float32)}}, "ssm_a"),
    ({"extra": {"rope_freqs.weight": np.ones(4, np.float32)}}, r"rope_freqs\.weight must be 8 positive numbers"),
    ({"extra": {"rope_freqs.weight": np.zeros(8, np.float32)}}, r"rope_freqs\.weight must be 8 positive numbers"),
    ({"extra": {"rope_factors_long.weight": np.ones(8, np.float32)}}, r"rope_factors_long\.weight.*both others"),
    (
        {"extra": {"rope_freqs.weight": np.ones(8, np.float32)}, "metadata": {"rope.scale_linear": 2.0}},
        r"rope_freqs\.weight can't both apply",
    ),
    ({"extra": {"blk.0.attn_q.bias": np.zeros(64, np.int8)}}, "missing"),
])  # fmt: skip
def test_unsupported_or_contradictory_files_are_refused_by_name(tmp_path: Path, settings: dict, message: str) -> None:
    path = tmp_path / "odd.gguf"
    if settings.get("architecture") == "mamba":
        write_tensors(path, {"a": (np.zeros((1, 32), np.float32), Kind.F32)})
        path.write_bytes(path.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba"))
    else:
        write_gguf(path, **settings)
    with pytest.raises(ModelError, match=message) as error:
        gguf_config(str(path))
    assert str(path) in str(error.value)


def test_keys_without_an_effect_are_accepted(tmp_path: Path) -> None:
    neutral = {
        "vocab_size": 99, "tensor_data_layout": "Meta AI original pth", "expert_count": 0, "expert_used_count": 2,
        "rope.scaling.finetuned": True, "rope.dimension_count": 16, "attention.value_length": 16,
        "attention.scale": 0.25, "attention.causal": True, "attention.sliding_window": 128, "attention.clamp_kqv": 0.0,
        "logit_scale": 1.0,
        "embedding_scale": 0.0, "use_parallel_residual": False, "leading_dense_block_count": 0, "a_new_key": "",
        "rope.dimension_sections": [0, 0, 0, 0], "rope.scaling.type": "none", "embedding_length_out": 64,
    }  # fmt: skip
    write_gguf(tmp_path / "plain.gguf")
    write_gguf(tmp_path / "m.gguf", metadata=neutral)
    assert gguf_config(str(tmp_path / "m.gguf")) == gguf_config(str(tmp_path / "plain.gguf"))


def test_end_tokens_are_those_of_text_turn_and_message(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tokens={"eot": 0, "eom": 1})
    assert gguf_config(str(tmp_path / "m.gguf"))[0].eos_token_ids == (2, 0, 1)


def test_an_array_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    content = HEADER + struct.pack("<QQQ", 0, 1, 1) + b"a" + struct.pack("<IIQ", 9, 0, 2**22 + 1)
    with open(tmp_path / "m.gguf", "wb") as file:
        file.write(content)
        file.truncate(2**23)
    with pytest.raises(ModelError, match="'a' has 4194305 items, and at most 4194304 are read"):
        GGUFFile(tmp_path / "m.gguf")


def test_an_unreadable_quantisation_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tensor("w", np.zeros((2, 32), np.int32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"t\.gguf.*'w'.*I32"):
        GGUFFile(tmp_path / "t.gguf").dense("w")


HEADER = b"GGUF" + struct.pack("<I", 3)


@pytest.mark.parametrize(("content", "message"), [
    (b"", "0 bytes"),
    (b"GGUF", "4 bytes"),
    (b"PK\x03\x04" + bytes(100), r"b'PK"),
    (b"GGUF" + struct.pack(">I", 3) + bytes(100), "big-endian"),
    (b"GGUF" + struct.pack("<I", 1) + bytes(100), "version 1 "),
    (HEADER + struct.pack("<QQ", 2**60, 0) + bytes(100), "don't fit"),
    (HEADER + struct.pack("<QQ", 0, 2**63) + bytes(100), "don't fit"),
    (HEADER + struct.pack("<QQQ", 0, 1, 2**62) + bytes(100), "truncated"),
    (HEADER + struct.pack("<QQQ", 0, 1, 1) + b"a" + struct.pack("<IIQ", 9, 4, 2**61) + bytes(50), "'a'.*truncated"),
    (HEADER + struct.pack("<QQQ", 0, 1, 1) + b"a" + struct.pack("<IIQ", 9, 8, 2**40) + bytes(50), "8796093022208"),
    (HEADER + struct.pack("<QQQ", 0, 1, 1) + b"a" + struct.pack("<IIQ", 9, 9, 1) + bytes(50), "'a'.*type 9"),
    (HEADER + struct.pack("<QQQ", 0, 1, 1) + b"a" + struct.pack("<I", 99) + bytes(50), "'a'.*type 99"),
    (HEADER + struct.pack("<QQQ", 0, 1, 2) + b"\xff\xfe" + bytes(50), "UTF-8"),
    (HEADER + struct.pack("<QQQ", 1, 0, 1) + b"w" + struct.pack("<I", 5) + bytes(90), "5 dimensions"),
    (HEADER + struct.pack("<QQQ", 1, 0, 1) + b"w" + struct.pack("<IQIQ", 1, 32, 77, 0) + bytes(90), "type 77"),
    (HEADER + struct.pack("<QQQ", 1, 0, 1) + b"w" + struct.pack("<IQIQ", 1, 33, 3, 0) + bytes(90), "blocks of 32"),
    (HEADER + struct.pack("<QQQ", 1, 0, 1) + b"w" + struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0) + bytes(90), "ends"),
    (HEADER + struct.pack("<QQQ", 1, 0, 1) + b"w" + struct.pack("<IQIQ", 1, 4, 0, 2**63) + bytes(90), "ends at"),
])  # fmt: skip
def test_impossible_headers_are_rejected_immediately(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    start = time.thread_time()
    with pytest.raises(ModelError, match=message) as error:
        GGUFFile(path)
    assert str(path) in str(error.value)
    assert time.thread_time() - start < 1.0


def test_missing_files_and_folders_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(ModelError, match="can't be read"):
            GGUFFile(path)


def test_truncated_files_are_rejected(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", matrices=Kind.Q4_1)
    content = (tmp_path / "m.gguf").read_bytes()
    rng = random.Random(0)
    cut = tmp_path / "cut.gguf"
    # the writer pads the end to 32 bytes, and no tensor uses the padding
    for length in [*rng.sample(range(len(content) - 32), 150), len(content) - 33]:
        cut.write_bytes(content[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            GGUFModel(GGUFFile(cut))


def test_random_damage_raises_only_model_errors(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", matrices=Kind.Q4_1)
    content = (tmp_path / "m.gguf").read_bytes()
    header = GGUFFile(tmp_path / "m.gguf").info("token_embd.weight").offset
    rng = random.Random(1)
    bad = tmp_path / "bad.gguf"
    refused = 0
    for _ in range(300):
        damaged = bytearray(content)
        for _ in range(rng.choice((1, 1, 2, 8))):
            damaged[rng.randrange(header)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        bad.write_bytes(damaged)
        try:
            read_everything(bad)
        except ModelError as error:
            assert str(bad) in str(error)
            refused += 1
    assert refused > 50  # the damage does reach the checks
