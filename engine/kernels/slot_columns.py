"""The layout of the sampling parameters that captured sampling reads from device memory.

One row per slot, 8 bytes per column: float64 columns hold the bits of the number. Shared by the kernels and the torch
implementation in engine/sampling.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

# float64 columns. At most one of the two temperatures is above 0: both are 0 for a row that takes the argmax.
FULL_TEMPERATURE, TRUNCATED_TEMPERATURE, TOP_K, TOP_P, MIN_P, REPETITION, FREQUENCY, PRESENCE = range(8)
NUM_FLOATS = 8
# int64 columns. KEY: mix64(seed). PENALISED and ADJUSTED_ARGMAX are flags: the row has penalties; the row takes the
# argmax of logits that penalties, bias, bans or a mask changed. Bans apply to positions below BANNED_UNTIL. CONSTRAINED
# is a flag: only the tokens of the slot's mask are allowed. TOP_COUNT: 0 if the kernels don't compute log-probabilities
# of the row, else 1 + the number of alternatives. NUM_NAMED: the number of logprob_token_ids.
KEY, PENALISED, ADJUSTED_ARGMAX, NUM_BIASED, NUM_BANNED, BANNED_UNTIL, CONSTRAINED, TOP_COUNT, NUM_NAMED = range(
    NUM_FLOATS, NUM_FLOATS + 9
)
NUM_COLUMNS = NUM_FLOATS + 9

MASK_BITS = 32
"""Tokens per word of a mask: bit t % 32 of word t // 32 says whether token t is allowed."""


class SlotTensors(NamedTuple):
    """Device tensors of all slots. Slot s is row s + 1; row 0 is padding and stays 0, which means argmax.

    - values int64 [slots + 1, NUM_COLUMNS].
    - bias_ids int32 and bias_values float32 [slots + 1, B]: the first NUM_BIASED entries of a row are in use; the
      others are id 0 and -0.0, which added to a logit changes nothing.
    - banned_ids int32 [slots + 1, M]: the first NUM_BANNED entries are in use; the others repeat the first.
    - named_ids int32 [slots + 1, N]: logprob_token_ids; the first NUM_NAMED entries are in use.
    - masks int32 [slots + 1, ceil(vocab_size / 32)]: see engine/sampling/token_masks.py; undefined unless CONSTRAINED.
    - kept int64 [slots + 1, 2]: written by the kernels that sample after top-k and top-p, for log-probabilities: the
      sort key of the last kept token, and the sum of weights; see engine/kernels/top_k_top_p_kernels.py.
    - counts int32 [slots, vocab_size]: token counts as in engine/sampling/penalties.py; slot s is row s.
    """

    values: Tensor
    bias_ids: Tensor
    bias_values: Tensor
    banned_ids: Tensor
    named_ids: Tensor
    masks: Tensor
    kept: Tensor
    counts: Tensor
