"""Async client of an engine, transports to an engine thread or process, and the supervisor that restarts it."""
