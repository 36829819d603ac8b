"""The training step: optimizer, gradients, statistics. Pure."""
