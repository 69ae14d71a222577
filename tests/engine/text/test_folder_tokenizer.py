"""Tokenizers of folders in Hugging Face layout: tokenizer.json decides, whatever class is named beside it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from engine.errors import ModelError
from engine.text.added_tokens import MAX_ADDED_CHARS, MAX_ADDED_TOKENS, MAX_TOKEN_CHARS
from engine.text.detokenizer import Detokenizers
from engine.text.folder_tokenizer import require_same_pipeline
from engine.text.tokenizer import NoTokenizer, Tokenizer

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_end|>"]
CORPUS = [
    "hello  world 1234 don't stop, a  1 and  12  34",
    "the caf\u00e9 \u00bd is over there\n\n  def f(x):\n    return x",
]
TEXTS = ["a  1", "hello  world 1234", "cafe\u0301 \u00bd", " don't", "\n\n  x1", "<s>a</s>", "\u2581x \U0001f600", ""]
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
MESSAGES = [{"role": "user", "content": "hello 12"}]


def byte_level(*before: Any, **options: Any) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([*before, pre_tokenizers.ByteLevel(**{"add_prefix_space": False} | options)])


def train(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS * 4, trainer)
    return backend


def smollm2() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = byte_level(pre_tokenizers.Digits(individual_digits=True))
    backend.decoder = decoders.ByteLevel()
    return train(backend)


def llama3() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=True))
    backend.pre_tokenizer = byte_level(pre_tokenizers.Split(Regex(LLAMA3), behavior="isolated"), use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend = train(backend)
    template = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return backend


def llama2() -> tokenizers.Tokenizer:
    """Without a pre-tokenizer: a normaliser writes the spaces, and unknown characters become bytes."""
    words = {**{text: i for i, text in enumerate(SPECIAL)}, **{f"<0x{byte:02X}>": 4 + byte for byte in range(256)}}
    for text in ["\u2581", *"aehlo1\n", "\u2581a", "\u2581\u2581"]:
        words.setdefault(text, len(words))
    merges = [("\u2581", "a"), ("\u2581", "\u2581")]
    backend = tokenizers.Tokenizer(models.BPE(words, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def metaspace() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    return train(backend)


def qwen2() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"), behavior="isolated")
    backend.pre_tokenizer = byte_level(split, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return train(backend)


def prefix_space() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = byte_level(pre_tokenizers.Digits(individual_digits=False), add_prefix_space=True)
    backend.decoder = decoders.ByteLevel(add_prefix_space=True)
    backend = train(backend)
    ends = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    backend.post_processor = ends
    return backend


def save(
    folder: Path, backend: tokenizers.Tokenizer, model_type: str = "llama", **config: Any
) -> tuple[Path, tokenizers.Tokenizer]:
    """Write a folder without weights; return it and what the tokenizers library reads from it."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} | config
    given = {key: value for key, value in config.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(given))
    return folder, tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def change_file(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


CLASSES = ["GPT2Tokenizer", "GPT2TokenizerFast", "Qwen2Tokenizer", "LlamaTokenizer", "LlamaTokenizerFast",
           "CodeLlamaTokenizer", "GemmaTokenizer", "T5Tokenizer", "BertTokenizer", "PreTrainedTokenizerFast",
           "TokenizersBackend", "UnknownTokenizer", None]  # fmt: skip


@pytest.mark.parametrize("make", [smollm2, llama3, llama2, metaspace, qwen2, prefix_space])
def test_ids_and_text_are_the_files_whatever_class_is_named(tmp_path: Path, make: Callable) -> None:
    for name in CLASSES:
        for model_type in ("llama", "qwen2", "mistral", "unknown"):
            folder, wanted = save(tmp_path / "model", make(), model_type, tokenizer_class=name)
            found = Tokenizer.load(str(folder))
            assert found.backend.to_str() == wanted.to_str(), (name, model_type)
            assert found.eos_token_ids == (2,)
        for text in TEXTS:
            for special in (True, False):
                assert found.encode(text, special) == wanted.encode(text, add_special_tokens=special).ids
            ids = wanted.encode(text).ids
            assert found.decode(ids, skip_special_tokens=False) == wanted.decode(ids, skip_special_tokens=False)


def test_the_pipeline_is_the_same_before_and_after_the_first_chat(tmp_path: Path) -> None:
    folder, wanted = save(
        tmp_path / "model", smollm2(), tokenizer_class="GPT2Tokenizer", chat_template="{{ bos_token }}"
    )
    found = Tokenizer.load(str(folder))
    assert found.render_chat(MESSAGES) == "<s>"
    assert found.prepare_chat().backend_tokenizer is found.backend
    assert found.backend.to_str() == wanted.to_str()
    assert found.description()["vocab_size"] == wanted.get_vocab_size()


def test_settings_that_only_describe_the_tokenizer_do_not_stop_a_chat(tmp_path: Path) -> None:
    settings = {"padding_side": "middle", "encode": "a method", "model_max_length": 2048, "image_token": "<image>"}
    folder, _ = save(tmp_path / "model", smollm2(), chat_template="{{ eos_token }}{{ image_token }}", **settings)
    found = Tokenizer.load(str(folder))
    assert found.render_chat(MESSAGES) == "</s><image>"
    described = found.description()
    assert {key: described[key] for key in settings} == settings
    assert described["added_tokens_decoder"]["1"]["content"] == "<s>"


@pytest.mark.parametrize("part", ["normalizer", "pre_tokenizer", "post_processor", "decoder"])
def test_a_part_that_would_differ_from_the_file_is_named(part: str) -> None:
    file = json.loads(llama3().to_str())
    require_same_pipeline(llama3(), file, "folder")
    with pytest.raises(ModelError, match=f"folder: the tokenizer's {part} would differ"):
        require_same_pipeline(llama3(), file | {part: json.loads(llama2().to_str() if part != "pre_tokenizer"
                              else metaspace().to_str())[part]}, "folder")  # fmt: skip


def test_a_model_and_added_tokens_that_would_differ_are_named() -> None:
    file = json.loads(smollm2().to_str())
    with pytest.raises(ModelError, match="'s model would differ"):
        require_same_pipeline(smollm2(), file | {"model": file["model"] | {"type": "Unigram"}}, "folder")
    file["added_tokens"][1]["lstrip"] = True
    with pytest.raises(ModelError, match="'s added token '<s>' would differ"):
        require_same_pipeline(smollm2(), file, "folder")


def test_a_stored_truncation_or_padding_changes_no_prompt(tmp_path: Path) -> None:
    backend = smollm2()
    whole = backend.encode("hello  world 1234").ids
    backend.enable_truncation(3)
    backend.enable_padding(length=64, pad_id=3, pad_token="<|im_end|>")
    folder, _ = save(tmp_path / "model", backend)
    assert Tokenizer.load(str(folder)).encode("hello  world 1234") == whole


@pytest.mark.parametrize("make, setting, named", [
    (llama3, {"add_bos_token": False}, "add_bos_token=False"),
    (llama3, {"add_eos_token": True}, "add_eos_token=True"),
    (smollm2, {"add_bos_token": True}, "add_bos_token=True"),
    (smollm2, {"add_prefix_space": True}, "add_prefix_space=True"),
    (prefix_space, {"add_prefix_space": False}, "add_prefix_space=False"),
    (llama2, {"add_prefix_space": False}, "add_prefix_space=False"),
    (smollm2, {"fix_mistral_regex": True}, "fix_mistral_regex=True"),
])  # fmt: skip
def test_the_file_wins_over_a_setting_that_contradicts_it_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Callable, setting: dict, named: str
) -> None:
    folder, wanted = save(tmp_path / "model", make(), tokenizer_class="LlamaTokenizer", **setting)
    assert Tokenizer.load(str(folder)).encode("a b") == wanted.encode("a b").ids
    assert [record.getMessage() for record in caplog.records] == [
        f"{folder}: tokenizer.json decides, against {named} in tokenizer_config.json"
    ]


