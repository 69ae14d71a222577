"""Sampling: penalties, temperature, truncation, token selection and log-probabilities."""
