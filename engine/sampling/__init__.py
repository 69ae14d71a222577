"""From logits to tokens: penalties, temperature, truncation, sampling, log-probabilities."""
