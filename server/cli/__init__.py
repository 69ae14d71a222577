"""The command `encore`."""
