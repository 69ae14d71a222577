"""Child processes: start, watch, stop and kill them. Used for the engine, the ranks of a model and API workers."""
