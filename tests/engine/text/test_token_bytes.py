"""The bytes of tokens join to the text's, and each token's position is that of its first character."""

import codecs

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from engine.text.token_bytes import TokenBytes, TokenPlaces, prompt_places
from engine.text.tokenizer import Tokenizer

EMOJI = "😀"
TEXTS = [
    "the 😀 e\u0301 👨‍👩‍👧 x", "héllo wörld",
    "日本語 text", "a\n\tb", "  two  spaces ", "\ufffd literal \ufffd", "🇩🇪👍🏽", "čem Ġ <0x41>",
]  # fmt: skip
some_texts = st.text(alphabet="ab é\u0301😀日\ufffd\nč", max_size=20)


def byte_level(trim_offsets=True, **options) -> Tokenizer:
    """Byte-level BPE: one id per byte, merges within and across characters, a BOS that is added to a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("ð", "Ł"), ("Ġ", "ð"), ("Ã", "©"), ("Ġ", "a"), ("Ł", "ĺ")]
    words = [*alphabet, *("".join(pair) for pair in merges)]
    backend = tokenizers.Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, **options)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    backend.add_tokens([AddedToken("<tool>", special=False), AddedToken("žluť😀", special=False)])
    bos = backend.token_to_id("<s>"), backend.token_to_id("</s>")
    backend.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=trim_offsets),
            processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", bos[0]), ("</s>", bos[1])]),
        ]
    )
    return Tokenizer(backend, name="byte-level")


def byte_fallback() -> Tokenizer:
    """Like Llama 2: words begin with ▁, decode drops the first one, unknown characters are bytes."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "é", "▁a", "▁b"]
    merges = [("▁", "a"), ("▁", "b")]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={word: i for i, word in enumerate(words)}, merges=merges, unk_token="<unk>", byte_fallback=True
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>"])
    return Tokenizer(backend, name="byte-fallback")


def metaspace() -> Tokenizer:
    words = ["<unk>", "▁", "▁hello", "▁world", "a", "b", "é", "😀", "\n"]
    backend = tokenizers.Tokenizer(models.Unigram([(word, -1.0) for word in words], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return Tokenizer(backend, name="metaspace")


def word_piece() -> Tokenizer:
    words = ["[UNK]", "a", "##a", "b", "##b", "hello", "##é"]
    backend = tokenizers.Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    backend.decoder = decoders.WordPiece(cleanup=False)
    return Tokenizer(backend, name="word-piece")


BYTE_LEVEL, FALLBACK = byte_level(), byte_fallback()


def places_of(tokenizer, prompt=(), **options):
    return TokenPlaces(TokenBytes(tokenizer), prompt, **options)


def check(tokenizer, ids, places, text):
    """Each token of whole characters stands where its text is; a part of a character at that character."""
    token_bytes = TokenBytes(tokenizer)
    for token_id, place in zip(ids, places, strict=True):
        data = token_bytes.of(token_id)
        try:
            own = data.decode()
        except UnicodeDecodeError:
            whole = text[place : place + len(data)].encode()
            assert data in whole, (data, place)
        else:
            assert text[place : place + len(own)] == own, (own, place)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, FALLBACK], ids=lambda one: one.name)