@pytest.mark.parametrize("make, settings", [
    (llama3, {"add_bos_token": True, "add_eos_token": False, "add_prefix_space": False}),
    (llama2, {"add_bos_token": True, "add_prefix_space": True}),
    (prefix_space, {"add_bos_token": True, "add_eos_token": True, "add_prefix_space": True}),
    (smollm2, {"add_bos_token": None, "add_prefix_space": False, "clean_up_tokenization_spaces": True}),
])  # fmt: skip
def test_settings_that_agree_with_the_file_are_not_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Callable, settings: dict
) -> None:
    Tokenizer.load(str(save(tmp_path / "model", make(), **settings)[0]))
    assert not caplog.records


def test_spaces_are_not_cleaned_up_and_special_tokens_can_be_split(tmp_path: Path) -> None:
    folder, wanted = save(tmp_path / "model", smollm2(), clean_up_tokenization_spaces=True, split_special_tokens=True)
    found = Tokenizer.load(str(folder))
    assert found.decode(found.encode("a , b . do n't")) == "a , b . do n't"
    assert 1 in wanted.encode("<s>").ids and 1 not in found.encode("<s>")


def flags(token: AddedToken) -> dict[str, Any]:
    return token.__getstate__()


def test_tokens_that_only_the_configuration_names_are_added_as_transformers_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    decoder = {
        str(index): flags(token)
        for index, token in llama2().get_added_tokens_decoder().items()
    }  # fmt: skip
    size = llama2().get_vocab_size()
    decoder[str(size + 1)] = flags(AddedToken("<tool>", special=False, normalized=False, rstrip=True))
    decoder[str(size)] = flags(AddedToken("<think>", special=True))
    folder, _ = save(
        tmp_path / "model", llama2(), added_tokens_decoder=decoder, pad_token="<pad>", image_token="<image>",
        additional_special_tokens=["<|im_end|>", "<extra>"],
    )  # fmt: skip
    found = Tokenizer.load(str(folder))
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    added = {i: flags(token) for i, token in found.backend.get_added_tokens_decoder().items()}
    assert added == {i: flags(token) for i, token in reference.added_tokens_decoder.items()}
    assert (
        found.encode("<think> x<tool>  y<pad><image><extra>")
        == reference("<think> x<tool>  y<pad><image><extra>").input_ids
    )
    assert not caplog.records


