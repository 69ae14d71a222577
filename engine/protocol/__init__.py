"""Data that crosses process boundaries: requests, sampling parameters, messages, outputs."""
