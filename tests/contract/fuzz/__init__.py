"""Differential fuzzer of the capture core: random programs, eager against captured, bit for bit.

`python -m tests.contract.fuzz --programs 1000` makes random modules, callables and training loops from the grammar of
`grammar.py`, and runs each eager and captured. Outputs, gradients, parameters, buffers, Python state and random states
must be equal in every bit, or the call must run eager with a counted reason.
"""
