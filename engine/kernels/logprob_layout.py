"""The layout of log-probabilities that the kernels write, shared by them and the host's reader in engine/sampling.

A step's scores are int64 [columns, rows], dense, where rows is the bucket: the columns that a step needs are then one
contiguous copy. Log-probabilities are the bits of a float64.
"""

from __future__ import annotations

MAX_TOP = 20
"""Most alternatives per row that the kernels find; torch finds more."""

# The chosen token, -1 if there is none; its log-probability; its rank.
TOKEN, LOGPROB, RANK = range(3)
TOP = 3
"""First column of the alternatives, most likely first: log-probability and id of each. -inf: no alternative."""

NAMED = TOP + 2 * MAX_TOP
"""First column of the log-probabilities of logprob_token_ids; there is one for each, as many as a request may give."""
