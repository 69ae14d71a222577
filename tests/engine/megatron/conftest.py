"""Initialise Megatron's process group for every CPU test in this folder."""

from tests.support.megatron_fixtures import one_process, one_thread

__all__ = ["one_process", "one_thread"]
