"""HTTP plumbing around the routes: connection limits, middleware, API keys, errors, streaming."""
