"""Triton kernels, one file per operation, with their launchers."""
