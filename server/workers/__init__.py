"""Processes that answer HTTP: the uvicorn server, API workers and their manager."""
