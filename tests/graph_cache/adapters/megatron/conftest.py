"""Give every CPU test of this folder Megatron's process group."""

from tests.support.megatron_fixtures import experts_on_cpu, one_process, one_thread

__all__ = ["experts_on_cpu", "one_process", "one_thread"]
