"""Evaluation with lm-evaluation-harness, of a checkpoint by a command and of a run in the training loop."""