def test_files_of_older_versions_add_tokens_as_transformers_does(tmp_path: Path) -> None:
    size = smollm2().get_vocab_size()
    folder, _ = save(tmp_path / "model", smollm2(), eos_token=None)
    (folder / "added_tokens.json").write_text(json.dumps({"<b>": size + 1, "<a>": size}))
    named = {
        "eos_token": {"content": "<a>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    }
    (folder / "special_tokens_map.json").write_text(json.dumps(named))
    found, reference = Tokenizer.load(str(folder)), transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    assert found.encode("x<a><b>") == reference("x<a><b>").input_ids
    assert found.eos_token_ids == (reference.eos_token_id,) == (size,)
    assert found.decode([size, size + 1]) == reference.decode([size, size + 1], skip_special_tokens=True) == "<b>"


def test_a_declared_token_keeps_the_files_id_and_flags(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    decoder = {"7": flags(AddedToken("<s>", special=True)), "2": flags(AddedToken("</s>", special=False, lstrip=True))}
    folder, wanted = save(tmp_path / "model", smollm2(), added_tokens_decoder=decoder)
    assert Tokenizer.load(str(folder)).backend.to_str() == wanted.to_str()
    (record,) = caplog.records
    assert record.getMessage() == (
        f"{folder}: ids and flags of tokenizer.json are used; another file differs in '</s>', '<s>'"
    )


def test_a_token_that_would_get_another_id_than_declared_is_refused(tmp_path: Path) -> None:
    decoder = {"5000": flags(AddedToken("<think>", special=True))}
    folder, backend = save(tmp_path / "model", smollm2(), added_tokens_decoder=decoder)
    with pytest.raises(ModelError, match=rf"'<think>' is declared with id 5000, .* id {backend.get_vocab_size()}"):
        Tokenizer.load(str(folder))


@pytest.mark.parametrize("name, model_type, config, wanted", [
    ("GPT2Tokenizer", "llama", {}, None), ("LlamaTokenizer", "llama", {}, 2), (None, "t5", {}, 2),
    (None, "llama", {}, None), ("LlamaTokenizer", "llama", {"eos_token": "<|im_end|>"}, 3),
    ("PreTrainedTokenizerFast", "llama", {}, None),
])  # fmt: skip
def test_an_end_token_that_no_file_names_is_the_classs_if_the_file_has_it(
    tmp_path: Path, name: str | None, model_type: str, config: dict, wanted: int | None
) -> None:
    folder, _ = save(tmp_path / "model", smollm2(), model_type, tokenizer_class=name, eos_token=config.get("eos_token"))
    found = Tokenizer.load(str(folder))
    assert found.eos_token_ids == (() if wanted is None else (wanted,))


def test_chat_templates_come_from_every_place_that_holds_them(tmp_path: Path) -> None:
    both = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T{{ tools }}"}]
    folder, _ = save(tmp_path / "model", smollm2(), chat_template=both)
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert Tokenizer.load(str(folder)).render_chat(MESSAGES) == "D"
    assert Tokenizer.load(str(folder)).render_chat(MESSAGES, tools=[tool]).startswith("T[{")
    (folder / "chat_template.jinja").write_text("F")
    assert Tokenizer.load(str(folder)).render_chat(MESSAGES, tools=[tool]) == "F"
    (folder / "chat_templates").mkdir()
    (folder / "chat_templates" / "tool_use.jinja").write_text("G{{ tools }}")
    assert Tokenizer.load(str(folder)).render_chat(MESSAGES) == "F"
    assert Tokenizer.load(str(folder)).render_chat(MESSAGES, tools=[tool]).startswith("G[{")


def test_a_processors_chat_template_is_used_if_there_is_no_other(tmp_path: Path) -> None:
    folder, _ = save(tmp_path / "model", smollm2())
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "P{{ eos_token }}{{ image_token }}"}))
    assert Tokenizer.load(str(folder)).render_chat(MESSAGES) == "P</s>"


