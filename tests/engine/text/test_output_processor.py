"""Detokenized pieces add up to the full text, stop strings are found across them, and events become deltas."""

import pytest
import tokenizers
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from engine.errors import RequestError
from engine.protocol.outputs import RequestOutput
from engine.protocol.request import SamplingParams, TokenEvent, TokenLogprob, split_n
from engine.text.detokenizer import ByteDetokenizer, Detokenizer, Detokenizers, StopStrings
from engine.text.output_processor import OutputProcessor

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = [
    ("Ġ", "w"),
    ("o", "r"),
    ("Ġw", "or"),
    ("l", "d"),
    ("Ġwor", "ld"),
    ("ð", "Ł"),
    ("Ã", "©"),
    ("ï", "¿"),
    ("ï¿", "½"),
]
ODD_TEXTS = [
    "héllo wörld",
    "日本語 text",
    "😀👩‍👩‍👧‍👦🇩🇪",
    "\ufffd\ufffd literal",
    "  two  spaces ",
    "a\n\tb",
    "é" * 20,
    "<s>",
]


class Tokens:
    """The part of engine.text.tokenizer.Tokenizer that detokenization uses, over a real `tokenizers` backend."""

    def __init__(self, backend):
        self.backend = backend

    def decode(self, ids, skip_special_tokens=True):
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def encode(self, text):
        return self.backend.encode(text, add_special_tokens=False).ids


def byte_level() -> Tokens:
    """Byte-level BPE: one id per byte, a few merges (some end within a character), two special tokens, one added."""
    words = ALPHABET + ["".join(pair) for pair in MERGES]
    backend = tokenizers.Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("<end>", special=True)])
    backend.add_tokens([AddedToken("<tool>", special=False)])
    return Tokens(backend)


def byte_fallback() -> Tokens:
    """Like Llama 2: words begin with ▁, decode drops the first one, unknown characters are bytes <0x00> to <0xFF>."""
    words = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁hello", "▁world", "h", "é", "▁."]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>"])
    return Tokens(backend)


BYTES, FALLBACK = byte_level(), byte_fallback()
VOCAB = BYTES.backend.get_vocab_size()
SPECIAL = BYTES.backend.token_to_id("<s>")
END = BYTES.backend.token_to_id("<end>")
some_ids = st.lists(st.integers(0, VOCAB + 2), max_size=40)  # including unknown ids
garbage_ids = st.lists(
    st.sampled_from([BYTES.backend.token_to_id(c) for c in "ðŁĺĢÃ©ï¿½âĤ¬a"] + [SPECIAL, VOCAB - 1]), max_size=40
)
texts = st.lists(st.text(max_size=8) | st.sampled_from(ODD_TEXTS), max_size=6).map("".join)


def pieces(tokenizer, chunks, prompt=(), by_decode=False, **options):
    """Detokenize with the detokenizer chosen for the tokenizer or, with `by_decode`, with Detokenizer."""
    stream = Detokenizer(tokenizer, prompt, **options) if by_decode else Detokenizers(tokenizer).make(prompt, **options)
    return [*(stream.add(chunk) for chunk in chunks), stream.finish()]


def chunked(ids, sizes):
    """Split ids into chunks, cycling through these sizes."""
    chunks, start = [], 0
    while start < len(ids):
        size = sizes[len(chunks) % len(sizes)]
        chunks.append(ids[start : start + size])
        start += size
    return chunks


@settings(max_examples=300, deadline=None)
@given(
    some_ids | garbage_ids | texts.map(BYTES.encode),
    st.booleans(),
    st.lists(st.integers(1, 7), min_size=1),
    st.booleans(),
)
@example([0] * 5 + [94, 0, 126, VOCAB, 94], False, [3], True)  # an id without text within a character
def test_pieces_add_up_to_the_whole_decode_whatever_the_ids(ids, skip, sizes, by_decode):
    found = pieces(BYTES, chunked(ids, sizes), by_decode=by_decode, skip_special_tokens=skip)
    assert "".join(found) == BYTES.decode(ids, skip)


