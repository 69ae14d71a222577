"""A request between its route and the engine: admission, tokenization, jobs, status."""
