"""Encore's HTTP side: parse, submit, respond. Knows the engine's client interface; never names torch."""
