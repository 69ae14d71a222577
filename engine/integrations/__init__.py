"""Adapters for training libraries, imported by their users only."""
