"""A model on a mesh of devices: its weights and its decoding engine."""
