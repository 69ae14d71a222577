"""Logs, metrics, and counters shared between API workers."""
