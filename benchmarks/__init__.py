"""Benchmarks of Encore: `python -m benchmarks` lists them."""
