"""Batches for training and validation, in an order that can be stored and resumed."""
