"""Prompt scoring as evaluation harnesses do it (echo, logprobs, 0 or 1 new tokens), compared with the model."""

from __future__ import annotations

import pytest
import torch

CONTEXT, CONTINUATIONS = "the old king sleeps", [" near the river", " and the red bird sings", " x", "🙂 é"]


@pytest.fixture(scope="module")
def reference(tiny_model):
    """Logprobs computed by transformers with the same weights: ids -> [tokens, vocabulary]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()

    def scores(ids):
        with torch.no_grad():
            return torch.log_softmax(model(torch.tensor([ids])).logits[0], dim=-1)

    return scores


def direct(reference, ids, scored):
    """Sum of the last `scored` tokens' logprobs, and whether each token was the most likely."""
    rows = reference(ids)[-scored - 1 : -1]
    chosen = rows[range(scored), ids[-scored:]]
    return chosen.sum().item(), bool((rows.argmax(-1) == torch.tensor(ids[-scored:])).all())


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("as_ids", [False, True])
def test_loglikelihoods_equal_a_direct_computation(server, reference, max_tokens, as_ids):
    encode = server.service.client.tokenizer.encode
    whole = [encode(CONTEXT + continuation) for continuation in CONTINUATIONS]
    lengths = [len(ids) - len(encode(CONTEXT)) for ids in whole]
    # The request of lm-eval's local-completions: a batch of prompts, greedy, the prompt's own tokens scored.
    answer = server.answer("/v1/completions", {
        "model": "tiny", "prompt": whole if as_ids else [CONTEXT + one for one in CONTINUATIONS], "temperature": 0,
        "max_tokens": max_tokens, "logprobs": 1, "seed": 1234, "echo": True,
    })  # fmt: skip
    for choice, ids, scored in zip(answer["choices"], whole, lengths, strict=True):
        logprobs = choice["logprobs"]
        end = len(logprobs["token_logprobs"]) - max_tokens
        assert end == len(ids)
        chosen = logprobs["token_logprobs"][end - scored : end]
        best = [max(top.values()) for top in logprobs["top_logprobs"][end - scored : end]]
        expected, greedy = direct(reference, ids, scored)
        assert sum(chosen) == pytest.approx(expected, abs=1e-4)
        assert (chosen == best) == greedy


def test_rolling_loglikelihood_of_a_whole_text(server, reference):
    text = " ".join(CONTINUATIONS) * 4
    ids = [0, *server.service.client.tokenizer.encode(text)]  # the harness prepends the end-of-text id
    [choice] = server.answer("/v1/completions", {
        "model": "tiny", "prompt": ids, "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True,
    })["choices"]  # fmt: skip
    expected, _ = direct(reference, ids, len(ids) - 1)
    assert sum(choice["logprobs"]["token_logprobs"][1:-1]) == pytest.approx(expected, abs=1e-3)


def test_top_logprobs_are_the_models_own(server, reference):
    ids = server.service.client.tokenizer.encode(CONTEXT)
    answer = server.answer("/generate", {
        "input_ids": ids, "sampling_params": {"max_new_tokens": 1, "temperature": 0}, "return_logprob": True,
        "top_logprobs_num": 5, "logprob_start_len": 0,
    })  # fmt: skip
    for row, top in zip(reference(ids)[:-1], answer["meta_info"]["input_top_logprobs"][1:], strict=True):
        values, best = row.topk(5)
        assert [token for _, token, _ in top] == best.tolist()
        assert [value for value, _, _ in top] == pytest.approx(values.tolist(), abs=1e-4)


def test_scoring_does_not_reuse_a_prefix_without_logprobs(server):
    body = {"prompt": CONTEXT * 5, "max_tokens": 0, "logprobs": 0, "echo": True}
    first = server.answer("/v1/completions", body)["choices"][0]["logprobs"]["token_logprobs"]
    again = server.answer("/v1/completions", body)["choices"][0]["logprobs"]["token_logprobs"]
    assert None not in again[1:] and again[1:] == pytest.approx(first[1:], abs=1e-5)


def test_echo_of_a_stream_scores_the_prompt_once(server):
    body = {"prompt": CONTEXT, "max_tokens": 2, "logprobs": 1, "echo": True, "temperature": 0}
    whole = server.answer("/v1/completions", body)["choices"][0]
    chunks = [chunk["choices"][0] for chunk in server.events("/v1/completions", body | {"stream": True})]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    for name in whole["logprobs"]:
        joined = [value for chunk in chunks if chunk["logprobs"] for value in chunk["logprobs"][name]]
        assert joined == whole["logprobs"][name], name
