"""A training run in one process."""
