"""The synthetic tokenizer of benchmark shapes."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from benchmarks.vocabulary import write_tokenizer


@pytest.mark.parametrize("size", [300, 5000])
def test_the_tokenizer_has_the_size_asked_for_and_round_trips(tmp_path, size):
    write_tokenizer(tmp_path, size)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == len(tokenizer.get_vocab()) == size
    text = 'a {"name": "Zoë", "size": 12}'
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([size - 1]).strip().isalnum() and tokenizer.eos_token_id == 2
