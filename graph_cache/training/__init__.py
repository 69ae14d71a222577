"""The capture core in training jobs: forward and backward graphs of modules in the order of a step, or a whole step.

Uses the same pool, runner, backends and counters as inference. Knows modules and autograd, no trainer and no model.
"""
