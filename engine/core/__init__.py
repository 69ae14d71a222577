"""The step loop: schedule, execute, finish."""
