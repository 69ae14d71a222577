"""Serving layer between routes and engine client: admission, tokenization, jobs, request log, status."""
