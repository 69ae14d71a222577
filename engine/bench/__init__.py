"""`encore bench`: offline latency and throughput."""
