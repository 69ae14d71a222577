"""ART's tokenization reads answers of the server: the ids and log-probabilities that it would train on.

Skips where openpipe-art is absent; docs/rl.md says how to install it for this test. Only its modules that tokenize and
hold trajectories are imported, since its package imports its backends.
"""

from __future__ import annotations

import importlib.util
import sys
import types

import pytest
from transformers import AutoTokenizer

from tests.server.conftest import running, tiny_config

MESSAGES = ["hello there", "the quick brown fox", "one red bird"]


@pytest.fixture(scope="module")
def server(folders):
    """A server as ART starts one: clients that ask for log-probabilities get token ids."""
    config = tiny_config(folders["a"], return_tokens_as_token_ids=True, return_token_ids=True, max_model_len=1024)
    with running(config) as handle:
        yield handle


@pytest.fixture
def art(monkeypatch):
    """The module of ART's tokenization, without the package's own imports."""
    found = importlib.util.find_spec("art")
    if found is None or not found.submodule_search_locations:
        pytest.skip("needs openpipe-art")
    package = types.ModuleType("art")
    package.__path__ = list(found.submodule_search_locations)
    monkeypatch.setitem(sys.modules, "art", package)
    yield pytest.importorskip("art.preprocessing.tokenize", reason="needs openpipe-art", exc_type=ImportError)
    for name in [name for name in sys.modules if name.startswith("art.")]:
        del sys.modules[name]


@pytest.fixture
def client(server):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        yield client


def check(result, choice, prompt_ids, reference):
    """The trained ids are those that were generated, and their log-probabilities those of the model."""
    places = [index for index, trained in enumerate(result.assistant_mask) if trained]
    prompt, trained = result.token_ids[: places[0]], [result.token_ids[index] for index in places]
    assert places == list(range(places[0], places[0] + len(places)))
    assert prompt == prompt_ids
    assert trained == choice.model_extra["token_ids"]
    expected = reference.logprobs(prompt + trained)
    for index, token in zip(places, trained, strict=True):
        assert result.logprobs[index] == pytest.approx(float(expected[index - 1, token]), abs=1e-4)


def test_art_trains_on_the_tokens_that_were_generated(art, server, client, folders, references):
    tokenizer = AutoTokenizer.from_pretrained(folders["a"])
    groups, answers = [], {}
    for text in MESSAGES:
        messages = [{"role": "user", "content": text}]
        trajectories = []
        for seed in range(8):
            answer = client.chat.completions.create(
                model="tiny", messages=messages, logprobs=True, max_tokens=24, temperature=1.0, seed=seed
            )
            trajectory = art.Trajectory(messages_and_choices=[*messages, answer.choices[0]], reward=float(seed))
            answers[id(trajectory)] = answer
            trajectories.append(trajectory)
        groups.append(art.TrajectoryGroup(trajectories))
    results = list(art.tokenize_trajectory_groups(tokenizer, groups, False, True))
    assert len(results) == 8 * len(MESSAGES)
    for result in results:
        answer = answers[id(result.trajectory)]
        check(result, answer.choices[0], answer.model_extra["prompt_token_ids"], references["a"])
