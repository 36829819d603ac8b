"""Decoding on a CPU: another layout of the parameters, and the loop over it."""
