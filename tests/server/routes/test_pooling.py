"""/v1/embeddings, /pooling, /v1/score and /v1/rerank: the vectors and scores of transformers, in vLLM's formats."""

from __future__ import annotations

import base64
import random
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import openai
import pytest

from server.schemas import answers as wire
from tests.server.conftest import running, tiny_config
from tests.support.embedding_models import (
    QUERY,
    EmbeddingReference,
    HeadReference,
    TokenReference,
    write_folder,
    write_modules,
)
from tests.support.waiting import PATIENCE

TEXTS = ["the quick brown fox", "red", "a lazy dog sleeps beside the river", "blue bird sings " * 9]


@pytest.fixture(scope="module")
def folder(tiny_model, tmp_path_factory):
    folder = write_folder(tiny_model, tmp_path_factory.mktemp("embedding"))
    write_modules(folder, "Transformer", "Pooling", "Normalize")
    return folder


@pytest.fixture(scope="module")
def reference(folder):
    return EmbeddingReference(folder)


@pytest.fixture(scope="module")
def embedder(folder):
    """An embedding model without LM head, in a process of its own."""
    with running(tiny_config(folder, in_process=False, max_num_batched_tokens=64, max_waiting=256)) as handle:
        yield handle


@pytest.fixture(scope="module")
def classifier(tiny_model, tmp_path_factory):
    folder = write_folder(
        tiny_model, tmp_path_factory.mktemp("classifier"), "Qwen3ForSequenceClassification", num_labels=1
    )
    with running(tiny_config(folder)) as handle:
        yield handle, HeadReference(folder)


def vectors(answer, field="embedding"):
    assert [one["index"] for one in answer["data"]] == list(range(len(answer["data"])))
    return np.array([one[field] for one in answer["data"]], np.float32)


def assert_close(found, expected):
    np.testing.assert_allclose(found, np.stack(expected), atol=1e-4)


def error_of(response, status=400):
    assert response.status_code == status, response.text
    return response.json()["error"]


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_openais_client_gets_the_vectors(embedder, reference, encoding):
    client = openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="none", max_retries=0)
    answer = client.embeddings.create(model="tiny", input=TEXTS, encoding_format=encoding)
    found = [one.embedding for one in answer.data]
    if encoding == "base64":
        found = [np.frombuffer(base64.b64decode(one), "<f4") for one in found]
    assert_close(found, [reference.vector(text) for text in TEXTS])
    count = sum(len(reference.tokenizer(text)["input_ids"]) for text in TEXTS)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == count and answer.object == "list"
    by_default = client.embeddings.create(model="tiny", input="red", dimensions=16)  # it asks for base64 and decodes it
    assert_close(by_default.data[0].embedding, reference.vector("red", 16))


def test_options_of_an_embedding(embedder, reference):
    def embed(given, **options):
        answer = embedder.answer("/v1/embeddings", {"input": given, **options})
        wire.Embeddings.model_validate(answer, strict=True)
        return vectors(answer)

    assert_close(embed([[5, 9, 200], [7]]), [reference.vector([5, 9, 200]), reference.vector([7])])
    assert_close(embed([5, 9, 200]), [reference.vector([5, 9, 200])])
    assert_close(embed("red", use_activation=False), [reference.vector("red", normalize=False)])
    assert_close(embed("red", normalize=False), [reference.vector("red", normalize=False)])
    assert_close(embed("red", prompt_name="query"), [reference.vector(QUERY + "red")])
    plain = reference.tokenizer("red", add_special_tokens=False)["input_ids"]
    assert_close(embed("red", add_special_tokens=False), [reference.vector(plain)])
    assert_close(embed("red", user="me", embed_dtype="float32"), [reference.vector("red")])


