"""Encore's HTTP server. It uses the engine's client interface and never imports torch."""
