"""Triton kernels of the decode step on CUDA, and where they are launched from."""