def test_a_cut_keeps_the_tokens_that_end_a_text(embedder, reference):
    *plain, end = reference.tokenizer(TEXTS[3])["input_ids"]
    for options, expected in (
        ({"truncate_prompt_tokens": 8}, [*plain[:7], end]),
        ({"truncate_prompt_tokens": 8, "truncation_side": "left"}, [*plain[-7:], end]),
        ({"truncate_prompt_tokens": 8, "add_special_tokens": False}, plain[:8]),
        ({"truncate_prompt_tokens": 500}, [*plain, end]),
    ):
        answer = embedder.answer("/v1/embeddings", {"input": TEXTS[3], **options})
        assert_close(vectors(answer), [reference.vector(expected)])
    longest = embedder.answer("/v1/embeddings", {"input": "blue bird " * 100, "truncate_prompt_tokens": -1})
    assert longest["usage"]["prompt_tokens"] == 256


def test_pooling_gives_vectors_in_its_own_format(embedder, reference, start_server, folder):
    answer = embedder.answer("/pooling", {"input": TEXTS, "task": "embed"})
    wire.Pooled.model_validate(answer, strict=True)
    assert_close(vectors(answer, "data"), [reference.vector(text) for text in TEXTS])
    refused = error_of(embedder.post("/pooling", {"input": "red", "task": "token_embed"}))
    assert refused["param"] == "task" and "--enable-return-hidden-states" in refused["message"]
    refused = error_of(embedder.post("/pooling", {"input": "red", "task": "classify"}))
    assert refused["param"] == "task" and "no classification head" in refused["message"]


def test_vectors_of_every_token(server, folder, reference):
    with running(tiny_config(folder, enable_return_hidden_states=True)) as handle:
        answer = handle.answer("/pooling", {"input": ["red bird", "a"], "task": "token_embed"})
    wire.Pooled.model_validate(answer, strict=True)
    for text, one in zip(["red bird", "a"], answer["data"], strict=True):
        ids = reference.tokenizer(text)["input_ids"]
        assert_close(np.array(one["data"]), [reference.vector(ids[: end + 1]) for end in range(len(ids))])


