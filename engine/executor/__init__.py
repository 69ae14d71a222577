"""How one engine drives one or several worker processes."""
