"""Helpers without knowledge of captures: memory layouts, hashes, checks of settings, CPU threads."""
