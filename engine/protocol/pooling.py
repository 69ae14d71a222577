"""Pooling: one vector of a prompt in place of generated tokens, for embeddings, scores and classification.

Defines the modes, the defaults of a served model (PoolingConfig), and the last steps, which run on the host: the cut to
fewer dimensions, normalisation, and the activation of a classification head. Used in the caller's process: no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from engine.errors import PromptTooLong, RequestError

POOLING_MODES = ("last", "mean", "classify")
"""How the hidden states [T, h] of a prompt, after the last norm, become one vector.

- last: the one of the last token, [h].
- mean: their mean, [h], summed in float32.
- classify: the outputs of the model's classification head for the last token, [labels].
"""

ACTIVATIONS = ("auto", "identity", "sigmoid", "softmax")


@dataclass(frozen=True, kw_only=True)
class PoolingConfig:
    """How a model's folder says that its vectors are made; the defaults are for a plain decoder.

    - mode: "last" or "mean". normalize: divide a vector by its Euclidean norm.
    - dimensions: the sizes to which vectors may be cut; empty: any.
    - max_length: the longest input in tokens; None: the context.
    - prompts: texts to write before an input, by name; default_prompt: the name of the one that is always written.
    - score_tokens: the tokens, as text or ids, that say "no" and "yes" to a query and a document; None: none.
    - score_template: the template of a query and a document; "" to join their tokens. score_prompt: its variable
      add_generation_prompt.
    - activation: of a classification head's outputs, or of a score by two tokens, whose logit is the difference of
      theirs; "auto": sigmoid of one label, softmax of several.
    """

    mode: str = "last"
    normalize: bool = True
    dimensions: tuple[int, ...] = ()
    max_length: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict, hash=False)
    default_prompt: str | None = None
    score_tokens: tuple[str | int, str | int] | None = None
    score_template: str = ""
    score_prompt: bool = False
    activation: str = "auto"

    def prompt(self, name: str | None) -> str:
        """Return the text before an input: of the prompt `name`, or the default one. Raises RequestError."""
        chosen = self.default_prompt if name is None else name
        if chosen is None:
            return ""
        if chosen not in self.prompts:
            known = ", ".join(map(repr, self.prompts)) or "none"
            raise RequestError(
                f"prompt_name={chosen!r} is not a prompt of this model; it has {known}", param="prompt_name"
            )
        return self.prompts[chosen]

    def longest(self, max_model_len: int) -> int:
        """Return the longest input in tokens."""
        return max_model_len if self.max_length is None else min(self.max_length, max_model_len)

    def check_length(self, tokens: int, max_model_len: int, param: str) -> None:
        """Raise PromptTooLong for an input with more tokens than the model embeds."""
        if tokens > (longest := self.longest(max_model_len)):
            raise PromptTooLong(
                f"{param} has {tokens} tokens, and at most {longest} are embedded: shorten it", param=param
            )

    def check_dimensions(self, dimensions: int | None, hidden_size: int) -> None:
        """Raise RequestError for a number of dimensions that the model's vectors can't be cut to."""
        if dimensions is None:
            return
        if not 1 <= dimensions <= hidden_size:
            raise RequestError(
                f"dimensions={dimensions}: the vectors of this model have {hidden_size} values; give 1 to "
                f"{hidden_size}, or leave it out",
                param="dimensions",
            )
        if self.dimensions and dimensions not in self.dimensions:
            raise RequestError(
                f"dimensions={dimensions}: this model's vectors can be cut to {', '.join(map(str, self.dimensions))}",
                param="dimensions",
            )


def check_pooling(mode: object, max_tokens: int | None, n: int, return_hidden_states: bool) -> None:
    """Raise RequestError for an unknown mode, and for parameters that contradict it."""
    if mode not in POOLING_MODES:
        raise RequestError(f"pooling must be one of {', '.join(POOLING_MODES)}; found {mode!r}", param="pooling")
    if max_tokens != 0 or n != 1:
        raise RequestError(
            f"pooling generates no tokens: set max_tokens=0 and n=1, found max_tokens={max_tokens} and n={n}",
            param="max_tokens" if max_tokens != 0 else "n",
        )
    if return_hidden_states:
        raise RequestError(
            "pooling and return_hidden_states exclude each other: leave one out", param="return_hidden_states"
        )


def finish_embedding(vector: np.ndarray, dimensions: int | None, normalize: bool) -> np.ndarray:
    """Cut float32 [..., h] to its first `dimensions` values and normalise it. A zero vector stays zero."""
    cut = vector if dimensions is None else vector[..., :dimensions]
    if not normalize:
        return cut
    norm = np.sqrt(np.sum(np.square(cut, dtype=np.float64), axis=-1, keepdims=True))
    return (cut / np.maximum(norm, 1e-12)).astype(np.float32)


def activate(logits: np.ndarray, activation: str) -> np.ndarray:
    """Apply an activation of ACTIVATIONS to a head's outputs, float32 [labels]."""
    kind = ("sigmoid" if len(logits) == 1 else "softmax") if activation == "auto" else activation
    if kind == "identity":
        return logits
    exact = logits.astype(np.float64)
    if kind == "sigmoid":
        return (0.5 * (1.0 + np.tanh(0.5 * exact))).astype(np.float32)  # doesn't overflow
    weights = np.exp(exact - exact.max())
    return (weights / weights.sum()).astype(np.float32)
