"""Tokenizers of GGUF files give the ids of llama.cpp, for every pre-tokenizer and for SentencePiece's vocabularies.

The expected ids are answers of llama.cpp (llama_cpp_python 0.3.36) for the same files.
"""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import pre_tokenizers

from engine.checkpoint.source import ModelSource
from engine.errors import ModelError, NoTokenizer
from engine.text.detokenizer import Detokenizers
from engine.text.gguf_tokenizer import PRE_TOKENIZERS
from engine.text.token_bytes import TokenBytes
from engine.text.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
# Words of each class that a pre-tokenizer tells apart, next to each other.
TEXT = (
    "I'll don'T've 1234567 "
    "\u0661\u0662\u06631234 ab12 x\u00bd \u00dcn\u00ef e\u0301 \u4f60\u597d\u30ab\u30ca\ud55c !!\n\n"
    "  x\t\t(ya)/\r\n  \n\n <a_B1>HTTPs, 12'S `$+\u20ac`\n/ a b  IMGIMGABZ\u3000B hello\r\n\r"
    "it'sx    y de\u0301s, ce\u0301\u0301"
)
# Names of pre-tokenizers, separated by spaces -> the ids of TEXT.
EXPECTED = {
    name: ids
    for names, ids in json.loads((Path(__file__).parent / "gguf_ids.json").read_text()).items()
    for name in names.split()
}
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level_vocabulary() -> tuple[list[str], list[str], list[int]]:
    """Return tokens, merges and types; any two or three neighbours in TEXT make a token, across all words."""
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ((text, _),) = splitter.pre_tokenize_str(TEXT)
    pairs = list(dict.fromkeys(text[at : at + 2] for at in range(len(text) - 1)))
    triples = list(dict.fromkeys(text[at : at + 3] for at in range(len(text) - 2)))
    merges = [" ".join(pair) for pair in pairs] + [f"{triple[:2]} {triple[2]}" for triple in triples]
    special = ["<unk>", "<s>", "</s>"]
    # No merge makes the last one: only ignore_merges finds it.
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), *pairs, *triples, "\u0120hello"]
    return tokens, merges, [UNKNOWN, CONTROL, CONTROL] + [NORMAL] * (len(tokens) - 3)


def sentencepiece_vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Return tokens, scores and types of a small vocabulary with byte tokens and runs of spaces of one score."""
    tokens, types = ["<unk>", "<s>", "</s>", *BYTES], [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256]
    scores = [0.0] * len(tokens)
    words = "ll he or llo \u2581w hello \u2581hello ld \u2581wor \u2581world aa aaa == === \u2581a".split()
    for place, word in enumerate(words):
        tokens, scores, types = [*tokens, word], [*scores, -float(place + 1)], [*types, NORMAL]
    for length in range(2, 9):
        tokens, scores, types = [*tokens, "\u2581" * length], [*scores, -1e9], [*types, NORMAL]
    for place, letter in enumerate("\u2581abcdehlortw=\u00e9\n"):
        tokens, scores, types = [*tokens, letter], [*scores, -100.0 - place], [*types, NORMAL]
    added = [("<tool>", USER_DEFINED), ("\n\n", USER_DEFINED), ("<|im_end|>", NORMAL), ("<extra>", UNUSED)]
    return (
        [*tokens, *[token for token, _ in added]],
        [*scores, *[-1000.0] * len(added)],
        [*types, *[kind for _, kind in added]],
    )


def raw_vocabulary() -> tuple[list[str], list[str], list[int]]:
    """Return tokens, merges and types of a vocabulary like Gemma 4's: merges over text with "\u2581" for spaces."""
    merges = ["h e", "l l", "\u2581 he", "ll o", "\u2581he llo", "\n \n", "\n\n \n", "\u2581 \u2581", "\u2581 a"]
    words = [merge.replace(" ", "") for merge in merges]
    special = ["<pad>", "<eos>", "<bos>", "<|tool_response>", "</s>"]
    tokens = [*special, *BYTES, *"\u2581helo a\n", *words]
    types = [CONTROL, CONTROL, CONTROL, USER_DEFINED, NORMAL, *[BYTE] * 256]
    return tokens, merges, types + [NORMAL] * (len(tokens) - len(types))


