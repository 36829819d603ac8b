"""Evaluation with lm-evaluation-harness: a model behind its interface, its tasks, the command and the training loop."""
