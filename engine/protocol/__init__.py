"""Values that cross process boundaries: requests, sampling parameters, messages, outputs."""