@pytest.mark.parametrize("make", [smollm2, llama3, qwen2])
def test_added_tokens_decode_to_their_content(tmp_path: Path, make: Callable) -> None:
    added = ["\u010dem", "\u00f5", "\u0120x", "\u00e9\u00e9", "<plain>", "two words"]
    backend = make()
    backend.add_tokens([AddedToken(text, normalized=False) for text in added])
    backend.add_special_tokens([AddedToken("\u010d\u010d", normalized=False)])
    found = Tokenizer.load(str(save(tmp_path / "model", backend)[0]))
    text = "a \u010dem\u00f5\u010d\u010d 1\u00f5\u0120x\U0001f600\u00e9\u00e9<plain>two words"
    ids = found.encode(text, add_special_tokens=False)
    assert {found.backend.token_to_id(token) for token in added} <= set(ids)
    shown = text.replace("\u010d\u010d", "")
    assert found.decode(ids, skip_special_tokens=False) == text
    assert found.decode(ids) == shown
    for skip, wanted in ((False, text), (True, shown)):
        stream = Detokenizers(found).make(skip_special_tokens=skip)
        assert "".join(map(stream.add_one, ids)) + stream.finish() == wanted
        assert "".join(found.decode((index,), skip_special_tokens=skip) for index in ids).replace("\ufffd", "") == (
            wanted.replace("\U0001f600", "")
        )


def test_a_character_is_not_joined_across_an_added_token(tmp_path: Path) -> None:
    backend = smollm2()
    backend.add_tokens([AddedToken("\u010dem", normalized=False)])
    found = Tokenizer.load(str(save(tmp_path / "model", backend)[0]))
    middle, (first, *rest) = backend.token_to_id("\u010dem"), found.encode("\U0001f600")
    stream = Detokenizers(found).make()
    ids = [first, middle, *rest, middle]
    assert found.decode(ids) == "".join(map(stream.add_one, ids)) + stream.finish()
    assert found.decode(ids).count("\u010dem") == 2


def test_a_decoder_that_writes_spaces_for_an_added_token_still_does(tmp_path: Path) -> None:
    """Gemma's tokenizer.json lists runs of spaces as added tokens."""
    backend = llama2()
    backend.add_tokens([AddedToken("\u2581\u2581", normalized=False)])
    found = Tokenizer.load(str(save(tmp_path / "model", backend)[0]))
    assert found.decode(found.encode("a  a")) == "a  a"


CODE = "import pathlib\npathlib.Path({marker!r}).write_text('ran')\nfrom transformers import GPT2Tokenizer as Custom\n"


