"""Processes that serve HTTP: the uvicorn server, the API workers and their manager."""
