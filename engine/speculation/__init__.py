"""Speculative decoding: drafters, which propose tokens, and the acceptance of what they proposed."""