def load(
    folder: Path, kind: str, tokens: list[str], types: list[int], *, ids: tuple[int, ...] = (1, 2), **metadata: Any
) -> Tokenizer:
    """Load a file that has only a tokenizer. `metadata`: keys of `tokenizer.ggml`, `name`, `chat_template`."""
    path = folder / "t.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for name, index in zip(("bos", "eos"), ids, strict=False):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", index)
    if "name" in metadata:
        writer.add_name(metadata.pop("name"))
    if "chat_template" in metadata:
        writer.add_chat_template(metadata.pop("chat_template"))
    adders = {bool: writer.add_bool, str: writer.add_string, int: writer.add_uint32, list: writer.add_array}
    for key, value in metadata.items():
        adders[type(value)](f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return Tokenizer.load(ModelSource(str(path), "gguf", "sample"))


def load_byte_level(folder: Path, **metadata: Any) -> Tokenizer:
    tokens, merges, types = byte_level_vocabulary()
    return load(folder, "gpt2", tokens, types, **{"merges": merges} | metadata)


def load_ids(folder: Path, text: str) -> list[int]:
    return load_byte_level(folder, pre="gpt-2").encode(text)


def load_sentencepiece(folder: Path, **metadata: Any) -> Tokenizer:
    tokens, scores, types = sentencepiece_vocabulary()
    return load(folder, "llama", tokens, types, **{"scores": scores} | metadata)


def load_raw(folder: Path, **metadata: Any) -> Tokenizer:
    tokens, merges, types = raw_vocabulary()
    return load(folder, "gemma4", tokens, types, ids=(2, 1), **{"merges": merges} | metadata)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_words_are_cut_as_llama_cpp_cuts_them(tmp_path: Path, name: str) -> None:
    assert load_byte_level(tmp_path, pre=name).encode(TEXT, add_special_tokens=False) == EXPECTED[name]


def test_every_pre_tokenizer_has_expected_ids() -> None:
    elsewhere = {"qwen2", *(name for name, one in PRE_TOKENIZERS.items() if one.is_raw)}
    assert EXPECTED.keys() | elsewhere == PRE_TOKENIZERS.keys()


def test_qwen2_composes_accents_and_is_like_its_relatives_otherwise(tmp_path: Path) -> None:
    qwen2, relative = (load_byte_level(tmp_path, pre=name) for name in ("qwen2", "megrez"))
    composed = unicodedata.normalize("NFC", TEXT)
    assert qwen2.encode(TEXT) == relative.encode(composed) != relative.encode(TEXT)


@pytest.mark.parametrize(("metadata", "begins"), [
    ({"pre": "llama-bpe"}, True), ({"pre": "llama-bpe", "add_bos_token": False}, False), ({"pre": "tekken"}, True),
    ({"pre": "gpt-2"}, False), ({"pre": "gpt-2", "add_bos_token": True}, True), ({"pre": "glm4"}, False),
])  # fmt: skip
def test_bos_is_added_by_default_where_llama_cpp_adds_it(tmp_path: Path, metadata: dict, begins: bool) -> None:
    assert load_byte_level(tmp_path, **metadata).encode("ab")[:1] == ([1] if begins else load_ids(tmp_path, "ab")[:1])


def test_a_file_without_the_id_of_bos_adds_none_and_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokens, merges, types = byte_level_vocabulary()
    found = load(tmp_path, "gpt2", tokens, types, ids=(), merges=merges, pre="llama-bpe")
    assert found.encode("ab") == found.encode("ab", add_special_tokens=False)
    assert "has no tokenizer.ggml.bos_token_id" in caplog.text


def test_a_file_without_pre_tokenizer_is_cut_by_default_and_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert load_byte_level(tmp_path).encode(TEXT) == EXPECTED["default"]
    assert "names no pre-tokenizer (tokenizer.ggml.pre)" in caplog.text
    caplog.clear()
    assert load_byte_level(tmp_path, pre="default").encode(TEXT) == EXPECTED["default"]
    assert not caplog.text


def test_of_a_merge_that_appears_twice_the_first_one_counts(tmp_path: Path) -> None:
    tokens, merges, types = byte_level_vocabulary()
    again = load(tmp_path, "gpt2", tokens, types, pre="gpt-2", merges=[*merges, *merges[::-1]])
    assert again.encode(TEXT) == EXPECTED["gpt-2"]


def test_nothing_merges_over_a_byte_without_token(tmp_path: Path) -> None:
    tokens, merges, types = byte_level_vocabulary()
    lacking = load(tmp_path, "gpt2", ["*" if token == "~" else token for token in tokens if token != "*"], types[1:],
                   pre="gpt-2", merges=merges)  # fmt: skip
    whole = load_byte_level(tmp_path, pre="gpt-2")
    assert lacking.decode(lacking.encode("a~b !~! ab")) == "ab !! ab"
    assert len(lacking.encode("!~!")) == 2 > len(whole.encode("!!"))


def test_tokens_are_special_by_their_text_except_for_qwen2(tmp_path: Path) -> None:
    tokens, merges, types = byte_level_vocabulary()
    tokens, types = [*tokens, "<|im_end|>"], [*types[:2], NORMAL, *types[3:], NORMAL]
    for pre, has_tokens in (("megrez", True), ("qwen2", False)):
        found = load(tmp_path, "gpt2", tokens, types, merges=merges, pre=pre)
        ids = found.encode("ab</s>ab<|im_end|>")
        assert ({2, len(tokens) - 1} <= set(ids)) == has_tokens  # for llama.cpp, megrez has both and so has qwen2
        assert found.decode(ids) == ("ab</s>ab" if has_tokens else "ab</s>ab<|im_end|>")


# The texts of SentencePiece's vocabulary -> ids with BOS and a space before each part, and ids with neither but EOS.
SENTENCEPIECE = {
    "": ([1], [2]),
    "hello world": ([1, 265, 268], [264, 268, 2]),
    " hello": ([1, 281, 265], [265, 2]),
    "   a": ([1, 275, 273], [274, 273, 2]),
    "aaaa": ([1, 281, 269, 269], [269, 269, 2]),
    "aaaaa": ([1, 281, 269, 270], [269, 270, 2]),
    "=====": ([1, 281, 271, 272], [271, 272, 2]),
    "h\u00e9llo \u4f60": ([1, 281, 287, 294, 262, 281, 231, 192, 163], [287, 294, 262, 281, 231, 192, 163, 2]),
    "hello<tool>hello": ([1, 265, 296, 265], [264, 296, 264, 2]),
    "hello\n\n\nhello": ([1, 265, 297, 281, 295, 264], [264, 297, 295, 264, 2]),
    "a<|im_end|>hello": ([1, 273, 298, 265], [282, 298, 264, 2]),
    "            hello": ([1, 280, 276, 265], [280, 275, 265, 2]),
    " " * 19: ([1, 280, 280, 276], [280, 280, 275, 2]),
    "<s>hello</s>": ([1, 1, 265, 2], [1, 264, 2, 2]),
    "<extra>a": ([1, 281, 63, 286, 123, 291, 290, 282, 65, 282], [63, 286, 123, 291, 290, 282, 65, 282, 2]),
    "\u2581hello": ([1, 281, 265], [265, 2]),
}


def test_sentencepiece_merges_by_score(tmp_path: Path) -> None:
    found = load_sentencepiece(tmp_path)
    assert {text: found.encode(text) for text in SENTENCEPIECE} == {
        text: with_bos for text, (with_bos, _) in SENTENCEPIECE.items()
    }


def test_sentencepiece_without_prefix_and_bos(tmp_path: Path) -> None:
    found = load_sentencepiece(tmp_path, add_space_prefix=False, add_bos_token=False, add_eos_token=True)
    assert {text: found.encode(text) for text in SENTENCEPIECE} == {
        text: with_eos for text, (_, with_eos) in SENTENCEPIECE.items()
    }
    assert found.decode(found.encode(" hello", add_special_tokens=False)) == " hello"


def test_bos_and_eos_of_sentencepiece_have_default_ids(tmp_path: Path) -> None:
    tokens, scores, types = sentencepiece_vocabulary()
    found = load(tmp_path, "llama", tokens, types, ids=(), scores=scores, add_eos_token=True)
    assert found.encode("hello") == [1, 265, 2]
    assert found.eos_token_ids == (2,)


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_streams_what_it_decodes(tmp_path: Path, prefix: bool) -> None:
    found = load_sentencepiece(tmp_path, add_space_prefix=prefix)
    text = "hello  world \u4f60\n\u00e9 hello<tool>"
    ids = found.encode(text, add_special_tokens=False)
    assert found.decode(ids) == text
    stream = Detokenizers(found).make(found.encode("a"))
    pieces = [stream.add_one(index) for index in ids]
    assert "".join(pieces) + stream.finish() == (" " if prefix else "") + text  # after a prompt, the space stays
    assert "\ufffd" not in "".join(pieces)
    assert TokenBytes(found).of(found.backend.token_to_id("<0xF0>")) == b"\xf0"


def test_special_tokens_are_skipped_and_those_of_users_stay(tmp_path: Path) -> None:
    found = load_sentencepiece(tmp_path)
    ids = found.encode("a<|im_end|><tool><unk>a")
    assert found.decode(ids) == "a<tool> a"
    assert found.decode(ids, skip_special_tokens=False) == "<s> a<|im_end|><tool><unk> a"


def test_special_tokens_of_phi_3_take_the_white_space_after_them(tmp_path: Path) -> None:
    found, plain = (load_sentencepiece(tmp_path, name=name) for name in ("Phi-3 mini", "phi 4"))
    assert found.encode("<|im_end|>\n  hello") == [1, 298, 265]
    assert found.encode("<s> hello") == [1, 1, 281, 265]
    assert plain.encode("<|im_end|>\n  hello") == [1, 298, 281, 295, 281, 265]


# Ids after BOS, which llama.cpp adds even if the file says otherwise.
RAW = {
    "": [], "hello hello": [269, 272, 273], "  a": [276, 267], "\n\n": [274], "\n\n\n": [275],
    "\n\n\n\n": [274, 274], "a\n\u4f60": [267, 268, 233, 194, 165], "hello</s>": [269, 272, 65, 52, 120, 67],
    "<|tool_response>a": [3, 267], "Z": [95],
}  # fmt: skip


def test_gemma4_merges_text_instead_of_bytes(tmp_path: Path) -> None:
    found = load_raw(tmp_path, add_bos_token=False)
    assert {text: found.encode(text) for text in RAW} == {text: [2, *ids] for text, ids in RAW.items()}
    assert found.decode(found.encode(" hello \u4f60\n\n")) == " hello \u4f60\n\n"


def test_a_token_of_newlines_that_no_merge_makes_is_refused(tmp_path: Path) -> None:
    _, merges, _ = raw_vocabulary()
    with pytest.raises(NoTokenizer, match=r"tokenizer\.ggml\.merges lack .* convert the model again"):
        load_raw(tmp_path, merges=[merge for merge in merges if not merge.startswith("\n")])


def test_gemma4_without_a_token_for_each_byte_is_damaged(tmp_path: Path) -> None:
    tokens, merges, types = raw_vocabulary()
    with pytest.raises(ModelError, match="damaged: 1 bytes, <0x41> first, have no token"):
        load(tmp_path, "gemma4", ["A" if token == "<0x41>" else token for token in tokens], types, merges=merges)


@pytest.mark.parametrize("kind", ["bert", "t5", "rwkv", "plamo2", "hybriddna", "whitespace"])
def test_other_kinds_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    with pytest.raises(NoTokenizer, match=rf"{kind}.*tokenizer\.ggml\.model.*gpt2, gemma4, llama are.*ids still work"):
        load(tmp_path, kind, ["a"], [NORMAL])


def test_an_unknown_pre_tokenizer_is_refused_with_the_list(tmp_path: Path) -> None:
    with pytest.raises(NoTokenizer, match=r"'whitespace' \(tokenizer\.ggml\.pre\).*afmoe, bailingmoe, .*youtu are"):
        load_byte_level(tmp_path, pre="whitespace")


def test_sentencepiece_without_scores_is_refused(tmp_path: Path) -> None:
    tokens, _, types = sentencepiece_vocabulary()
    for scores in ({}, {"scores": [0.0] * len(tokens)}):
        with pytest.raises(NoTokenizer, match=r"tokenizer\.ggml\.scores"):
            load(tmp_path, "llama", tokens, types, **scores)
    with pytest.raises(ModelError, match="there are 2 scores for"):
        load(tmp_path, "llama", tokens, types, scores=[0.0, -1.0])


@pytest.mark.parametrize(("template", "more", "metadata", "ends"), [
    ("{{ '<|end|>' }}", [], {}, [2, "<|end|>"]),
    ("{{ '<|end|>' }}", [], {"eot_token_id": 1}, [2, 1]),
    ("{{ '<|user|>' }}", [], {}, [2]),
    ("{{ '<|end|><|call|><|return|>' }}", ["<|call|>", "<|return|>"], {}, [2, "<|call|>", "<|return|>"]),
])  # fmt: skip
def test_turns_end_with_the_token_that_the_template_writes(
    tmp_path: Path, template: str, more: list[str], metadata: dict, ends: list
) -> None:
    tokens, scores, types = sentencepiece_vocabulary()
    added = ["<|end|>", *more]
    types, scores = [*types, *[CONTROL] * len(added)], [*scores, *[0.0] * len(added)]
    found = load(tmp_path, "llama", [*tokens, *added], types, scores=scores, chat_template=template, **metadata)
    expected = [len(tokens) + added.index(end) if isinstance(end, str) else end for end in ends]
    assert list(found.eos_token_ids) == expected
