"""Attention by the place where the keys are: a block takes any of these as an argument."""
