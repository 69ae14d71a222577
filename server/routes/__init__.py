"""HTTP routes: parse, submit, respond."""
