"""Communication between tensor-parallel ranks: collectives, and a one-shot all-reduce over NVLink."""
