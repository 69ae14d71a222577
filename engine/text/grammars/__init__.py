"""Grammars that constrain a request's output: translation, checks in a child process, compilation, token masks."""
