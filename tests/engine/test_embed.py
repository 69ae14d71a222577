"""Engine.embed and Engine.score: published layouts of folders, against transformers."""

from __future__ import annotations

import json

import numpy as np
import pytest

from engine.errors import ConfigError, EngineError, ModelError, PromptTooLong, RequestError
from tests.engine.checkpoint.gguf_samples import write_gguf
from tests.support.embedding_models import (
    QUERY,
    RERANKER_TEMPLATE,
    EmbeddingReference,
    HeadReference,
    TokenReference,
    change_config,
    write_folder,
    write_modules,
)
from tests.support.engines import engines
from tests.support.families import FAMILIES, tiny_folder

TEXTS = ["the quick brown fox", "red", "a lazy dog sleeps beside the river and the fox", "blue bird sings " * 9]
PAIRS = [("red fox", text) for text in TEXTS]


@pytest.fixture
def make(tmp_path):
    with engines(model=str(tmp_path)) as make:
        yield make


def assert_vectors(found, expected):
    assert all(one.dtype == np.float32 for one in found)
    np.testing.assert_allclose(np.stack(found), np.stack(expected), atol=1e-4)


def test_a_sentence_transformers_folder_without_head_or_prefix(tiny_model, tmp_path, make):
    """The layout of Qwen3-Embedding: named Qwen3ForCausalLM, saved as Qwen3Model."""
    write_folder(tiny_model, tmp_path)
    change_config(tmp_path, architectures=["Qwen3ForCausalLM"])
    write_modules(tmp_path, "Transformer", "Pooling", "Normalize")
    reference, engine = EmbeddingReference(tmp_path), make(max_num_batched_tokens=32)
    assert_vectors(engine.embed(TEXTS), [reference.vector(text) for text in TEXTS])
    assert_vectors(engine.embed("red", dimensions=16), [reference.vector("red", 16)])
    assert_vectors(engine.embed("red", normalize=False), [reference.vector("red", normalize=False)])
    assert_vectors(engine.embed(TEXTS, prompt_name="query"), [reference.vector(QUERY + text) for text in TEXTS])
    ids = [[5, 9, 200], [7]]
    assert_vectors(engine.embed(prompt_token_ids=ids), [reference.vector(one) for one in ids])
    assert engine.embed([]) == []
    vectors = [reference.vector(text) for text in TEXTS]
    np.testing.assert_allclose(
        engine.score("red", TEXTS), [reference.vector("red") @ one for one in vectors], atol=1e-4
    )
    with pytest.raises(RequestError, match="no LM head, so it generates no text"):
        engine.generate("red")


