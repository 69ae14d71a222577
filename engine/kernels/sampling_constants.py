"""Constants that the sampling kernels share with the reference implementation in engine/sampling/ops.py."""

ONE = 2**40  # the weight of the most likely token; with under 2**22 tokens a total stays below 2**62
