"""The vocabulary as llguidance needs it: the bytes of each token."""

from __future__ import annotations

from dataclasses import dataclass

from llguidance import LLTokenizer

from engine.errors import RequestError
from engine.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class VocabularySource:
    """What llguidance builds its vocabulary from; picklable.

    - tokenizer: the JSON of the `tokenizers` library.
    - size: number of token ids of the model; ids beyond the tokenizer's are never allowed.
    - eos_token_ids: allowed where a grammar may end.
    """

    tokenizer: str
    size: int
    eos_token_ids: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> VocabularySource:
        """Return the source of a model's tokenizer."""
        return cls(tokenizer.backend.to_str(), max(vocab_size, tokenizer.vocab_size), eos_token_ids)

    def load(self) -> LLTokenizer:
        """Build the vocabulary, which takes about a second for 150,000 tokens.

        Raises RequestError if the tokenizer has a form that llguidance doesn't support.
        """
        try:
            return LLTokenizer(self.tokenizer, n_vocab=self.size, eos_token=list(self.eos_token_ids))
        except ValueError as error:
            raise RequestError(
                f"the model's tokenizer does not support structured outputs: {error}", param="structured_outputs"
            ) from error