@settings(max_examples=300, deadline=None)
@given(some_ids | garbage_ids, some_ids | garbage_ids, st.booleans())
def test_whatever_the_prompt_ended_with_pieces_add_up_to_what_the_output_adds(prompt, ids, skip):
    detokenizer = Detokenizers(BYTES).make(prompt, skip_special_tokens=skip)
    if isinstance(detokenizer, ByteDetokenizer):
        found = "".join(map(detokenizer.add_one, ids)) + detokenizer.finish()
        assert BYTES.decode(prompt, skip) + found == BYTES.decode(prompt + ids, skip)


@settings(max_examples=200, deadline=None)
@given(texts, texts, st.booleans())
def test_pieces_after_a_prompt_add_up_to_the_text_it_adds(prompt, text, by_decode):
    found = "".join(pieces(BYTES, [[i] for i in BYTES.encode(text)], BYTES.encode(prompt), by_decode))
    whole = BYTES.decode(BYTES.encode(prompt) + BYTES.encode(text))
    assert BYTES.decode(BYTES.encode(prompt)) + found == whole


@settings(max_examples=200, deadline=None)
@given(texts.filter(lambda text: "\ufffd" not in text), st.booleans())
def test_no_piece_but_the_last_holds_half_a_character(text, by_decode):
    ids = BYTES.encode(text)
    found = pieces(BYTES, [[i] for i in ids], by_decode=by_decode)
    assert not any("\ufffd" in piece for piece in found)
    cut = pieces(BYTES, [[i] for i in BYTES.encode("a😀")[:-1]])
    assert cut[-1] == "\ufffd" and "".join(cut[:-1]) == "a"


@pytest.mark.parametrize("by_decode", [False, True])
def test_character_is_released_by_the_token_that_completes_it(by_decode):
    ids = [BYTES.backend.token_to_id(c) for c in ("ðŁ", "ĺ", "Ģ", "a")]
    assert pieces(BYTES, [[i] for i in ids], by_decode=by_decode) == ["", "", "😀", "a", ""]


class LongestDecode:
    """Decodes as BYTES, and remembers the largest number of ids in one call."""

    longest = 0

    def decode(self, ids, skip_special_tokens=True):
        self.longest = max(self.longest, len(ids))
        return BYTES.decode(ids, skip_special_tokens)


def test_bytes_that_never_become_a_character_do_not_block_the_stream():
    ids = [BYTES.backend.token_to_id("Ģ")] * 200  # a continuation byte without a leading byte
    decoder = LongestDecode()
    stream = Detokenizer(decoder)
    for token_id in ids:
        stream.add([token_id])
    assert decoder.longest <= 8 + 6  # the context and the tokens that one character may have, and one more
    assert "".join(pieces(BYTES, [[i] for i in ids])) == "\ufffd" * 200


def test_tokens_without_text_neither_pile_up_within_a_character_nor_end_it():
    first, *rest = (BYTES.backend.token_to_id(c) for c in "âĤ¬")
    decoder = LongestDecode()
    stream = Detokenizer(decoder)
    stream.add([first])
    assert "".join(stream.add([END]) for _ in range(200)) == "" and decoder.longest <= 6
    assert "".join(map(stream.add_one, rest)) == "€"


@pytest.mark.parametrize("prompt", ["", "hi"])
def test_skipped_special_tokens_do_not_pile_up(prompt):
    decoder = LongestDecode()
    stream = Detokenizer(decoder, BYTES.encode(prompt))
    assert "".join(stream.add([END]) for _ in range(500)) == "" and decoder.longest <= 8 + 1
    assert stream.add(BYTES.encode(" world")) == " world"


def test_special_tokens_are_shown_on_demand():
    ids = [SPECIAL, *BYTES.encode("a<tool>"), END]
    assert "".join(pieces(BYTES, [[i] for i in ids], skip_special_tokens=False)) == "<s>a<tool><end>"
    assert "".join(pieces(BYTES, [[i] for i in ids])) == "a<tool>"


