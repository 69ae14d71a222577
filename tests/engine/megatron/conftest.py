"""Give every CPU test of this folder Megatron's process group."""

from tests.support.megatron_fixtures import one_process, one_thread

__all__ = ["one_process", "one_thread"]
