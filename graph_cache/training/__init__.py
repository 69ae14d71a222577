"""CUDA graphs for training: forward and backward graphs of modules in the order of a step, or a graph of a whole step.

Uses the same pool, runner, backends and counters as inference. Depends on modules and autograd, not on any trainer or
model.
"""