def test_only_a_prompt_ending_mid_character_gets_the_decoding_detokenizer():
    whole, half = BYTES.encode("a😀"), BYTES.encode("a😀")[:-1]
    prompts = ([], whole, [*whole, SPECIAL], half, [*half, SPECIAL])
    kinds = [type(Detokenizers(BYTES).make(prompt)) for prompt in prompts]
    assert kinds == [ByteDetokenizer] * 3 + [Detokenizer] * 2
    assert type(Detokenizers(FALLBACK).make(whole)) is Detokenizer


def test_character_begun_in_the_prompt_is_completed_in_the_output():
    ids = BYTES.encode("a😀b")
    for cut in (2, 3):
        for before in ([], BYTES.encode("\ufffd")):  # complete characters of the prompt aren't repeated
            assert "".join(pieces(BYTES, [[i] for i in ids[cut:]], ids[:1] + before + ids[1:cut])) == "😀b"


valid_fallback = st.lists(
    st.sampled_from(["▁hello", "▁world", "▁", "h", "é", "▁.", "<s>"]) | st.sampled_from("é😀日ß\n").map(str.encode),
    max_size=20,
).map(
    lambda words: [
        FALLBACK.backend.token_to_id(token)
        for word in words
        for token in ([f"<0x{byte:02X}>" for byte in word] if isinstance(word, bytes) else [word])
    ]
)


@settings(max_examples=300, deadline=None)
@given(valid_fallback, valid_fallback, st.booleans())
def test_leading_spaces_are_those_of_the_whole_text(prompt, ids, skip):
    alone = "".join(pieces(FALLBACK, [[i] for i in ids], skip_special_tokens=skip))
    assert alone == FALLBACK.decode(ids, skip)
    before = FALLBACK.decode(prompt, skip)
    assume(not before or FALLBACK.decode(prompt[-5:], skip))  # not all of the context is special tokens
    after = "".join(pieces(FALLBACK, [[i] for i in ids], prompt, skip_special_tokens=skip))
    assert before + after == FALLBACK.decode(prompt + ids, skip)


def test_first_word_after_a_prompt_keeps_its_space():
    hello, world = (FALLBACK.backend.token_to_id(word) for word in ("▁hello", "▁world"))
    assert pieces(FALLBACK, [[world], [hello]], [hello]) == [" world", " hello", ""]
    assert pieces(FALLBACK, [[world], [hello]]) == ["world", " hello", ""]


