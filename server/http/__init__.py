"""What holds before a route runs: connection limits, middleware, keys, errors, streaming."""
