"""The async client of an engine, its transports to threads and processes, and the supervisor that restarts it."""
