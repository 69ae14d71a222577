"""Run an engine in one process, or in one process per tensor-parallel rank."""
