"""Vision encoders in a training job: their length, their layers, packed images padded to token budgets."""
