"""A tokenizer of any size for shapes with random weights: token masks cost what they cost for a real vocabulary."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

NUM_RESERVED = 3  # special tokens: <|0|>, <|1|> and <|2|>
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_JSON = ('":', '":"', '":["', '":{"', '","', '",', '"},', '"},{"', '"],"', '"}]', "[{", "[]", "{}", '{"', "},", "]}")


def write_tokenizer(folder: str | Path, vocab_size: int) -> None:
    """Write tokenizer.json and tokenizer_config.json: a byte-level BPE of `vocab_size` tokens, at least 259.

    The tokens are the bytes, pieces of JSON, numbers of up to three digits, and words of two letters and more with and
    without a space, shortest first. Encoded text uses bytes only; a model may sample every token.
    """
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    space = "Ġ"  # a space in byte-level BPE
    tokens = itertools.chain((f"<|{index}|>" for index in range(NUM_RESERVED)), alphabet, _pieces(space))
    vocab = {token: index for index, token in enumerate(itertools.islice(tokens, vocab_size))}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    special = [f"<|{index}|>" for index in range(NUM_RESERVED)]
    backend.add_special_tokens(special)
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=special[1], eos_token=special[2]).save_pretrained(
        folder
    )


def _pieces(space: str) -> Iterator[str]:
    yield from _JSON
    for digits in (2, 3):
        yield from (str(number).zfill(digits) for number in range(10**digits))
    for length in itertools.count(2):
        for letters in itertools.product(_LETTERS, repeat=length):
            word = "".join(letters)
            yield word
            yield space + word
