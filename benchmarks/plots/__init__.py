"""Plots of the recorded results: `python -m benchmarks.plots` draws them."""
