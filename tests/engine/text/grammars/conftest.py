"""A vocabulary with special tokens, and helpers that feed texts to constraints."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken

from engine.protocol.structured_outputs import StructuredOutputs
from engine.text.grammars.checks import check
from engine.text.grammars.vocabulary import VocabularySource

EOS = 0


@pytest.fixture(scope="session")
def source(tiny_model: Path) -> VocabularySource:
    backend = tokenizers.Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("<call>", "</call>")])
    return VocabularySource(backend.to_str(), backend.get_vocab_size() + 7, (EOS,))


@pytest.fixture(scope="session")
def vocabulary(source: VocabularySource) -> LLTokenizer:
    return source.load()


Follows = Callable[[StructuredOutputs, str], bool]


@pytest.fixture(scope="session")
def compiled(vocabulary: LLTokenizer) -> Callable[[StructuredOutputs], LLMatcher]:
    def compile_one(outputs: StructuredOutputs) -> LLMatcher:
        matcher, _, refusal = check(outputs, vocabulary)
        assert matcher is not None, refusal
        return matcher

    return compile_one


@pytest.fixture(scope="session")
def follows(vocabulary: LLTokenizer, compiled: Callable[[StructuredOutputs], LLMatcher]) -> Follows:
    """Whether a text, with special tokens between « and », is a whole output that the constraint allows."""

    def follow(outputs: StructuredOutputs, text: str) -> bool:
        matcher = compiled(outputs).deep_copy()
        ids: list[int] = []
        for part in re.split("(«.*?»)", text):
            if part.startswith("«"):
                [special] = vocabulary.tokenize_str(part[1:-1], parse_special=True)
                ids.append(special)
            elif part:
                ids += vocabulary.greedy_tokenize(part)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return follow
