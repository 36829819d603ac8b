"""preflight.py: whether a config fits a slice that is not rented yet, and how fast it will be."""
