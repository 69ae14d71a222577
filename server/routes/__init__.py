"""HTTP routes: check the body, reserve capacity, tokenize, run, answer."""