def first_stop(text, stops, include):
    """Reference: (text before the stop string that ends first, that string), found by trying every end position."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            stop = max(ended, key=len)
            return text[:end] if include else text[: end - len(stop)], stop
    return text, None


some_stops = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4)


@settings(max_examples=500, deadline=None)
@given(st.lists(st.text("abc", max_size=6), max_size=12), some_stops, st.booleans())
def test_stop_is_found_wherever_the_pieces_break(chunks, stops, include):
    search = StopStrings(stops, include_in_output=include)
    shown, found = "", None
    for count, chunk in enumerate(chunks):
        piece, found = search.add(chunk)
        shown += piece
        text = "".join(chunks[: count + 1])
        if found:
            break
        # No more is held back than a possible beginning of a stop string.
        assert text.startswith(shown)
        held = text[len(shown) :]
        assert held == max(
            (text[len(text) - n :] for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), key=len
        )
    shown += "" if found else search.finish()
    assert (shown, found) == first_stop("".join(chunks), stops, include)


def test_unarmed_search_lets_a_stop_pass_and_shows_it():
    search = StopStrings(["END"])
    assert search.add("aENDb", armed=False) == ("aENDb", None)
    assert search.add("cE") == ("c", None)
    assert search.add("NDx") == ("", "END")


def test_no_stop_strings_hold_nothing_back():
    assert StopStrings([]).add("anything") == ("anything", None)


def logprob(token_id):
    return TokenLogprob(token_id, -1.0, 1)


def processed(params, chunks, *, tokenizer=BYTES, prompt=(), last="length", stop_reason=None):
    """Return the deltas of a request 'r' with these chunks of tokens; the engine ends it with the last one."""
    processor = OutputProcessor(tokenizer)
    processor.add("r", params, prompt)
    deltas = []
    for count, ids in enumerate(chunks, start=1):
        final = count == len(chunks)
        event = TokenEvent(
            request_id="r",
            token_ids=list(ids),
            logprobs=[logprob(i) for i in ids],
            finish_reason=last if final else None,
            stop_reason=stop_reason if final else None,
            weight_version="v3",
        )
        deltas.append(processor.process(event))
    assert len(processor) == 0 or last is None
    return deltas


def test_stop_string_ends_the_request_with_the_token_that_completes_it():
    ids = BYTES.encode("abSTOPcd")
    deltas = processed(SamplingParams(stop="STOP"), [ids[:4], ids[4:7], ids[7:]])
    first, second, late = deltas
    assert (first.text_delta, first.finish_reason, first.abort) == ("ab", None, False)
    assert (second.text_delta, second.finish_reason, second.stop_reason, second.abort) == ("", "stop", "STOP", True)
    assert second.token_ids == ids[4:6] and [entry.token_id for entry in second.logprobs] == ids[4:6]
    assert late is None


def test_stop_string_may_be_shown():
    ids = BYTES.encode("abSTOPcd")
    (delta,) = processed(SamplingParams(stop="STOP", include_stop_str_in_output=True), [ids])
    assert (delta.text_delta, delta.token_ids) == ("abSTOP", ids[:6])
    assert delta.finish_reason == "stop" and delta.abort is False  # the engine has already ended it


@pytest.mark.parametrize("reason", ["length", "stop", "abort", "error"])
def test_held_back_text_comes_with_the_last_event(reason):
    ids = BYTES.encode("abSTO") + BYTES.encode("😀")[:1]
    chunks = [ids[:3], ids[3:], [END] if reason == "stop" else []]
    deltas = processed(SamplingParams(stop="STOP"), chunks, last=reason)
    assert [delta.text_delta for delta in deltas] == ["ab", "", "STO\ufffd"]
    assert (deltas[-1].finish_reason, deltas[-1].abort, deltas[-1].weight_version) == (reason, False, "v3")


def test_stop_in_the_last_tokens_wins_over_length_and_error():
    ids = BYTES.encode("abSTOP")
    for reason in ("length", "error"):
        (delta,) = processed(SamplingParams(stop="STOP"), [ids], last=reason)
        assert (delta.text_delta, delta.finish_reason, delta.stop_reason, delta.error) == ("ab", "stop", "STOP", None)


@pytest.mark.parametrize(
    "min_tokens, text, reason",
    [(0, "", "stop"), (2, "", "stop"), (3, "abx", "stop"), (5, "abx", "stop"), (6, "abxab", "length")],
)
def test_stop_string_is_not_looked_for_before_min_tokens(min_tokens, text, reason):
    chunks = [[i] for i in BYTES.encode("abxab")]
    deltas = [delta for delta in processed(SamplingParams(stop="ab", min_tokens=min_tokens), chunks) if delta]
    assert "".join(delta.text_delta for delta in deltas) == text
    assert deltas[-1].finish_reason == reason


def test_text_of_the_token_that_stopped_is_left_out_unless_asked_for():
    ids = [*BYTES.encode("ab"), BYTES.backend.token_to_id("<tool>")]
    for include, text in ((False, "ab"), (True, "ab<tool>")):
        params = SamplingParams(stop_token_ids=ids[-1:], include_stop_str_in_output=include)
        (delta,) = processed(params, [ids], last="stop", stop_reason=ids[-1])
        assert (delta.text_delta, delta.token_ids, delta.stop_reason) == (text, ids, ids[-1])


@settings(max_examples=150, deadline=None)
@given(texts, st.lists(st.text("ab d😀é", min_size=1, max_size=3), max_size=3), st.integers(0, 12), st.integers(1, 4),
       st.booleans())  # fmt: skip
def test_stream_is_the_whole_text_up_to_the_first_stop(text, stops, min_tokens, size, include):
    ids = BYTES.encode(text)
    params = SamplingParams(stop=stops, min_tokens=min_tokens, max_tokens=None, include_stop_str_in_output=include)
    deltas = [delta for delta in processed(params, [*chunked(ids, [size]), []]) if delta]
    shown = "".join(delta.text_delta for delta in deltas)
    tokens = [token_id for delta in deltas for token_id in delta.token_ids]
    last = deltas[-1]
    assert tokens == ids[: len(tokens)]
    if last.finish_reason == "stop":
        whole, stop = BYTES.decode(tokens), last.stop_reason
        assert len(tokens) >= min_tokens and stop in stops
        assert whole.startswith(shown if include else shown + stop)
    else:
        assert (shown, tokens) == (BYTES.decode(ids), ids)
        assert min_tokens or not any(stop in shown for stop in stops)


def test_events_of_unknown_or_removed_requests_are_ignored():
    processor = OutputProcessor(BYTES)
    assert processor.process(TokenEvent(request_id="x", token_ids=[1])) is None
    processor.add("x", SamplingParams(), [])
    assert processor.remove("x") and not processor.remove("x")
    assert processor.process(TokenEvent(request_id="x", token_ids=[1])) is None


def test_id_in_use_is_refused_until_its_request_ends():
    processor = OutputProcessor(BYTES)
    processor.add("x", SamplingParams(), [])
    with pytest.raises(RequestError) as error:
        processor.add("x", SamplingParams(), [])
    assert error.value.param == "request_id"
    processor.process(TokenEvent(request_id="x", finish_reason="abort"))
    processor.add("x", SamplingParams(), [])


def test_without_a_tokenizer_there_are_ids_and_no_stop_strings():
    processor = OutputProcessor(None)
    with pytest.raises(RequestError) as error:
        processor.add("x", SamplingParams(stop="a"), [1])
    assert error.value.param == "stop" and len(processor) == 0
    (delta,) = processed(SamplingParams(), [[1, 2]], tokenizer=None)
    assert (delta.text_delta, delta.token_ids, delta.finish_reason) == ("", [1, 2], "length")


def test_deltas_of_several_sequences_add_up_to_one_output():
    params = SamplingParams(n=3, logprobs=0, stop="c")
    processor = OutputProcessor(BYTES)
    prompt = BYTES.encode("hi")
    output = RequestOutput.empty("id", "hi", prompt, n=3)
    children = split_n("id", params, 5)
    for child in children:
        processor.add(child.request_id, child.params, prompt, request_id="id", index=child.index)
    for step, text in enumerate(["ab", "bc", "de"]):
        assert not output.finished
        for child in children:
            ids = BYTES.encode(text)[: 2 if child.index else 1]
            event = TokenEvent(
                request_id=child.request_id,
                token_ids=ids,
                logprobs=[logprob(i) for i in ids],
                prompt_logprobs=[None, logprob(1)] if step == 0 and child.index == 0 else None,
                finish_reason="length" if step == 2 else None,
                weight_version=f"v{step}",
                cached_tokens=2 if step == 0 else 0,
            )
            delta = processor.process(event)
            if delta is not None:
                assert (delta.request_id, delta.child_id, delta.index) == ("id", child.request_id, child.index)
                output.add(delta)
    assert output.finished and output.prompt_logprobs == [None, logprob(1)] and output.cached_tokens == 2
    assert [o.text for o in output.outputs] == ["abd", "abb", "abb"]
    assert [(o.finish_reason, o.stop_reason, o.weight_version) for o in output.outputs] == [
        ("length", None, "v2"), ("stop", "c", "v1"), ("stop", "c", "v1")]  # fmt: skip
    for one in output.outputs:
        assert [entry.token_id for entry in one.logprobs] == one.token_ids
    assert (output.text, output.finish_reason, output.token_ids) == ("abd", "length", output.outputs[0].token_ids)


def test_error_reaches_the_output():
    (delta,) = processed(SamplingParams(), [BYTES.encode("ab")], last=None)
    assert delta.finish_reason is None
    processor = OutputProcessor(BYTES)
    processor.add("x", SamplingParams(), [])
    output = RequestOutput.empty("x", None, [])
    output.add(processor.process(TokenEvent(request_id="x", finish_reason="error", error="the engine died")))
    assert (output.outputs[0].finish_reason, output.outputs[0].error) == ("error", "the engine died")