@pytest.mark.parametrize(
    "pooling",
    [
        {"pooling_mode_lasttoken": False, "pooling_mode_mean_tokens": True},
        {"pooling_mode_lasttoken": False, "pooling_mode": "mean"},
    ],
    ids=["flags", "name"],
)
def test_mean_pooling_without_normalisation_and_a_default_prompt(tiny_model, tmp_path, make, pooling):
    write_folder(tiny_model, tmp_path)
    write_modules(tmp_path, "Transformer", "Pooling", pooling=pooling)
    prompts = {"prompts": {"query": QUERY}, "default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 150}))
    reference, engine = EmbeddingReference(tmp_path, "mean", normalize=False), make(max_num_batched_tokens=16)
    assert_vectors(engine.embed(TEXTS), [reference.vector(QUERY + text) for text in TEXTS])
    with pytest.raises(PromptTooLong, match=r"prompt_token_ids\[1\] has 151 tokens, and at most 150 are embedded"):
        engine.embed(prompt_token_ids=[[1], [1] * 151])


def test_a_chat_model_embeds_with_the_last_token_and_still_generates(make_engine, lively_model, reference):
    engine = make_engine()
    embedded = EmbeddingReference(lively_model)
    assert_vectors(engine.embed(TEXTS), [embedded.vector(text) for text in TEXTS])
    mean = EmbeddingReference(lively_model, "mean")
    assert_vectors(engine.embed(TEXTS, pooling="mean"), [mean.vector(text) for text in TEXTS])
    ids = [5, 9, 200]
    params = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    assert engine.generate(prompt_token_ids=ids, sampling_params=params)[0].token_ids == reference.greedy(ids, 8)


QUICK = ("llama", "gemma3_text", "qwen3_moe", "phi")


@pytest.mark.parametrize(
    "family", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in sorted(FAMILIES)]
)
def test_every_family_embeds_with_its_head_and_without(tiny_model, tmp_path, family):
    from transformers import AutoModel

    tiny_folder(family, tmp_path / "whole", tiny_model)
    tiny_folder(family, tmp_path / "bare", tiny_model)
    AutoModel.from_pretrained(tmp_path / "whole", dtype="float32").save_pretrained(tmp_path / "bare")
    prompts = [list(range(3, 40)), [7], [250, 8, 8, 8, 100]]
    reference = EmbeddingReference(tmp_path / "whole", "mean", normalize=False)
    for folder in ("whole", "bare"):
        with engines(model=str(tmp_path / folder)) as make:
            engine = make(max_num_batched_tokens=16)
            assert engine.info.generates_text == (folder == "whole")
            found = engine.embed(prompt_token_ids=prompts, pooling="mean", normalize=False)
        assert_vectors(found, [reference.vector(ids) for ids in prompts])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_classification_head_scores_pairs(tiny_model, tmp_path, make, ranks):
    write_folder(tiny_model, tmp_path, "Qwen3ForSequenceClassification", num_labels=1)
    reference, engine = HeadReference(tmp_path), make(max_num_batched_tokens=32, tensor_parallel_size=ranks)
    logits = [float(reference.logits(*pair)[0]) for pair in PAIRS]
    np.testing.assert_allclose(engine.score("red fox", TEXTS, use_activation=False), logits, atol=1e-4)
    np.testing.assert_allclose(engine.score("red fox", TEXTS), 1 / (1 + np.exp(-np.array(logits))), atol=1e-4)
    each = engine.score(TEXTS, list(reversed(TEXTS)), use_activation=False)
    pairs = zip(TEXTS, reversed(TEXTS), strict=True)
    np.testing.assert_allclose(each, [float(reference.logits(*pair)[0]) for pair in pairs], atol=1e-4)


def test_a_head_follows_weight_updates(tiny_model, tmp_path, make):
    import torch

    write_folder(tiny_model, tmp_path, "Qwen3ForSequenceClassification", num_labels=1)
    engine = make()
    before = engine.score("red", "fox", use_activation=False)[0]
    head = HeadReference(tmp_path).model.score.weight.detach()
    assert engine.update_weights({"score.weight": -2 * head}, version="new") == 1
    assert engine.score("red", "fox", use_activation=False)[0] == pytest.approx(-2 * before, abs=1e-4)
    assert torch.isfinite(head).all()


