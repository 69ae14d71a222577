"""A pytest plugin for vLLM's API tests: their servers are `encore serve`, and nothing is fetched from a model hub.

It puts stand-ins in place of `tests.utils` and `tests.conftest`, deselects tests that ask no server, and answers for
every model name with the tokenizer of the served model. The environment has:

    API_TEST_PYTHON, API_TEST_SOURCE: Encore's interpreter and its repository
    API_TEST_MODEL, API_TEST_TOKENIZER: what is served, and a folder with its tokenizer
    API_TEST_MAX_LEN: its longest context in tokens
    API_TEST_SECONDS: the limit for one test
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests

START_SECONDS = 300.0
USUAL_LEN = 2048  # context of a server whose test asks for none: a small model often writes until it is full
REFUSED = 2  # exit status of a server whose settings don't fit the model
# Flags of vLLM that choose how a GPU computes, or what Encore does without being asked.
WITHOUT_EFFECT = {
    "--dtype", "--enforce-eager", "--gpu-memory-utilization", "--seed", "--enable-auto-tool-choice", "--load-format",
    "--enable-chunked-prefill", "--no-async-scheduling", "--trust-remote-code", "--enable-tokenizer-info-endpoint",
    "--num-gpu-blocks-override", "--block-size",
}  # fmt: skip
# What sets API keys, which Encore reads from a variable only.
KEYS_FLAG, KEYS_VARIABLE, ENCORE_KEYS = "--api-key", "VLLM_API_KEY", "ENCORE_API_KEYS"


def parsed(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag of a vLLM command line with its values."""
    flag, values = "", []
    for word in words:
        if word.startswith("--"):
            if flag:
                yield flag, values
            flag, _, value = word.partition("=")
            flag, values = flag.replace("_", "-"), [value] if value else []
        else:
            values.append(word)
    if flag:
        yield flag, values


@functools.cache
def known_flags() -> set[str]:
    """Return the flags of `encore serve`."""
    command = [os.environ["API_TEST_PYTHON"], "-m", "server.cli", "serve", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, env=encore_environment(), check=True)
    return set(re.findall(r"--[a-z][\w-]*", shown.stdout))


def encore_environment() -> dict[str, str]:
    """Return the environment of Encore's processes."""
    return os.environ | {"PYTHONPATH": os.environ["API_TEST_SOURCE"], "OMP_NUM_THREADS": "1"}


class RemoteOpenAIServer:
    """Runs `encore serve` with the flags that it knows; others are printed and left out."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(
        self, model: str, vllm_serve_args: Sequence[str], *, env_dict: dict[str, str] | None = None, **_: Any
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.host, self.port = probe.getsockname()
        self.uds, self.show_hidden_metrics = None, False
        environment = encore_environment()
        if keys := (env_dict or {}).get(KEYS_VARIABLE):
            environment[ENCORE_KEYS] = keys
        names, flags, most_tokens = [model], [], int(os.environ["API_TEST_MAX_LEN"])
        length = min(USUAL_LEN, most_tokens)
        known = known_flags()
        for flag, values in parsed(vllm_serve_args):
            if flag == "--served-model-name":
                names = values
            elif flag == KEYS_FLAG:
                environment[ENCORE_KEYS] = ",".join(values)
            elif flag == "--port":
                self.port = int(values[0])
            elif flag == "--max-model-len":
                length = min(int(values[0]), most_tokens)
            elif flag in known and flag not in WITHOUT_EFFECT:
                flags += [flag, *([",".join(values)] if values else [])]
            elif flag not in WITHOUT_EFFECT:
                print(f"[encore] no {flag}")
        command = [
            os.environ["API_TEST_PYTHON"], "-m", "server.cli", "serve", "--model", os.environ["API_TEST_MODEL"],
            "--served-model-name", ",".join(names), "--port", str(self.port), "--compat", "vllm",
            "--warmup", "lazy", "--graph-manifest", "none", "--max-model-len", str(length), *flags,
        ]  # fmt: skip
        self._log = tempfile.TemporaryFile("w+")
        self.proc = subprocess.Popen(command, stderr=self._log, env=environment)
        try:
            self._wait()
        except BaseException:
            self._stop()
            raise

    def _wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.proc.poll() is not None:
                self._log.seek(0)
                message = f"encore serve did not start: {self._log.read().strip().splitlines()[-1]}"
                if self.proc.returncode == REFUSED:  # a tool format of another model, for example
                    pytest.skip(message)
                pytest.fail(message, pytrace=False)
            try:
                if requests.get(self.url_for("ready"), timeout=5).status_code == 200:
                    return
            except requests.RequestException:
                pass
            time.sleep(0.2)
        pytest.fail("encore serve did not become ready")

    def _stop(self) -> None:
        self.proc.send_signal(signal.SIGTERM)
        try:
            self.proc.wait(20)
        except subprocess.TimeoutExpired:
            self.proc.kill()
            self.proc.wait()

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    @property
    def url_root(self) -> str:
        return f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        return self.url_root + "/" + "/".join(part.strip("/") for part in parts if part)

    def get_client(self, **options: Any) -> Any:
        import openai

        return openai.OpenAI(**self._options(self.url_for("v1"), options))

    def get_async_client(self, **options: Any) -> Any:
        import openai

        return openai.AsyncOpenAI(**self._options(self.url_for("v1"), options))

    def get_client_anthropic(self, **options: Any) -> Any:
        import anthropic

        return anthropic.Anthropic(**self._options(self.url_root, options))

    def get_async_client_anthropic(self, **options: Any) -> Any:
        import anthropic

        return anthropic.AsyncAnthropic(**self._options(self.url_root, options))

    def _options(self, url: str, options: dict[str, Any]) -> dict[str, Any]:
        return {"base_url": url, "api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": 600} | options


class NoSuchServer:
    """A kind of server that Encore has not."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pytest.skip("no such server")


