"""Executors: run each step, and every other operation of a worker, on all ranks."""
