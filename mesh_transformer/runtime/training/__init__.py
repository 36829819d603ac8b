"""A training run: its start, loop, metrics, folder and end."""
