"""Checkpoints into model parameters, and weight updates in place."""