def unchanged(*arguments: Any, **_: Any) -> Any:
    """Decorate nothing: stands in for decorators, with and without arguments."""
    if len(arguments) == 1 and callable(arguments[0]):
        return arguments[0]
    return unchanged


@contextmanager
def unavailable(*_: Any, **__: Any) -> Iterator[None]:
    """Skip a test that asks for a helper that only a GPU's tests need."""
    pytest.skip("a helper of GPU tests")
    yield


def stand_in(name: str, **values: Any) -> types.ModuleType:
    """Return a module with these values; other names are decorators that do nothing."""
    module = types.ModuleType(name)
    vars(module).update(values)
    module.__getattr__ = lambda missing: (
        (_ for _ in ()).throw(AttributeError(missing)) if missing[:2] == "__" else unchanged
    )  # type: ignore[method-assign]  # noqa: E501
    return module


def _tokenizer(*_: Any, **__: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(os.environ["API_TEST_TOKENIZER"])


class _Hub:
    """A hub whose every repository is the tokenizer's folder."""

    def snapshot_download(self, *_: Any, **__: Any) -> str:
        return os.environ["API_TEST_TOKENIZER"]


def put_stand_ins() -> None:
    """Put the stand-ins in place. pytest imports a folder's conftest.py before it configures plugins."""
    vllm_folder = Path(os.environ["API_TEST_VLLM"])
    sys.modules["tests.utils"] = stand_in(
        "tests.utils", RemoteOpenAIServer=RemoteOpenAIServer, RemoteOpenAIServerCustom=NoSuchServer,
        RemoteLaunchRenderServer=NoSuchServer, ROCM_EXTRA_ARGS=[], ROCM_ENGINE_KWARGS={}, VLLM_PATH=vllm_folder,
    )  # fmt: skip
    sys.modules["tests.conftest"] = stand_in("tests.conftest", LocalAssetServer=unavailable)
    import transformers
    import vllm.config
    import vllm.tokenizers
    import vllm.transformers_utils.repo_utils as repositories

    vllm.tokenizers.get_tokenizer = _tokenizer
    # Other modules read the class's defaults. Tests ask its objects for the size of the vocabulary only.
    vllm.config.ModelConfig.__init__ = lambda *_, **__: None  # type: ignore[method-assign]
    vllm.config.ModelConfig.get_vocab_size = lambda *_: len(_tokenizer())  # type: ignore[method-assign]
    repositories.hf_api = _Hub
    transformers.AutoTokenizer.from_pretrained = _tokenizer  # type: ignore[method-assign]


put_stand_ins()


def pytest_configure(config: pytest.Config) -> None:
    """Register vLLM's markers."""
    for marker in ("slow_test", "skip_global_cleanup", "core_model", "cpu_model", "cpu_test", "optional"):
        config.addinivalue_line("markers", marker)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test that takes too long, so that the outcomes of the others are known."""
    seconds = float(os.environ["API_TEST_SECONDS"])

    def fail(*_: object) -> None:
        pytest.fail(f"not done after {seconds:g} s", pytrace=False)

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what asks no server: tests of vLLM's own classes."""
    asking = [item for item in items if _asks_a_server(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in asking])
    items[:] = asking


def _asks_a_server(item: pytest.Item) -> bool:
    function = getattr(item, "function", None)
    if function is None or any("mock" in name for name in getattr(item, "fixturenames", ())):
        return False
    names = getattr(item, "fixturenames", ())
    by_fixture = any(re.search(r"(^|_)(server|client)(_|$)", name) for name in names)
    return by_fixture or "RemoteOpenAIServer(" in inspect.getsource(function)


# Fixtures of vLLM's own tests/conftest.py that its API tests use.


@pytest.fixture(scope="session")
def local_asset_server() -> None:
    """No images: tests with text don't use it."""


@pytest.fixture(scope="session")
def qwen3_lora_files() -> str:
    return os.environ["API_TEST_TOKENIZER"]
