"""Tokenizers from GGUF metadata and from Hugging Face folders, and chat templates."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from engine.checkpoint.source import ModelSource
from engine.errors import ModelError, RequestError
from engine.text.tokenizer import NoTokenizer, Tokenizer
from tests.engine.checkpoint.gguf_samples import add_tokenizer, vocabulary, write_gguf


def load_gguf_tokenizer(folder: Path, **changes) -> Tokenizer:
    """Load the sample tokenizer with extra GGUF metadata (merges, pre, or key -> (type, value))."""
    path = folder / "t.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    add_tokenizer(writer, **{key: changes.pop(key) for key in ("merges", "pre") if key in changes})
    for key, (kind, value) in changes.items():
        writer.kv_data[0].pop(f"tokenizer.ggml.{key}", None)
        getattr(writer, f"add_{kind}")(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return Tokenizer.load(ModelSource(str(path), "gguf", "sample"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_gguf_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def pieces(tokenizer: Tokenizer, text: str) -> list[str | None]:
    return tokenizer.convert_ids_to_tokens(tokenizer.encode(text))


def test_ids_are_positions_in_the_metadata(tokenizer: Tokenizer) -> None:
    tokens, _, _ = vocabulary()
    assert tokenizer.vocab_size == len(tokens)
    assert tokenizer.encode("hello the") == [tokens.index("hello"), tokens.index("Ġthe")]
    assert tokenizer.convert_ids_to_tokens([0, 300, 99999]) == ["<|endoftext|>", None, None]


def test_digits_are_split_even_where_a_merge_exists(tokenizer: Tokenizer) -> None:
    assert pieces(tokenizer, "hello 123") == ["hello", "Ġ", "1", "2", "3"]


def test_no_space_is_put_before_the_text(tokenizer: Tokenizer) -> None:
    assert pieces(tokenizer, "the the") == ["the", "Ġthe"]


def test_gpt2_pretokenisation_keeps_digits_together(tmp_path: Path) -> None:
    assert pieces(load_gguf_tokenizer(tmp_path, pre="gpt-2"), "hello 123") == ["hello", "Ġ", "12", "3"]


def test_qwen2_pretokenisation_splits_digits_and_composes_accents(tmp_path: Path) -> None:
    qwen = load_gguf_tokenizer(tmp_path, pre="qwen2")
    assert pieces(qwen, "12 the") == ["1", "2", "Ġthe"]
    assert qwen.decode(qwen.encode("e\u0301")) == "\u00e9"


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_control_tokens_are_found_in_text_and_can_be_skipped(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the<|im_end|>and")
    assert 2 in ids
    assert tokenizer.decode(ids) == "theand"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "the<|im_end|>and"


def test_ids_that_end_a_text_are_known(tmp_path: Path, tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_token_ids == (2,)
    assert load_gguf_tokenizer(tmp_path, eot_token_id=("uint32", 0)).eos_token_ids == (2, 0)


def test_a_begin_token_is_added_only_if_the_file_says_so(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with_bos = load_gguf_tokenizer(tmp_path, add_bos_token=("bool", True))
    assert tokenizer.encode("the") == with_bos.encode("the", add_special_tokens=False)
    assert with_bos.encode("the") == [1, *tokenizer.encode("the")]


def test_an_end_token_is_added_only_if_the_file_says_so(tmp_path: Path, tokenizer: Tokenizer) -> None:
    plain = tokenizer.encode("the")
    assert load_gguf_tokenizer(tmp_path, add_eos_token=("bool", True)).encode("the") == [*plain, 2]
    assert load_gguf_tokenizer(tmp_path, add_eos_token=("bool", False)).encode("the") == plain
    both = load_gguf_tokenizer(tmp_path, add_eos_token=("bool", True), add_bos_token=("bool", True))
    assert both.encode("the") == [1, *plain, 2]
    assert both.encode("the", add_special_tokens=False) == plain


def test_messages_that_go_to_a_tool_end_with_a_token_of_the_file(tmp_path: Path) -> None:
    found = load_gguf_tokenizer(tmp_path, eot_token_id=("uint32", 0), eom_token_id=("uint32", 1))
    assert found.eos_token_ids == (2, 0, 1)
    with pytest.raises(ModelError, match=r"eom_token_id is 99999"):
        load_gguf_tokenizer(tmp_path, eom_token_id=("uint32", 99999))


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize(("templates", "plain", "with_tools"), [
    ({"": "D{{ messages[0].content }}", ".tool_use": "T{{ tools[0].function.name }}"}, "Dhello 12", "Tf"),
    ({"": "D", ".rag": "R"}, "D", "D"),
    ({".default": "D", ".tool_use": "T{{ tools | length }}"}, "D", "T1"),
    ({"": "D", ".default": "other"}, "D", "D"),
])  # fmt: skip
def test_a_file_with_several_templates_has_one_for_tools(
    tmp_path: Path, templates: dict, plain: str, with_tools: str
) -> None:
    path = tmp_path / "t.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    add_tokenizer(writer)
    writer.kv_data[0].pop("tokenizer.chat_template")
    for name, template in templates.items():
        writer.add_string(f"tokenizer.chat_template{name}", template)
    writer.add_array("tokenizer.chat_templates", [name[1:] for name in templates if name] or ["default"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found = Tokenizer.load(ModelSource(str(path), "gguf", "sample"))
    assert found.has_chat_template
    assert found.render_chat(MESSAGES) == plain
    assert found.render_chat(MESSAGES, tools=[TOOL]) == with_tools


def test_added_tokens_of_a_gguf_file_decode_to_their_content(tmp_path: Path) -> None:
    tokens, _, types = vocabulary()
    added = ["\u010dem", "\u00f5\u00f5"]
    found = load_gguf_tokenizer(tmp_path, tokens=("array", [*tokens, *added]), token_type=("array", [*types, 4, 3]))
    ids = found.encode("the \u010dem and\u00f5\u00f5")
    assert {len(tokens), len(tokens) + 1} <= set(ids)
    assert found.decode(ids, skip_special_tokens=False) == "the \u010dem and\u00f5\u00f5"
    assert found.decode(ids) == "the \u010dem and"


def test_added_tokens_of_a_gguf_file_are_limited(tmp_path: Path) -> None:
    tokens, _, types = vocabulary()
    with pytest.raises(ModelError, match=r"t\.gguf has 5000 characters in one of its added tokens, and at most 4096"):
        load_gguf_tokenizer(tmp_path, tokens=("array", [*tokens, "x" * 5000]), token_type=("array", [*types, 4]))


@pytest.mark.parametrize("text", [None, 7, b"bytes", ["list"], "lone \ud800 surrogate"])
def test_invalid_text_is_a_request_error(tokenizer: Tokenizer, text: object) -> None:
    with pytest.raises(RequestError) as error:
        tokenizer.encode(text)
    assert error.value.param == "prompt"


def test_unknown_ids_decode_to_nothing_and_impossible_ones_are_refused(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([99999]) == ""
    for ids in ([-1], [2**70], ["a"]):
        with pytest.raises(RequestError):
            tokenizer.decode(ids)


MESSAGES = [{"role": "user", "content": "hello 12"}]


def test_chat_is_rendered_by_the_files_template(tokenizer: Tokenizer) -> None:
    text = "<|im_start|>user\nhello 12<|im_end|>\n"
    assert tokenizer.render_chat(MESSAGES, add_generation_prompt=False) == text
    assert tokenizer.apply_chat_template(MESSAGES) == tokenizer.encode(text + "<|im_start|>assistant\n")


@pytest.mark.parametrize("messages", [[], [{}], [{"role": "user"}], [{"role": "user", "content": 5}], ["hello"]])
def test_messages_that_the_template_cannot_render_are_a_request_error(tokenizer: Tokenizer, messages: list) -> None:
    with pytest.raises(RequestError) as error:
        tokenizer.apply_chat_template(messages)
    assert error.value.param == "messages"


def test_a_model_without_template_refuses_chat(tmp_path: Path) -> None:
    path = tmp_path / "plain.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    add_tokenizer(writer)
    writer.kv_data[0].pop("tokenizer.chat_template")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    plain = Tokenizer.load(ModelSource(str(path), "gguf", "plain"))
    assert not plain.has_chat_template
    with pytest.raises(RequestError, match="plain has no chat template"):
        plain.apply_chat_template(MESSAGES)


def test_a_file_without_tokenizer_leaves_token_ids(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tokenizer=False)
    source = ModelSource(str(tmp_path / "m.gguf"), "gguf", "m")
    with pytest.raises(NoTokenizer, match="token ids still work"):
        Tokenizer.load(source)
    assert Tokenizer.try_load(source) is None


def test_unsupported_pretokenisation_is_named(tmp_path: Path) -> None:
    with pytest.raises(NoTokenizer, match="'gpt2' with pre-tokenizer 'unheard-of'"):
        load_gguf_tokenizer(tmp_path, pre="unheard-of")


@pytest.mark.parametrize("changes", [
    {"merges": ["no-space"]}, {"merges": ["t q-not-there"]}, {"tokens": ("array", ["a", "a"])},
    {"tokens": ("string", "a")}, {"eos_token_id": ("uint32", 100000)}, {"token_type": ("uint32", 3)},
])  # fmt: skip
def test_a_damaged_vocabulary_is_a_model_error_not_a_missing_tokenizer(tmp_path: Path, changes: dict) -> None:
    with pytest.raises(ModelError, match=r"t\.gguf.*damaged") as error:
        load_gguf_tokenizer(tmp_path, **changes)
    assert not isinstance(error.value, NoTokenizer)


def test_a_folder_gives_what_transformers_gives(tiny_model: Path) -> None:
    found, reference = Tokenizer.load(str(tiny_model)), AutoTokenizer.from_pretrained(tiny_model)
    text = "the quick brown fox, 123 <|im_end|>"
    assert found.encode(text) == reference.encode(text)
    assert found.decode(found.encode(text)) == reference.decode(reference.encode(text), skip_special_tokens=True)
    assert found.apply_chat_template(MESSAGES) == reference.apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_dict=False
    )
    assert found.vocab_size == len(reference)
    assert found.eos_token_ids == (reference.eos_token_id,)


def test_neither_a_gguf_file_nor_a_folder_imports_transformers_at_start(tiny_model: Path, tmp_path: Path) -> None:
    """The import takes a second, in the server's process and in the engine's."""
    load_gguf_tokenizer(tmp_path)
    script = "import sys; from engine.text.tokenizer import Tokenizer; "
    script += "[Tokenizer.load(model) for model in sys.argv[1:]]; "
    script += "print([name for name in sys.modules if name.split('.')[0] in ('torch', 'transformers')])"
    models = [tiny_model, tmp_path / "t.gguf"]
    ran = subprocess.run([sys.executable, "-c", script, *models], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


def test_a_folders_generation_config_adds_ids_that_end_a_text(tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    assert Tokenizer.load(str(folder)).eos_token_ids == (0, 2)


def test_a_folder_without_tokenizer_leaves_token_ids(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny_model / "config.json").read_text())
    with pytest.raises(NoTokenizer, match="token ids still work"):
        Tokenizer.load(str(tmp_path))
    assert Tokenizer.try_load(str(tmp_path)) is None


def test_a_folder_with_a_damaged_tokenizer_is_a_model_error(tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="can't be loaded") as error:
        Tokenizer.try_load(str(folder))
    assert str(folder) in str(error.value)


def test_other_threads_run_while_a_long_text_is_encoded(tiny_model: Path) -> None:
    """`Tokenizer.encode` of the tokenizers library holds the GIL for a second per megabyte."""
    tokenizer = Tokenizer.load(str(tiny_model))
    turns, encoded = 0, threading.Event()

    def encode() -> None:
        tokenizer.encode("red fox\n" * 60_000)
        encoded.set()

    thread = threading.Thread(target=encode)
    thread.start()
    while not encoded.is_set():
        time.sleep(0.001)
        turns += 1
    thread.join()
    assert turns >= 5  # one, before it begins, if it holds the GIL
