"""Load checkpoints into models, and update weights in place."""
