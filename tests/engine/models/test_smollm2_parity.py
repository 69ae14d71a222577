"""Parity of the default model with transformers, on the same dequantised float32 weights: greedy text by token."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from engine.attention.kv_cache import KVCache
from engine.checkpoint.gguf_file import GGUFFile
from engine.checkpoint.gguf_model import GGUFModel
from engine.checkpoint.source import ModelSource, resolve_model
from engine.config import DEFAULT_MODEL
from engine.layers.int4 import int4_available
from engine.loader.cpu_formats import load_gguf
from engine.models import Decoder
from engine.text.tokenizer import Tokenizer
from tests.support.attention import decode_attention, prefill_attention

CHATS = [
    "What is the capital of France, and what is it known for?",
    "Explain in simple words why the sky is blue.",
    "Write a short story about a fox who learns to swim.",
]
PLAIN = ["The three most important inventions of the 19th century are", "def fibonacci(n):\n    "]
NEW_TOKENS = 64
PAGE, PAGES_EACH = 16, 8
TEXT = (
    "The sun is a star at the centre of the solar system. It is a massive, nearly perfect sphere of hot plasma, heated "
    "by nuclear fusion in its core. Light from the sun takes about eight minutes and twenty seconds to reach us. "
    "Plants use this light to turn water and carbon dioxide into sugar and oxygen, and almost all life depends on it. "
    "In 1969 two astronauts walked on the moon for the first time, while a third stayed in orbit and waited for them."
)


@pytest.fixture(scope="module")
def source() -> ModelSource:
    return resolve_model(DEFAULT_MODEL)


@pytest.fixture(scope="module")
def tokenizer(source: ModelSource) -> Tokenizer:
    return Tokenizer.load(source)


@pytest.fixture(scope="module")
def float32(source: ModelSource) -> Decoder:
    return load_gguf(source.path, cpu_weight_format="fp32", max_len=512)[1]


def make_cache(model: Decoder, pages: int) -> KVCache:
    config = model.config
    return KVCache(config.cache_specs(), pages, PAGE, model.dtype, "cpu")


@torch.inference_mode()
def greedy(model: Decoder, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Generate `count` tokens per prompt, ignoring EOS: prefill one by one, then decode in one batch."""
    kv = make_cache(model, 1 + len(prompts) * PAGES_EACH)
    tables = [list(range(1 + row * PAGES_EACH, 1 + (row + 1) * PAGES_EACH)) for row in range(len(prompts))]
    outputs: list[list[int]] = []
    for prompt, table in zip(prompts, tables, strict=True):
        attention = prefill_attention(kv, [(0, len(prompt))], [table])
        hidden = model(torch.tensor(prompt), torch.arange(len(prompt)), attention)
        outputs.append([int(model.compute_logits(hidden[-1:]).argmax())])
    page_table = torch.tensor(tables)
    for step in range(count - 1):
        positions = torch.tensor([len(prompt) + step for prompt in prompts])
        last = torch.tensor([output[-1] for output in outputs])
        logits = model.compute_logits(model(last, positions, decode_attention(kv, page_table, positions)))
        for output, token in zip(outputs, logits.argmax(dim=1).tolist(), strict=True):
            output.append(token)
    return outputs


def reference_model(source: ModelSource) -> LlamaForCausalLM:
    """Return transformers' Llama with the file's dequantised weights."""
    weights = GGUFModel(GGUFFile(source.path))
    config = weights.config
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config["vocab_size"],
            hidden_size=576,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            intermediate_size=1536,
            max_position_embeddings=8192,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
            tie_word_embeddings=True,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=2,
        )
    )
    assert model.load_state_dict(dict(weights.weights()), strict=False).missing_keys == ["lm_head.weight"]
    model.tie_weights()
    return model.eval()


def test_greedy_text_equals_transformers(source: ModelSource, tokenizer: Tokenizer, float32: Decoder) -> None:
    prompts = [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in CHATS]
    prompts += [tokenizer.encode(text) for text in PLAIN]
    found = greedy(float32, prompts, NEW_TOKENS)
    width = max(map(len, prompts))
    ids = torch.tensor([[2] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.inference_mode():
        # ignore EOS, so that all 64 tokens of every prompt are compared
        wanted = reference_model(source).generate(
            ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None
        )
    assert found == wanted[:, width:].tolist()
    assert "Paris" in tokenizer.decode(found[0])


@torch.inference_mode()
def loss_in_chunks(model: Decoder, ids: list[int], chunk: int) -> float:
    """Return the mean negative log likelihood of ids[1:] in nats, computed `chunk` tokens at a time."""
    kv = make_cache(model, 2 + len(ids) // PAGE)
    table = list(range(1, kv.num_pages))
    logits = []
    for start in range(0, len(ids) - 1, chunk):
        part = ids[start : min(start + chunk, len(ids) - 1)]
        attention = prefill_attention(kv, [(start, len(part))], [table])
        hidden = model(torch.tensor(part), torch.arange(start, start + len(part)), attention)
        logits.append(model.compute_logits(hidden).float())
    return float(F.cross_entropy(torch.cat(logits), torch.tensor(ids[1:])))


@pytest.mark.skipif(not int4_available(), reason="this CPU or torch has no fast 4-bit kernel")
def test_int4_weights_match_the_loss_of_exact_weights(
    source: ModelSource, tokenizer: Tokenizer, float32: Decoder
) -> None:
    ids = tokenizer.encode(TEXT)
    exact = loss_in_chunks(float32, ids, 128)
    int4 = load_gguf(source.path, cpu_weight_format="int4", max_len=512)[1]
    assert 1.0 < exact < 3.0
    for chunk in (4, 16, 128):  # 8-bit head and 4-bit layers; 4-bit layers; dense copies
        assert math.isclose(loss_in_chunks(int4, ids, chunk), exact, rel_tol=0.01)
