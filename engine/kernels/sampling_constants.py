"""Constants shared by the sampling kernels and the reference implementation in engine/sampling/ops.py."""

ONE = 2**40  # weight of the most likely token; totals stay below 2**62 for vocabularies under 2**22 tokens