@pytest.mark.parametrize(
    "config",
    [{"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, {"problem_type": "regression"}],
    ids=["activation_fn", "problem_type"],
)
def test_an_activation_of_the_folder_is_used(tiny_model, tmp_path, make, config):
    write_folder(tiny_model, tmp_path, "Qwen3ForSequenceClassification", num_labels=1)
    change_config(tmp_path, **config)
    reference = HeadReference(tmp_path)
    expected = [float(reference.logits(*pair)[0]) for pair in PAIRS]
    np.testing.assert_allclose(make().score("red fox", TEXTS), expected, atol=1e-4)


def test_two_tokens_score_pairs_with_the_template_of_qwen3_reranker(tiny_model, tmp_path, make):
    write_folder(tiny_model, tmp_path, "Qwen3ForCausalLM")
    engine = make(score_tokens=("n", "y"), num_speculative_tokens=2, max_model_len=512)
    reference = TokenReference(tmp_path, *engine.tokenizer.encode("ny", add_special_tokens=False))

    def prompt(query, document, instruction):
        return (
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
            'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
            f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\n"
        )

    default = "Given a web search query, retrieve relevant passages that answer the query"
    expected = [reference.score(prompt(*pair, default)) for pair in PAIRS]
    assert max(expected) - min(expected) > 1e-3
    np.testing.assert_allclose(engine.score("red fox", TEXTS), expected, atol=1e-4)
    with_own = engine.score("red fox", TEXTS[:2], instruction="Find rhymes")
    np.testing.assert_allclose(
        with_own, [reference.score(prompt(*pair, "Find rhymes")) for pair in PAIRS[:2]], atol=1e-4
    )


MESSAGES = {
    "transformer_task": "text-generation", "modality_config": {"text": {}, "message": {"format": "flat"}},
    "processing_kwargs": {"chat_template": {"add_generation_prompt": True}},
}  # fmt: skip


def write_logit_score(folder, activation=None, **transformer):
    write_modules(folder, "Transformer", "LogitScore")
    values = {"true_token_id": 77, "false_token_id": 88}
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps(values))
    (folder / "chat_template.jinja").write_text(RERANKER_TEMPLATE)
    (folder / "sentence_bert_config.json").write_text(json.dumps(transformer))
    values = {"prompts": {}, "default_prompt_name": None, "activation_fn": activation, "model_type": "CrossEncoder"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(values))


def test_a_sentence_transformers_reranker_gives_tokens_and_template(tiny_model, tmp_path, make):
    write_folder(tiny_model, tmp_path, "Qwen3ForCausalLM")
    write_logit_score(tmp_path, **MESSAGES)
    reference, engine = TokenReference(tmp_path, 88, 77), make()
    expected = [reference.score(f"<|im_start|>match: red fox / {text}<|im_end|>+") for text in TEXTS]
    np.testing.assert_allclose(engine.score("red fox", TEXTS), expected, atol=1e-4)
    expected = reference.score("<|im_start|>rhymes: red fox / red<|im_end|>+")
    assert engine.score("red fox", "red", instruction="rhymes") == pytest.approx([expected], abs=1e-4)


def test_a_sentence_transformers_reranker_of_texts_without_activation(tiny_model, tmp_path, make):
    write_folder(tiny_model, tmp_path, "Qwen3ForCausalLM")
    write_logit_score(tmp_path, "torch.nn.modules.linear.Identity", modality_config={"text": {}})
    reference = TokenReference(tmp_path, 88, 77)
    expected = np.array([reference.score(f"red fox{text}<|im_end|>") for text in TEXTS])
    np.testing.assert_allclose(make().score("red fox", TEXTS), np.log(expected / (1 - expected)), atol=1e-3)


def test_a_sentence_transformers_head_takes_messages(tiny_model, tmp_path, make):
    write_folder(tiny_model, tmp_path, "Qwen3ForSequenceClassification", num_labels=1)
    write_modules(tmp_path, "Transformer")
    values = MESSAGES | {"transformer_task": "sequence-classification", "processing_kwargs": {}}
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(values))
    (tmp_path / "chat_template.jinja").write_text(RERANKER_TEMPLATE)
    reference, engine = HeadReference(tmp_path), make()
    prompts = [f"<|im_start|>match: red fox / {text}<|im_end|>" for text in TEXTS]
    expected = [float(reference.logits(prompt, special=False)[0].sigmoid()) for prompt in prompts]
    np.testing.assert_allclose(engine.score("red fox", TEXTS), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (lambda folder: write_modules(folder, "Transformer"), "lists Transformer;"),
        (
            lambda folder: write_logit_score(folder, **MESSAGES | {"processing_kwargs": {"chat_template": {"x": 1}}}),
            "processing_kwargs.chat_template has x",
        ),
        (lambda folder: write_modules(folder, "Transformer", "Pooling", "Dense"), "Transformer, Pooling, Dense"),
        (
            lambda folder: write_modules(folder, "Transformer", "Pooling", pooling={"pooling_mode_max_tokens": True}),
            "pooling_mode_lasttoken, pooling_mode_max_tokens; the last token or the mean is supported",
        ),
        (
            lambda folder: write_modules(folder, "Transformer", "Pooling", pooling={"include_prompt": False}),
            "include_prompt=false",
        ),
        (lambda folder: (folder / "modules.json").write_text("{"), "can't be read as JSON"),
        (
            lambda folder: (folder / "modules.json").write_text('[{"idx": 0, "path": "../x", "type": "a.Pooling"}]'),
            "outside the folder",
        ),
        (lambda folder: change_config(folder, is_causal=False), "'is_causal' must be true"),
        (lambda folder: change_config(folder, classifier_from_token=["yes"]), "classifier_from_token must be two"),
        (lambda folder: change_config(folder, problem_type="ranking"), "problem_type is 'ranking'"),
        (lambda folder: change_config(folder, activation_fn="torch.nn.Tanh"), "'activation_fn' is 'torch.nn.Tanh'"),
    ],
    ids=[
        "alone",
        "template",
        "dense",
        "max",
        "without prompt",
        "json",
        "path",
        "bidirectional",
        "one token",
        "problem",
        "tanh",
    ],
)
def test_what_a_folder_asks_for_and_the_engine_can_not_compute_is_refused(tiny_model, tmp_path, make, write, said):
    write_folder(tiny_model, tmp_path)
    write(tmp_path)
    with pytest.raises(ModelError, match=said.replace("[", r"\[")):
        make()