def folder_with_code(folder: Path, marker: Path, where: str) -> Path:
    save(folder, smollm2(), "custom")
    (folder / "custom.py").write_text(CODE.format(marker=str(marker)))
    for name in ("config.json", "tokenizer_config.json") if where == "both" else (where,):
        content = json.loads((folder / name).read_text())
        auto_map = {"AutoConfig": "custom.Custom", "AutoTokenizer": ["custom.Custom", "custom.Custom"]}
        (folder / name).write_text(json.dumps(content | {"auto_map": auto_map, "tokenizer_class": "Custom"}))
    return folder


# The case that reads config.json by its class imports PyTorch in the child, which takes seconds.
@pytest.mark.parametrize("where, with_file", [
    ("both", True), ("config.json", False), ("tokenizer_config.json", False), ("both", False),
])  # fmt: skip
def test_code_of_a_folder_never_runs_even_if_standard_input_says_yes(
    tmp_path: Path, where: str, with_file: bool
) -> None:
    marker = tmp_path / "ran"
    folder = folder_with_code(tmp_path / "model", marker, where)
    if not with_file:
        backend = json.loads((folder / "tokenizer.json").read_text())["model"]
        (folder / "vocab.json").write_text(json.dumps(backend["vocab"]))
        (folder / "merges.txt").write_text("\n".join(map(" ".join, backend["merges"])))
        (folder / "tokenizer.json").unlink()
    script = "import sys; from engine.text.tokenizer import Tokenizer; Tokenizer.load(sys.argv[1]); print('loaded')"
    ran = subprocess.run(
        [sys.executable, "-c", script, folder], input="yes\n" * 100, capture_output=True, text=True, timeout=600,
        env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "cache")},
    )  # fmt: skip
    assert not marker.exists()
    if with_file:
        assert ran.stdout == "loaded\n"
    else:
        assert ran.stdout in ("", "loaded\n")
        if where != "config.json":
            assert "auto_map" in ran.stderr.strip().splitlines()[-1]
    assert "y/N" not in ran.stdout + ran.stderr


LOADED_FILES = ["tokenizer.json", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json",
                "generation_config.json", "chat_template.jinja", "chat_templates/x.jinja",
                "chat_template.json"]  # fmt: skip


@pytest.mark.parametrize("name", LOADED_FILES)
def test_a_fifo_is_refused_instead_of_read(tmp_path: Path, name: str) -> None:
    folder, _ = save(tmp_path / "model", smollm2())
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(ModelError, match=f"{name} is a FIFO"):
        Tokenizer.load(str(folder))


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt", "tokenizer.model", "special_tokens_map.json"])
def test_a_fifo_is_refused_before_transformers_reads_the_folder(tmp_path: Path, name: str) -> None:
    folder, _ = save(tmp_path / "model", smollm2(), tokenizer_class="GPT2Tokenizer")
    (folder / "tokenizer.json").unlink()
    for file in ("vocab.json", "merges.txt"):
        (folder / file).write_text("{}")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(ModelError, match=f"{name} is a FIFO"):
        Tokenizer.load(str(folder))


@pytest.mark.parametrize("name, limit", [
    ("tokenizer.json", 128 * 2**20), ("tokenizer_config.json", 32 * 2**20), ("added_tokens.json", 32 * 2**20),
    ("generation_config.json", 32 * 2**20), ("chat_template.jinja", 2**20), ("chat_templates/x.jinja", 2**20),
])  # fmt: skip
def test_a_file_beyond_its_limit_is_refused_unread(tmp_path: Path, name: str, limit: int) -> None:
    folder, _ = save(tmp_path / "model", smollm2())
    (folder / name).parent.mkdir(exist_ok=True)
    with open(folder / name, "wb") as file:
        file.truncate(limit + 1)  # takes no disk
    with pytest.raises(ModelError, match=f"{name} has {limit + 1} bytes, and at most {limit} are read"):
        Tokenizer.load(str(folder))


