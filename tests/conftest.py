"""Shared fixtures and marker rules.

- `gpu`: needs a CUDA device; skipped with a reason if there is none.
- `interpretable`: a `gpu` test that also runs on the CPU under TRITON_INTERPRET=1 (slow, no bfloat16).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

from tests.hub_server import Hub, running_hub
from tests.support.waiting import PATIENCE

if TYPE_CHECKING:
    import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_configure(config: pytest.Config) -> None:
    # The same examples in every run, without limits on time. `--hypothesis-profile random` looks for others.
    busy = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile(
        "same", derandomize=True, database=None, deadline=None, suppress_health_check=busy, print_blob=True
    )
    hypothesis.settings.register_profile("random", derandomize=False, deadline=None, suppress_health_check=busy)
    hypothesis.settings.load_profile(config.getoption("--hypothesis-profile", None) or "same")

    # A shell has it ignored for what it runs in the background, and every process of a test would inherit that.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if "gpu" in item.keywords]
    if not marked:
        return
    import torch

    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device: torch.cuda.is_available() is False")
    for item in marked:
        if not (INTERPRETED and "interpretable" in item.keywords):
            item.add_marker(skip)


@pytest.fixture(scope="module", autouse=True)
def same_settings_after_a_module() -> Iterator[None]:
    """Fail a module whose tests change Encore's settings in the environment, which every later server would read."""
    settings = encore_settings()
    yield
    assert encore_settings() == settings


def encore_settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("ENCORE_")}


@pytest.fixture(scope="session", autouse=True)
def patient_http_clients() -> None:
    """Let httpx wait for answers longer than by default, which is 5 s: a busy machine exceeds that."""
    from httpx._config import DEFAULT_TIMEOUT_CONFIG as default

    default.connect = default.read = default.write = default.pool = PATIENCE


@pytest.fixture
def device() -> torch.device:
    """The CUDA device, or the CPU if kernels are interpreted."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


TINY_WORDS = (
    "the a one red blue green small old new quick brown fox dog cat bird tree house river stone light night day sun "
    "moon star sea wind rain snow fire earth sky road hill field song word time hand eye heart mind man woman child "
    "king queen runs jumps sleeps sings eats sees likes over under near far and or but not is was will be to of in on "
    "at by with from"
).split()
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role') }}{% endif %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random 2-layer Llama (float32, context 4,096) and a byte-level BPE tokenizer of about 300 ids.

    Its greedy text is arbitrary but deterministic; `<|endoftext|>` is id 0, and the tokenizer has a chat template.
    """
    folder = tmp_path_factory.mktemp("tiny-llama")
    write_tiny_model(folder)
    return folder


def write_tiny_model(folder: Path) -> None:
    """Write the model of `tiny_model` to a folder."""
    import tokenizers
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([" ".join(TINY_WORDS)] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|endoftext|>", eos_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A local stand-in for the Hugging Face hub, and an empty cache of it."""
    from huggingface_hub import constants

    with running_hub() as hub:
        # as HF_ENDPOINT and HF_HOME would set them, which are read once per process
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
        yield hub
