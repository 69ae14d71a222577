"""Load on a running server: datasets, a streaming client, and the report of `encore bench serve`."""
