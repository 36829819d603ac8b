"""Checkpoints on disk and in object stores."""