@pytest.mark.parametrize("place", ["tokenizer.json", "added_tokens_decoder", "added_tokens.json"])
@pytest.mark.parametrize("count, length, figure", [
    (MAX_ADDED_TOKENS + 1, 7, f"{MAX_ADDED_TOKENS + 1} added tokens, and at most {MAX_ADDED_TOKENS}"),
    (1, MAX_TOKEN_CHARS + 1, f"{MAX_TOKEN_CHARS + 1} characters in one of its added tokens, and at most 4096"),
    (MAX_ADDED_CHARS // 4000 + 1, 4000, f"characters in all added tokens, and at most {MAX_ADDED_CHARS}"),
])  # fmt: skip
def test_numbers_and_lengths_of_added_tokens_are_limited_before_a_library_reads_them(
    tmp_path: Path, place: str, count: int, length: int, figure: str
) -> None:
    folder, _ = save(tmp_path / "model", smollm2())
    texts = [f"{index:0{length}}" for index in range(count)]
    if place == "tokenizer.json":
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        listed = [{"id": 400 + index, "content": text, **plain} for index, text in enumerate(texts)]
        change_file(folder, lambda content: content["added_tokens"].extend(listed[4 if count > 9999 else 0 :]))
    elif place == "added_tokens.json":
        (folder / place).write_text(json.dumps({text: 400 + index for index, text in enumerate(texts)}))
    else:
        config = json.loads((folder / "tokenizer_config.json").read_text())
        config[place] = {400 + index: {"content": text} for index, text in enumerate(texts)}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=figure):
        Tokenizer.load(str(folder))


@pytest.mark.parametrize("change, figure", [
    (lambda file: file["model"]["vocab"].update({"x" * 4097: 999}), "4097 characters in one of its vocabulary entries"),
    (lambda file: file["model"].update(type="Unigram", unk_id=0, vocab=[["x" * 5000, 0.0]]), "5000 characters in one"),
    (lambda file: file["model"]["vocab"].update({f"{i:04000}": 999 + i for i in range(4200)}),
     "characters in all vocabulary entries, and at most 16777216"),
    (lambda file: file.update(normalizer={"type": "Prepend", "prepend": "x" * 5_000_000}), "normalizer has 50000"),
])  # fmt: skip
def test_vocabularies_and_parts_are_limited_before_a_library_reads_them(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], figure: str
) -> None:
    folder, _ = save(tmp_path / "model", smollm2())
    change_file(folder, change)
    with pytest.raises(ModelError, match=figure):
        Tokenizer.load(str(folder))


def test_a_model_with_more_added_tokens_than_most_is_loaded(tmp_path: Path) -> None:
    """Orpheus adds 28,672 tokens of speech."""
    backend = smollm2()
    backend.add_tokens([AddedToken(f"<|s_{index}|>", normalized=False) for index in range(28_672)])
    found = Tokenizer.load(str(save(tmp_path / "model", backend)[0]))
    assert found.encode("a<|s_28671|>")[-1] == backend.get_vocab_size() - 1


def test_too_many_chat_templates_are_refused(tmp_path: Path) -> None:
    folder, _ = save(tmp_path / "model", smollm2())
    (folder / "chat_templates").mkdir()
    for index in range(101):
        (folder / "chat_templates" / f"{index}.jinja").write_text("x")
    with pytest.raises(ModelError, match="more than 100 chat templates"):
        Tokenizer.load(str(folder))


def test_a_folder_without_tokenizer_json_is_built_by_transformers(tmp_path: Path) -> None:
    folder, _ = save(tmp_path / "model", smollm2(), "qwen2", tokenizer_class="GPT2Tokenizer")
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("\n".join(map(" ".join, model["merges"])))
    (folder / "tokenizer.json").unlink()
    found, reference = Tokenizer.load(str(folder)), transformers.AutoTokenizer.from_pretrained(folder)
    assert found.encode("a  1") == reference("a  1").input_ids


def test_settings_are_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    folder, _ = save(tmp_path / "model", smollm2(), auto_map={"AutoTokenizer": ["x.X", None]})
    Tokenizer.load(str(folder))
    assert [record.getMessage() for record in caplog.records] == [
        f"{folder}: the code that auto_map names is never run; tokenizer.json is used"
    ]


def test_a_vocabulary_with_code_names_auto_map(tmp_path: Path) -> None:
    folder = folder_with_code(tmp_path / "model", tmp_path / "ran", "tokenizer_config.json")
    (folder / "tokenizer.json").rename(folder / "vocab.json")
    with pytest.raises(NoTokenizer, match="auto_map"):
        Tokenizer.load(str(folder))
