"""Communication between tensor-parallel ranks: collectives, and the one-shot all-reduce over NVLink."""