def test_arguments_are_checked_before_anything_runs(tiny_model, tmp_path, make, make_engine):
    write_folder(tiny_model, tmp_path)
    change_config(tmp_path, matryoshka_dimensions=[16, 32])
    engine = make()
    for arguments, param in (
        ({"dimensions": 49}, "dimensions"),
        ({"dimensions": 20}, "dimensions"),
        ({"pooling": "cls"}, "pooling"),
        ({"prompt_name": "query"}, "prompt_name"),
    ):
        with pytest.raises(RequestError) as refused:
            engine.embed(["red"], **arguments)
        assert refused.value.param == param
    with pytest.raises(RequestError, match="queries has 2 texts and documents 3"):
        engine.score(["a", "b"], ["a", "b", "c"])
    with pytest.raises(RequestError, match="no template that reads it"):
        engine.score("a", "b", instruction="x")
    with pytest.raises(ConfigError, match="must be two different tokens"):
        make(score_tokens=("yes", "yes"))
    with pytest.raises(ConfigError, match="score_tokens need an LM head"):
        make(score_tokens=("y", "n")).score("a", "b")
    with pytest.raises(ConfigError, match="'the quick brown' is not one token"):
        make_engine(score_tokens=("the quick brown", "no")).score("a", "b")


@pytest.mark.parametrize(("kind", "mode"), [(1, "mean"), (3, "last"), (None, "last")])
def test_a_gguf_file_says_how_it_is_pooled(tmp_path, kind, mode):
    path = tmp_path / "m.gguf"
    write_gguf(path, metadata={} if kind is None else {"pooling_type": kind})
    ids = [5, 9, 20]
    settings = {"cpu_weight_format": "fp32", "enable_return_hidden_states": True}
    with engines(model=str(path), **settings) as make:
        engine = make(dtype="auto", max_model_len=64)
        wanted = {"max_tokens": 0, "return_hidden_states": True}
        (whole,) = engine.generate(prompt_token_ids=ids, sampling_params=wanted)
        expected = whole.hidden_states.mean(0) if mode == "mean" else whole.hidden_states[-1]
        assert_vectors(engine.embed(prompt_token_ids=ids, normalize=False), [expected])


def test_a_gguf_file_with_another_pooling_is_refused(tmp_path):
    write_gguf(tmp_path / "m.gguf", metadata={"pooling_type": 2})
    with engines(model=str(tmp_path / "m.gguf")) as make, pytest.raises(ModelError, match="llama.pooling_type is 2"):
        make()


def test_several_labels_have_no_score(tiny_model, tmp_path, make):
    write_folder(tiny_model, tmp_path, "Qwen3ForSequenceClassification", num_labels=3)
    with pytest.raises(RequestError, match="has 3 labels, and a score needs one"):
        make().score("red", "fox")


def test_an_embedding_that_fails_raises(make_engine):
    engine = make_engine()
    engine.loop.executor.worker.runner.model.embedding.weight.data[42] = float("inf")
    with pytest.raises(EngineError, match="hidden states are not finite"):
        engine.embed(prompt_token_ids=[[5, 42]])
