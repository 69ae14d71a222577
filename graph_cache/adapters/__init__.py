"""Adapters of the capture core to other people's systems: each is the sole importer of its own."""
