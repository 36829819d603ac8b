"""Sampling from a model without a server."""
