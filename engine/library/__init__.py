"""The models on this machine: list, pull, show and remove them, and tell whether they fit its memory."""
