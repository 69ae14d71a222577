"""Helpers independent of models and requests: async copies, OpenMP settings, child processes, progress."""