@settings(deadline=None)
@given(text=some_texts)
@example(text=TEXTS[0])
@example(text=TEXTS[5])
@example(text=TEXTS[6])
def test_bytes_join_to_the_text_and_places_are_right(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    token_bytes = TokenBytes(tokenizer)
    joined = b"".join(map(token_bytes.of, ids)).decode()
    assert joined == (" " * (joined != text) + text)  # Llama 2 writes a space before the first word
    places = places_of(tokenizer, tokenizer.encode("b", add_special_tokens=False))
    check(tokenizer, ids, [places.add(one) for one in ids], joined)
    assert places.finish() == len(joined)


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 2), max_size=30), skip=st.booleans())
@example(ids=[BYTE_LEVEL.backend.token_to_id(one) for one in ("ð", "ð", "Ł", "a")], skip=True)
def test_places_are_right_whatever_the_ids(ids, skip):
    """Bytes that are no characters are U+FFFD in the text, and the tokens after them stand after it."""
    text = BYTE_LEVEL.decode(ids, skip_special_tokens=skip)
    places, token_bytes = places_of(BYTE_LEVEL, skip_special_tokens=skip), TokenBytes(BYTE_LEVEL)
    data = b""
    special = {BYTE_LEVEL.backend.token_to_id(name) for name in ("<s>", "</s>")}
    for token_id in ids:
        own = b"" if skip and token_id in special else token_bytes.of(token_id)
        place = places.add(token_id)
        before, read = codecs.utf_8_decode(data, "replace", False)
        if own and not 0x80 <= own[0] < 0xC0:  # begins a character: everything before is complete
            assert place == len(data.decode("utf-8", "replace"))
        else:
            assert place == len(before)
        data += own
    assert places.finish() == len(text) == len(data.decode("utf-8", "replace"))


@pytest.mark.parametrize(
    ("tokenizer", "entry", "data"),
    [
        (BYTE_LEVEL, "ðŁ", b"\xf0\x9f"),
        (BYTE_LEVEL, "Ġð", b" \xf0"),
        (BYTE_LEVEL, "Ã©", "é".encode()),
        (BYTE_LEVEL, "<s>", b"<s>"),
        (BYTE_LEVEL, "<tool>", b"<tool>"),
        (BYTE_LEVEL, "žluť😀", "žluť😀".encode()),
        (FALLBACK, "<0xF0>", b"\xf0"),
        (FALLBACK, "▁a", b" a"),
        (FALLBACK, "é", "é".encode()),
        (FALLBACK, "<unk>", b"<unk>"),
        (metaspace(), "▁hello", b" hello"),
        (metaspace(), "😀", EMOJI.encode()),
        (word_piece(), "##a", b"a"),
        (word_piece(), "hello", b" hello"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_bytes_of_a_token(tokenizer, entry, data):
    token_id = tokenizer.backend.token_to_id(entry)
    assert TokenBytes(tokenizer).of(token_id) == data
    assert TokenBytes(tokenizer).text(token_id) == data.decode("utf-8", "replace")


def test_an_unknown_id_has_no_bytes():
    assert TokenBytes(BYTE_LEVEL).of(BYTE_LEVEL.vocab_size) == b""


@pytest.mark.parametrize("trim", [False, True])
@pytest.mark.parametrize("text", TEXTS)
def test_places_in_a_prompt_are_in_the_text_as_it_was_sent(text, trim):
    """Special tokens that the tokenizer adds have no place in the text, and don't move what follows."""
    tokenizer = byte_level(trim_offsets=trim)
    ids = tokenizer.encode(text)
    places = prompt_places(tokenizer, TokenBytes(tokenizer), text, ids, True)
    assert places[0] == 0 and places[-1] == len(text)
    check(tokenizer, ids[1:-1], places[1:-1], text)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, FALLBACK], ids=lambda one: one.name)
@pytest.mark.parametrize("text", ["a 😀 b", "<s>é😀", " a"])
def test_places_in_a_prompt_of_ids_are_in_the_text_that_they_decode_to(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    shown = tokenizer.decode(ids, skip_special_tokens=False)
    places = prompt_places(tokenizer, TokenBytes(tokenizer), None, ids, True)
    start = TokenBytes(tokenizer).text(ids[0])
    skipped = 1 if start.startswith(" ") and not shown.startswith(" ") else 0
    check(tokenizer, ids[skipped:], places[skipped:], shown)


def test_a_character_that_the_prompt_began_is_the_outputs_first():
    ids = [BYTE_LEVEL.backend.token_to_id(one) for one in ("a", "ðŁ", "ĺ", "Ģ", "a")]
    places = places_of(BYTE_LEVEL, ids[:2], at=7)
    assert [places.add(one) for one in ids[2:]] == [7, 7, 8] and places.at == 9