def test_a_chat_model_embeds_beside_its_chats(server, tiny_model):
    reference = EmbeddingReference(tiny_model)
    chat = {"messages": [{"role": "user", "content": "red"}], "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    alone = server.answer("/v1/chat/completions", chat)["choices"]
    with ThreadPoolExecutor(4) as pool:
        chats = [pool.submit(server.answer, "/v1/chat/completions", chat) for _ in range(2)]
        answers = list(pool.map(lambda _: server.answer("/v1/embeddings", {"input": TEXTS}), range(6)))
    for answer in answers:
        assert_close(vectors(answer), [reference.vector(text) for text in TEXTS])
    assert [one.result()["choices"] for one in chats] == [alone] * 2
    server.wait_idle()


def test_64_clients_get_their_own_vectors(embedder, reference):
    chance = random.Random(1)
    prompts = [[chance.randrange(3, 300) for _ in range(chance.randrange(1, 90))] for _ in range(64)]

    def embed(ids):
        return vectors(http.post("/v1/embeddings", json={"input": [ids, ids[:1]]}).json())

    with httpx.Client(base_url=embedder.url, timeout=PATIENCE) as http, ThreadPoolExecutor(64) as pool:
        for ids, found in zip(prompts, pool.map(embed, prompts), strict=True):
            assert_close(found, [reference.vector(ids), reference.vector(ids[:1])])


def test_clients_that_disconnect_leave_nothing(embedder):
    def leave(number):
        try:
            http.post("/v1/embeddings", json={"input": [[number + 1] * 250] * 8}, timeout=0.002 * (1 + number % 20))
        except httpx.TimeoutException:
            return 1
        return 0

    with httpx.Client(base_url=embedder.url) as http, ThreadPoolExecutor(16) as pool:
        assert sum(pool.map(leave, range(48))) > 0
    embedder.wait_idle()
    embedder.wait(lambda: embedder.service.client.stats().kv_cache_usage == 0, "free pages")
    embedder.wait(lambda: embedder.service.admission.outputs.used == 0, "the end of the unread answers")
    assert embedder.service.client.stats().idle_check_failures == 0


def test_scores_without_head_are_cosines_of_embeddings(embedder, reference):
    query = reference.vector("red")
    expected = [float(query @ reference.vector(text)) for text in TEXTS]
    for path in ("/score", "/v1/score"):
        answer = embedder.answer(path, {"text_1": "red", "text_2": TEXTS})
        wire.Scores.model_validate(answer, strict=True)
        np.testing.assert_allclose([one["score"] for one in answer["data"]], expected, atol=1e-4)
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        answer = embedder.answer(path, {"query": "red", "documents": TEXTS, "top_n": 2})
        wire.Reranked.model_validate(answer, strict=True)
        order = sorted(range(4), key=lambda index: -expected[index])[:2]
        assert [one["index"] for one in answer["results"]] == order
        assert [one["document"]["text"] for one in answer["results"]] == [TEXTS[index] for index in order]


def test_a_classification_head_scores_and_classifies(classifier):
    server, reference = classifier
    expected = [float(reference.logits("red", text)[0].sigmoid()) for text in TEXTS]
    for names in (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")):
        answer = server.answer("/v1/score", {names[0]: "red", names[1]: TEXTS})
        np.testing.assert_allclose([one["score"] for one in answer["data"]], expected, atol=1e-4)
    count = sum(len(reference.tokenizer("red", text)["input_ids"]) for text in TEXTS)
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == count
    plain = server.answer("/v1/rerank", {
        "query": "red", "documents": [{"text": text} for text in TEXTS], "use_activation": False,
        "return_documents": False,
    })  # fmt: skip
    assert all("document" not in one for one in plain["results"])
    found = {one["index"]: one["relevance_score"] for one in plain["results"]}
    logits = [float(reference.logits("red", text)[0]) for text in TEXTS]
    np.testing.assert_allclose([found[index] for index in range(4)], logits, atol=1e-4)
    tokens = reference.tokenizer(TEXTS[3], add_special_tokens=False)["input_ids"]
    cut = {"text_1": TEXTS[3], "text_2": TEXTS[3], "max_tokens_per_query": 3, "max_tokens_per_doc": 5}
    texts = [reference.tokenizer.decode(tokens[:count]) for count in (3, 5)]
    answer = server.answer("/v1/score", cut | {"use_activation": False})
    assert answer["data"][0]["score"] == pytest.approx(float(reference.logits(*texts)[0]), abs=1e-4)
    answer = server.answer("/pooling", {"input": TEXTS, "use_activation": False})
    assert_close(vectors(answer, "data"), [reference.logits(text).numpy() for text in TEXTS])
    assert server.http.get("/health_generate").status_code == 200


def test_two_tokens_score_and_a_cut_leaves_the_template_whole(tiny_model, tmp_path):
    folder = write_folder(tiny_model, tmp_path / "reranker", "Qwen3ForCausalLM")
    (tmp_path / "template.jinja").write_text(
        "<Q>{{ query }}<D>{{ document }}{% if instruction %} {{ instruction }}{% endif %}</D>\n"
    )
    settings = {"score_tokens": ("n", "y"), "score_template": str(tmp_path / "template.jinja")}
    with running(tiny_config(folder, **settings)) as server:
        reference = TokenReference(folder, *server.service.client.tokenizer.encode("ny", add_special_tokens=False))
        body = {"query": "red", "documents": TEXTS, "instruction": "rhymes"}
        answer = server.answer("/v1/rerank", body)
        for one in answer["results"]:
            prompt = f"<Q>red<D>{one['document']['text']} rhymes</D>\n"
            assert one["relevance_score"] == pytest.approx(reference.score(prompt), abs=1e-4)
        assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"]
        long = "red fox blue bird " * 60
        assert error_of(server.post("/v1/rerank", body | {"documents": ["a", long]}))["param"] == "documents[1]"
        cut = server.answer("/v1/score", {"text_1": "red", "text_2": long, "truncate_prompt_tokens": 60})
        assert cut["usage"]["prompt_tokens"] <= 60

        def count(end):
            prompt = f"<Q>red<D>{long[:end]}</D>\n"
            return len(reference.tokenizer(prompt, add_special_tokens=False)["input_ids"])

        kept = [end for end in range(300) if count(end) == cut["usage"]["prompt_tokens"]]
        scores = [reference.score(f"<Q>red<D>{long[:end]}</D>\n") for end in kept]
        assert min(abs(cut["data"][0]["score"] - one) for one in scores) < 1e-4
        refused = error_of(server.post("/v1/score", {"text_1": "red", "text_2": long, "truncate_prompt_tokens": 5}))
        assert refused["param"] == "text_2" and "leave no room" in refused["message"]
        assert server.answer("/v1/completions", {"prompt": "red", "max_tokens": 2})["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        ("/v1/embeddings", {"input": []}, "input", "empty"),
        ("/v1/embeddings", {"input": ["red", "blue bird " * 200]}, "input[1]", "at most 256 are embedded"),
        ("/v1/embeddings", {"input": [[1], []]}, "input[1]", "is empty"),
        ("/v1/embeddings", {"input": [[1], [9999]]}, "input[1]", "token id 9999"),
        ("/v1/embeddings", {"input": "red", "dimensions": 49}, "dimensions", "have 48 values"),
        ("/v1/embeddings", {"input": "red", "encoding_format": "bytes"}, "encoding_format", "'float' or 'base64'"),
        ("/v1/embeddings", {"input": "red", "normalize": True, "use_activation": False}, "normalize", "differ"),
        ("/v1/embeddings", {"input": "red", "prompt_name": "x"}, "prompt_name", "it has 'query', 'document'"),
        ("/v1/embeddings", {"input": "red", "truncate_prompt_tokens": 1}, "truncate_prompt_tokens", "leaves nothing"),
        ("/v1/embeddings", {"input": "red", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "leaves nothing"),
        ("/v1/embeddings", {"input": "red", "truncation_side": "left"}, "truncation_side", "requires"),
        ("/v1/embeddings", {"input": "red", "embed_dtype": "float16"}, "embed_dtype", "not supported"),
        ("/v1/embeddings", {"input": "red", "dimension": 4}, "dimension", "dimensions"),
        ("/v1/embeddings", {"messages": []}, "input", "required"),
        ("/v1/embeddings", {"input": [[1]] * 300}, "input", "300 sequences"),
        ("/v1/embeddings", {"input": "red", "priority": 3}, "priority", "admin key"),
        ("/v1/score", {"text_1": "red"}, "text_1", "found text_1"),
        ("/v1/score", {"text_1": "red", "documents": ["a"]}, "documents", "send one of"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1", "text_1 has 2 texts and text_2 3"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_2", "empty"),
        ("/v1/score", {"text_1": "a", "text_2": ["b", "blue bird " * 200]}, "text_2[1]", "at most 256"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "instruction": "x"}, "instruction", "no template"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "use_activation": True}, "use_activation", "no effect"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents", "empty"),
        ("/v1/rerank", {"query": "a", "documents": ["b", {"image": "x"}]}, "documents", "list of texts"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "at least 1"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "max_chunks_per_doc": 5}, "max_chunks_per_doc", "max_tokens"),
        ("/v1/completions", {"prompt": "red"}, "model", "no LM head"),
        ("/generate", {"text": "red", "sampling_params": {"pooling": "last"}}, "pooling", "use /v1/embeddings"),
    ],
)  # fmt: skip
def test_what_is_refused_names_the_field(embedder, path, body, param, said):
    error = error_of(embedder.post(path, body), 403 if param == "priority" else 400)
    assert error["param"] == param and said in error["message"], error


def test_an_unknown_model_and_a_full_queue_are_refused(embedder, start_server):
    assert error_of(embedder.post("/v1/embeddings", {"input": "red", "model": "other"}), 404)["param"] == "model"
    small = start_server(max_waiting=0, max_num_seqs=2)
    assert "at most 2 can run" in error_of(small.post("/v1/embeddings", {"input": ["a", "b", "c"]}))["message"]
    small.answer("/v1/embeddings", {"input": ["a", "b"]})
