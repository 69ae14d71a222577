"""Helpers without knowledge of models or requests: async copies, OpenMP settings, child processes, progress."""
