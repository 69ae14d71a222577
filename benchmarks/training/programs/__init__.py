"""Ordinary training programs for `benchmarks.training.reach`, in files by theme."""
